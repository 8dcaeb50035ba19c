"""The methods of every writer, a subset of those of clu's MetricWriter."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trainer.messages import printable
from trainer.writers.summary import Summary

Log = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Prints a line of warning to stderr, with control characters escaped."""
    print(printable(line, keep="\n\t"), file=sys.stderr, flush=True)


class Writer:
    """The methods of clu.metric_writers.MetricWriter that a run calls; each does nothing here."""

    # A writer overrides those whose values it can represent, and drops all others, as clu's do.

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Writes scalars of a step, numbers or arrays with one; merges those of several calls."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts in markdown by their names."""

    def write_hparams(self, hparams: Mapping[str, object]) -> None:
        """Writes hyperparameters by their names, once per run."""

    def flush(self) -> None:
        """Writes buffered values."""

    def close(self) -> None:
        """Flushes and closes the writer."""


class MultiWriter(Writer):
    """Calls several writers, clu's too; raises the first exception once all were called."""

    def __init__(self, writers: Sequence[Any]) -> None:
        self.writers = tuple(writers)

    def progress(self, step: int) -> None:
        """Passes a finished step to the writers that show progress."""
        self._call_each("progress", step)

    def finish(self, summary: Summary) -> None:
        """Passes the end of this process's part of a run to the writers that record it."""
        self._call_each("finish", summary)

    @property
    def error(self) -> str | None:
        """Why a writer could not write its newest values, or None."""
        return self._first("error")

    @property
    def behind(self) -> str | None:
        """Why metrics.jsonl lacks its newest lines, or None; the other writers do not matter."""
        return self._first("behind")

    @property
    def rows(self) -> int:
        """How many rows metrics.jsonl has."""
        return self._first("rows") or 0

    def _first(self, attribute: str) -> Any:
        """Returns the first value of an attribute that a writer has, and that says something."""
        return next(filter(None, (getattr(each, attribute, None) for each in self.writers)), None)

    def write_scalars(self, step: int, scalars: Mapping[str, ArrayLike]) -> None:
        """Writes scalars of a step with every writer; see `Writer.write_scalars`."""
        self._call_each("write_scalars", step, scalars)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts with every writer; see `Writer.write_texts`."""
        self._call_each("write_texts", step, texts)

    def write_hparams(self, hparams: Mapping[str, object]) -> None:
        """Writes hyperparameters with every writer, as text if clu's writers have no such type."""
        plain = int | float | str | bool
        texts = {name: x if isinstance(x, plain) else str(x) for name, x in hparams.items()}
        self._call_each("write_hparams", texts)

    def flush(self) -> None:
        """Flushes every writer."""
        self._call_each("flush")

    def close(self) -> None:
        """Closes every writer."""
        self._call_each("close")

    def _call_each(self, method: str, *arguments: object) -> None:
        """Calls a method of those writers that have it; clu's have no `progress` and `finish`."""
        first: Exception | None = None
        for call in (getattr(writer, method) for writer in self.writers if hasattr(writer, method)):
            try:
                call(*arguments)
            except Exception as e:
                first = first or e
        if first is not None:
            raise first


def real_number(name: str, value: ArrayLike) -> int | float | bool:
    """Converts a scalar, or an array with one element; ValueError if it is no real number."""
    if type(value) in (float, int, bool):
        return value  # type: ignore[return-value]
    array = np.asarray(value)
    # Refuse objects (O), text (U, S), times (M, m) and complex numbers (c). bfloat16 has the kind
    # V, as structured arrays do, but no field names.
    if array.size != 1 or array.dtype.kind in "OUSMmc" or array.dtype.names:
        raise ValueError(
            f"The metric {name!r} must be one real number, got {value!r}. "
            "Reduce an array before it is written."
        )
    item = array.reshape(()).item()
    return item if isinstance(item, int | float | bool) else float(item)
