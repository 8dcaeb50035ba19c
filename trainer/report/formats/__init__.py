"""Writes a report as Markdown, its tables as CSV and as LaTeX."""
