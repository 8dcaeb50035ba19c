"""Runs training on the host: decides when to save, stop, evaluate and roll back, and who writes.

Read loop.py first: it steps, writes, evaluates and saves. run.py opens the folder and calls it.
"""
