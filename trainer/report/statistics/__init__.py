"""The statistics of comparisons, as functions of arrays. Start with decide.py."""

from trainer.report.statistics.decide import (
    LEVEL,
    PLANNED_LEVEL,
    Decisions,
    Looks,
    collapsed,
    decide,
    enough_units,
    fewest_signs,
    fewest_units,
    looks_after_change,
    looks_at_any,
    looks_of_plan,
    ranked,
    relevance,
)
from trainer.report.statistics.differences import Unpaired, welch
from trainer.report.statistics.estimates import Estimate, OneSample, iqm, mean_interval, one_sample
from trainer.report.statistics.held_out import TwoWay, two_way
from trainer.report.statistics.improvement import Improvement, probability_of_improvement
from trainer.report.statistics.power import (
    detectable_effect,
    needed,
    needed_range,
    needed_unpaired,
    noether,
    seeds_for_power,
)

__all__ = [
    "LEVEL",
    "PLANNED_LEVEL",
    "Decisions",
    "Estimate",
    "Improvement",
    "Looks",
    "OneSample",
    "TwoWay",
    "Unpaired",
    "collapsed",
    "decide",
    "detectable_effect",
    "enough_units",
    "fewest_signs",
    "fewest_units",
    "iqm",
    "looks_after_change",
    "looks_at_any",
    "looks_of_plan",
    "mean_interval",
    "needed",
    "needed_range",
    "needed_unpaired",
    "noether",
    "one_sample",
    "probability_of_improvement",
    "ranked",
    "relevance",
    "seeds_for_power",
    "two_way",
    "welch",
]
