"""Checkpoints that can be trusted: saved behind the run, checked leaf by leaf, restored exactly.

The only room that knows orbax, which is imported when a checkpoint is first written or read.
"""

from trainer.checkpoint.inspection import Info, check, diff, load_params, ls, misfits, rename
from trainer.checkpoint.integrity import CheckpointError, Damaged, digests
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.reading import check_not_lost, holds_results

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "Damaged",
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
