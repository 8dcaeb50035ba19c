"""Reports, and curves of metrics. Read document.py first, then comparison.py; or curves.py."""
