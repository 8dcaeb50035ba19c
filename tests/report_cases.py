"""Results of sweeps made by hand, for the tests of reports."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.report.results import ArmSpace, Curve, ReportGoal, Result, Revision, Workload
from trainer.writers.summary import Summary

RATE = "optimizer.groups.matrices.optimizer.learning_rate.peak_value"


def run(
    name: str, arm: str, seed: int, value: float | None, number: int | None = None, **more: Any
) -> Result:
    """Returns a run with its reported value; one without it has diverged."""
    metrics = {} if value is None else {"eval/loss": value, "validation/loss": value}
    end = "diverged" if value is None else "done"
    summary = Summary(end, step=100, metrics=metrics)
    fields = {"summary": summary, "steps": 100, "flops": 1e6}
    return changed(Result(name, Path(f"/nowhere/{name}"), arm, seed, number, **fields), **more)


def changed(run: Result, **more: Any) -> Result:
    """Returns a run with other values of its attributes, or of those of its summary."""
    ours = {field.name for field in dataclasses.fields(run)}
    summary = {name: more.pop(name) for name in list(more) if name not in ours}
    return replace(run, summary=replace(run.summary, **summary), **more)


def workload(
    finals: Mapping[str, Sequence[float | None]],
    trials: Mapping[str, Sequence[tuple[float, float | None]]] | None = None,
    first_seed: int | Mapping[str, int] = 0,
    **more: Any,
) -> Workload:
    """Returns a workload.

    Args:
        finals: arm -> the values of its compared runs; None for one that diverged.
        trials: arm -> learning rate and value of each trial.
        first_seed: of the compared runs; or arm -> first seed.
        more: fields of the workload.
    """
    compared = []
    for arm, values in finals.items():
        first = first_seed if isinstance(first_seed, int) else first_seed[arm]
        for index, value in enumerate(values):
            compared.append(run(f"final/{arm}/{first + index}", arm, first + index, value, 0))
    searched = [
        run(f"trials/{arm}/{n:04d}/0", arm, 0, value, n, values={RATE: rate})
        for arm, points in (trials or {}).items()
        for n, (rate, value) in enumerate(points)
    ]
    spaces = {arm: ArmSpace("grid", {RATE: "log_uniform 0.0001 to 1"}) for arm in trials or {}}
    fields = {
        "name": "work",
        "path": Path("/nowhere"),
        "goal": ReportGoal("loss", "min", "validation", "test"),
        "arms": tuple(finals),
        "trials": tuple(searched),
        "finals": tuple(compared),
        "spaces": spaces,
        "winners": {(arm, 0): 0 for arm in trials or {}},
        **_planned(finals),
        **more,
    }
    made = Workload(**fields)
    for each in (*made.trials, *made.finals):
        made._curves.setdefault(each.name, curve([10, 20, 100], [2.0, 1.0, _last(each)]))
    return made


def _planned(finals: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    """Returns the fields of a plan with one search an arm, all of whose runs have ended."""
    most = max(map(len, finals.values()), default=0)
    revision = Revision(1, "0" * 64, {}, None, False, False, arms=tuple(finals), units=most)
    return {"revisions": (revision,), "completed": 1, "units": tuple(range(most))}


def _last(each: Result) -> float:
    return each.summary.metrics.get("validation/loss", float("nan"))


def curve(steps: Sequence[float], values: Sequence[float], seconds: float = 0.1) -> Curve:
    """Returns a curve; `seconds` is the time of a step."""
    at = np.asarray(steps, float)
    return Curve(at, np.asarray(values, float), at * seconds)
