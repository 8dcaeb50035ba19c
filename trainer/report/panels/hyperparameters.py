"""The table of the winners' hyperparameters, defaults included."""

from collections.abc import Sequence

from trainer.report.conditions import read_config
from trainer.report.document import Column, Table, columns_of
from trainer.report.results import Workload
from trainer.sweep.confounders import arguments

_ROOT = "optimizer"


def hyperparameters_table(workload: Workload, prefix: str) -> Table | None:
    """Returns the optimizers' arguments of each arm's compared runs; None if none is shown."""
    # There is a row for each argument whose values differ between arms, or for every one if there
    # is a single arm. It is None if no config can be read, or no argument differs.
    arms: dict[str, dict[str, str]] = {}
    ranges = False
    for arm in workload.arms:
        roots = [read_config(run.folder) for run in workload.finals_of(arm)]
        found = [
            dict(arguments(root.kwargs[_ROOT], _ROOT))
            for root in roots
            if root is not None and _ROOT in root.kwargs
        ]
        if found:
            every = dict.fromkeys(path for each in found for path in each)
            of_path = {path: {each.get(path, "–"): None for each in found} for path in every}
            arms[arm] = {path: _cell(list(values)) for path, values in of_path.items()}
            ranges |= any(len(values) > 1 for values in of_path.values())
    paths = dict.fromkeys(path for arguments in arms.values() for path in arguments)
    rows = tuple(
        (path, *values)
        for path in paths
        if len(set(values := [arguments.get(path) for arguments in arms.values()])) > 1
        or len(arms) == 1
    )
    if not rows:
        return None
    columns = (Column("path", "path", "code"), *columns_of(arms, {"path"}))
    note = (
        "Defaults included; – is an argument that the arm's optimizer does not have. What is equal"
        " in all arms is left out: config_full.yaml in the folder of a run has everything."
    )
    if ranges:
        note += (
            " Where the winners of an arm's searches differ, the smallest and the largest of their"
            " values are shown."
        )
    title = "Hyperparameters of the compared runs"
    return Table(f"{prefix}hyperparameters", title, columns, rows, note)


def _cell(values: Sequence[str]) -> str:
    """Returns the only value, the ends of several numbers, or all other values; none is twice."""
    if len(values) == 1:
        return values[0]
    try:
        ordered = sorted(values, key=float)
    except ValueError:
        return " or ".join(values)
    return f"{ordered[0]} to {ordered[-1]}"
