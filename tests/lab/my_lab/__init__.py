"""A small lab's own package: it stands outside the framework and imports none of it.

The tests of "bring your own" name its functions in configs, with `--vocabulary=my_lab`.
"""
