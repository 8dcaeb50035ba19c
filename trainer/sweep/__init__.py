"""Sweeps: many runs that one file describes.

Read definition.py first, which has what the file of a sweep says. spaces.py and methods.py have
what it may name. reading.py reads it with the configs of its arms, plan.py lists its trials, and
programs.py builds one of each program that they need. slurm.py submits its workers to Slurm.
"""
