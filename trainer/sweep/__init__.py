"""Sweeps: many runs that one file describes.

Start with definition.py: what the file of a sweep says, and how it is read with the configs of its
arms. spaces.py and methods.py have the functions that it may name. plan.py lists the trials, and
programs.py builds one trial of each program that they need. plan_file.py writes the plan into the
folder of the sweep, and extension.py adds to it.

worker.py computes the trials: folder.py finds those that nobody computes, wave_runner.py computes
the trials of a wave side by side, and wave.py moves them to their places at the end. local.py
starts workers on this machine, slurm.py submits them to Slurm, ray.py runs them on a Ray cluster.

Unless a function says otherwise, `folder` is the folder of the sweep, `vocabulary` the user's
packages whose public functions configs may name, and `log` takes a line for the user.
"""
