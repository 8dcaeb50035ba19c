"""Formats what extends a sweep as plain text, for the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.messages import printable, table
from trainer.sweep.differences import revised, shown
from trainer.sweep.stored_plan import StoredPlan
from trainer.sweep.warning_text import together, warning_lines


def render_extension(
    folder: Path, stored: StoredPlan, revision: Mapping[str, Any], power: Sequence[str] = ()
) -> str:
    """Formats a revision: the new trials, programs and what they cost, and what was known.

    Args:
        folder: the folder of the sweep.
        stored: its plan before the revision.
        revision: as `extension.make_extension` returns it.
        power: sentences about the differences that the added units find.

    Returns:
        Lines of text; the last ends with a newline.
    """
    lines = [f"revision {stored.revision + 1} of the sweep in {folder}", ""]
    lines += [*_arms(stored, revision), ""]
    if revision["programs"]:
        lines += _programs(revision["programs"])
    lines += revision["reasons"]
    lines += revised(stored.revisions[-1], revision)
    steps = sum(each["steps"] * len(each["trials"]) for each in revision["programs"])
    flops = sum(x["flops"] * x["steps"] * len(x["trials"]) for x in revision["programs"])
    lines.append(f"{len(revision['trials']):,} new runs: {steps:,} steps, {flops:.3g} FLOPs")
    known = revision["known"]
    were = "were" if known["final"] else "were not"
    lines += [
        f"known before: the results of {len(known['finished']):,} of {len(stored.trials):,} runs;"
        f" the winners {were} chosen",
        *power,
        *warning_lines(
            together(each["warnings"] for each in revision["programs"]), revision["arms"]
        ),
        "",
        f"plan {revision['digest']}",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def _arms(stored: StoredPlan, revision: Mapping[str, Any]) -> list[str]:
    """Returns a table of the points of each arm, and lines about spaces that changed."""
    rows: list[Sequence[str]] = [("arm", "trials", "new", "method")]
    lines = []
    before = stored.revisions[-1]["arms"]
    for name, arm in revision["arms"].items():
        old = {(trial.search, trial.number) for trial in stored.trials if trial.arm == name}
        new = {(sum(x[4:]), x[1]) for x in revision["trials"] if x[0] == name} - old
        rows.append((name, f"{len(old | new):,}", f"{len(new):,}", arm["method"]))
        for key in ("method", "space") if old else ():
            if before[name][key] != arm[key]:
                lines.append(
                    f"{key} of {name}: {shown(before[name][key])} -> {shown(arm[key])}, from trial"
                    f" {max(number for _, number in old) + 1:04d} on"
                )
    return [*table(rows, right=(1, 2)), *lines]


def _programs(programs: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("new runs", "steps", "batch", "FLOPs a step", "first run")]
    for each in programs:
        rows.append(
            (
                f"{len(each['trials']):,}",
                f"{each['steps']:,}",
                f"{each['batch_size']:,}",
                f"{each['flops']:,}",
                each["trials"][0],
            )
        )
    return table(rows, right=(0, 1, 2, 3))
