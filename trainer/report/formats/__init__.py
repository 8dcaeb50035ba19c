"""Writes a report as Markdown, and its tables as LaTeX."""
