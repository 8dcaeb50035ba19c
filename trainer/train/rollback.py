"""Where a run goes back to after a step that is not finite, and the log of these rollbacks.

A rollback is a function of the state and the bad step alone, never of the clock or of which
checkpoints are on disk. A run that is killed at any moment therefore reaches the same bits: if the
state to go back to is not on disk, it is computed again from an older one, and the rollbacks on the
way are applied again as rollbacks.json lists them.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import numpy as np

from trainer.engine.step import State
from trainer.messages import refuse_os_errors
from trainer.train.nonfinite import Log, RetriedFile, Write
from trainer.writers.json_files import read_json

ROLLBACKS_FILE = "rollbacks.json"
MOST_ROLLBACKS = 10
_KEYS = ("rollbacks", "left_out", "last", "again")  # of the fields of Counters, in rollbacks.json
_ADVICE = (
    "it lists where the run went back to, without which a resumed run has other bits. Restore the "
    "file, or remove it to continue without it."
)


class _Row(TypedDict):
    step: int
    rollbacks: int
    left_out: int
    last: int
    again: int


class Counters(NamedTuple):
    """How a run went back so far; `State.run_state["rollback"]` holds these four integers."""

    rollbacks: int = 0
    # the step from `step` to `step + 1` takes the batch with the index `step + skipped_batches`
    skipped_batches: int = 0
    last: int = 0  # the bad step of the last rollback
    retries: int = 0  # how many times in a row the run failed to get past that step


class RollbackTarget(NamedTuple):
    """Where a run continues after a step that was not finite."""

    step: int  # finished steps of the state to go back to
    counters: Counters  # of the run from there on


def counters_of(run_state: Mapping[str, jax.Array]) -> Counters:
    """Reads the counters in a state's `run_state`; zeros if `on_nonfinite` is not "rollback"."""
    if "rollback" not in run_state:
        return Counters()
    return Counters(*(int(n) for n in np.asarray(run_state["rollback"])))


def rollback_target(counters: Counters, bad: int, first: int = 0) -> RollbackTarget | None:
    """Returns where a run continues after the bad step; None after `MOST_ROLLBACKS` rollbacks."""
    # The batch of that step, which is counted from 1, is skipped for good. If the run did not get
    # past the bad step of the last rollback, the state itself may be the cause: the run goes back
    # 1, 3, 7, ... steps further, and skips the batches of those steps too, but not further than
    # `first`, the step at which it began.
    if counters.rollbacks == MOST_ROLLBACKS:
        return None
    retries = counters.retries + 1 if counters.rollbacks and bad <= counters.last else 0
    target = max(first, bad - 2**retries)
    return RollbackTarget(
        target,
        Counters(
            rollbacks=counters.rollbacks + 1,
            skipped_batches=counters.skipped_batches + bad - target,
            last=max(bad, counters.last),
            retries=retries,
        ),
    )


class RollbackLog(RetriedFile):
    """The rollbacks that lead to the present state: step -> the counters from that step on."""

    # A rollback is on disk before a state that follows from it. Raises UserError if rollbacks.json
    # cannot be read or is damaged.

    def __init__(self, folder: Path, write: Write, log: Log):
        super().__init__(ROLLBACKS_FILE, write, log)
        # At a step they replace those of the state.
        self.counters = read_rollbacks(folder)

    @property
    def newest(self) -> int:
        """The step that the run went back to last; 0 if it never did."""
        return max(self.counters, default=0)

    def add(self, back: RollbackTarget) -> None:
        """Adds a rollback; those to the same or later steps are no longer on the run's path."""
        step, counters = back
        self.counters = {s: c for s, c in self.counters.items() if s < step} | {step: counters}
        rows = [
            {"step": s, **dict(zip(_KEYS, c, strict=True))}
            for s, c in sorted(self.counters.items())
        ]
        self.write(json.dumps(rows, indent=1) + "\n")

    def is_on_path(self, state: State) -> bool:
        """Returns whether a restored state is still a part of the run: no rollback discarded it."""
        if (newest := self.counters.get(self.newest)) is None or int(state.step) <= self.newest:
            return True
        # The counter of rollbacks in a later state says whether it was computed before the newest
        # rollback, which discarded it, or after.
        return counters_of(state.run_state).rollbacks >= newest.rollbacks


def apply_rollback(state: State, counters: Counters | None) -> State:
    """Replaces the counters of a state; None leaves it as it is."""
    # The new state shares all other arrays with `state`.
    if counters is None or "rollback" not in state.run_state:
        return state
    # Keep its sharding, the only one that the compiled step takes.
    array = jax.device_put(np.asarray(counters, np.int32), state.run_state["rollback"].sharding)
    return state._replace(run_state={**state.run_state, "rollback": array})


def read_rollbacks(folder: Path) -> dict[int, Counters]:
    """Reads step -> counters from rollbacks.json, {} if absent; raises UserError if damaged."""
    file, rows = folder / ROLLBACKS_FILE, []
    unreadable = refuse_os_errors(f"{file} cannot be read", _ADVICE.capitalize())
    with unreadable, suppress(FileNotFoundError):
        rows = read_json(file, list[_Row], _ADVICE)
    return {row["step"]: Counters(*(row[key] for key in _KEYS)) for row in rows}
