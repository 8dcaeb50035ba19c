"""The table of the winners' hyperparameters, defaults included."""

from trainer.report.conditions import read_config
from trainer.report.document import Column, Table, column_names
from trainer.report.results import Workload
from trainer.sweep.alike import arguments

_ROOT = "optimizer"


def hyperparameters_table(workload: Workload, prefix: str) -> Table | None:
    """Returns the arguments of the optimizers of each arm's compared runs.

    Args:
        workload: the results.
        prefix: of the name of the table, which tells workloads apart.

    Returns:
        A table with a row for each argument whose values differ between arms, or for every one if
        there is a single arm; None if no config can be read.
    """
    arms: dict[str, dict[str, str]] = {}
    for arm in workload.arms:
        runs = workload.finals_of(arm)
        root = read_config(runs[0].folder) if runs else None
        if root is not None and _ROOT in root.kwargs:
            arms[arm] = dict(arguments(root.kwargs[_ROOT], _ROOT))
    paths = dict.fromkeys(path for arguments in arms.values() for path in arguments)
    rows = tuple(
        (path, *values)
        for path in paths
        if len(set(values := [arguments.get(path) for arguments in arms.values()])) > 1
        or len(arms) == 1
    )
    if not rows:
        return None
    columns = [Column("path", "path", "code")]
    names = column_names(list(arms), {"path"})
    columns += [Column(name, arm) for name, arm in zip(names, arms, strict=True)]
    note = (
        "Defaults included; – is an argument that the arm's optimizer does not have. What is equal"
        " in all arms is left out: config_full.yaml in the folder of a run has everything."
    )
    title = "Hyperparameters of the compared runs"
    return Table(f"{prefix}hyperparameters", title, tuple(columns), rows, note)
