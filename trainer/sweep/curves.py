"""The runs of each arm's best point, whose metrics `plot` draws."""

from pathlib import Path

from trainer.messages import UserError, plural
from trainer.sweep.status import SweepReader


def best_runs(folder: Path) -> dict[str, list[Path]]:
    """Returns the runs of each arm's best point: those on final seeds, or else those of the search.

    Args:
        folder: of the sweep.

    Returns:
        Arm and number, such as "muon 0007", or the number of its searches, such as "muon, 5
        searches" -> the folders of the runs of their best points that are done.

    Raises:
        UserError: the folder is not that of a sweep, or no point has all of its results.
    """
    reader = SweepReader(folder)
    status = reader.read()
    found: dict[str, list[Path]] = {}
    for arm in status.arms:  # the final runs come last, and replace those of the search
        trials = status.final or () if arm.final else reader.plan.trials
        best = [t for t in trials if t.arm == arm.arm and arm.best.get(t.search) == t.number]
        outcomes = [(t, status.outcomes.get(t.folder)) for t in best]
        done = [folder / t.folder for t, outcome in outcomes if outcome and outcome.end == "done"]
        if done:
            names = [name.replace("/", " ") for name in arm.points]
            several = f"{arm.arm}, {plural(len(names), 'search')}"
            found[names[0] if list(arm.best) == [0] else several] = done
    if not found:
        raise UserError(
            f"No trial of {folder} has a result that can be drawn: `python -m trainer sweep status`"
            " shows what there is."
        )
    return found
