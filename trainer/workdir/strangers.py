"""Tells what a workdir has: files of others, and whether a run has made steps in it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path

from trainer import config as configs
from trainer.checkpoint import holds_results
from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.workdir.regular import NAMES, TOKENIZER_FILE
from trainer.writers.lines import SAMPLES_FILE
from trainer.writers.loggers import ID_FILE
from trainer.writers.summary import SUMMARY_FILE

# Names that may exist before a run begins: files of a run that was killed at once, hidden files,
# and logs of the run's launcher (Slurm, or `... | tee WORKDIR/log.txt`).
_NO_STRANGER = re.compile(
    r"checkpoints|events\.out\..*|\..*|lost\+found|wandb|.*\.(log|out|err)|log(\W.*)?"
)
_AFTER_CONFIG = {"config_full.yaml", TOKENIZER_FILE}
_AFTER_RECORD = {SUMMARY_FILE, SAMPLES_FILE}
# What a run has before its first step.
_BEFORE_STEPS = {"config.yaml", "plan.txt", "run.json", "lock", "epoch", SUMMARY_FILE, ID_FILE}
_BEFORE_STEPS |= _AFTER_CONFIG


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


def holds_steps(folder: Path) -> bool:
    """Returns whether a folder has anything of a step: a checkpoint, a row or any other result.

    A run that ended before its first step has nothing that another config would contradict.

    Args:
        folder: of a run, or of a wave of a sweep; may not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    names = unknown_names(folder, _BEFORE_STEPS) if folder.exists() else []
    # A file may have been opened, and not been written.
    written = [name for name in names if (folder / name).is_dir() or (folder / name).stat().st_size]
    return bool(written) or holds_results(folder / "checkpoints")


def remove_remains(folder: Path) -> None:
    """Removes what another config would not replace of a run that has made no step.

    That is its tokenizer, and TensorBoard's files, which have the values of its config.

    Args:
        folder: of the run.

    Raises:
        OSError: a file cannot be removed.
    """
    for file in (folder / TOKENIZER_FILE, *folder.glob("events.out.*")):
        file.unlink(missing_ok=True)


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
