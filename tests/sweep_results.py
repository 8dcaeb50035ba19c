"""Compares the results of two sweeps of the same plan."""

import json
from pathlib import Path

from tests.runs import computed
from trainer.checkpoint import CheckpointError, diff_checkpoints
from trainer.writers import read_metrics
from trainer.writers.summary import read_summary


def _content(trial: Path, plan: bool) -> dict[str, object]:
    """Returns what a trial's folder must have in common with that of the undisturbed one.

    If the sweep was extended, `plan` is False: a trial names the plan that it was computed from.
    """
    found: dict[str, object] = {}
    for file in trial.iterdir():
        if file.name == "metrics.jsonl":
            rows = read_metrics(file)
            found[file.name] = json.dumps(
                [computed(row) for row in rows]
            )  # text, because NaN is not equal to itself
        elif file.name == "run.json":
            record = json.loads(file.read_text())
            kept = record["sweep"] if plan else record["sweep"]["trial"]
            found[file.name] = kept, record["lineage"][-1]["exit"]
        elif file.name == "summary.json":
            found[file.name] = computed(json.loads(file.read_bytes()))
        else:
            text = file.read_text(errors="replace") if file.is_file() else "a folder"
            found[file.name] = text
    return found


def folders(sweep: Path) -> dict[str, Path]:
    places = [*sweep.glob("trials/*/*/*"), *sweep.glob("final*/*/*")]
    return {place.relative_to(sweep).as_posix(): place for place in places}


def compare(ours: Path, theirs: Path, steps: int, plan: bool = True) -> dict[str, list[str]]:
    """Compares a sweep with the undisturbed one; returns what is wrong, by its kind."""
    found, wanted = folders(ours), folders(theirs)
    waves = [path.name for path in ours.glob("waves/*") if path.name != "limits.json"]
    differing = []
    for name in sorted(found.keys() & wanted.keys()):
        one, two = _content(found[name], plan), _content(wanted[name], plan)
        for file in sorted(one.keys() | two.keys()):
            if one.get(file) != two.get(file):
                differing.append(
                    f"{name}/{file}: {one.get(file)!r:.600}, not {two.get(file)!r:.600}"
                )
        if (wanted[name] / "checkpoints").exists():
            try:
                summary = read_summary(wanted[name])
                # One that was stopped at a cut has the state there.
                last = summary.step if summary and summary.end == "pruned" else steps
                lines = diff_checkpoints(found[name], last, last, other=wanted[name])
            except CheckpointError as error:
                lines = [str(error)]
            differing += [f"{name}: {line}" for line in lines]
    return {
        "lost": sorted(wanted.keys() - found.keys()),
        "doubled": sorted(found.keys() - wanted.keys()) + [f"waves/{name}" for name in waves],
        "differing": differing,
    }
