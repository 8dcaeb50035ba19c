"""Saves checkpoints in the background, restores them exactly, and removes superfluous ones.

They are committed and removed so that no crash leaves an incomplete one; see `commit`. Its order is
also safe against a loss of power: it syncs the files that the checkpoint must not be ahead of, then
every file and folder of the checkpoint. Only then does the checkpoint get its name, which is synced
before older checkpoints are removed.
"""

import contextlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import leaf_file
from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint, one_line
from trainer.checkpoint.integrity import to_host
from trainer.checkpoint.reading import all_agree, read_manifest, read_state, storage
from trainer.writers.base import to_stderr
from trainer.writers.files import Outage, sync, sync_tree

Fence = Callable[[], None]


def commit(temporary: Path, final: Path, before: Callable[[], None], fence: Fence) -> None:
    """Syncs a step's files and renames it; raises OSError if the disk cannot be written."""
    # `before` syncs the files that the checkpoint must not be ahead of; `fence` is called just
    # before the rename. Any exception of the two is passed on.
    before()
    sync_tree(temporary)
    # As late as possible: another process may take the workdir over while the files are synced.
    fence()
    temporary.rename(final)
    sync(final.parent)
    sync(final.parent.parent)  # checkpoints/ itself may be new


def remove(directory: Path, steps: Collection[int], fence: Fence) -> None:
    """Removes checkpoints, the newest first; raises OSError if one cannot be renamed."""
    # Each is renamed before its files are deleted, because a folder with the name of a step must be
    # complete at any moment. `fence` is called first and before each rename, and its exceptions are
    # passed on. Those before a checkpoint that cannot be renamed were removed.
    if not steps and not (directory / REMOVED).exists():
        return
    fence()
    sync(directory)  # a killed process may not have synced the names of those that stay
    delete_removed(directory)
    home = directory / REMOVED
    for step in sorted(steps, reverse=True):
        fence()
        home.mkdir(mode=0o700, exist_ok=True)
        (directory / str(step)).rename(free_name(home, step))
    # Sync the renames before any file is deleted: a folder named as a step must be complete.
    sync(directory)
    delete_removed(directory)


def delete_removed(directory: Path) -> None:
    """Deletes the folder of removed checkpoints, including those of a killed process."""
    # Files that a reader on NFS has open are deleted after the next save.
    home = directory / REMOVED
    if home.is_symlink() or home.is_file():
        home.unlink()
    shutil.rmtree(home, ignore_errors=True)


def remove_unfinished(directory: Path, step: int | None = None) -> None:
    """Deletes the temporary folders of failed or killed saves, of one step or, if None, of any."""
    for rest in directory.glob(f"{'*' if step is None else step}{TEMPORARY}*"):
        shutil.rmtree(rest, ignore_errors=True)


def set_step_aside(path: Path) -> Path:
    """Moves a damaged step to damaged/, or raises CheckpointError; returns its new path."""
    home = path.parent / DAMAGED
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        return path.rename(free_name(home, int(path.name)))
    except OSError as e:
        why = "it is a file" if isinstance(e, FileExistsError) else one_line(e)
        raise CheckpointError(
            f"The damaged checkpoint {path} cannot be moved to the folder {home}: {why}. Move it "
            "away, and start the same command again."
        ) from e


def free_name(home: Path, step: int) -> Path:
    """Returns an unused path for a step, such as damaged/100 or damaged/100.1."""
    names = (f"{step}.{i}" if i else str(step) for i in range(1000))
    return next(home / name for name in names if not (home / name).exists())


# Which checkpoints there are.

DAMAGED, REMOVED = "damaged", "removed"  # folders beside the steps
TEMPORARY = ".orbax-checkpoint-tmp"  # part of the name of a step that is being written


