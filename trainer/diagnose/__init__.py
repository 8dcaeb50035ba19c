"""Commands that examine runs: verify checks exact resume, replay finds the origin of a NaN.

compare.py and its neighbours find how two configs or runs differ.

Read verify.py first, which runs a config twice and compares the traces.
"""
