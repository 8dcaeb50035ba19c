"""Draws a `Figure` of a report as SVG, PDF and PNG. Read axes.py first, then svg.py."""
