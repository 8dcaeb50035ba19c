"""The checks that every function of the results of runs makes first."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def sample(values: ArrayLike) -> NDArray[np.float64]:
    """Returns values as an array of floats.

    Raises:
        ValueError: they are not one row of at least one number, or one is NaN.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"Give one row of at least one number, got the shape {array.shape}.")
    if np.isnan(array).any():
        raise ValueError(
            f"{int(np.isnan(array).sum())} of {array.size} values are NaN. Give a diverged run as"
            " inf, or as -inf where larger is better."
        )
    return array


def direction(better: str) -> int:
    """Returns 1 if `better` is "min" and -1 if it is "max".

    Raises:
        ValueError: it is neither.
    """
    if better not in {"min", "max"}:
        raise ValueError(f"better must be 'min' or 'max', got {better!r}.")
    return 1 if better == "min" else -1


def lower_is_better(values: ArrayLike, better: str) -> NDArray[np.float64]:
    """Returns values as an array of floats, with the sign changed if larger ones are better.

    Args:
        values: at least one number.
        better: "min" or "max".

    Raises:
        ValueError: see `direction` and `sample`.
    """
    return direction(better) * sample(values)


def spread(values: NDArray[np.float64], scale: float | None = None) -> float:
    """Returns the sample standard deviation, or 0.0 where it consists of rounding errors.

    Args:
        values: at least two finite numbers.
        scale: the largest number that they were computed from; by default their own largest.
    """
    deviation = float(values.std(ddof=1))
    scale = float(np.abs(values).max()) if scale is None else scale
    return deviation if deviation > 1e-12 * scale else 0.0
