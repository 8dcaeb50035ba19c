"""Saves checkpoints in the background, restores them exactly, and removes superfluous ones.

Where they are, and how they are committed there so that no crash leaves an incomplete one, is the
subject of `folder` and `bucket`.
"""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import leaf_file
from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint, one_line
from trainer.checkpoint.folder import Folder
from trainer.checkpoint.integrity import to_host
from trainer.checkpoint.reading import (
    all_agree,
    all_gather_ints,
    home_of,
    read_manifest,
    read_state,
    storage,
)
from trainer.writers.base import to_stderr
from trainer.writers.files import Outage


def check_not_lost(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if every checkpoint of a run was set aside as damaged."""
    # A run must not start anew in such a folder, because it would erase the metrics.
    home = home_of(directory)
    if not home.steps() and (damaged := home.damaged()):
        raise CheckpointError(
            f"Every checkpoint of this run was damaged and moved to {damaged}. Starting anew "
            "would erase its metrics: remove that folder to do so, choose another --workdir, or "
            f"move a repaired checkpoint back to {home}."
        )


# Which checkpoints to keep.


class Retention:
    """Keeps the newest checkpoints, the best ones by a finite metric, and chosen steps."""

    def __init__(
        self,
        keep_latest: int = 2,
        keep_best: int = 1,
        best_mode: str = "max",
        keep_always: Collection[int] = (),
    ) -> None:
        if keep_latest < 1 or keep_best < 0:
            raise ValueError(
                f"keep_latest={keep_latest} and keep_best={keep_best} were given; "
                "keep_latest must be at least 1 and keep_best at least 0."
            )
        if best_mode not in ("max", "min"):
            raise ValueError(f"best_mode={best_mode!r} was given; it must be 'max' or 'min'.")
        self._latest, self._best = keep_latest, keep_best
        # sorted() puts the best metric first, and of two equal ones the earlier.
        self._sign = -1 if best_mode == "max" else 1
        self._always = frozenset(keep_always)
        self._metrics: dict[int, float] = {}
        self._later_metrics: dict[int, float] = {}

    def read(self, found: Mapping[int, Any]) -> None:
        """Reads the metrics of the checkpoints that there are, given as step -> place."""
        self._metrics = dict.fromkeys(found, math.nan)
        for step, path in found.items():
            with contextlib.suppress(CorruptCheckpoint):
                if (metric := read_manifest(path)["metric"]) is not None:
                    self._metrics[step] = float(metric)
        self._metrics |= {s: x for s, x in self._later_metrics.items() if s in found}

    def saving(self, step: int, metric: float | None) -> None:
        """Sets the metric of a checkpoint that is about to be saved; None if it has none."""
        self._later_metrics.pop(step, None)  # of an earlier checkpoint of this step
        self._metrics[step] = math.nan if metric is None else metric

    def record_metric(self, step: int, metric: float) -> None:
        """Sets the metric of a checkpoint that was saved before it was evaluated."""
        # It replaces the metric on disk in every later decision.
        self._later_metrics[step] = self._metrics[step] = metric

    def forget_after(self, step: int) -> None:
        """Forgets the metrics of later steps than `step`."""
        for known in (self._later_metrics, self._metrics):
            for later in [s for s in known if s > step]:
                del known[later]

    def superfluous(self, steps: Collection[int]) -> set[int]:
        """Returns those of `steps`, all checkpoints of the run, that need not be kept."""
        metrics = {step: self._metrics.get(step, math.nan) for step in steps}
        # Without NaNs, which have no order: orbax's own policy took a NaN for the best metric.
        finite = [step for step in steps if math.isfinite(metrics[step])]
        best = sorted(finite, key=lambda step: (self._sign * metrics[step], step))[: self._best]
        return set(steps) - set(sorted(steps)[-self._latest :]) - set(best) - self._always


class Checkpoints:
    """The checkpoints of one run, in one directory, written by the processes of that run."""

    # A save that fails, for example on a full disk, does not raise: the first of several failures
    # is logged, `error` has the reason until a later save succeeds, and older checkpoints stay. A
    # damaged checkpoint is moved to checkpoints/damaged/, and the previous intact one is used. If
    # the disk cannot be read at the moment, nothing is moved. The directory is made when the first
    # checkpoint is saved; if it is a file with a URL, they are saved there. A metric that is not
    # finite is never best. `fence` is called just before a checkpoint is committed, moved or
    # removed: an exception of it prevents that, and is raised by the next save, wait or close.
    # `before_commit` is called in a background thread of process 0; it syncs the files that no
    # checkpoint may be ahead of, and if it raises OSError, the save fails. One process writes a
    # file with `leaf_file`; several, which wait for each other, and one that writes to a bucket,
    # write shards with `storage`.

    def __init__(
        self,
        directory: str | os.PathLike[str],
        retention: Retention | None = None,
        *,
        log: Callable[[str], None] = to_stderr,
        fence: Callable[[], None] | None = None,
        before_commit: Callable[[], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._home: Any = home_of(directory)  # a Folder or a Bucket
        self._retention = retention or Retention()
        self._log = log
        self._outage = Outage(log)
        self._fence = fence or (lambda: None)
        # What the fence raised in a background thread, until it is raised in the main thread.
        self._fence_error: BaseException | None = None
        self._before_commit = before_commit or (lambda: None)
        self._read_only = read_only
        # The steps that were committed; None before the first save has looked.
        self._known: set[int] | None = None
        self._is_open = False  # False after an error: the next save looks at the folder again
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def error(self) -> str | None:
        """Why the last save failed, without a full stop; None if it succeeded."""
        return self._outage.error

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return list(self._home.steps())

    def latest(self) -> int | None:
        """Returns the newest committed step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, metric: float | None = None) -> bool:
        """Starts to save a state, after the previous save; returns whether it was started."""
        # Returns when the state's buffers may be donated to the next step; the files are written in
        # the background. It is not started if the step is saved already, or fails at once. `metric`
        # ranks the checkpoint. Raises ValueError if a leaf is not an array.
        if self._read_only:
            raise ValueError(f"The checkpoints in {self.directory} were opened to be read only.")
        self.wait()
        self._fence()
        step = int(step)
        try:
            if self._has(step):
                return False
        except CheckpointError as e:
            self._failed(step, e)
            return False
        sharded = self._by_shards()
        leaves: Mapping[str, Any] = storage().shards_to_host(state) if sharded else to_host(state)
        value = None if metric is None else float(metric)
        manifest = {
            "step": step,
            # JSON has no NaN and no infinity; float() reads their texts.
            "metric": value if value is None or math.isfinite(value) else repr(value),
            "processes": jax.process_count(),
        }
        problem = None
        try:
            if not self._is_open:
                self._open()
        except Exception as e:
            if jax.process_count() == 1:
                self._failed(step, e)
                return False
            problem = e  # process 0 tells the others when they wait for its folder
        self._retention.saving(step, value)
        written = partial(self._write, step, manifest, leaves, problem)
        self._pending = step, self._thread.submit(self._finish, step, written)
        return True

    def record_metric(self, step: int, metric: float) -> None:
        """Sets, in memory alone, the metric of a checkpoint saved before it was evaluated."""
        self._retention.record_metric(step, float(metric))

    def prune(self) -> None:
        """Removes superfluous checkpoints at the end, as `record_metric` may have changed them."""
        self.wait()
        self._fence()
        if jax.process_index() == 0:
            try:
                self._retention.read(self._home.steps())
                self._home.remove(self._retention.superfluous(self.steps()), self._fence)
            except OSError as e:
                self._log(f"Older checkpoints could not be removed: {one_line(e)}.")

    def wait(self) -> None:
        """Waits until the save in progress, if there is one, is committed or has failed."""
        if self._pending is None:
            return
        (step, finished), self._pending = self._pending, None
        problem = finished.exception()
        # An exception does not tell that the step was not committed: removing older checkpoints,
        # after the commit, may have raised it.
        can_look = isinstance(self._home, Folder) and jax.process_index() == 0
        is_there = step in (self._home.steps() if can_look else self._known or ())
        if self._fence_error is not None or not is_there:
            self._failed(step, problem or OSError("its files disappeared after they were written"))
            return
        if problem is not None:  # it was saved, but older ones could not be removed
            self._log(f"After the checkpoint of step {step}: {one_line(problem)}.")
            self._known = None
        self._outage.ended(f"Checkpoints can be saved again: the one of step {step} was saved.")

    def close(self) -> None:
        """Waits for the save in progress, and ends the threads."""
        try:
            self.wait()
        finally:
            self._is_open = False
            self._thread.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Reads a checkpoint into the structure, dtypes and shardings of an abstract state."""
        # A `step` of None is the newest intact one; damaged ones are set aside. Every leaf is
        # committed and strongly typed. Raises CheckpointError if there is no intact checkpoint, the
        # disk cannot be read, or structure, shapes or dtypes differ.
        self.wait()
        found = self._home.steps()
        if step is not None and step not in found:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self._home}; "
                f"there are {sorted(found) or 'none at all'}."
            )
        if not found:
            raise CheckpointError(f"There is no checkpoint in {self._home}.")
        for number in [step] if step is not None else sorted(found, reverse=True):
            try:
                return read_state(found[number], abstract_state)
            except CorruptCheckpoint as e:
                self._set_aside(number, found[number], str(e))
        raise CheckpointError(
            f"No checkpoint in {self._home} can be used: "
            f"{'step ' + str(step) if step is not None else 'all ' + str(len(found))} damaged. "
            f"Look at {self._home.damaged() or self._home}, or start again in an empty workdir."
        )

    def discard_after(self, step: int) -> list[int]:
        """Removes and returns the steps after `step`, for a rollback; raises CheckpointError."""
        # `save` skips a step that exists.
        self.wait()
        self._fence()
        later = [number for number in self.steps() if number > step]
        self._retention.forget_after(step)
        self._known = None
        why = ""
        if jax.process_index() == 0:
            try:
                self._home.remove(later, self._fence)
            except OSError as e:
                why = f": {one_line(e)}"
        if not all_agree(not why):
            later_ones = f"The checkpoints after step {step} in {self._home}"
            raise CheckpointError(f"{later_ones} could not be removed{why}.")
        return later

    def _set_aside(self, step: int, path: Any, why: str) -> None:
        line, problem = f"Checkpoint of step {step} is damaged: {why}.", None
        if self._read_only:
            self._log(line)
            return
        if jax.process_index() == 0:
            self._fence()
            try:
                moved = self._home.set_aside(path)
                self._log(f"{line} It was moved to {moved}; the previous one is used.")
            except CheckpointError as e:
                problem = e
        if not all_agree(problem is None):
            raise problem or CheckpointError(f"{line} Another process cannot move it.")
        self._known = None  # the step can be saved again

    def _by_shards(self) -> bool:
        return jax.process_count() > 1 or not isinstance(self._home, Folder)

    def _has(self, step: int) -> bool:
        """Returns whether a step is committed; CheckpointError in all processes if one fails."""
        # Asked once, because a bucket answers slowly, and for what process 0 finds: on NFS, another
        # process may see a folder that was renamed only later.
        if self._known is None:
            found, why = set[int](), ""
            try:
                found = set(self._home.steps())
            except CheckpointError as e:
                why = str(e).rstrip(".")
            answers = all_gather_ints([not why, step in found])
            if not answers[:, 0].all():
                raise CheckpointError(why or "another process cannot list those that there are")
            self._known = (found | {step}) if answers[0, 1] else (found - {step})
        return step in self._known

    def _open(self) -> None:
        """Prepares the directory, and deletes the files of a killed save."""
        if jax.process_index() == 0:
            self._home.open()
            self._retention.read(self._home.steps())
        self._is_open = True

    # In a background thread.

    def _write(
        self, step: int, manifest: dict[str, Any], leaves: Any, problem: Exception | None
    ) -> None:
        """Writes and commits a step; raises `problem`, if there is one, in all processes."""

        def make() -> Any:
            if problem is not None:
                raise problem
            return self._home.make(step)

        def commit(place: Any, text: str) -> None:
            self._home.commit(place, step, text, self._before_commit, self._check_fence)

        if self._by_shards():
            storage().save_shards(make, manifest, leaves, commit)
        else:
            folder = make()
            commit(folder, leaf_file.write_step(folder, manifest, leaves))

    def _finish(self, step: int, written: Callable[[], None]) -> None:
        """Removes superfluous checkpoints once a step is `written` and committed."""
        written()
        if self._known is not None:
            self._known.add(step)
        if jax.process_index() == 0:
            self._home.remove(self._retention.superfluous(self.steps()), self._check_fence)

    def _check_fence(self) -> None:
        """Calls the fence, and keeps its exception for the main thread."""
        try:
            self._fence()
        except BaseException as e:
            self._fence_error = e
            raise

    def _failed(self, step: int, error: BaseException) -> None:
        """Logs a failed save, and removes its temporary files."""
        self._is_open = False
        if self._fence_error is not None:
            raised, self._fence_error = self._fence_error, None
            raise raised
        self._fence()  # the directory may belong to another process by now
        if jax.process_index() == 0 and isinstance(self._home, Folder):
            self._home.forget(step)  # in a bucket, the next call of `open` does it
        try:
            newest = self.latest()
            kept = "There is no older one" if newest is None else f"The newest is of step {newest}"
        except CheckpointError:  # a server that does not answer
            kept = "Older ones stay"
        self._outage.failed(
            f"The checkpoint of step {step} could not be saved: {one_line(error)}",
            f"{kept}; training continues and the next save tries again.",
        )
