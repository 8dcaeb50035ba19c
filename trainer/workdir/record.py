"""run.json: how a run was made, how each of its processes ended, and what it left in its folder."""

import datetime
import hashlib
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.checkpoint.commit import step_directories
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.reading import check_saved_files
from trainer.config import Call
from trainer.messages import UserError
from trainer.workdir.fingerprint import Change, fingerprint_differences, fingerprint_digest
from trainer.writers.files import read_regular
from trainer.writers.run_record import FORMAT, read_record
from trainer.writers.summary import SUMMARY_FILE, read_summary

TOKENIZER_FILE = "tokenizer.json"
# Of which run.json has the hashes, besides metrics.jsonl.
_FILES = (SUMMARY_FILE, "config.yaml", "config_full.yaml")


def begin(
    before: dict[str, Any] | None,
    fingerprint: Mapping[str, Any],
    epoch: int,
    changes: Sequence[Change],
    commits: Mapping[str, Any],
    files: Sequence[Mapping[str, Any]],
    tokenizer: str | None = None,
    step_program: str | None = None,
) -> dict[str, Any]:
    """Returns a run's record with an entry for this process at the end of its lineage."""
    # `before` is the record that earlier processes left, and None for the first one. `epoch` is
    # that of its lock, and `files` has name, path and hash of each file that the config was read
    # from. `tokenizer` is the content of tokenizer.json, None if the run writes none;
    # `step_program` the digest of the program of a training step, None if it is not known.
    lineage = list(before["lineage"]) if before else []
    for entry in lineage:
        # A process that was not killed has recorded its end, in `Workdir.close`.
        if entry.get("exit") is None:
            entry["exit"] = "killed"
    # Carry over the lost rows of a run that was stopped or killed: no exit code tells of them yet.
    ended = not lineage or lineage[-1].get("exit") not in ("stopped", "killed")
    lost_rows = [] if ended else list(lineage[-1].get("lost_rows", []))
    lineage.append(
        {
            "began": now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "epoch": epoch,
            "command": [sys.executable, *sys.orig_argv[1:]],
            "fingerprint": fingerprint_digest(fingerprint),
            "changed": [str(change) for change in changes],
            "config_files": [dict(file) for file in files],
            "vocabulary": dict(commits),
            "restored": None,
            "rows": None,
            "lost_rows": lost_rows,
            "exit": None,
        }
    )
    record = {"format": FORMAT, "fingerprint": dict(fingerprint), "lineage": lineage}
    if step_program is not None:
        record["step_program"] = step_program
    if tokenizer is not None:
        record["tokenizer"] = _sha256(tokenizer.encode())
    return record


def check_tokenizer(folder: Path) -> None:
    """Raises UserError if tokenizer.json is not the one that the run has written."""
    try:
        known = (read_record(folder / "run.json") or {}).get("tokenizer")
        found = _sha256(read_regular(folder / TOKENIZER_FILE))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}).") from error
    if known not in (None, found):
        raise UserError(
            f"{folder / TOKENIZER_FILE} is not the tokenizer of this run, whose hash is in "
            "run.json: with another one, a text would be nonsense. Put the file back that the run "
            "has written; or remove it, and the data set of the run makes it again."
        )


def refuse_trial(folder: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for the folder of a finished trial, where a run would begin anew."""
    # The folder must have no checkpoints; `record` is the content of its run.json.

    # Without a summary.json, the trial is computed as a run, which was killed before it was moved.
    if "sweep" in record and (folder / SUMMARY_FILE).exists():
        raise UserError(
            f"The workdir {folder} is that of a finished trial of a sweep, which has no checkpoint"
            " to continue from. Choose another --workdir, in which the trial is repeated."
        )


def results_of(folder: Path) -> dict[str, Any] | None:
    """Returns the SHA-256 of files and the steps of the checkpoints, as run.json has them."""
    # None if the disk cannot be read, or there is no metrics.jsonl.
    try:
        rows = _sha256(read_regular(folder / "metrics.jsonl"))
        files = {
            name: _sha256(read_regular(folder / name))
            for name in _FILES
            if (folder / name).exists()
        }
        steps = list(step_directories(folder / "checkpoints"))
    except (OSError, CheckpointError):
        return None
    return {"metrics_sha256": rows, "files": files, "checkpoints": steps}


def edited_files_of_run(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Returns the files of a run that are not as it left them when it ended."""
    # `record` is the content of its run.json. Trials of sweeps have none, as their ledger has them,
    # nor has a run that goes on; earlier versions recorded no hash but that of metrics.jsonl.
    last = next(reversed(record.get("lineage", ())), {})
    if "sweep" in record or not last.get("results"):
        return []
    then, here = (
        {"metrics.jsonl": each.get("metrics_sha256"), **each.get("files", {})}
        for each in (last["results"], results_of(folder) or {})
    )
    found = [name for name, hash in then.items() if here.get(name) != hash]
    return found + ["run.json"] * (last["fingerprint"] != fingerprint_digest(record["fingerprint"]))


def is_untouched(
    folder: Path, config: Call, fingerprint: Callable[[], Mapping[str, Any]], step: int
) -> bool:
    """Returns whether a run with this config has ended in a folder not changed since."""
    # `step` is the last of the run; `fingerprint` is called for a run that has ended. Nothing is
    # written, and nothing is locked: a process that goes on with the run has removed summary.json.
    try:
        summary, record = read_summary(folder), read_record(folder / "run.json")
        if summary is None or record is None or (summary.end, summary.step) != ("done", step):
            return False
        last = next(reversed(record["lineage"]), {})
        results = last.get("results")
        here = results_of(folder) or {}
        if last.get("exit") != "done" or not results or {**here, **results} != here:
            return False
        if fingerprint_differences(record["fingerprint"], fingerprint()):
            return False
        if read_regular(folder / "config.yaml") != configs.file_text(config).encode():
            return False
        if not all((folder / name).is_file() for name in ("config_full.yaml", "plan.txt")):
            return False
        checkpoints = step_directories(folder / "checkpoints")
        if max(checkpoints, default=None) != step:
            return False
        check_saved_files(checkpoints[step])
        if "tokenizer" in record:
            check_tokenizer(folder)
    except (OSError, UserError, CheckpointError):
        return False
    return True


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
