"""Whether the folder of a finished run is as the run left it, so that nothing is to be done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.checkpoint.commit import step_directories
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.reading import check_files
from trainer.config import Call
from trainer.messages import UserError
from trainer.workdir.fingerprint import compare, digest
from trainer.workdir.record import check_tokenizer
from trainer.writers.files import read_regular
from trainer.writers.run_record import read_record
from trainer.writers.summary import SUMMARY_FILE, read_summary

# Of which run.json has the hashes, besides metrics.jsonl.
_FILES = (SUMMARY_FILE, "config.yaml", "config_full.yaml")


def results_of(folder: Path) -> dict[str, Any] | None:
    """Returns the SHA-256 of files and the steps of the checkpoints, as run.json has them."""
    # None if the disk cannot be read, or there is no metrics.jsonl.
    try:
        rows = _sha256(folder / "metrics.jsonl")
        files = {name: _sha256(folder / name) for name in _FILES if (folder / name).exists()}
        steps = list(step_directories(folder / "checkpoints"))
    except (OSError, CheckpointError):
        return None
    return {"metrics_sha256": rows, "files": files, "checkpoints": steps}


def _sha256(file: Path) -> str:
    return hashlib.sha256(read_regular(file)).hexdigest()


def edited(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Returns the files of a run that are not as it left them when it ended."""
    # `record` is the content of its run.json. Trials of sweeps have none, as their ledger has them,
    # nor has a run that goes on; earlier versions recorded no hash but that of metrics.jsonl.
    last = next(reversed(record.get("lineage", ())), {})
    if "sweep" in record or not last.get("results"):
        return []
    then, now = (
        {"metrics.jsonl": each.get("metrics_sha256"), **each.get("files", {})}
        for each in (last["results"], results_of(folder) or {})
    )
    found = [name for name, hash in then.items() if now.get(name) != hash]
    return found + ["run.json"] * (last["fingerprint"] != digest(record["fingerprint"]))


def is_untouched(
    folder: Path, config: Call, fingerprint: Callable[[], Mapping[str, Any]], step: int
) -> bool:
    """Returns whether a run with this config has ended in a folder not changed since."""
    # `step` is the last of the run, and `fingerprint` is called for a run that has ended only.
    # Nothing is written, and nothing is locked: a process that goes on with the run has removed
    # summary.json.
    try:
        summary, record = read_summary(folder), read_record(folder / "run.json")
        if summary is None or record is None or (summary.end, summary.step) != ("done", step):
            return False
        last = next(reversed(record["lineage"]), {})
        results = last.get("results")
        now = results_of(folder) or {}
        if last.get("exit") != "done" or not results or {**now, **results} != now:
            return False
        if compare(record["fingerprint"], fingerprint()):
            return False
        if read_regular(folder / "config.yaml") != configs.file_text(config).encode():
            return False
        if not all((folder / name).is_file() for name in ("config_full.yaml", "plan.txt")):
            return False
        checkpoints = step_directories(folder / "checkpoints")
        if max(checkpoints, default=None) != step:
            return False
        check_files(checkpoints[step])
        if "tokenizer" in record:
            check_tokenizer(folder)
    except (OSError, UserError, CheckpointError):
        return False
    return True
