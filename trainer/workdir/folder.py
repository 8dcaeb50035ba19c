"""The folder of a run: made only when the plan has passed, and kept to one config."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer import config as configs
from trainer.config.tree import Call, ConfigError
from trainer.workdir.fingerprint import REFUSED, Change, command_line, compare, digest
from trainer.workdir.lock import Fenced, Lock
from trainer.writers.base import Log, to_stderr
from trainer.writers.files import remove_temporaries, replace_file

FORMAT = 1
_SHOWN = 4  # lines of differences in an error, which has seven at most


class Workdir:
    """A run's folder, opened for writing by this process alone.

    Args:
      path: the folder; made, with its parents, if it is not there. Its permissions are 0700.
      config: the resolved config; an existing folder must hold the same.
      plan: the text of the plan, written to plan.txt.
      fingerprint: of fingerprint(); a folder whose run had another one is refused where that
        alters the data or the program, and else the change is announced.
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
        _check_allowed(allow_changed, config, fingerprint)
        self._check(config, fingerprint, allow_changed)
        self._make()
        self.lock = self._lock(take_over)
        try:
            remove_temporaries(self.path)
            # Again: another process may have come between.
            before, self.changes = self._check(config, fingerprint, allow_changed)
            self._record = self._begin(before, fingerprint)
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

    def restored(self, step: int | None) -> None:
        """Notes in run.json which step this process began from; None for a fresh start."""
        self._record["lineage"][-1]["restored"] = step
        try:
            self._save_record()
        except OSError as e:  # a run is worth more than its record
            self._log(f"{self.run_file} could not be written: {e.strerror}.")

    def close(self, exit_kind: str) -> None:
        """Notes in run.json how this process ended ("done", "stopped", "failed"), and lets go.

        A process that was killed says nothing, which the next one writes down as "killed".
        """
        try:
            self._record["lineage"][-1] |= {"exit": exit_kind, "ended": _now()}
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

    def _make(self) -> None:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"The workdir {self.path} cannot be made: {e.strerror}. Choose another --workdir."
            ) from e

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
        try:
            changes = self._config_changes(config)
            record = _read_record(self.run_file)
        except OSError as e:
            raise ConfigError(
                f"The workdir {self.path} cannot be read: {e.strerror}. Choose another --workdir."
            ) from e
        refused = [line for line in changes if not _covered(line.partition(":")[0], allowed)]
        if refused and "config" not in allowed and "program" not in allowed:
            raise ConfigError(
                f"The workdir {self.path} holds another config; from it to this one:\n"
                + _listed(refused)
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
            _refuse(self.path, differing[len(changes) :], allowed)
        return record, differing

    def _config_changes(self, config: Call) -> list[str]:
        if not self.config_file.exists():
            if self.metrics_file.exists() or self.checkpoints.exists():
                raise ConfigError(
                    f"The workdir {self.path} holds results but no config.yaml, so that nobody can "
                    "tell what they are of. Choose another --workdir."
                )
            return []
        old = configs.load([self.config_file]).root
        return configs.diff(old, config)

    def _begin(
        self, before: dict[str, Any] | None, fingerprint: Mapping[str, Any]
    ) -> dict[str, Any]:
        lineage = list(before["lineage"]) if before else []
        for entry in lineage:
            if entry.get("exit") is None:
                entry["exit"] = "killed"
        lineage.append(
            {
                "began": _now(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "epoch": self.lock.epoch,
                "command": command_line(),
                "fingerprint": digest(fingerprint),
                "changed": [str(change) for change in self.changes],
                "restored": None,
                "exit": None,
            }
        )
        return {"format": FORMAT, "fingerprint": dict(fingerprint), "lineage": lineage}

    def _save_record(self) -> None:
        self.write("run.json", json.dumps(self._record, indent=1) + "\n")


def _read_record(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        if record["format"] != FORMAT:
            raise ValueError(f"its format is {record['format']}, not {FORMAT}")
        compare(record["fingerprint"], {})
        _ = [entry.get("exit") for entry in record["lineage"]]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(
            f"{path} cannot be read ({e or type(e).__name__}). Put it right, or move it away to go "
            "on without its lineage."
        ) from e
    return record


def _covered(path: str, allowed: Sequence[str]) -> bool:
    return any(
        path == name or path.startswith((f"{name}.", f"{name}[")) or path.endswith(f".{name}")
        for name in allowed
    )


def _refuse(path: Path, changes: Sequence[Change], allowed: Sequence[str]) -> None:
    refused = [
        change
        for change in changes
        if change.kind != "bits"
        and change.kind not in allowed
        and not any(name == change.key or name.endswith(f".{change.key}") for name in allowed)
    ]
    if refused:
        kinds = " and the ".join(dict.fromkeys(change.kind for change in refused))
        raise ConfigError(
            f"The run in {path} was made with something else that alters the {kinds}:\n"
            + _listed([str(change) for change in refused])
            + "Go back to what it was, choose another --workdir, or go on with --allow_changed="
            + ",".join(change.key for change in refused)
            + "."
        )


def _listed(lines: Sequence[str]) -> str:
    shown = list(lines if len(lines) <= _SHOWN else lines[: _SHOWN - 1])
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return "".join(f"  {line}\n" for line in shown)


def _check_allowed(allowed: Sequence[str], config: Call, fingerprint: Mapping[str, Any]) -> None:
    paths = [path for path, _ in configs.leaves(config)]
    known = {*REFUSED, *REFUSED.values(), *fingerprint}
    for name in allowed:
        if name not in known and not any(_covered(path, [name]) for path in paths):
            raise ConfigError(
                f"--allow_changed={name} names nothing that can change. There are "
                f"{', '.join(sorted(REFUSED))}, and the paths of the config, such as steps."
            )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
