"""Drawings of schedules and metrics, and the statistics of comparisons. Read plots.py first."""
