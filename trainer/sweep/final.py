"""The second plan of a sweep: the winner of each arm again, on seeds that no trial used."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from trainer.config.wording import brief, listing
from trainer.sweep.outcome import Outcome
from trainer.sweep.plan import Trial
from trainer.sweep.stored_plan import StoredPlan
from trainer.writers.files import replace_file
from trainer.writers.json_files import damaged, read_json

FINAL_FILE = "final.json"
_ADVICE = (
    "it names the winners of the search. Remove it, and they are chosen again from the results."
)


class _Winner(TypedDict):
    number: int
    value: float


class _Revision(TypedDict):
    revision: int
    seeds: list[int]
    winners: dict[str, _Winner | None]


def rank(plan: StoredPlan, outcomes: Mapping[str, Outcome | None]) -> dict[str, dict[int, float]]:
    """Computes by what the points of each arm are compared.

    Args:
        plan: the plan of the sweep.
        outcomes: folder of a trial -> its outcome; None or absent if there is none yet.

    Returns:
        Arm -> number of a point -> the mean of the goal over its seeds, the best point first.
        Points that diverged or failed on any seed have infinity as the worst value, and come last.
        Points without all of their results are left out.
    """
    sign = 1 if plan.goal.better == "min" else -1
    values: dict[str, dict[int, list[float | None]]] = {}
    for trial in plan.trials:
        outcome = outcomes.get(trial.folder)
        points = values.setdefault(trial.arm, {})
        seeds = points.setdefault(trial.number, [])
        if outcome is None:
            seeds.append(None)
        else:
            value = outcome.value(plan.goal)
            seeds.append(sign * math.inf if value is None else value)
    means = {
        arm: {n: math.fsum(v) / len(v) for n, v in points.items() if None not in v}  # type: ignore[arg-type]
        for arm, points in values.items()
    }
    return {
        arm: dict(sorted(points.items(), key=lambda item: (sign * item[1], item[0])))
        for arm, points in means.items()
    }


def choose_winners(folder: Path, plan: StoredPlan, outcomes: Mapping[str, Outcome | None]) -> None:
    """Writes final.json: the best point of each arm, and the seeds on which it runs again.

    Args:
        folder: of the sweep.
        plan: its plan, all of whose trials have results.
        outcomes: folder of a trial -> its outcome.
    """
    winners = {}
    for arm, points in rank(plan, outcomes).items():
        number, value = next(iter(points.items()))
        # An arm of which every point diverged has no winner.
        winners[arm] = {"number": number, "value": value} if math.isfinite(value) else None
    content = {"revision": plan.revision, "seeds": list(plan.final_seeds), "winners": winners}
    file, before = folder / FINAL_FILE, _read(folder, plan)
    replace_file(file, (json.dumps([*before, content], indent=1) + "\n").encode())


def final_trials(folder: Path, plan: StoredPlan) -> list[Trial] | None:
    """Returns the final trials: the arms in their order, then the seeds.

    They are in `final/`; those of a winner that another one preceded, before an extension of the
    sweep, are in `final.N/`, with the number of the revision.

    Args:
        folder: of the sweep.
        plan: its plan.

    Returns:
        The trials; None if the search of the plan's revision is not complete.

    Raises:
        DamagedFile: final.json is damaged.
        OSError: the disk cannot be read.
    """
    revisions = _read(folder, plan)
    content = next((each for each in revisions if each["revision"] == plan.revision), None)
    if content is None:
        return None
    first = {(trial.arm, trial.number): trial for trial in reversed(plan.trials)}
    trials = []
    for arm, winner in content["winners"].items():
        if winner is None:
            continue
        number = winner["number"]
        won = [(each["winners"].get(arm) or {}).get("number") for each in revisions]
        since = won.index(number)
        before = any(other not in (None, number) for other in won[:since])
        name = f"final.{revisions[since]['revision']}" if before else "final"
        trial = first[arm, number]
        trials += [
            Trial(arm, number, seed, trial.values, trial.base, final=name)
            for seed in content["seeds"]
        ]
    return trials


def _read(folder: Path, plan: StoredPlan) -> list[_Revision]:
    file = folder / FINAL_FILE
    try:
        revisions = read_json(file, list[_Revision], _ADVICE)
    except FileNotFoundError:
        return []
    points = {(trial.arm, trial.number) for trial in plan.trials}
    for each in revisions:
        won = {(arm, winner["number"]) for arm, winner in each["winners"].items() if winner}
        if not won <= points:
            arm, number = min(won - points)
            raise damaged(file, f"{arm} has no point {number}", _ADVICE)
        now = each["revision"] == plan.revision
        if now and each["seeds"] != list(plan.final_seeds):
            raise damaged(file, f"its seeds are {brief(each['seeds'])}", _ADVICE)
        if now and set(each["winners"]) != set(plan.arms):
            raise damaged(file, f"its arms are {listing(list(each['winners']))}", _ADVICE)
    return revisions
