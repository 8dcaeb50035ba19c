"""The statistics of comparisons, as functions of arrays. Read differences.py first."""

from trainer.report.statistics.differences import Difference, holm, paired, welch
from trainer.report.statistics.estimates import Estimate, OneSample, iqm, mean_interval, one_sample
from trainer.report.statistics.improvement import Improvement, probability_of_improvement
from trainer.report.statistics.power import needed, needed_unpaired, noether, seeds_for_power

__all__ = [
    "Difference",
    "Estimate",
    "Improvement",
    "OneSample",
    "holm",
    "iqm",
    "mean_interval",
    "needed",
    "needed_unpaired",
    "noether",
    "one_sample",
    "paired",
    "probability_of_improvement",
    "seeds_for_power",
    "welch",
]
