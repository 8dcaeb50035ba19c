"""Checkpoints that can be trusted: asynchronous saves, checksums, retention, exact restore."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import integrity
from trainer.checkpoint.commit import commit, remove, remove_unfinished, set_aside, sweep
from trainer.checkpoint.integrity import CheckpointError, Damaged
from trainer.checkpoint.reading import (
    DAMAGED,
    all_agree,
    place,
    read_in_all_processes,
    step_directories,
    storage,
)
from trainer.checkpoint.retention import Retention
from trainer.writers.base import to_stderr


class Checkpoints:
    """The checkpoints of one run, in one directory, written by one process group.

    A save that fails (a full disk) does not raise: it is said once through `log`, `error` says why
    until a later save succeeds, and older checkpoints stay. A damaged checkpoint is moved to
    checkpoints/damaged/ and the previous good one is used; where the disk cannot be read just now,
    nothing is moved.

    Args:
      directory: WORKDIR/checkpoints; made when the first checkpoint is saved.
      keep_latest: how many of the newest checkpoints to keep, at least 1.
      keep_best: how many of the best by `metric` to keep beside them; 0 for none.
      best_mode: 'max' or 'min'. A NaN or infinite metric is never best.
      keep_always: steps to keep in any case.
      log: takes one line of warning; default stderr.
      fence: called just before a checkpoint is committed, moved or removed; what it raises stops
        that and is raised by the next save, wait or close.
      before_commit: called behind the steps before a checkpoint is committed, in process 0 alone;
        syncs what no checkpoint may be ahead of. An OSError fails the save.
      read_only: never moves or removes anything, and refuses to save.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        best_mode: str = "max",
        keep_always: Collection[int] = (),
        log: Callable[[str], None] = to_stderr,
        fence: Callable[[], None] | None = None,
        before_commit: Callable[[], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.error: str | None = None
        self._retention = Retention(keep_latest, keep_best, best_mode, keep_always)
        self._log = log
        self._fence = fence or (lambda: None)
        self._before_commit = before_commit or (lambda: None)
        self._read_only = read_only
        self._manager: Any = None
        self._behind = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None
        self._fenced: BaseException | None = None

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return list(step_directories(self.directory))

    def latest(self) -> int | None:
        """Returns the newest committed step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, *, metric: float | None = None) -> bool:
        """Starts to save a state and returns whether it did.

        Returns when the values are safe from the next step's donation; writing goes on behind.
        Waits for the previous save first. False: the step is there already, or the save failed
        at once (then `error` says why).

        Args:
          step: number of finished steps, at least 0.
          state: pytree of arrays and typed PRNG keys; NamedTuples, dicts, lists, tuples, None.
          metric: what 'best' is judged by.
        """
        if self._read_only:
            raise ValueError(f"The checkpoints in {self.directory} were opened to be read only.")
        self._collect()
        self._fence()
        step = int(step)
        if step in step_directories(self.directory):
            return False
        leaves = integrity.to_host(state)
        value = None if metric is None else float(metric)
        manifest = {
            "format": integrity.FORMAT,
            "step": step,
            "metric": value if value is None or math.isfinite(value) else repr(value),
            "processes": jax.process_count(),
        }
        try:
            manager = self._open()
            self._retention.saving(step, value)
            manager.save(
                step,
                args=storage().save_args(manifest, leaves),
                force=True,
            )
        except Exception as e:
            self._failed(step, e)
            return False
        self._pending = step, self._behind.submit(self._finish, manager)
        return True

    def judge(self, step: int, metric: float) -> None:
        """Tells what a checkpoint is worth that was saved before that was known."""
        self._retention.judge(step, float(metric))

    def prune(self) -> None:
        """Removes the checkpoints that need not be kept, as every save does when it is committed.

        For a run that ends without another save: what judge() was told may have changed them.
        """
        self._collect()
        self._fence()
        if jax.process_index() == 0:
            try:
                self._retention.read(step_directories(self.directory))
                remove(self.directory, self._retention.superfluous(self.steps()), self._fence)
            except OSError as e:
                self._log(f"Older checkpoints could not be removed: {integrity.reason(e)}.")

    def wait(self) -> None:
        """Waits until the save in progress, if any, is committed or has failed (see `error`)."""
        self._collect()

    def close(self) -> None:
        """Waits for the save in progress and frees what orbax holds."""
        try:
            self._collect()
        finally:
            self._drop_manager()
            self._behind.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def restore(self, abstract_state: Any, step: int | None = None) -> Any:
        """Reads a checkpoint into the structure, shapes, dtypes and shardings of abstract_state.

        Args:
          abstract_state: pytree of jax.ShapeDtypeStruct with `sharding` (None: first device).
          step: which one; None for the newest good one, setting damaged ones aside.

        Returns: the state, every leaf committed and strongly typed. Raises CheckpointError when
        there is none, all are damaged, the one asked for is, the disk cannot be read, or structure,
        shape or dtype differ (it names the leaves then).
        """
        self._collect()
        found = step_directories(self.directory)
        if step is not None and step not in found:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory}; "
                f"there are {sorted(found) or 'none at all'}."
            )
        if not found:
            raise CheckpointError(f"There is no checkpoint in {self.directory}.")
        targets = integrity.named_leaves(abstract_state)
        for number in [step] if step is not None else sorted(found, reverse=True):
            try:
                arrays = read_in_all_processes(found[number], targets)
            except Damaged as e:
                self._set_aside(number, found[number], str(e))
                continue
            leaves = [place(arrays.pop(name), target) for name, target in targets.items()]
            return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        raise CheckpointError(
            f"No checkpoint in {self.directory} can be used: "
            f"{'step ' + str(step) if step is not None else 'all ' + str(len(found))} damaged. "
            f"Look at {self.directory / DAMAGED}, or start again in an empty workdir."
        )

    def discard_after(self, step: int) -> list[int]:
        """Removes the checkpoints of later steps than `step` and returns these steps.

        For going back on purpose: a later save of the same step would otherwise be skipped.
        Raises CheckpointError where the disk does not let them be removed.
        """
        self._collect()
        self._fence()
        later = [number for number in self.steps() if number > step]
        self._retention.forget_after(step)
        if later:
            self._drop_manager()
        why = ""
        if jax.process_index() == 0:
            try:
                remove(self.directory, later, self._fence)
            except OSError as e:
                why = f": {integrity.reason(e)}"
        if not all_agree(not why):
            later_ones = f"The checkpoints after step {step} in {self.directory}"
            raise CheckpointError(f"{later_ones} could not be removed{why}.")
        return later

    # -- inside

    def _set_aside(self, step: int, path: Path, reason: str) -> None:
        line, problem = f"Checkpoint of step {step} is damaged: {reason}.", None
        if self._read_only:
            self._log(line)
            return
        if jax.process_index() == 0:
            self._fence()
            try:
                self._log(f"{line} It was moved to {set_aside(path)}; the previous one is used.")
            except CheckpointError as e:
                problem = e
        self._drop_manager()
        if not all_agree(problem is None):
            raise problem or CheckpointError(f"{line} Another process cannot move it.")

    def _open(self) -> Any:
        if self._manager is None:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._retention.read(step_directories(self.directory))
            if jax.process_index() == 0:
                sweep(self.directory)
            committing = partial(commit, before=self._before_commit, fence=self._fence_behind)
            self._manager = storage().open_manager(self.directory, committing)
        return self._manager

    def _fence_behind(self) -> None:
        """Asks the fence in another thread; what it raises, the run's own is to raise too."""
        try:
            self._fence()
        except BaseException as e:
            self._fenced = e
            raise

    def _finish(self, manager: Any) -> None:
        """Waits for the commit and then removes what need not be kept; in a thread of its own."""
        manager.wait_until_finished()
        if jax.process_index() == 0:
            remove(self.directory, self._retention.superfluous(self.steps()), self._fence_behind)

    def _collect(self) -> None:
        """Waits for the save in progress and takes note of how it ended."""
        if self._pending is None:
            return
        (step, finished), self._pending = self._pending, None
        problem = finished.exception()
        if self._fenced is not None or step not in step_directories(self.directory):
            self._failed(step, problem or OSError("it was written, and then was not there"))
            return
        if problem is not None:  # it is there, but older ones could not be removed
            self._log(f"After the checkpoint of step {step}: {integrity.reason(problem)}.")
        if self.error is not None:
            self.error = None
            self._log(f"Checkpoints can be saved again: that of step {step} was.")

    def _failed(self, step: int, error: BaseException) -> None:
        """Notes a failed save, removes what it left, and says so once."""
        self._drop_manager()  # orbax believes that the step exists
        if self._fenced is not None:
            fenced, self._fenced = self._fenced, None
            raise fenced
        self._fence()  # what lies there may be another's by now
        if jax.process_index() == 0:
            remove_unfinished(self.directory, step)
        first = self.error is None
        self.error = f"The checkpoint of step {step} could not be saved: {integrity.reason(error)}"
        if first:
            newest = self.latest()
            kept = "There is no older one" if newest is None else f"The newest is of step {newest}"
            self._log(f"{self.error}. {kept}; training goes on and the next save tries again.")

    def _drop_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            try:
                manager.close()
            except Exception:  # the error of a failed save, which is noted already
                pass
