"""Finds the runs in folders, names them, and groups those that differ in their seeds only."""

import re
from collections.abc import Sequence
from pathlib import Path

from trainer import config as configs
from trainer.config import Call
from trainer.messages import UserError
from trainer.report.curves import Line, combine, read_points
from trainer.sweep.status import best_runs
from trainer.writers import read_metrics

_SEEDS = ("seed", "data_seed")


def runs_in(folder: Path, name: str) -> list[str]:
    """Returns the runs below a folder that is not one itself, such as those of an arm of a sweep.

    Args:
        folder: the folder; that of a run has none.
        name: of a metric; runs without it, such as those that diverged at once, are left out.
    """
    if (folder / "metrics.jsonl").exists():
        return []
    files = sorted(
        file for depth in ("*", "*/*", "*/*/*") for file in folder.glob(f"{depth}/metrics.jsonl")
    )
    return [str(file.parent) for file in files if any(name in row for row in read_metrics(file))]


def groups_in(
    workdirs: Sequence[str], metric: str, *, each_run: bool = False
) -> dict[str, list[str]]:
    """Returns the runs to draw, in groups that differ in their seeds only.

    Args:
        workdirs: folders of runs, of folders with runs, or of sweeps, whose best trials are drawn.
        metric: a metric; runs without it that are not named themselves are left out.
        each_run: whether each run is a group of its own.

    Returns:
        Name -> folders.
    """
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
    """Reads a metric of runs; those that differ in their seeds only are one line, their mean.

    Args:
        workdirs: folders of runs, of folders with runs, or of sweeps, whose best trials are read.
        metric: its name in metrics.jsonl.
        x: what the horizontal axis shows.
        smoothing: the weight of an exponential average, from 0 to below 1.
        each_run: whether each run is a line of its own.

    Returns:
        Name -> line.

    Raises:
        UserError: a run does not have the metric, or cannot be read.
    """
    try:
        return {
            name: combine([read_points(run, metric, x) for run in several], smoothing)
            for name, several in groups_in(workdirs, metric, each_run=each_run).items()
        }
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def names_of(workdirs: Sequence[str]) -> dict[str, str]:
    """Names runs by the ends of their paths, as short as possible and all different.

    Args:
        workdirs: the runs' folders; one that is given twice counts once.

    Returns:
        name -> folder, in the order given.
    """
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
    """Groups the runs whose configs are equal but for their seeds.

    Args:
        runs: name -> folder. A run whose config.yaml does not exist or cannot be read is a group
            of its own.

    Returns:
        name -> folders, in the order of their first runs. A group is named by what its runs' names
        have in common at their beginnings or ends.
    """
    groups: dict[str, dict[str, str]] = {}
    for name, folder in runs.items():
        groups.setdefault(_key(Path(folder)) or f"the run {name}", {})[name] = folder
    titles = [_common_name(list(group)) for group in groups.values()]
    named = {}
    for title, group in zip(titles, groups.values(), strict=True):
        first, more = next(iter(group)), len(group) - 1
        if titles.count(title) > 1:
            title = f"{first} and {more} more" if more else first
        named[title] = list(group.values())
    return named


def _key(folder: Path) -> str | None:
    """Returns what is equal for runs of one config; None if it cannot be read."""
    try:
        root = configs.load([folder / "config.yaml"]).root
    except (UserError, OSError):
        return None
    kept = {key: value for key, value in root.kwargs.items() if key not in _SEEDS}
    return configs.digest(Call(root.name, kept))


def _common_name(names: Sequence[str]) -> str:
    """Returns the whole words that names have in common, such as "muon" for "muon_0", "muon_1".

    Args:
        names: at least one.
    """
    if len(names) == 1:
        return names[0]
    words = [re.findall(r"[^/_. -]+|[/_. -]+", name) for name in names]
    shared = _shared_start(words) or _shared_start([each[::-1] for each in words])[::-1]
    return "".join(shared).strip("/_. -") or f"{names[0]} and {len(names) - 1} more"


def _shared_start(lists: Sequence[Sequence[str]]) -> list[str]:
    shared: list[str] = []
    for words in zip(*lists, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return shared
