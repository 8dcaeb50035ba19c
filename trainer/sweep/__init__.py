"""Sweeps: many runs that one file describes.

Read definition.py first, which has what the file of a sweep says, and reads it with the configs of
its arms. spaces.py and methods.py have what it may name. plan.py lists its trials, and programs.py
builds one of each program that they need. plan_file.py writes the plan into the folder
of the sweep, and extension.py adds to it.

worker.py computes the trials: folder.py says which ones nobody computes, wave_runner.py computes
those of a wave side by side, and wave.py moves them to their places at the end. local.py starts
workers on this machine, slurm.py submits them to Slurm.
"""
