"""Drawings of schedules and of the metrics of runs. Read plots.py first."""
