"""Writes a report as one HTML page with its style and script. Read page.py first."""
