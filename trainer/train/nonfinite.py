"""Steps whose loss or gradient was not finite: their record, the fault of a batch, the advice."""

import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data.dtypes import changed_values, narrow_dtype
from trainer.engine.contracts import Batch
from trainer.engine.datasets import WHOLE, digest_batch
from trainer.engine.experiment import Experiment
from trainer.engine.metric_sums import compute_losses, with_ignored
from trainer.engine.program import Program
from trainer.engine.step import State, output_shapes
from trainer.messages import started
from trainer.writers.files import Outage
from trainer.writers.json_files import DamagedFile, read_json
from trainer.writers.lines import PREFIXES

NONFINITE_FILE = "nonfinite.json"
ADVICE = "Lower the learning rate, or clip the gradients (clip_norm)."
Write = Callable[[str, str], None]  # takes a file's name and its text; writes all of it or nothing
Log = Callable[[str], None]  # takes a line
_KEPT = 100  # events in the file: a run that skips steps forever must not fill the disk


class _Event(TypedDict):
    step: int
    batch_number: int
    batch_sha256: NotRequired[str]


class RetriedFile:
    """A small file of the run's folder; text that a full disk does not take is written later."""

    def __init__(self, name: str, write: Write, log: Log):
        self._name, self._write = name, write
        self._outage = Outage(log)
        self._text: str | None = None

    def write(self, text: str) -> None:
        """Replaces the whole content of the file, now or at a later `flush`."""
        self._text = text
        self.flush()

    def flush(self) -> str | None:
        """Writes the newest text unless it is written, and returns why that fails, or None."""
        if self._text is None:
            return None
        try:
            self._write(self._name, self._text)
        except OSError as error:
            self._outage.failed(
                f"{self._name} could not be written: {error}",
                "Training continues, and the next save tries again.",
            )
            return self._outage.error
        self._text = None
        self._outage.ended()
        return None


def describe_fault(metrics: Mapping[str, float], steps: tuple[int, int]) -> str:
    """Describes what was not finite, as the beginning of a sentence."""
    # `steps` are the first and the last step whose update may have made the parameters not finite.
    both = {name: metrics[name] for name in ("train/loss", "grad_norm")}
    text = " and ".join(f"{name} is {value}" for name, value in both.items())
    if not all(math.isfinite(value) for value in both.values()):
        return text
    if steps[0] == steps[1]:
        return f"{text}, and yet its update makes parameters that are not finite"
    text += ", and yet the parameters after it are not finite"
    return f"{text}, because of an update between step {steps[0]} and step {steps[1]}"


def fault_at_end(program: Program, state: State, evaluated: Mapping[str, float]) -> str:
    """Returns why a run with all of its steps has diverged; "" if it is done."""
    # `evaluated` has the results of the last evaluation. Metrics other than a loss may be NaN, such
    # as the mean of a class of which a split has no example.
    if not bool(program.params_finite(state)):
        return "The parameters after the last step are not finite."
    for name in (f"{prefix}loss" for prefix in PREFIXES.values()):
        if not math.isfinite(evaluated.get(name, 0.0)):
            return f"In the last evaluation, {name} is {evaluated[name]}."
    return ""


class NonFiniteLog(RetriedFile):
    """Writes one event for each step that was not finite to nonfinite.json."""

    # A step that is computed again, after a restart or a rollback, adds no second event.

    def __init__(self, folder: Path, write: Write, experiment: Experiment, log: Log):
        super().__init__(NONFINITE_FILE, write, log)
        self._experiment = experiment
        self._events = read_events(folder)

    def add(self, step: int, batch_index: int, metrics: Mapping[str, float]) -> None:
        """Adds an event, unless the file has one for this batch or has 100 events."""
        # Steps count from 1; `batch_index`, the position of the batch in the data stream, from 0.

        # Compare batches and not steps: a step has another batch after a rollback.
        known = any(event["batch_number"] == batch_index for event in self._events)
        if known or len(self._events) >= _KEPT:
            return
        seed = self._experiment.seed
        # Whole if possible, so that a replay by another number of processes finds the same hash.
        batch = next(self._experiment.batches(batch_index, WHOLE))
        # The key of the step, as `train_step` derives it.
        key = jax.random.fold_in(jax.random.key(seed), step)
        self._events.append(
            {
                "step": step,
                "action": self._experiment.on_nonfinite,
                # As text, because JSON has no NaN and no infinity.
                "train/loss": str(metrics["train/loss"]),
                "grad_norm": str(metrics["grad_norm"]),
                "batch_number": batch_index,
                "batch_sha256": digest_batch(batch),
                "seed": seed,
                "data_seed": self._experiment.seed_of_data,
                "rng": [int(word) for word in jax.random.key_data(key).ravel()],
            }
        )
        self.write(json.dumps(self._events, indent=1) + "\n")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Reads the events in a run's nonfinite.json, oldest first; none if it cannot be read."""
    try:
        events = read_json(folder / NONFINITE_FILE, list[_Event], "remove it.")
    except (OSError, DamagedFile):
        return []
    return [dict(event) for event in events]