def step_directories(directory: str | os.PathLike[str]) -> dict[int, Path]:
    """Returns step -> absolute path of the committed steps in checkpoints/, oldest first."""
    root = Path(directory)
    try:
        root = root.absolute()
        if not root.is_dir():
            return {}
        # Names as a save writes them: int() would also read '007' and '1_0'. 18 digits fit int64.
        names = [path for path in root.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", path.name)]
        return dict(sorted((int(path.name), path) for path in names if path.is_dir()))
    except OSError as e:
        raise CheckpointError(f"{root} cannot be listed: {one_line(e)}.") from e


def holds_results(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a checkpoints/ directory has more than the files of an interrupted save."""
    root = Path(directory)
    if not root.is_dir():
        return root.exists()
    return any(TEMPORARY not in path.name and path.name != REMOVED for path in root.iterdir())


def check_not_lost(directory: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if every checkpoint of a run was set aside as damaged."""
    # A run must not start anew in such a folder, because it would erase the metrics.
    home = Path(directory) / DAMAGED
    if not step_directories(directory) and home.is_dir() and any(home.iterdir()):
        raise CheckpointError(
            f"Every checkpoint of this run was damaged and moved to {home}. Starting anew "
            "would erase its metrics: remove that folder to do so, choose another --workdir, or "
            f"move a repaired checkpoint back to {directory}."
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

    def read(self, found: Mapping[int, Path]) -> None:
        """Reads the metrics of the checkpoints on disk, given as step -> folder."""
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
    # checkpoint is saved. A metric that is not finite is never best. `fence` is called just before
    # a checkpoint is committed, moved or removed: an exception of it prevents that, and is raised
    # by the next save, wait or close. `before_commit` is called in a background thread of process
    # 0; it syncs the files that no checkpoint may be ahead of, and if it raises OSError, the save
    # fails. One process writes with `leaf_file`, and several, which wait for each other, with
    # `storage`.

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
        self._retention = retention or Retention()
        self._log = log
        self._outage = Outage(log)
        self._fence = fence or (lambda: None)
        # What the fence raised in a background thread, until it is raised in the main thread.
        self._fence_error: BaseException | None = None
        self._before_commit = before_commit or (lambda: None)
        self._read_only = read_only
        self._newest: int | None = None  # the step that was committed last
        self._is_open = False  # False after an error: the next save looks at the folder again
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._pending: tuple[int, Future[None]] | None = None

    @property
    def error(self) -> str | None:
        """Why the last save failed, without a full stop; None if it succeeded."""
        return self._outage.error

    def steps(self) -> list[int]:
        """Returns the steps of all committed checkpoints, oldest first."""
        return list(step_directories(self.directory))

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
        if self._has(step):
            return False
        several = self._is_of_several()
        leaves: Mapping[str, Any] = storage().shards_to_host(state) if several else to_host(state)
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
            if not several:
                self._failed(step, e)
                return False
            problem = e  # process 0 tells the others when they wait for its folder
        self._retention.saving(step, value)
        written = partial(self._write, step, manifest, leaves, problem)
        self._pending = step, self._thread.submit(self._finish, written)
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
                self._retention.read(step_directories(self.directory))
                remove(self.directory, self._retention.superfluous(self.steps()), self._fence)
            except OSError as e:
                self._log(f"Older checkpoints could not be removed: {one_line(e)}.")

    def wait(self) -> None:
        """Waits until the save in progress, if there is one, is committed or has failed."""
        if self._pending is None:
            return
        (step, finished), self._pending = self._pending, None
        problem = finished.exception()
        if problem is None:
            self._newest = step
        # The folder tells whether the step was committed. The exception does not: removing older
        # checkpoints, after the commit, may have raised it.
        if self._fence_error is not None or not self._has(step):
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
        found = step_directories(self.directory)
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
            f"Look at {self.directory / DAMAGED}, or start again in an empty workdir."
        )

    def discard_after(self, step: int) -> list[int]:
        """Removes and returns the steps after `step`, for a rollback; raises CheckpointError."""
        # `save` skips a step that exists.
        self.wait()
        self._fence()
        later = [number for number in self.steps() if number > step]
        self._retention.forget_after(step)
        self._newest = None
        why = ""
        if jax.process_index() == 0:
            try:
                remove(self.directory, later, self._fence)
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
                moved = set_step_aside(path)
                self._log(f"{line} It was moved to {moved}; the previous one is used.")
            except CheckpointError as e:
                problem = e
        if not all_agree(problem is None):
            raise problem or CheckpointError(f"{line} Another process cannot move it.")

    def _is_of_several(self) -> bool:
        return jax.process_count() > 1

    def _has(self, step: int) -> bool:
        """Returns whether a step is committed."""
        # On NFS, a process may see the folder that another one has renamed only later.
        told = jax.process_index() > 0 and step == self._newest
        return told or step in step_directories(self.directory)

    def _open(self) -> None:
        """Makes the directory, and deletes the files of a killed save."""
        if jax.process_index() == 0:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._retention.read(step_directories(self.directory))
            delete_removed(self.directory)
            remove_unfinished(self.directory)
        self._is_open = True

    # In a background thread.

    def _write(
        self, step: int, manifest: dict[str, Any], leaves: Any, problem: Exception | None
    ) -> None:
        """Writes and commits a step; raises `problem`, if there is one, in all processes."""

        def make() -> Path:
            if problem is not None:
                raise problem
            # A unique name: a process that lost the workdir may still write into its own folder.
            return Path(tempfile.mkdtemp(prefix=f"{step}{TEMPORARY}-", dir=self.directory))

        def commit_step(temporary: Path) -> None:
            commit(temporary, self.directory / str(step), self._before_commit, self._check_fence)

        if self._is_of_several():
            storage().save_shards(make, manifest, leaves, commit_step)
        else:
            temporary = make()
            leaf_file.write_step(temporary, manifest, leaves)
            commit_step(temporary)

    def _finish(self, written: Callable[[], None]) -> None:
        """Removes superfluous checkpoints once a step is `written` and committed."""
        written()
        if jax.process_index() == 0:
            remove(self.directory, self._retention.superfluous(self.steps()), self._check_fence)

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
        if jax.process_index() == 0:
            remove_unfinished(self.directory, step)
        newest = self.latest()
        kept = "There is no older one" if newest is None else f"The newest is of step {newest}"
        self._outage.failed(
            f"The checkpoint of step {step} could not be saved: {one_line(error)}",
            f"{kept}; training continues and the next save tries again.",
        )
