"""Checkpoints: saved in the background, verified by checksums, restored bit for bit.

Only this package imports orbax and tensorstore, and does so when a checkpoint is first written or
read.
"""

from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint
from trainer.checkpoint.folders import check_not_lost, holds_results
from trainer.checkpoint.inspection import Info, check, diff, load_params, ls, misfits
from trainer.checkpoint.integrity import digests
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.renaming import rename

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "CorruptCheckpoint",
    "Info",
    "check",
    "check_not_lost",
    "diff",
    "digests",
    "holds_results",
    "load_params",
    "ls",
    "misfits",
    "rename",
]
