"""Refuses a workdir that has other files than those of a run."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from trainer import config as configs
from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.workdir.regular import NAMES, TOKENIZER_FILE
from trainer.writers.lines import SAMPLES_FILE
from trainer.writers.summary import SUMMARY_FILE

# Names that may exist before a run begins: files of a run that was killed at once, hidden files,
# and logs of the run's launcher (Slurm, or `... | tee WORKDIR/log.txt`).
_NO_STRANGER = re.compile(
    r"checkpoints|events\.out\..*|\..*|lost\+found|.*\.(log|out|err)|log(\W.*)?"
)
_AFTER_CONFIG = {"config_full.yaml", TOKENIZER_FILE}
_AFTER_RECORD = {SUMMARY_FILE, SAMPLES_FILE}


def check_no_strangers(folder: Path) -> None:
    """Checks that a folder is either empty or the folder of a run.

    The folder of a run has run.json. If a crash or the user removed that file, a folder counts as
    one of a run if it has only files that a run writes, and config.yaml is as a run writes it: the
    user's own config.yaml must not be overwritten.

    Args:
        folder: an existing folder without results.

    Raises:
        UserError: the folder has other files.
        OSError: the folder cannot be read.
    """
    names = {path.name for path in folder.iterdir()}
    if "run.json" in names:
        return
    strangers = unknown_names(folder, NAMES)
    # A run writes config.yaml before the ones, and run.json before the others.
    strangers += names & _AFTER_RECORD
    strangers += names & (set() if "config.yaml" in names else _AFTER_CONFIG)
    if "config.yaml" in names and not _is_as_written(folder / "config.yaml"):
        strangers.append("config.yaml")
    if strangers:
        raise UserError(
            f"The workdir {folder} is not the folder of a run: it holds "
            f"{listing(sorted(strangers), 4)}, and no run.json. Nothing was written there. Name a "
            f"folder that is empty or does not exist, such as --workdir={folder / 'run'}."
        )


def unknown_names(folder: Path, known: Collection[str]) -> list[str]:
    """Returns the names in a folder that are neither known nor those of logs and hidden files.

    Args:
        folder: an existing folder.
        known: names that the folder may have.

    Raises:
        OSError: the folder cannot be read.
    """
    names = sorted({path.name for path in folder.iterdir()} - set(known))
    unknown = [name for name in names if not _NO_STRANGER.fullmatch(name)]
    return [name for name in unknown if not _is_an_output_of_ours(folder / name)]


def _is_as_written(file: Path) -> bool:
    """Returns whether a config.yaml was written by a run: it is canonical, byte for byte."""
    try:
        return configs.dump(configs.load([file]).root) == file.read_text(encoding="utf-8")
    except (UserError, UnicodeError):
        return False


def _is_an_output_of_ours(file: Path) -> bool:
    """Returns whether a file is stdout or stderr of this process, as in `> WORKDIR/output`."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            # The shell creates that file before the command starts.
            if os.path.samestat(os.fstat(stream), file.stat()):
                return True
    return False
