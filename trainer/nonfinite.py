"""What a run does when a loss or a gradient is not finite: it records the step, and where asked
goes back.

Going back is a function of the state and the bad step alone, never of which checkpoints happen to
be on disk or of the clock. A run that is killed anywhere therefore comes to the same bits: where
the state to go back to is not on disk, it is computed again from an older one.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.experiment import Experiment

FILE = "nonfinite.json"
MOST_ROLLBACKS = 10
_KEPT = 100  # events in the file: a run that skips for ever must not fill it


class NonFinite(RuntimeError):
    """A loss or a gradient that is not finite, and the run is to end there."""


class RollBack(Exception):
    """The run is to go back to `step` and on from there with `counters`."""

    def __init__(self, step: int, counters: "Counters"):
        super().__init__(step)
        self.step = step
        self.counters = counters


class Counters(NamedTuple):
    """How a run went back so far; `State.hyper["rollback"]` holds them.

    Attributes:
        rollbacks: how many times.
        left_out: how many batches the stream of data is ahead of the steps.
        last: the step that was bad the last time.
        again: how many times in a row the run did not come past that step.
    """

    rollbacks: int = 0
    left_out: int = 0
    last: int = 0
    again: int = 0


def counters_of(hyper: Mapping[str, Any]) -> Counters:
    """Reads the counters out of a state's `hyper`; zeros where the run never rolls back."""
    if "rollback" not in hyper:
        return Counters()
    return Counters(*(int(n) for n in np.asarray(hyper["rollback"])))


def go_back(counters: Counters, bad: int) -> tuple[int, Counters]:
    """Says where to go on after a bad step.

    The batch of that step is left out for good. Where the run did not come past the step that was
    bad the last time, the state itself may be spoilt: it goes back 1, 3, 7, ... steps further, and
    their batches are left out too.

    Args:
        counters: of the state.
        bad: the step, counted from 1, whose loss or gradient was not finite.

    Returns:
        The finished steps of the state to go back to, and its counters from there on.

    Raises:
        NonFinite: after `MOST_ROLLBACKS`.
    """
    if counters.rollbacks == MOST_ROLLBACKS:
        raise NonFinite(
            f"Step {bad} is not finite, and the run went back {MOST_ROLLBACKS} times before. "
            "Lower the learning rate, or clip the gradients (clip_norm)."
        )
    again = counters.again + 1 if counters.rollbacks and bad <= counters.last else 0
    target = max(0, bad - 2**again)
    return target, Counters(
        rollbacks=counters.rollbacks + 1,
        left_out=counters.left_out + bad - target,
        last=max(bad, counters.last),
        again=again,
    )


def digest_batch(batch: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes of a batch, as 64 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class Record:
    """Writes what was not finite to nonfinite.json, the same event once however often it is met.

    Args:
        folder: the run's folder.
        write: takes a file's name and its text, whole or not at all.
        experiment: knows the data, and what is done about such steps.
    """

    def __init__(self, folder: Path, write: Callable[[str, str], None], experiment: Experiment):
        self._path = folder / FILE
        self._write = write
        self._experiment = experiment
        self._events = read_events(folder)

    def add(self, step: int, left_out: int, metrics: Mapping[str, Any]) -> None:
        """Notes a step.

        Args:
            step: counted from 1.
            left_out: how many batches the data were ahead of the steps.
            metrics: of the step.
        """
        number, seed = step - 1 + left_out, self._experiment.seed
        if len(self._events) >= _KEPT or any(e["batch_number"] == number for e in self._events):
            return
        batch = next(iter(self._experiment.data.train(number, seed)))
        key = jax.random.fold_in(jax.random.key(seed), step)
        self._events.append(
            {
                "step": step,
                "action": self._experiment.on_nonfinite,
                "train/loss": str(float(metrics["train/loss"])),
                "grad_norm": str(float(metrics["grad_norm"])),
                "batch_number": number,
                "batch_sha256": digest_batch(batch),
                "seed": seed,
                "rng": [int(word) for word in jax.random.key_data(key).ravel()],
            }
        )
        self._write(FILE, json.dumps(self._events, indent=1) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads nonfinite.json; an absent or unreadable file holds no events."""
    try:
        events = json.loads((folder / FILE).read_text())
        return [e for e in events if isinstance(e["step"], int) and "batch_number" in e]
    except (OSError, ValueError, TypeError, KeyError):
        return []
