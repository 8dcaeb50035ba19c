"""Curves of the metrics of runs, and figures. Read curves.py first, then plots.py."""
