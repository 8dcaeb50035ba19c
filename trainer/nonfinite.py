"""What a run does when a loss or a gradient is not finite: it records the step, and where asked
goes back.

Going back is a function of the state and the bad step alone, never of which checkpoints happen to
be on disk or of the clock. A run that is killed anywhere therefore comes to the same bits: where
the state to go back to is not on disk, it is computed again from an older one, and the turns on the
way are made again as rollbacks.json has them.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from trainer.config import ConfigError
from trainer.experiment import Experiment
from trainer.step import State

FILE = "nonfinite.json"
TURNS = "rollbacks.json"
MOST_ROLLBACKS = 10
ADVICE = "Lower the learning rate, or clip the gradients (clip_norm)."
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


def go_back(counters: Counters, bad: int, advice: str = ADVICE) -> tuple[int, Counters]:
    """Says where to go on after a bad step.

    The batch of that step is left out for good. Where the run did not come past the step that was
    bad the last time, the state itself may be spoilt: it goes back 1, 3, 7, ... steps further, and
    their batches are left out too.

    Args:
        counters: of the state.
        bad: the step, counted from 1, whose loss or gradient was not finite.
        advice: what the error says to do.

    Returns:
        The finished steps of the state to go back to, and its counters from there on.

    Raises:
        NonFinite: after `MOST_ROLLBACKS`.
    """
    if counters.rollbacks == MOST_ROLLBACKS:
        raise NonFinite(
            f"Step {bad} is not finite, and the run went back {MOST_ROLLBACKS} times before. "
            f"{advice}"
        )
    again = counters.again + 1 if counters.rollbacks and bad <= counters.last else 0
    target = max(0, bad - 2**again)
    return target, Counters(
        rollbacks=counters.rollbacks + 1,
        left_out=counters.left_out + bad - target,
        last=max(bad, counters.last),
        again=again,
    )


class Turns:
    """Where a run went back to, step -> the counters from there on: the path that leads to now.

    A state is a function of its step and the turns before it, so that it can be computed again from
    any older one. They are on disk before a state that follows from them.

    Args:
        folder: the run's folder.
        write: takes a file's name and its text, whole or not at all.
        log: takes a line for the user.

    Raises:
        ConfigError: rollbacks.json does not hold what was written.
    """

    def __init__(self, folder: Path, write: Callable[[str, str], None], log: Callable[[str], None]):
        self._file = _KeptFile(TURNS, write, log)
        self._at = read_turns(folder)

    @property
    def newest(self) -> int:
        """The step that the run went back to last; 0 for none."""
        return max(self._at, default=0)

    def add(self, step: int, counters: Counters) -> None:
        """Notes that the run goes back to a step: later turns are not on its path any more."""
        self._at = {s: c for s, c in self._at.items() if s < step} | {step: counters}
        rows = [{"step": s, **self._at[s]._asdict()} for s in sorted(self._at)]
        self._file.put(json.dumps(rows, indent=1) + "\n")

    def flush(self) -> str | None:
        """Writes what could not be written before, and returns why it still cannot, or None."""
        return self._file.flush()

    def at(self, step: int) -> Counters | None:
        """Returns the counters that the state of a step is to go on with, if it gets others."""
        return self._at.get(step)

    def led_to(self, state: State) -> bool:
        """Tells whether a state lies on the path, and not on one that the run went back from."""
        turn = self._at.get(self.newest)
        if turn is None or int(state.step) <= self.newest:
            return True
        return counters_of(state.hyper).rollbacks >= turn.rollbacks


def turned(state: State, counters: Counters | None) -> State:
    """Gives a state other counters; None leaves it as it is."""
    if counters is None or "rollback" not in state.hyper:
        return state
    array = jax.device_put(np.asarray(counters, np.int32), state.hyper["rollback"].sharding)
    return state._replace(hyper={**state.hyper, "rollback": array})


def read_turns(folder: Path) -> dict[int, Counters]:
    """Reads rollbacks.json: step -> counters; an absent file holds none. Raises ConfigError."""
    try:
        rows = json.loads((folder / TURNS).read_text())
        return {
            int(row.pop("step")): Counters(**{k: int(n) for k, n in row.items()}) for row in rows
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{folder / TURNS} cannot be read: {error}. It says where the run went back to, so "
            "that it comes to the same bits. Put it back, or remove it to go on without."
        ) from error


class _KeptFile:
    """A small file of the run's folder; what a full disk does not take is kept for later."""

    def __init__(self, name: str, write: Callable[[str, str], None], log: Callable[[str], None]):
        self._name = name
        self._write = write
        self._log = log
        self._text: str | None = None
        self._error: str | None = None

    def put(self, text: str) -> None:
        self._text = text
        self.flush()

    def flush(self) -> str | None:
        if self._text is None:
            return None
        try:
            self._write(self._name, self._text)
        except OSError as error:
            first, self._error = self._error is None, f"{self._name} could not be written: {error}"
            if first:
                self._log(f"{self._error}. The run goes on, and the next save tries again.")
            return self._error
        self._text = self._error = None
        return None


def describe(metrics: Mapping[str, float]) -> str:
    """Says what was not finite, as the beginning of a sentence."""
    both = {name: metrics[name] for name in ("train/loss", "grad_norm")}
    said = " and ".join(f"{name} is {value}" for name, value in both.items())
    finite = all(math.isfinite(value) for value in both.values())
    return f"{said}, and yet the parameters after it are not finite" if finite else said


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
        log: takes a line for the user.
    """

    def __init__(
        self,
        folder: Path,
        write: Callable[[str, str], None],
        experiment: Experiment,
        log: Callable[[str], None],
    ):
        self._file = _KeptFile(FILE, write, log)
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
        self._file.put(json.dumps(self._events, indent=1) + "\n")

    def flush(self) -> None:
        """Writes what could not be written before."""
        self._file.flush()


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads nonfinite.json; an absent or unreadable file holds no events."""
    try:
        events = json.loads((folder / FILE).read_text())
        return [e for e in events if isinstance(e["step"], int) and "batch_number" in e]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []
