"""Commands that examine runs: verify checks exact resume, replay finds the origin of a NaN.

Read verify.py first, which runs a config twice and compares the traces.
"""
