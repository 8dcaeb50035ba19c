"""Reports, and curves of metrics. Start with document.py, then comparison.py; or with plots.py."""

# The formats of `write.py`. They are here so that the command line imports nothing else for them.
FORMATS = ("html", "markdown", "csv", "latex", "pdf", "png")
DEFAULT_FORMATS = FORMATS[:2]
