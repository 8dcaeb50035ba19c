"""The statistics of comparisons, as functions of arrays. Start with decide.py."""
