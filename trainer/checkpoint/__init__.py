"""Checkpoints: saved in the background, verified by checksums, restored bit for bit.

Only this package imports tensorstore, when several processes or to a bucket save, or what they
saved is read, and safetensors, when parameters are exported.
"""
# ruff: noqa: F401  # what other packages import from here; users import lockstep

from trainer.checkpoint.errors import CheckpointError, CorruptCheckpoint, UnlikeCheckpoint
from trainer.checkpoint.inspection import (
    Info,
    check_leaves,
    diff_checkpoints,
    distances,
    leaf_names,
    leaves_digest,
    load_leaves,
    load_params,
    load_parts,
    ls,
    misfits,
)
from trainer.checkpoint.integrity import digests
from trainer.checkpoint.leaf_file import export, exported_before
from trainer.checkpoint.manager import Checkpoints, Retention, check_not_lost
