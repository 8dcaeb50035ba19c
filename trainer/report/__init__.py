"""Reports, and curves of metrics. Read document.py first, then comparison.py; or plots.py."""

# What `write.py` writes a report as. Here, so that the command line imports nothing else for it.
FORMATS = ("html", "markdown", "csv", "latex", "pdf", "png")