def advise(program: Program, batch_index: int) -> str:
    """Returns sentences that name the cause of a bad step, if it is in the batch, and a remedy."""
    experiment = program.experiment
    fault = find_fault(program, program.feed.batch(batch_index))
    skip = ", or set on_nonfinite='skip'" if experiment.on_nonfinite == "halt" else ""
    if fault is not None:
        return f"{fault}. Correct the data or the model{skip}."
    return f"{ADVICE[:-1]}{skip}."


def replay_command(folder: Path, step: int, vocabulary: Sequence[str]) -> str:
    """Returns the shell command that replays a step of the run in a folder."""
    command = started() or ["python", "-m", "trainer"]
    packages = [f"--vocabulary={package}" for package in vocabulary]
    return shlex.join([*command, "replay", str(folder), f"--step={step}", *packages])


# Faults of a batch.


def find_fault(program: Program, batch: Batch) -> str | None:
    """Finds a field of a batch that makes the loss not finite for any parameters; None if none."""
    # It has NaN, infinite values, values that do not fit into jax's dtype, or labels outside of the
    # classes. The last is tested on outputs that are all zero: their loss becomes finite when the
    # field is clipped to the classes. Returns a sentence without its full stop.
    arrays = {name: np.asarray(x) for name, x in batch.items()}
    for name, x in arrays.items():
        fault, lost = count_not_finite(x), changed_values(x)
        if not fault and lost.size:
            fault = (
                f"{lost.size} of {x.size} values that do not fit into {narrow_dtype(x.dtype)}, such"
                f" as {lost[0].item()}"
            )
        if fault:
            return f"The field {name!r} of its batch holds {fault}"
    try:
        return _labels(program, arrays)
    except Exception:  # the user's loss may refuse such outputs; the run's own error matters
        return None


def count_not_finite(values: Any) -> str:
    """Returns how many values of an array are not finite, as a part of a sentence; "" if none."""
    x = np.asarray(values)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return ""
    wide = x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)
    found = [(int(np.isnan(wide).sum()), "NaN"), (int(np.isinf(wide).sum()), "infinite")]
    text = " and ".join(f"{count} {kind}" for count, kind in found if count)
    return f"{text} of {x.size} values" if text else ""


def _labels(program: Program, batch: dict[str, np.ndarray]) -> str | None:
    experiment, state = program.experiment, program.abstract_state()

    # Outputs of zeros need only shapes, so the model is not run.
    outputs = output_shapes(experiment, state, batch)
    if not hasattr(outputs, "shape") or not outputs.shape:
        return None
    # [batch, classes], or [batch, positions, classes] for a sequence.
    classes = outputs.shape[-1]
    # In a ChunkedLogits, features and kernel become zeros, and so do the logits.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), outputs)

    def finite(batch: dict[str, np.ndarray]) -> bool:
        given = with_ignored(experiment.loss, {name: jnp.asarray(x) for name, x in batch.items()})
        losses = compute_losses(experiment.loss, zeros, given)
        return bool(jnp.isfinite(losses.counted(given)).all())

    if finite(batch):
        return None
    for name, x in batch.items():
        outside = (x < 0) | (x >= classes) if x.dtype.kind in "iu" else np.zeros(1, bool)
        if outside.any() and finite(batch | {name: np.clip(x, 0, classes - 1)}):
            return (
                f"The field {name!r} of its batch holds {x.min()} to {x.max()}, and the model's "
                f"outputs have {classes} classes, 0 to {classes - 1}: {int(outside.sum())} of "
                f"{x.size} labels are outside"
            )
    return None
