"""Reads run.json, which `trainer.workdir` writes: how a run was made, and how each process ended.

It imports no jax, so that commands which only look at a sweep start quickly.
"""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trainer.writers.json_files import damaged, read_json

FORMAT = 1
_ADVICE = "repair it, or move it away to resume without its history."


class _Rows(TypedDict):
    step: int
    rows: int
    log_every: int
    eval_every: int | list[list[int]]
    steps: int


class _Entry(TypedDict):
    began: NotRequired[str]
    changed: NotRequired[list[str]]
    exit: NotRequired[str | None]
    error: NotRequired[str]
    host: NotRequired[str]
    pid: NotRequired[int]
    computing: NotRequired[bool]
    restored: NotRequired[int | None]
    rows: NotRequired[_Rows | None]
    lost_rows: NotRequired[list[str]]
    results: NotRequired[dict[str, Any] | None]  # see trainer.workdir.folder
    wave: NotRequired[str]
    trials: NotRequired[int]  # of the wave
    load: NotRequired[float | None]


class _Fingerprint(TypedDict):
    code: NotRequired[dict[str, str]]
    seed: NotRequired[int | None]
    data_seed: NotRequired[int | None]


class _Record(TypedDict):
    format: int
    fingerprint: _Fingerprint
    lineage: list[_Entry]
    step_program: NotRequired[str]
    tokenizer: NotRequired[str]


def read_record(path: Path) -> dict[str, Any] | None:
    """Reads a run.json; None if there is none; raises DamagedFile, or OSError if the disk fails."""
    try:
        record = read_json(path, _Record, _ADVICE)
    except FileNotFoundError:
        return None
    if record["format"] != FORMAT:
        raise damaged(path, f"its format is {record['format']}, not {FORMAT}", _ADVICE)
    return dict(record)
