"""What differs between the arms of a comparison beside their optimizers and what they searched."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.config import Call
from trainer.config.tree import child_trees
from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.report.results import Result, Workload
from trainer.report.wording import joined
from trainer.sweep.alike import arguments, unlike, unlike_loss, values_text

# Arguments of the root that arms may differ in: what is compared, and what changes no result.
_MAY_DIFFER = ("optimizer", "seed", "log_every", "save_every", "keep_latest", "best_metric")
_MAY_DIFFER += ("best_mode", "hooks", "writers", "watchdog", "steps_per_call")
# What differs between runs of one comparison by purpose.
_OF_A_RUN = ("config", "seed", "data_seed")
_LOG_UNIFORM = re.compile(r"log_uniform (\S+) to (\S+)")


def conditions(workload: Workload) -> list[str]:
    """Says in which respects arms are not alike, in sentences for the verdict.

    Args:
        workload: the results.
    """
    sentences = []
    unlike = unlike_arguments(workload)
    if unlike:
        listed = "; ".join(f"{path} {values_text(values)}" for path, values in unlike.items())
        sentences.append(f"The arms differ in more than their optimizers: {listed}.")
    sentences += [*_widths(workload), *_machines(workload)]
    return sentences


def _widths(workload: Workload) -> Iterator[str]:
    """Says how wide the spaces of the arms are, if one is much wider than another."""
    decades = {
        arm: math.fsum(
            math.log10(float(found[2]) / float(found[1]))
            for text in space.axes.values()
            if (found := _LOG_UNIFORM.fullmatch(text))
        )
        for arm, space in workload.spaces.items()
    }
    if max(decades.values(), default=0.0) > 1.5 * min(decades.values(), default=0.0):
        listed = joined([f"{arm} {each:.3g}" for arm, each in decades.items()])
        yield (
            "The arms searched spaces of unequal width, in decades of their logarithmic axes:"
            f" {listed}."
        )


def unlike_arguments(workload: Workload) -> dict[str, dict[str, str]]:
    """Returns the arguments that differ between the configs of arms.

    Those of the optimizer are left out, and so are the axes of the search and what has no effect on
    results. Where two arms call different functions, their arguments are left out.

    Args:
        workload: the results.

    Returns:
        Path -> arm -> the value as text; "absent" where the arm has no such argument.
    """
    trees = {arm: tree for arm in workload.arms if (tree := _config_of(workload, arm)) is not None}
    if len(trees) < 2:
        return {}
    searched = {path for space in workload.spaces.values() for path in space.axes}
    return unlike({arm: dict(_leaves(tree, searched)) for arm, tree in trees.items()})


def unlike_losses(workload: Workload) -> str:
    """Says why the losses of arms cannot be compared.

    Args:
        workload: the results.

    Returns:
        A sentence; "" if all arms and all of their trials have the same loss, or if another metric
        is compared.
    """
    if workload.goal.metric != "loss":
        return ""
    trees = {arm: tree for arm in workload.arms if (tree := _config_of(workload, arm)) is not None}
    searched = [
        path
        for arm, space in workload.spaces.items()
        for path in space.axes
        if len({repr(run.values.get(path)) for run in workload.trials_of(arm)}) != 1
    ]
    found = unlike_loss(trees, searched)
    return found.text if found else ""


def _config_of(workload: Workload, arm: str) -> Call | None:
    """Returns the config of an arm with its defaults, if its runs have it."""
    runs = [*workload.finals_of(arm), *workload.trials_of(arm)]
    full = read_config(runs[0].folder) if runs else None
    return full or workload.configs.get(arm)


def read_config(folder: Path) -> Call | None:
    """Returns the config of a run, with its defaults if they were written; None without one.

    Args:
        folder: of the run.
    """
    for name in ("config_full.yaml", "config.yaml"):
        try:
            return configs.load([folder / name]).root
        except (UserError, OSError):
            continue
    return None


def _leaves(root: Call, searched: set[str]) -> Iterator[tuple[str, str]]:
    for key, child in child_trees(root).items():
        if key not in _MAY_DIFFER:
            yield from ((p, v) for p, v in arguments(child, key) if p not in searched)


def _machines(workload: Workload) -> list[str]:
    """Says which versions, machines and settings differ between runs although they may matter."""
    seen: dict[str, dict[str, list[str]]] = {}
    for run in (*workload.trials, *workload.finals):
        what = f"{'final runs' if run.name.startswith('final') else 'trials'} of {run.arm}"
        for key, value in run.fingerprint.items():
            if key not in _OF_A_RUN:
                seen.setdefault(key, {}).setdefault(fingerprint_text(value)[:16], []).append(what)
    parts = []
    for key, values in seen.items():
        if len(values) > 1:
            listed = joined(
                [
                    f"{value} ({listing(list(dict.fromkeys(runs)), 4)})"
                    for value, runs in values.items()
                ]
            )
            name = "uncommitted changes (a hash of them)" if key == "uncommitted" else key
            parts.append(f"{name} {listed}")
    if not parts:
        return []
    return [f"The runs were made under different conditions: {'; '.join(parts)}."]


def fingerprint_rows(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """Returns what the bits of runs depend on, as names and values; "differs" where they differ.

    Args:
        runs: at least one, with fingerprints.
    """
    rows = []
    for key, value in runs[0].fingerprint.items():
        if key not in _OF_A_RUN and key != "isa":
            every = {fingerprint_text(run.fingerprint.get(key)) for run in runs}
            rows.append((key, fingerprint_text(value) if len(every) == 1 else "differs"))
    return rows


def fingerprint_text(value: Any) -> str:
    """Returns an entry of a fingerprint as a short text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {str(each)[:12]}" for key, each in value.items()) or "none"
    return "none" if value is None else str(value)
