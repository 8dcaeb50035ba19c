"""What every writer has: the methods of clu's MetricWriter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trainer.config.tree import printable

Log = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Prints a line of warning."""
    print(printable(line, keep="\n\t"), file=sys.stderr, flush=True)


class Writer:
    """The methods of clu.metric_writers.MetricWriter, each of which does nothing.

    A kind of value that a writer has no place for is left out, as in clu.
    """

    def write_summaries(
        self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Takes raw tensors with the metadata of a TensorBoard plugin."""

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Takes numbers of a step; several calls of one step add to each other."""

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        """Takes images [N, H, W, C] or [H, W, C], C 1 or 3, uint8 or floats in [0, 1]."""

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        """Takes videos [N, T, H, W, C] or [T, H, W, C]."""

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        """Takes audios [N, T, C] in [-1, 1]."""

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Takes texts in markdown."""

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        """Takes arrays of any shape, to be shown as histograms."""

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        """Takes a flat mapping of hyperparameters, once a run."""

    def flush(self) -> None:
        """Writes what is buffered."""

    def close(self) -> None:
        """Flushes and closes."""


class MultiWriter(Writer):
    """Hands everything to several writers; when one raises, the others get theirs all the same."""

    def __init__(self, writers: Sequence[Any]) -> None:
        self.writers = tuple(writers)
        self._progress = [w.progress for w in writers if hasattr(w, "progress")]

    def progress(self, step: int) -> None:
        """Tells those that show it, a progress bar, which step is done."""
        for tell in self._progress:
            tell(step)

    @property
    def error(self) -> str | None:
        """Why a writer could not write its newest values, or None."""
        errors = (getattr(writer, "error", None) for writer in self.writers)
        return next((error for error in errors if error), None)

    @property
    def behind(self) -> str | None:
        """Why metrics.jsonl lacks its newest lines, or None; the other writers do not matter."""
        reasons = (getattr(writer, "behind", None) for writer in self.writers)
        return next((reason for reason in reasons if reason), None)

    @property
    def rows(self) -> int:
        """How many rows metrics.jsonl has."""
        counts = (getattr(writer, "rows", None) for writer in self.writers)
        return next((count for count in counts if count is not None), 0)

    def write_summaries(
        self, step: int, values: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self._each("write_summaries", step, values, metadata)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._each("write_scalars", step, scalars)

    def write_images(self, step: int, images: Mapping[str, Any]) -> None:
        self._each("write_images", step, images)

    def write_videos(self, step: int, videos: Mapping[str, Any]) -> None:
        self._each("write_videos", step, videos)

    def write_audios(self, step: int, audios: Mapping[str, Any], *, sample_rate: int) -> None:
        self._each("write_audios", step, audios, sample_rate=sample_rate)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._each("write_texts", step, texts)

    def write_histograms(
        self,
        step: int,
        arrays: Mapping[str, Any],
        num_buckets: Mapping[str, int] | None = None,
    ) -> None:
        self._each("write_histograms", step, arrays, num_buckets)

    def write_hparams(self, hparams: Mapping[str, Any]) -> None:
        self._each("write_hparams", hparams)

    def flush(self) -> None:
        self._each("flush")

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *args: Any, **kwargs: Any) -> None:
        first: Exception | None = None
        for writer in self.writers:
            try:
                getattr(writer, method)(*args, **kwargs)
            except Exception as e:
                first = first or e
        if first is not None:
            raise first


def number(name: str, value: Any) -> int | float | bool:
    """Returns a scalar (Python's, numpy's, jax's, of any shape with one element) as Python's own.

    Raises ValueError for anything else.
    """
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OUSMmc" or array.dtype.names:
        raise ValueError(
            f"The metric {name!r} is {value!r}; a scalar is one real number. "
            "Reduce an array before it is written, or write it as a histogram."
        )
    item = array.reshape(()).item()
    return item if isinstance(item, int | float | bool) else float(item)
