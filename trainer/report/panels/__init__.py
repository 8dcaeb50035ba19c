"""The panels of a report: each module computes one from the results of a workload.

A function `*_block` returns the content of its panel. `names` are axes' short names by path.
"""
