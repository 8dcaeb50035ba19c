"""Draws a `Figure` of a report as SVG, PDF and PNG. Start with axes.py, then svg.py."""
