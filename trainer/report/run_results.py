"""Finds single runs in folders, and reads their results, grouped by config."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Literal

from trainer import config as configs
from trainer.messages import UserError, joined, plural, refuse_os_errors
from trainer.report.conditions import read_run_config
from trainer.report.plots import Line, combine, read_points
from trainer.report.results import MISSING, ReportGoal, Result, Workload, with_outcome
from trainer.sweep.evidence import unlike_rows
from trainer.sweep.status import best_runs
from trainer.workdir.folder import edited_files_of_run
from trainer.writers import read_metrics
from trainer.writers.lines import PREFIXES
from trainer.writers.run_record import read_record
from trainer.writers.summary import SUMMARY_FILE, read_summary


def read_runs(
    workdirs: Sequence[str],
    metric: str = "loss",
    better: Literal["min", "max"] = "min",
    target: float | None = None,
) -> Workload:
    """Reads runs, those that differ in seeds only as one arm; raises UserError if it cannot."""
    # `workdirs` are the runs' folders, or folders with runs; `metric` has no split. It is an error
    # if a folder is not that of a run, no run has the metric, or an arm has a seed twice.
    groups = group_by_seed(names_of([run for workdir in workdirs for run in _runs(Path(workdir))]))
    results = tuple(_result(folder, arm) for arm, folders in groups.items() for folder in folders)
    _check_seeds(results)
    roots = {arm: read_run_config(folders[0], "config.yaml") for arm, folders in groups.items()}
    missing = [run.name for run in results if run.end == MISSING.end]
    are, others = "is" if len(missing) == 1 else "are", " and others" if len(missing) > 5 else ""
    text = (
        f"{plural(len(missing), 'run')} did not end, and {are} not compared:"
        f" {joined(missing[:5])}{others}."
    )
    return Workload(
        name="runs",
        goal=_goal(results, metric, better, target),
        arms=tuple(groups),
        finals=results,
        missing=(text,) if missing else (),
        faults=tuple(fault for run in results for fault in _faults(run)),
        picked=_picked(groups),
        configs={arm: root for arm, root in roots.items() if root},
    )


def _runs(workdir: Path) -> list[str]:
    """Returns the run in a folder, or else the runs below it."""
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
    if sweeps := sorted(file.parent.name for file in workdir.glob("*/plan.json")):
        raise UserError(f"{workdir} has the sweeps {joined(sweeps)}: name one, or several.")
    if not (found := runs_in(workdir, "step")):
        raise UserError(
            f"{workdir} is not the folder of a run or of a sweep: it has neither metrics.jsonl nor"
            " plan.json, and no folder in it has."
        )
    return found


def _picked(groups: Mapping[str, Sequence[str]]) -> str:
    """Returns a sentence if some runs are of sweeps; "" if none is."""
    # Which runs are named may have been decided by their results, and only the plan and the ledger
    # of a sweep say among how many arms they are and how often they were judged. `groups` are the
    # arms with the folders of their runs.
    places = [Path(folder).resolve() for folders in groups.values() for folder in folders]
    above = [next((x for x in run.parents if (x / "plan.json").exists()), None) for run in places]
    if not (sweeps := list(dict.fromkeys(str(sweep) for sweep in above if sweep is not None))):
        return ""
    return (
        f"{'Some of these' if None in above else 'These'} runs are of the"
        f" {'sweep' if len(sweeps) == 1 else 'sweeps'} {joined(sweeps)}, and which ones are named"
        f" may decide who is better: `python -m trainer report {' '.join(sweeps)}` judges by the"
        " plan."
    )


def _check_seeds(results: Sequence[Result]) -> None:
    """Raises UserError if an arm has a seed twice, for example because a run was copied."""
    seen: dict[tuple[str, int], Result] = {}
    for run in results:
        if (other := seen.setdefault((run.arm, run.seed), run)) is not run:
            same = other.fingerprint.get("data_seed") == run.fingerprint.get("data_seed")
            why = "they are one run" if same else "they differ in data_seed only"
            raise UserError(
                f"{other.folder} and {run.folder} have the same config and the same seed"
                f" {run.seed}, by which runs are paired: {why}, so name only one of them."
            )


def _goal(
    results: Sequence[Result], metric: str, better: Literal["min", "max"], target: float | None
) -> ReportGoal:
    found = {name for run in results for name in run.summary.metrics}
    if not (splits := [split for split, prefix in PREFIXES.items() if prefix + metric in found]):
        names = {n.removeprefix(p) for n in found for p in PREFIXES.values() if n.startswith(p)}
        has = f"there are {joined(sorted(names))}" if names else "none of them was evaluated"
        raise UserError(f"No run has the metric {metric!r} on a validation or test split: {has}.")
    return ReportGoal(
        metric=metric,
        better=better,
        select_on="validation" if "validation" in splits else "test",
        report_on="test" if "test" in splits else "validation",
        target=target,
    )


def _result(name: str, arm: str) -> Result:
    folder = Path(name)
    with refuse_os_errors(f"{folder} cannot be read"):
        record = read_record(folder / "run.json") or {}
    summary = read_summary(folder) or MISSING
    seed, steps = record.get("fingerprint", {}).get("seed", 0), summary.steps or 0
    first = summary.first_step or 0
    run = Result(name, folder, arm, seed, None, steps=steps, first_step=first)
    return with_outcome(run, summary, record)


def _faults(run: Result) -> Iterator[str]:
    """Yields the files of a run that disagree with each other, each with what is wrong."""
    names = edited_files_of_run(run.folder, read_record(run.folder / "run.json") or {})
    for name in names:
        yield f"{run.folder / name} (it is not as the run left it)"
    if run.end != "missing" and not names:
        for value in itertools.islice(unlike_rows(run.folder, run.summary), 1):
            yield f"{run.folder / SUMMARY_FILE} (its {value} is not that of metrics.jsonl)"


def runs_in(folder: Path, name: str) -> list[str]:
    """Returns the runs with the metric `name` below a folder; none below that of a run."""
    # Runs that diverged at once have no metric.
    if (folder / "metrics.jsonl").exists():
        return []
    files = sorted(
        file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/metrics.jsonl")
    )
    return [str(file.parent) for file in files if any(name in row for row in read_metrics(file))]


def groups_in(
    workdirs: Sequence[str], metric: str, *, each_run: bool = False
) -> dict[str, list[str]]:
    """Returns the runs to draw, in groups that differ in their seeds only: name -> folders."""
    # `workdirs` are folders of runs, of folders with runs, or of sweeps, whose best trials are
    # drawn; runs without the metric are left out. With `each_run`, each run is a group of its own.
    found: dict[str, list[str]] = {}
    plain: list[str] = []
    for workdir in dict.fromkeys(workdirs):
        folder = Path(workdir)
        if not (folder / "plan.json").exists():
            plain += runs_in(folder, metric) or [workdir]
            continue
        best = {name: list(map(str, paths)) for name, paths in best_runs(folder).items()}
        if each_run:
            plain += [run for each in best.values() for run in each]
            continue
        prefix = f"{folder.absolute().name} " if len(workdirs) > 1 else ""
        found |= {f"{prefix}{name}": several for name, several in best.items()}
    named = names_of(plain)
    if each_run or len(named) == 1:
        return found | {name: [run] for name, run in named.items()}
    return found | group_by_seed(named)


def read_lines(
    workdirs: Sequence[str],
    metric: str,
    x: str = "step",
    smoothing: float = 0.0,
    *,
    each_run: bool = False,
) -> dict[str, Line]:
    """Reads a metric of runs, a line for the mean over seeds; raises UserError if one lacks it."""
    # `x` is "step" or a name in metrics.jsonl; `smoothing` is the weight of an exponential average,
    # from 0 to below 1; for the others see `groups_in`.
    try:
        return {
            name: combine([read_points(run, metric, x) for run in several], smoothing)
            for name, several in groups_in(workdirs, metric, each_run=each_run).items()
        }
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def names_of(workdirs: Sequence[str]) -> dict[str, str]:
    """Returns name -> folder: the names are ends of paths, as short as possible, all different."""
    # A folder that is given twice counts once.
    paths: dict[Path, str] = {}
    for workdir in workdirs:
        paths.setdefault(Path(workdir).resolve(), workdir)
    names = {}
    for path, workdir in paths.items():
        depth = 1
        while any(other != path and other.parts[-depth:] == path.parts[-depth:] for other in paths):
            depth += 1
        names["/".join(path.parts[-depth:])] = workdir
    return names


def group_by_seed(runs: dict[str, str]) -> dict[str, list[str]]:
    """Groups the runs, name -> folder, whose configs are equal but for their seeds."""
    # A run whose config.yaml cannot be read is a group of its own. Groups are named by what their
    # runs' names have in common at their beginnings or ends.
    groups: dict[str, dict[str, str]] = {}
    for name, folder in runs.items():
        root, key = read_run_config(folder, "config.yaml"), f"the run {name}"
        if root is not None:
            kept = {key: x for key, x in root.kwargs.items() if key not in ("seed", "data_seed")}
            key = configs.digest(configs.Call(root.name, kept))
        groups.setdefault(key, {})[name] = folder
    titles = [_common_name(list(group)) for group in groups.values()]
    named = {}
    for title, group in zip(titles, groups.values(), strict=True):
        first, more = next(iter(group)), len(group) - 1
        if titles.count(title) > 1:
            title = f"{first} and {more} more" if more else first
        named[title] = list(group.values())
    return named


def _common_name(names: Sequence[str]) -> str:
    """Returns the whole words that names have in common, such as "muon" for "muon_0", "muon_1"."""
    if len(names) == 1:
        return names[0]
    words = [re.findall(r"[^/_. -]+|[/_. -]+", name) for name in names]
    shared = commonprefix(words) or commonprefix([each[::-1] for each in words])[::-1]
    return "".join(shared).strip("/_. -") or f"{names[0]} and {len(names) - 1} more"
