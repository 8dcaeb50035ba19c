"""What the files of a run's folder must be before anything reads them."""

from __future__ import annotations

import stat
from pathlib import Path

from trainer.config.tree import ConfigError

_NAMES = (
    "config.yaml",
    "plan.txt",
    "run.json",
    "metrics.jsonl",
    "nonfinite.json",
    "rollbacks.json",
    "trace.jsonl",
    "lock",
    "epoch",
)
_KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}


def check_files(folder: Path) -> None:
    """Refuses a folder in which another thing bears the name of one of a run's files.

    To open a pipe would wait for ever.

    Args:
      folder: of a run; it need not exist.

    Raises ConfigError.
    """
    for name in _NAMES:
        try:
            mode = (folder / name).stat().st_mode
        except OSError:  # absent; what cannot be read is told by whoever reads it
            continue
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "a device")
            raise ConfigError(
                f"{folder / name} is {kind}, where a run keeps a file. Move it away, or choose "
                "another workdir."
            )
