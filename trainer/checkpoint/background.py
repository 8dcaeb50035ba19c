"""Saves one checkpoint at a time in the background, and keeps its outcome for the main thread."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from trainer.checkpoint.commit import Fence, commit, remove_unfinished
from trainer.checkpoint.file_list import SizeAndCrc
from trainer.checkpoint.folders import TEMPORARY
from trainer.checkpoint.host_copy import HostLeaf
from trainer.checkpoint.reading import storage

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


class BackgroundSaver:
    """Writes checkpoints, commits them, and then calls a function, in other threads.

    A run of several processes writes with orbax, which makes them wait for each other.

    Nothing is raised there: the main thread asks for the outcome of a save before the next one.

    Args:
        directory: checkpoints/ of a run.
        before_commit: called in process 0 before a checkpoint is committed; see `commit`.
        fence: called in process 0 before the commit; prevents it by an exception.
        after_commit: called in every process after the commit.
    """

    def __init__(
        self,
        directory: Path,
        before_commit: Callable[[], None],
        fence: Fence,
        after_commit: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._before_commit = before_commit
        self._fence = fence
        self._after_commit = after_commit
        self._manager: CheckpointManager | None = None  # None if there is one process
        self._is_open = False
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None
        self._fence_error: BaseException | None = None

    @property
    def is_open(self) -> bool:
        """Whether `open` was called since the beginning, or since the last `close_manager`."""
        return self._is_open

    def open(self) -> None:
        """Deletes the files of a killed save, and opens orbax's manager if processes save together.

        Raises:
            OSError: the directory cannot be read or written.
        """
        if jax.process_count() == 1:
            remove_unfinished(self._directory)
        else:
            self._manager = storage().open_manager(self._directory, self._commit)
        self._is_open = True

    def start(self, step: int, manifest: dict[str, Any], leaves: Mapping[str, HostLeaf]) -> None:
        """Starts a save; the previous one must have been waited for.

        Args:
            step: number of finished steps.
            manifest: of the checkpoint, without its leaves.
            leaves: path -> leaf; their arrays must stay valid.

        Raises:
            Exception: any error of orbax or of the disk with which the save fails at once.
        """
        if not self._is_open:
            raise ValueError("The saver must be opened before it saves.")
        if self._manager is None:
            written = partial(self._write, step, manifest, leaves)
        else:
            # force: `Checkpoints` has decided that this step is saved, and orbax's own policy is
            # not asked.
            self._manager.save(step, args=storage().save_args(manifest, leaves), force=True)
            written = self._manager.wait_until_finished
        # Another thread waits for orbax's, so that older checkpoints are removed behind the steps
        # too.
        self._pending = step, self._thread.submit(self._finish, written)

    def _write(self, step: int, manifest: dict[str, Any], leaves: Mapping[str, HostLeaf]) -> None:
        """Writes and commits a step of a run of one process."""
        # A name of its own: a process that lost the workdir may still write into its folder.
        temporary = Path(tempfile.mkdtemp(prefix=f"{step}{TEMPORARY}-", dir=self._directory))
        # Imported when it is first needed, so that tensorstore does not delay the first step.
        known = importlib.import_module("trainer.checkpoint.writing").write_step(
            temporary, manifest, leaves
        )
        self._commit(temporary, self._directory / str(step), known)

    def _commit(
        self, temporary: Path, final: Path, known: Mapping[str, SizeAndCrc] | None = None
    ) -> None:
        commit(temporary, final, self._before_commit, self.check_fence, known)

    def _finish(self, written: Callable[[], None]) -> None:
        written()
        self._after_commit()

    def check_fence(self) -> None:
        """Calls the fence in a background thread, and keeps its exception for the main thread."""
        try:
            self._fence()
        except BaseException as e:
            self._fence_error = e
            raise

    def wait(self) -> tuple[int, BaseException | None] | None:
        """Waits for the save in progress.

        Returns:
            Its step, and the exception that ended it, which may be one of `after_commit`; None if
            no save was started since the last call.
        """
        if self._pending is None:
            return None
        (step, finished), self._pending = self._pending, None
        return step, finished.exception()

    @property
    def was_fenced(self) -> bool:
        """Whether the fence raised an exception that was not raised in the main thread yet."""
        return self._fence_error is not None

    def raise_fence_error(self) -> None:
        """Raises the exception of the fence, if there was one, in the main thread."""
        if self._fence_error is not None:
            error, self._fence_error = self._fence_error, None
            raise error

    def close_manager(self) -> None:
        """Closes orbax's manager; the next save needs a new one, which reads the folder again."""
        manager, self._manager = self._manager, None
        self._is_open = False
        if manager is not None:
            try:
                manager.close()
            except Exception:  # the error of a failed save, which was logged already
                pass

    def close(self) -> None:
        """Closes the manager, and ends the thread."""
        self.close_manager()
        self._thread.shutdown()
