"""Reads the results of single runs, grouped by config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainer import config as configs
from trainer.config import Call
from trainer.messages import UserError, plural
from trainer.report.results import Goal, Result, Workload, code_history
from trainer.report.runs import group_by_seed, names_of, runs_in
from trainer.report.wording import joined
from trainer.writers.lines import PREFIXES
from trainer.writers.run_record import read_record
from trainer.writers.summary import Summary, read_summary

_ENDS = ("done", "diverged", "failed")


def read_runs(
    workdirs: Sequence[str],
    metric: str = "loss",
    better: Literal["min", "max"] = "min",
    target: float | None = None,
) -> Workload:
    """Reads runs; those whose configs differ in their seeds only are one arm.

    Args:
        workdirs: the runs' folders, or folders with runs.
        metric: the name of a metric, without a split.
        better: whether its smallest or largest value is the best.
        target: a value of the metric; None for none.

    Raises:
        UserError: a folder is not that of a run, or no run has the metric.
    """
    named = names_of([run for workdir in workdirs for run in _runs(Path(workdir))])
    groups = group_by_seed(named)
    results = tuple(
        _result(Path(folder), folder, arm) for arm, folders in groups.items() for folder in folders
    )
    _check_seeds(results)
    return Workload(
        name="runs",
        path=None,
        goal=_goal(results, metric, better, target),
        arms=tuple(groups),
        trials=(),
        finals=results,
        spaces={},
        winners={},
        missing=tuple(_missing(results)),
        configs={arm: root for arm, folders in groups.items() if (root := _config(folders[0]))},
    )


def _runs(workdir: Path) -> list[str]:
    """Returns a run, or the runs below a folder."""
    if (workdir / "metrics.jsonl").is_file():
        return [str(workdir)]
    if workdir.is_file():
        raise UserError(f"{workdir} is a file: name the folder of a sweep or of a run.")
    if not workdir.exists():
        raise UserError(f"There is no folder {workdir}: name the folder of a sweep or of a run.")
    for above in workdir.absolute().parents:
        if (above / "plan.json").exists():
            raise UserError(
                f"{workdir} is in the folder of a sweep, which is {above}: name that one."
            )
    sweeps = sorted(file.parent.name for file in workdir.glob("*/plan.json"))
    if sweeps:
        raise UserError(f"{workdir} has the sweeps {joined(sweeps)}: name one, or several.")
    found = runs_in(workdir, "step")
    if not found:
        raise UserError(
            f"{workdir} is not the folder of a run or of a sweep: it has neither metrics.jsonl nor"
            " plan.json, and no folder in it has."
        )
    return found


def _check_seeds(results: Sequence[Result]) -> None:
    """Raises UserError if an arm has a seed twice, as when a run was copied."""
    seen: dict[tuple[str, int], Result] = {}
    for run in results:
        other = seen.setdefault((run.arm, run.seed), run)
        if other is not run:
            seeds = [each.fingerprint.get("data_seed") for each in (other, run)]
            why = "they are one run" if seeds[0] == seeds[1] else "they differ in data_seed only"
            raise UserError(
                f"{other.folder} and {run.folder} have the same config and the same seed"
                f" {run.seed}, by which runs are paired: {why}, so name only one of them."
            )


def _goal(
    results: Sequence[Result], metric: str, better: Literal["min", "max"], target: float | None
) -> Goal:
    found = {name for run in results for name in run.metrics}
    splits = [split for split, prefix in PREFIXES.items() if prefix + metric in found]
    if not splits:
        names = sorted(
            {
                name.removeprefix(p)
                for name in found
                for p in PREFIXES.values()
                if name.startswith(p)
            }
        )
        has = f"there are {joined(names)}" if names else "none of them was evaluated"
        raise UserError(f"No run has the metric {metric!r} on a validation or test split: {has}.")
    return Goal(
        metric=metric,
        better=better,
        select_on="validation" if "validation" in splits else "test",
        report_on="test" if "test" in splits else "validation",
        target=target,
    )


def _result(folder: Path, name: str, arm: str) -> Result:
    try:
        record = read_record(folder / "run.json") or {}
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}.") from error
    summary = read_summary(folder) or Summary("missing", 0)
    print_ = record.get("fingerprint", {})
    return Result(
        name=name,
        folder=folder,
        arm=arm,
        seed=print_.get("seed", 0),
        number=None,
        end=summary.end if summary.end in _ENDS else "missing",
        why=summary.why,
        step=summary.step,
        steps=summary.steps or 0,
        seconds=summary.seconds,
        metrics=summary.metrics,
        retries=max(0, len(record.get("lineage", ())) - 1),
        fingerprint=print_,
        **code_history(record),
    )


def _config(folder: str) -> Call | None:
    try:
        return configs.load([Path(folder) / "config.yaml"]).root
    except (UserError, OSError):
        return None


def _missing(results: Sequence[Result]) -> list[str]:
    left = [run.name for run in results if run.end == "missing"]
    if not left:
        return []
    return [
        f"{plural(len(left), 'run')} did not end, and {'is' if len(left) == 1 else 'are'} not"
        f" compared: {joined(left[:5])}{' and others' if len(left) > 5 else ''}."
    ]
