"""Commands that examine runs: verify checks exact resume, replay finds the origin of a NaN.

compare.py finds how two configs or runs differ. Start with verify.py, which runs a config twice and
compares the traces.
"""
