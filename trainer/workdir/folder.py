"""The folder of a run: made only when the plan has passed, and kept to one config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer import config as configs
from trainer.checkpoint import holds_results
from trainer.config.tree import Call, ConfigError
from trainer.workdir import place
from trainer.workdir.changes import check_allowed, covered, listed, refuse
from trainer.workdir.fingerprint import Change, compare
from trainer.workdir.lock import Fenced, Lock
from trainer.workdir.record import begin, now, read_record
from trainer.workdir.regular import check_files
from trainer.writers.base import Log, to_stderr
from trainer.writers.durable import sync
from trainer.writers.files import remove_temporaries, replace_file


class Workdir:
    """A run's folder, opened for writing by this process alone.

    Args:
      path: the folder; made, with its parents, if it is not there. Its permissions are 0700.
      config: the resolved config; an existing folder must hold the same.
      plan: the text of the plan, written to plan.txt.
      fingerprint: of fingerprint(); a folder whose run had another one is refused where that
        alters the data or the program, and else the change is announced.
      commits: of the user's packages, as `code.commits` returns them; noted in run.json.
      files: what the config was read from, noted in run.json: the name, path and hash of each file.
      allow_changed: what may differ all the same: paths of the config ("steps", "data"), keys of
        the fingerprint, or "config", "program", "data" as a whole.
      take_over: take the folder from a holder that cannot be asked any more.
      log: takes lines of warning.

    Raises ConfigError, before anything in an existing folder is touched.

    Attributes:
      path, config_file, plan_file, run_file, metrics_file, checkpoints: where things are.
      changes: what differs from the process before this one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: Call,
        *,
        plan: str,
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
        self._check(config, fingerprint, allow_changed)
        place.make(self.path)
        self.lock = self._lock(take_over)
        try:
            remove_temporaries(self.path)
            # Again: another process may have come between.
            before, self.changes = self._check(config, fingerprint, allow_changed)
            self._record = begin(
                before, fingerprint, self.lock.epoch, self.changes, commits or {}, files
            )
            self.write("config.yaml", configs.dump(config))
            self.write("plan.txt", plan)
            self._save_record()
        except OSError as e:
            self.lock.close()
            raise self._unwritable(e) from e
        except Fenced as e:  # two took over at the same moment, and this is the other one
            self.lock.close()
            raise ConfigError(str(e)) from e
        except BaseException:
            self.lock.close()
            raise
        for change in self.changes:
            known = "as allowed" if change.kind != "bits" else "bits may differ"
            log(f"Changed since this run stopped: {change} ({known}).")

    def check_fence(self) -> None:
        """Raises Fenced if another process has taken this folder over."""
        self.lock.check_fence()

    def write(self, name: str, text: str) -> None:
        """Writes a file of the folder whole or not at all.

        Raises ValueError for a name that leads out of the folder, Fenced, or OSError.
        """
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"{name!r} is not the name of a file in {self.path}.")
        self.check_fence()
        replace_file(self.path / name, text.encode(), self.check_fence)

    def sync_metrics(self) -> None:
        """Syncs metrics.jsonl, which no checkpoint may be ahead of; raises OSError.

        nonfinite.json and rollbacks.json are synced as they are written.
        """
        if self.metrics_file.exists():
            sync(self.metrics_file)
        sync(self.path)

    def restored(self, step: int | None, rows: Mapping[str, int] | None = None) -> None:
        """Notes in run.json which step this process began from, and what the metrics held then.

        Args:
          step: None for a fresh start.
          rows: a `trainer.rows.Logged`, as a dict; None where it is not known.
        """
        self._note(restored=step, rows=None if rows is None else dict(rows))

    def rows(self) -> list[dict[str, int]]:
        """Returns what `restored` noted of rows for each process of this run, oldest first."""
        noted = (entry.get("rows") for entry in self._record["lineage"])
        return [entry for entry in noted if entry]

    @property
    def lost_rows(self) -> list[str]:
        """What was said of metrics that are gone for good, since the run was last ended for it."""
        return self._record["lineage"][-1]["lost_rows"]

    def lose_rows(self, told: str, count: int = 0) -> None:
        """Notes in run.json that rows of metrics.jsonl are gone for good.

        Args:
          told: says so.
          count: how many of the rows that `restored` noted are among them.
        """
        rows = self._record["lineage"][-1].get("rows")
        if rows:
            rows = rows | {"rows": rows["rows"] - count}
        self._note(lost_rows=[*self.lost_rows, told], rows=rows)

    def _note(self, **values: Any) -> None:
        self._record["lineage"][-1] |= values
        try:
            self._save_record()
        except OSError as e:  # a run is worth more than its record
            self._log(f"{self.run_file} could not be written: {e.strerror}.")

    def close(self, exit_kind: str) -> None:
        """Notes in run.json how this process ended ("done", "stopped", "failed"), and lets go.

        A process that was killed says nothing, which the next one writes down as "killed".
        """
        try:
            self._record["lineage"][-1] |= {"exit": exit_kind, "ended": now()}
            self._save_record()
        except (Fenced, OSError):
            pass  # the folder is another's, or its disk is full: the run's own errors matter more
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

    # -- inside

    def _lock(self, take_over: bool) -> Lock:
        try:
            return Lock(self.path, take_over=take_over)
        except OSError as e:
            raise self._unwritable(e) from e

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"The workdir {self.path} cannot be written: {error.strerror}. "
            "Choose another --workdir, or make room for this one."
        )

    def _check(
        self, config: Call, fingerprint: Mapping[str, Any], allowed: Sequence[str]
    ) -> tuple[dict[str, Any] | None, list[Change]]:
        """Compares what is in the folder with this run; returns its run.json and the changes."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"The workdir {self.path} is a file. Choose another --workdir.")
        check_files(self.path)
        try:
            changes = self._config_changes(config)
            record = read_record(self.run_file)
        except OSError as e:
            raise ConfigError(
                f"The workdir {self.path} cannot be read: {e.strerror}. Choose another --workdir."
            ) from e
        refused = [line for line in changes if not covered(line.partition(":")[0], allowed)]
        if refused and "config" not in allowed and "program" not in allowed:
            raise ConfigError(
                f"The workdir {self.path} holds another config; from it to this one:\n"
                + listed(refused)
                + "Choose another --workdir, or go on with --allow_changed="
                + ",".join(dict.fromkeys(line.partition(":")[0] for line in refused[:3]))
                + ",..." * (len(refused) > 3)
                + "."
            )
        differing = [
            Change("program", path, *map(str.strip, values.split(" -> ", 1)))
            for path, _, values in (line.partition(": ") for line in changes)
            if " -> " in values
        ]
        if record is not None:
            differing += [
                change
                for change in compare(record["fingerprint"], fingerprint)
                if change.key != "config"
            ]
            refuse(self.path, differing[len(changes) :], allowed)
        return record, differing

    def _config_changes(self, config: Call) -> list[str]:
        if not self.config_file.exists():
            if self.metrics_file.exists() or holds_results(self.checkpoints):
                raise ConfigError(
                    f"The workdir {self.path} holds results but no config.yaml, so that nobody can "
                    "tell what they are of. Choose another --workdir."
                )
            return []
        old = configs.load([self.config_file]).root
        return configs.diff(old, config)

    def _save_record(self) -> None:
        self.write("run.json", json.dumps(self._record, indent=1) + "\n")
