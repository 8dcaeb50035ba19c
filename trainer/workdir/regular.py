"""Checks that the files of a run's folder are regular files, before they are read."""

from __future__ import annotations

import stat
from pathlib import Path

from trainer.writers.files import other_kind
from trainer.writers.json_files import DamagedFile
from trainer.writers.lines import ROW_FILES
from trainer.writers.loggers import ID_FILE
from trainer.writers.summary import SUMMARY_FILE

TOKENIZER_FILE = "tokenizer.json"
NAMES = (
    "config.yaml",
    "config_full.yaml",
    "plan.txt",
    "run.json",
    SUMMARY_FILE,
    *ROW_FILES,
    "nonfinite.json",
    "rollbacks.json",
    "clipped.json",
    "trace.jsonl",
    TOKENIZER_FILE,
    ID_FILE,
    "lock",
    "epoch",
)


def check_files(folder: Path) -> None:
    """Checks that none of a run's files is a folder, a pipe, a socket or a device.

    Opening a pipe would block forever.

    Args:
        folder: of a run; may not exist.

    Raises:
        DamagedFile: one of them is.
    """
    for name in NAMES:
        try:
            mode = (folder / name).stat().st_mode
        except OSError:  # absent, or unreadable, which whoever reads the file reports
            continue
        if not stat.S_ISREG(mode):
            raise DamagedFile(
                folder / name,
                f"{folder / name} is {other_kind(mode)}, where a run keeps a file",
                "move it away, or choose another workdir.",
            )
