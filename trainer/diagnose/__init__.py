"""Commands that examine runs: verify checks exact resume, replay finds the origin of a NaN.

compare.py and compare_programs.py find how two configs or runs differ. Start with verify.py, which
runs a config twice and compares the traces.
"""
