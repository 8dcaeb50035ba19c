"""The panels of a report: each module computes one from the results of a workload."""
