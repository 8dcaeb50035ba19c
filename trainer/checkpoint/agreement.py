"""How the processes of one run exchange a few integers, to agree on what all of them do next."""

from collections.abc import Sequence

import jax
import numpy as np


def all_gather_ints(values: Sequence[int]) -> np.ndarray:
    """Collects integers of every process as an int32 array [processes, values]."""
    # All processes must call it, in the same order and with equally many values, each within int32:
    # it waits for the last of them.
    if jax.process_count() == 1:
        return np.asarray(values, np.int32)[None]
    from jax.experimental import multihost_utils

    # int32, because jax truncates int64 unless jax_enable_x64 is set.
    gathered = multihost_utils.process_allgather(np.asarray(values, np.int32))
    return np.asarray(gathered).reshape(jax.process_count(), -1)


def all_agree(ok: bool) -> bool:
    """Returns whether `ok` is true in every process of the run."""
    # All processes must call it, including one that failed: the others wait for it.
    return bool(all_gather_ints([ok]).all())
