"""Writes arrays as a safetensors file, which other programs read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from trainer.checkpoint.leaf_file import DTYPES
from trainer.writers.files import replace_file


def export(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file: all of it, or nothing.

    Args:
        path: the file; one that exists is replaced.
        arrays: name -> array; dtypes are kept, bfloat16 as well.
        metadata: what the file says about them.

    Raises:
        ValueError: safetensors has no such dtype; the message names the array.
        OSError: the disk cannot be written; a file that existed is unchanged.
    """
    import safetensors.numpy

    contiguous = {name: np.ascontiguousarray(x).reshape(x.shape) for name, x in arrays.items()}
    for name, x in contiguous.items():
        if x.dtype.name not in DTYPES:
            raise ValueError(
                f"{name} has the dtype {x.dtype.name}, which a safetensors file cannot have. It "
                f"can have {', '.join(DTYPES)}."
            )
    replace_file(path, safetensors.numpy.save(contiguous, dict(metadata)))
