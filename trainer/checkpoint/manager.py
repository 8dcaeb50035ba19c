"""Saves checkpoints in the background, restores them exactly, and removes superfluous ones."""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from trainer.checkpoint import commit, leaf_file
from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint, one_line
from trainer.checkpoint.integrity import HostLeaf, to_host, write_file_list
from trainer.checkpoint.reading import all_agree, read_state, storage
from trainer.writers.base import to_stderr
from trainer.writers.files import Outage

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


class Checkpoints:
    """The checkpoints of one run, in one directory, written by the processes of that run."""

    # A save that fails, for example on a full disk, does not raise: the first of several failures
    # is logged, `error` has the reason until a later save succeeds, and older checkpoints stay. A
    # damaged checkpoint is moved to checkpoints/damaged/, and the previous intact one is used. If
    # the disk cannot be read at the moment, nothing is moved. The directory is made when the first
    # checkpoint is saved. A metric that is not finite is never best. `fence` is called just before
    # a checkpoint is committed, moved or removed: an exception of it prevents that, and is raised
    # by the next save, wait or close. `before_commit` is called in a background thread of process
    # 0; it syncs the files that no checkpoint may be ahead of, and if it raises OSError, the save
    # fails. One process writes with `leaf_file`; several, with orbax, wait for each other.

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
        self._retention = commit.Retention(keep_latest, keep_best, best_mode, keep_always)
        self._log = log
        self._outage = Outage(log)
        self._fence = fence or (lambda: None)
        # What the fence raised in a background thread, until it is raised in the main thread.
        self._fence_error: BaseException | None = None
        self._before_commit = before_commit or (lambda: None)
        self._read_only = read_only
        self._is_open = False  # whether `_open` was called, and `_close_manager` not since
        self._manager: CheckpointManager | None = None  # None if there is one process
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def error(self) -> str | None:
        """Why the last save failed, without a full stop; None if it succeeded."""
        return self._outage.error

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return list(commit.step_directories(self.directory))

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
        if step in commit.step_directories(self.directory):
            return False
        leaves = to_host(state)
        value = None if metric is None else float(metric)
        manifest = {
            "step": step,
            # JSON has no NaN and no infinity; float() reads their texts.
            "metric": value if value is None or math.isfinite(value) else repr(value),
            "processes": jax.process_count(),
        }
        try:
            if not self._is_open:
                self._open()
            self._retention.saving(step, value)
            if self._manager is None:
                written = partial(self._write, step, manifest, leaves)
            else:
                # force: this class decides which steps are saved, not orbax's own policy.
                self._manager.save(step, args=storage().save_args(manifest, leaves), force=True)
                written = self._manager.wait_until_finished
            # A second thread waits for orbax's, to remove older checkpoints in the background too.
            self._pending = step, self._thread.submit(self._finish, written)
        except Exception as e:
            self._failed(step, e)
            return False
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
                self._retention.read(commit.step_directories(self.directory))
                commit.remove(
                    self.directory, self._retention.superfluous(self.steps()), self._fence
                )
            except OSError as e:
                self._log(f"Older checkpoints could not be removed: {one_line(e)}.")

    def wait(self) -> None:
        """Waits until the save in progress, if there is one, is committed or has failed."""
        if self._pending is None:
            return
        (step, finished), self._pending = self._pending, None
        problem = finished.exception()
        # The folder tells whether the step was committed. The exception does not: removing older
        # checkpoints, after the commit, may have raised it.
        if self._fence_error is not None or step not in commit.step_directories(self.directory):
            self._failed(step, problem or OSError("its files disappeared after they were written"))
            return
        if problem is not None:  # it was saved, but older ones could not be removed
            self._log(f"After the checkpoint of step {step}: {one_line(problem)}.")
        self._outage.ended(f"Checkpoints can be saved again: the one of step {step} was saved.")

    def close(self) -> None:
        """Waits for the save in progress, and ends the threads."""
        try:
            self.wait()
        finally:
            self._close_manager()
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
        found = commit.step_directories(self.directory)
        if step is not None and step not in found:
            raise CheckpointError(
                f"There is no checkpoint of step {step} in {self.directory}; "
                f"there are {sorted(found) or 'none at all'}."
            )
        if not found:
            raise CheckpointError(f"There is no checkpoint in {self.directory}.")
        for number in [step] if step is not None else sorted(found, reverse=True):
            try:
                return read_state(found[number], abstract_state)
            except CorruptCheckpoint as e:
                self._set_aside(number, found[number], str(e))
        raise CheckpointError(
            f"No checkpoint in {self.directory} can be used: "
            f"{'step ' + str(step) if step is not None else 'all ' + str(len(found))} damaged. "
            f"Look at {self.directory / commit.DAMAGED}, or start again in an empty workdir."
        )

    def discard_after(self, step: int) -> list[int]:
        """Removes and returns the steps after `step`, for a rollback; raises CheckpointError."""
        # `save` skips a step that exists.
        self.wait()
        self._fence()
        later = [number for number in self.steps() if number > step]
        self._retention.forget_after(step)
        if later:
            self._close_manager()  # it would still list them
        why = ""
        if jax.process_index() == 0:
            try:
                commit.remove(self.directory, later, self._fence)
            except OSError as e:
                why = f": {one_line(e)}"
        if not all_agree(not why):
            later_ones = f"The checkpoints after step {step} in {self.directory}"
            raise CheckpointError(f"{later_ones} could not be removed{why}.")
        return later

    def _set_aside(self, step: int, path: Path, why: str) -> None:
        line, problem = f"Checkpoint of step {step} is damaged: {why}.", None
        if self._read_only:
            self._log(line)
            return
        if jax.process_index() == 0:
            self._fence()
            try:
                moved = commit.set_step_aside(path)
                self._log(f"{line} It was moved to {moved}; the previous one is used.")
            except CheckpointError as e:
                problem = e
        self._close_manager()
        if not all_agree(problem is None):
            raise problem or CheckpointError(f"{line} Another process cannot move it.")

    def _open(self) -> None:
        """Makes the directory, and deletes the files of a killed save."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._retention.read(commit.step_directories(self.directory))
        if jax.process_index() == 0:
            commit.delete_removed(self.directory)
        if jax.process_count() == 1:
            commit.remove_unfinished(self.directory)
        else:
            self._manager = storage().open_manager(self.directory, self._commit_with_list)
        self._is_open = True

    def _close_manager(self) -> None:
        """Closes orbax's manager; the next save needs a new one, which reads the folder again."""
        manager, self._manager, self._is_open = self._manager, None, False
        if manager is not None:
            with contextlib.suppress(Exception):  # of a failed save, which was logged already
                manager.close()

    # In a background thread.

    def _write(self, step: int, manifest: dict[str, Any], leaves: Mapping[str, HostLeaf]) -> None:
        """Writes and commits a step of a run of one process."""
        # A unique name: a process that lost the workdir may still write into its own folder.
        temporary = Path(tempfile.mkdtemp(prefix=f"{step}{commit.TEMPORARY}-", dir=self.directory))
        leaf_file.write_step(temporary, manifest, leaves)
        commit.commit(temporary, self.directory / str(step), self._before_commit, self._check_fence)

    def _commit_with_list(self, temporary: Path, final: Path) -> None:
        write_file_list(temporary, final)
        commit.commit(temporary, final, self._before_commit, self._check_fence)

    def _finish(self, written: Callable[[], None]) -> None:
        """Removes superfluous checkpoints once a step is `written` and committed."""
        written()
        if jax.process_index() == 0:
            commit.remove(
                self.directory, self._retention.superfluous(self.steps()), self._check_fence
            )

    def _check_fence(self) -> None:
        """Calls the fence, and keeps its exception for the main thread."""
        try:
            self._fence()
        except BaseException as e:
            self._fence_error = e
            raise

    def _failed(self, step: int, error: BaseException) -> None:
        """Logs a failed save, and removes its temporary files."""
        self._close_manager()  # orbax's manager would list the step as saved
        if self._fence_error is not None:
            raised, self._fence_error = self._fence_error, None
            raise raised
        self._fence()  # the directory may belong to another process by now
        if jax.process_index() == 0:
            commit.remove_unfinished(self.directory, step)
        newest = self.latest()
        kept = "There is no older one" if newest is None else f"The newest is of step {newest}"
        self._outage.failed(
            f"The checkpoint of step {step} could not be saved: {one_line(error)}",
            f"{kept}; training continues and the next save tries again.",
        )
