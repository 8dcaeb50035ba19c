"""Computes which differences a sweep would find, before the sweep is computed."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.messages import UserError, joined, plural
from trainer.report.document import shown
from trainer.report.pairs import FEWEST_TRIALS
from trainer.report.results import Workload, number_of_pairs
from trainer.report.statistics import decide
from trainer.report.sweep_results import planned_units, read_sweep_results
from trainer.sweep.ladder import rung_of
from trainer.sweep.ledger import began_late, compared_known, read_ledger
from trainer.sweep.plan import Plan, searches_of

POWER = 0.8
_FEWEST_SEARCHES = 3  # that a pilot must have
_DEVIATIONS = "standard deviations of the paired differences"


class Pilot(NamedTuple):
    """How much the paired differences of a finished sweep vary over its searches."""

    folder: str  # as the user named it
    sweep: Workload
    arms: tuple[str, str]  # the two arms whose differences vary most
    deviation: float  # the standard deviation of their paired differences, above 0


def read_pilot(folder: str, plan: Plan) -> Pilot:
    """Reads how much the results of searches vary; raises UserError if a sweep is no such pilot."""
    # Of all pairs of arms it takes the one whose differences vary most; if the two sweeps share at
    # least two arms, only pairs of these. A pilot is a finished sweep with at least three searches
    # and the goal of `plan`, which has several; and two of its arms have results that differ.
    if len(plan.offsets) == 1:
        raise UserError(
            "--pilot tells how much the results of searches vary, and this sweep has one search of"
            " each arm, whose winners are compared over seeds: write searches: 5, or leave --pilot"
            " out."
        )
    pilot = read_sweep_results(Path(folder))
    if pilot.ladder is not None or plan.ladder is not None:
        raise UserError(
            "--pilot is not for ladders, whose rungs have different results: leave it out."
        )
    if pilot.searches < _FEWEST_SEARCHES:
        raise UserError(
            f"The pilot {folder} has {plural(pilot.searches, 'search')} of each arm, and how much"
            f" searches vary is seen from at least {_FEWEST_SEARCHES}: name a sweep with searches:"
            f" {_FEWEST_SEARCHES} or more, or leave --pilot out."
        )
    theirs, ours = (
        f"the {'smallest' if each.better == 'min' else 'largest'} {each.metric} of the"
        f" {each.select_on} split"
        for each in (pilot.goal, plan.goal)
    )
    if theirs != ours:
        raise UserError(
            f"The pilot {folder} has another goal, {theirs}, than this sweep, {ours}: name a sweep"
            " with the same goal, or leave --pilot out."
        )
    if pilot.completed < len(pilot.revisions):
        raise UserError(
            f"The pilot {folder} is not finished. {' '.join(pilot.missing)} Compute the rest of it,"
            " or leave --pilot out."
        )
    common, found = [arm for arm in pilot.arms if arm in plan.arms], [(0.0, ("", ""))]
    for a, b in itertools.combinations(common if len(common) > 1 else pilot.arms, 2):
        x, y = (np.array([*pilot.units_of(arm).values()]) for arm in (a, b))
        if len(x) == len(y) == pilot.searches and np.isfinite([x, y]).all():
            found.append((float((x - y).std(ddof=1)), (a, b)))
    deviation, arms = max(found)
    if not deviation:
        raise UserError(
            f"No two arms of the pilot {folder} have results of every search that differ from each"
            " other by more than a constant: name another sweep, or leave --pilot out."
        )
    return Pilot(folder, pilot, arms, deviation)


def power_of_plan(plan: Plan, pilot: Pilot | None = None) -> list[str]:
    """Returns sentences on how many units arms have, and which difference these can find."""
    # There are none for one arm. With a pilot, the difference is also in units of the metric.
    searches, on_rungs = len(plan.offsets), Counter(map(rung_of, plan.arms)).values()
    arms, rungs = max(on_rungs), sum(count > 1 for count in on_rungs)  # of no ladder, one rung
    if arms < 2:
        return []
    fewest = min(plan.counts.values())
    if searches > 1 and fewest < FEWEST_TRIALS:
        return [
            f"warning: nothing will be said about the arms, because a search has"
            f" {plural(fewest, 'trial')}: with fewer than {FEWEST_TRIALS}, a narrow space would win"
            " too often."
        ]
    units = searches if searches > 1 else len(plan.final_seeds or plan.seeds)
    looks = decide.looks_of_file(plan.looks, units, plan.skewed)
    pairs = number_of_pairs(arms, plan.ablated) * rungs
    effect, noun = _effect(units, looks, pairs), _noun(searches, plan.final_seeds)
    signs = decide.fewest_signs(decide.PLANNED_LEVEL / pairs)
    if effect is None:
        fewest = next(n for n in itertools.count(2) if _effect(n, looks, pairs) is not None)
        return [
            f"warning: {plural(units, noun)} of each arm cannot decide anything: with"
            f" {plural(pairs, 'pair')} of arms it takes at least {fewest}, and {signs} are"
            " recommended."
        ]
    whose = f"{arms} arms" if searches > 1 else f"the configurations that are found for {arms} arms"
    most = " at most" if plan.looks == "any" else ""
    on = f" on {rungs} rungs" if rungs > 1 else ""
    text = (
        f"power: {whose} are compared over {plural(units, noun)}{on}, in pairs. A difference"
        f" of{most} {effect:.2g} {_DEVIATIONS} is found with a power of {POWER:g}."
    )
    if searches == 1:
        text += (
            f" One search of each arm says nothing about other searches: `searches: {signs}`"
            " compares the arms."
        )
    elif units < signs:
        text += (
            f" If a run diverges or collapses, signs are counted, which can decide from {signs} on:"
            f" `searches: {signs}`."
        )
    return [text, *(_in_units(plan, pilot, effect, looks.level / pairs) if pilot else ())]


def _in_units(plan: Plan, pilot: Pilot, effect: float, level: float) -> list[str]:
    from scipy.special import chdtri

    sweep, arm = pilot.sweep, pilot.arms[0]
    trials = sweep.points_of_search(arm)
    seeds = sum((run.arm, run.search) == (arm, 0) for run in sweep.finals)
    n = sweep.searches - 1  # the interval is that of normal differences
    low, high = (float(pilot.deviation * math.sqrt(n / chdtri(n, p))) for p in (0.05, 0.95))
    text = (
        f"pilot: in {pilot.folder} ({sweep.searches} searches with {plural(trials, 'trial')} and"
        f" {plural(seeds, 'final seed')} each), the differences of {joined(pilot.arms)} have a"
        f" standard deviation of {shown(pilot.deviation)} in the {sweep.goal.words} (90% interval"
        f" {shown(low)} to {shown(high)}), so that a difference of about"
        f" {shown(effect * pilot.deviation)} is found."
    )
    ours = min(plan.counts.values()), len(plan.final_seeds)
    if ours != (trials, seeds):
        text += (
            f" Searches with {plural(ours[0], 'trial')} and {plural(ours[1], 'final seed')}, as in"
            " this sweep, may vary otherwise."
        )
    if (relevant := plan.goal.relevant) is not None and plan.looks == "planned":
        n = decide.seeds_for_power(relevant / pilot.deviation, POWER, level)
        many = "more than 10,000" if n is None else f"about {n:,}"
        text += f" The difference that matters, {shown(relevant)}, takes {many} searches."
    return [text]


def power_of_extension(folder: Path, stored: Plan, revision: Mapping[str, Any]) -> list[str]:
    """Returns sentences on what units can find that are added after winners were chosen."""
    # There are none if no units are added to what was judged or will be. `stored` is the plan
    # before in a folder, and `revision` what is added, from `extension.make_extension`.
    in_order = not began_late(read_ledger(folder))
    every = [*stored.revisions, revision]
    until = [every[: number + 1] for number in range(len(every))]
    planned = [*itertools.takewhile(lambda each: not compared_known(each, in_order), until)][-1][-1]
    before, now, first_units = map(planned_units, (stored.revisions[-1], revision, planned))
    arms, noun = len(revision["arms"]), _noun(searches_of(revision), revision["final_seeds"])
    if arms < 2 or planned is revision or stored.looks == "any":
        return []
    pairs = number_of_pairs(arms, revision.get("ablated", ""))
    if now <= before:
        return _power_of_new_winners(stored, revision, plural(now, noun), now, pairs)
    if stored.skewed:
        return [
            f"power: with skewed: true, only the {plural(first_units, noun)} of the plan are"
            " judged, and the added ones change no verdict."
        ]
    first = _effect(first_units, decide.looks_of_plan(first_units), pairs)
    later = _effect(now, decide.Looks(None, (now,)), pairs)
    finds, unit = "cannot decide anything", f" {_DEVIATIONS}"
    if later is not None:
        finds = f"finds a difference of {later:.2g}{unit} with a power of {POWER:g}"
        unit = ""
    planned_look = ""
    if first is not None:
        planned_look = f"; the planned look at {first_units:,} finds {first:.2g}{unit}"
    text = (
        f"power: the results are judged again at {plural(now, noun)}, which {finds}{planned_look}."
    )
    if now < 2 * first_units:
        text += (
            f" Fewer than twice the planned number hardly help: extend to at least"
            f" {2 * first_units:,}, or start a fresh sweep."
        )
    return [text]


def _power_of_new_winners(
    stored: Plan, revision: Mapping[str, Any], units: str, now: int, pairs: int
) -> list[str]:
    """Returns a sentence if so few units decide nothing about new winners or arms."""
    added = {arm for arm, *_ in revision["trials"]}
    again = bool(added & stored.arms.keys())  # their winners may change
    looks = decide.looks_after_change(1, (now,)) if again else decide.Looks(None, (now,))
    fewest = decide.fewest_units(looks.later_level / pairs)
    if not added or now >= fewest or stored.skewed:
        return []
    whose = "an arm with another winner than before" if again else "an arm that is added"
    return [
        f"power: {units} cannot decide anything about {whose}, because the results of others are"
        f" known: with {plural(pairs, 'pair')} of arms it takes at least {fewest}. What is decided"
        f" now may be decided no more. Extend to {fewest} at once, or start a fresh sweep."
    ]


def _noun(searches: int, final_seeds: Sequence[int]) -> str:
    return "search" if searches > 1 else "final seed" if final_seeds else "seed"


def _effect(units: int, looks: decide.Looks, pairs: int) -> float | None:
    """Returns the effect that the last look finds at so many units; None if it decides nothing."""
    level = looks.level / pairs
    if units < decide.fewest_units(level):
        return None
    return decide.detectable_effect(units, POWER, level, later=looks.planned is None)
