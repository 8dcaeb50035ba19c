"""The folder of a run: created once the config is known to be valid, and bound to that config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer import config as configs
from trainer.checkpoint import holds_results
from trainer.config.tree import Call
from trainer.messages import UserError
from trainer.workdir import place
from trainer.workdir.changes import (
    as_changes,
    check_allowed,
    config_changes,
    refuse,
    refuse_config,
)
from trainer.workdir.fingerprint import Change, compare
from trainer.workdir.lock import Lock, WorkdirTakenOver
from trainer.workdir.record import begin, now, refuse_trial
from trainer.workdir.regular import TOKENIZER_FILE, check_files
from trainer.workdir.strangers import check_no_strangers, holds_steps, remove_remains
from trainer.writers.base import Log, to_stderr
from trainer.writers.durable import sync
from trainer.writers.files import remove_temporaries, replace_file
from trainer.writers.lines import sync_rows
from trainer.writers.run_record import read_record
from trainer.writers.summary import SUMMARY_FILE


class Workdir:
    """A run's folder, which this process alone may write.

    Args:
        path: the folder; created with its parents if it does not exist, with permissions 0700.
        config: the resolved config; that of an existing run must be equal, unless it has made no
            step (see `holds_steps`).
        full: the text of config_full.yaml, the config with all defaults; None writes no such file.
        plan: the text of the plan, written to plan.txt.
        tokenizer: the text of tokenizer.json; None writes no such file.
        fingerprint: as `fingerprint` returns it. If that of the existing run differs, the folder is
            refused for a change to the data or the program, unless it has made no step; other
            changes are logged.
        commits: of the user's packages, as `code.commits` returns them; written to run.json.
        files: name, path and hash of each file that the config was read from; written to run.json.
        allow_changed: differences that are allowed: paths of the config ("steps", "data"), keys of
            the fingerprint, or "config", "program", "data" as a whole.
        take_over: whether to take the folder from a holder on a host that is gone.
        log: takes lines of warning.

    Raises:
        UserError: the folder cannot be used; nothing in it was changed.

    Attributes:
        path, config_file, plan_file, run_file, metrics_file, checkpoints: paths of the folder and
            of its files.
        changes: the differences from the previous process of the run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Call,
        *,
        plan: str,
        full: str | None = None,
        tokenizer: str | None = None,
        fingerprint: Mapping[str, Any],
        commits: Mapping[str, Any] | None = None,
        files: Sequence[Mapping[str, Any]] = (),
        allow_changed: Sequence[str] = (),
        take_over: bool = False,
        log: Log = to_stderr,
    ) -> None:
        self._log = log
        self.path = Path(path).absolute()
        self.config_file = self.path / "config.yaml"
        self.plan_file = self.path / "plan.txt"
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        check_allowed(allow_changed, config, fingerprint)
        # Before the folder is created, so that a refused run leaves nothing behind.
        self._check(config, fingerprint, allow_changed)
        place.make(self.path)
        self.lock = self._lock(take_over)
        try:
            remove_temporaries(self.path)
            # Check again: another process may have written before the lock was taken.
            before, self.changes, begun = self._check(config, fingerprint, allow_changed)
            if self.changes and not begun:
                remove_remains(self.path)
            self._record = begin(
                before, fingerprint, self.lock.epoch, self.changes, commits or {}, files, tokenizer
            )
            self.write("config.yaml", configs.dump(config))
            for name, text in (("config_full.yaml", full), (TOKENIZER_FILE, tokenizer)):
                if text is not None:
                    self.write(name, text)
            self.write("plan.txt", plan)
            # Last, because a folder with a run.json counts as that of a run.
            self._save_record()
            # Of the process before: a run that goes on has no results that are its last.
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        except OSError as e:
            self.lock.close()
            raise self._unwritable(e) from e
        except WorkdirTakenOver as e:  # another process took over at the same moment, and won
            self.lock.close()
            raise UserError(str(e)) from e
        except BaseException:
            self.lock.close()
            raise
        for change in self.changes:
            known = "as allowed" if change.kind != "bits" else "bits may differ"
            log(
                f"Changed since this run stopped: {change} ({known})."
                if begun
                else f"Changed since this run ended before its first step: {change}."
            )

    def check_fence(self) -> None:
        """Checks that this process still holds the folder.

        Raises:
            WorkdirTakenOver: another process has taken it over.
        """
        self.lock.check_fence()

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder, all of it or nothing.

        Args:
            name: of the file.
            text: its content.

        Raises:
            ValueError: the name is a path.
            WorkdirTakenOver: another process has taken the folder over.
            OSError: the disk cannot be written.
        """
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in {self.path}.")
        self.check_fence()
        replace_file(self.path / name, text.encode(), self.check_fence)

    def sync_metrics(self) -> None:
        """Syncs metrics.jsonl and samples.jsonl, which must be on disk before a checkpoint.

        nonfinite.json and rollbacks.json are synced as they are written.

        Raises:
            OSError: the disk cannot be written.
        """
        sync_rows(self.path)
        sync(self.path)  # the name of a new metrics.jsonl

    def restored(self, step: int | None, rows: Mapping[str, int] | None = None) -> None:
        """Records in run.json which step this process started from, and the rows of metrics then.

        Args:
            step: None for a fresh start.
            rows: a `trainer.train.rows.Logged`, as a dict; None if it is not known.
        """
        self._add_to_record(restored=step, rows=None if rows is None else dict(rows))

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The entries of run.json for the processes so far, oldest first; the last is this one."""
        return self._record["lineage"]

    def record(self, **values: object) -> None:
        """Adds values to the entry of this process in run.json.

        Args:
            **values: of JSON.
        """
        self._add_to_record(**values)

    def rows(self) -> list[dict[str, int]]:
        """Returns the rows that `restored` recorded for the processes of this run, oldest first."""
        recorded = (entry.get("rows") for entry in self._record["lineage"])
        return [entry for entry in recorded if entry]

    @property
    def lost_rows(self) -> list[str]:
        """Sentences about rows lost for good since the run last ended with exit code 1."""
        return self._record["lineage"][-1]["lost_rows"]

    def lose_rows(self, sentence: str, count: int = 0) -> None:
        """Records in run.json that rows of metrics.jsonl are lost for good.

        Args:
            sentence: describes the loss.
            count: how many of the rows that `restored` recorded are among them.
        """
        rows = self._record["lineage"][-1].get("rows")
        if rows:
            rows = rows | {"rows": rows["rows"] - count}
        self._add_to_record(lost_rows=[*self.lost_rows, sentence], rows=rows)

    def _add_to_record(self, **values: object) -> None:
        self._record["lineage"][-1] |= values
        try:
            self._save_record()
        except OSError as e:  # the run must not end because of its record
            self._log(f"{self.run_file} could not be written: {e.strerror}.")

    def close(self, exit_kind: str, **values: object) -> None:
        """Records in run.json how this process ended, and releases the lock.

        The next process records "killed" for a process that did not call this.

        Args:
            exit_kind: "done", "stopped" or "failed".
            **values: of JSON, to record as well.
        """
        try:
            self._record["lineage"][-1] |= {"exit": exit_kind, "ended": now(), **values}
            self._save_record()
        except (WorkdirTakenOver, OSError):
            pass  # the folder was taken over, or the disk is full: the run's errors matter more
        finally:
            self.lock.close()

    def __enter__(self) -> Workdir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.lock.held:
            self.close("done" if error is None else "failed")

    def _lock(self, take_over: bool) -> Lock:
        try:
            return Lock(self.path, take_over=take_over, beat=True)
        except OSError as e:
            raise self._unwritable(e) from e

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"The workdir {self.path} cannot be written: {error.strerror}. "
            "Choose another --workdir, or free space for this one."
        )

    def _check(
        self, config: Call, fingerprint: Mapping[str, Any], allowed: Sequence[str]
    ) -> tuple[dict[str, Any] | None, list[Change], bool]:
        """Returns the content of run.json, what differs from this run, and `holds_steps`."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"The workdir {self.path} is a file. Choose another --workdir.")
        check_files(self.path)
        try:
            if not self._holds_results() and self.path.exists():
                check_no_strangers(self.path)
            record = read_record(self.run_file)
            if record is not None and not holds_results(self.checkpoints):
                refuse_trial(self.path, record)
            changes = self._config_changes(config)
            begun = holds_steps(self.path)
        except OSError as e:
            raise UserError(
                f"The workdir {self.path} cannot be read: {e.strerror}. Choose another --workdir."
            ) from e
        if begun:
            refuse_config(self.path, changes, allowed)
        differing = as_changes(changes)
        if record is not None:
            differing += [
                change
                for change in compare(record["fingerprint"], fingerprint)
                if change.key != "config"
            ]
            # The first ones are those of the config, which were refused or allowed above.
            if begun:
                refuse(self.path, differing[len(changes) :], allowed)
        return record, differing, begun

    def _holds_results(self) -> bool:
        return self.metrics_file.exists() or holds_results(self.checkpoints)

    def _config_changes(self, config: Call) -> list[str]:
        if not self.config_file.exists():
            if self._holds_results():
                raise UserError(
                    f"The workdir {self.path} has results but no config.yaml, so that the config "
                    "they were made with is unknown. Choose another --workdir."
                )
            return []
        return config_changes(self.config_file, config)

    def _save_record(self) -> None:
        self.write("run.json", json.dumps(self._record, indent=1) + "\n")
