"""The panels of a report: each module computes one from the results of a workload.

A function `*_block` returns the content of its panel. `prefix` is how the names of its figures and
tables begin, which distinguishes workloads; `names` are short names of axes by config path.
"""
