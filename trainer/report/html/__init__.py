"""Writes a report as one HTML page with its style and script. Start with page.py."""
