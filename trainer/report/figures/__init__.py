"""Draws a `Figure` of a report as SVG, PDF and PNG. Start with svg.py."""
