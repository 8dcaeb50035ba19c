"""Finds the dtypes that jax does not have, and the values that it would change.

Unless 64 bits are enabled, jax converts 64-bit numbers to 32 bits, without a message: an integer
that does not fit wraps around, and a float becomes infinite.
"""

from typing import Any

import numpy as np

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_fault(dtype: Any) -> str | None:
    """Returns why jax has no arrays of a dtype, and what to store instead; None if it has.

    Example:
        >>> dtype_fault(np.dtype("int64"))
        >>> dtype_fault(np.dtype(">f4"))
        "whose bytes are in the order of another machine. Convert it: x.astype('float32')"
    """
    # The text follows the dtype in a sentence, and has no last full stop.
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # a dtype of jax's own
        return None
    if dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8):
        if dtype.isnative:
            return None
        return (
            f"whose bytes are in the order of another machine. Convert it: x.astype({dtype.name!r})"
        )
    if dtype.kind == "V" and dtype.names is None:
        from jax import numpy as jnp

        if jnp.issubdtype(dtype, jnp.number):  # such as bfloat16 or int4, which numpy does not know
            return None
    return f"a dtype that jax does not have. {_advice(dtype)}"


def value_fault(x: Any) -> str | None:
    """Returns which value of an array jax would change, and what to store instead; else None.

    Example:
        >>> value_fault(np.arange(3))
        >>> value_fault(np.array([1.0, 1e300])).split(". ")[0]
        'with the value 1e+300, which jax would make infinite in float32'
    """
    # The text follows the array in a sentence, and has no last full stop.
    lost = changed_values(x)
    if not lost.size:
        return None
    narrow, value = narrow_dtype(x.dtype), lost[np.argmax(np.abs(lost))].item()
    if lost.dtype.kind == "f":
        return (
            f"with the value {value}, which jax would make infinite in {narrow}. Scale the array, "
            "or correct the value"
        )
    return (
        f"with the value {value}, which jax would wrap around in {narrow}. Store a quantity as "
        "float32, and the number of an example as two arrays, (x >> 32).astype('int32') and "
        "(x % 2**32).astype('uint32'); or set JAX_ENABLE_X64=1 in the environment"
    )


def changed_values(x: Any) -> np.ndarray:
    """Returns the values of an array, on one axis, that do not fit into jax's dtype for it."""
    # They are integers that would wrap around, or floats that would become infinite; the real or
    # imaginary parts of complex numbers.
    if isinstance(x, np.ndarray) and x.dtype.name in _NARROW and x.size:
        if x.dtype.kind == "c":
            return np.concatenate([changed_values(x.real), changed_values(x.imag)])
        narrow = _NARROW[x.dtype.name]
        limits = np.finfo(narrow) if x.dtype.kind == "f" else np.iinfo(narrow)
        # fmin and fmax ignore NaN. A reduction makes no copy of the array, as a comparison would.
        low, high = np.fmin.reduce(x, axis=None), np.fmax.reduce(x, axis=None)
        if not (limits.min <= low and high <= limits.max) and narrow_dtype(x.dtype) != x.dtype:
            lost = (x < limits.min) | (x > limits.max)
            if x.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    lost = np.isinf(x.astype(narrow)) & np.isfinite(x)
            return x[lost]
    return np.empty(0)


def narrow_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that jax makes of one that it has: of 32 bits, or unchanged."""
    import jax  # reading data sets needs no jax

    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _advice(dtype: np.dtype) -> str:
    if dtype.kind in "USTO":
        return (
            "Store classes as their numbers, int32: numpy.unique(labels, return_inverse=True) "
            "returns the classes and the number of each label; number all splits at once"
        )
    if dtype.kind in "mM":
        return (
            "Store times as numbers, such as the float32 of (x - start) / numpy.timedelta64(1, 's')"
        )
    if dtype.names is not None:
        return f"Store each of its fields as an array: {', '.join(map(repr, dtype.names))}"
    return "Convert it to a number of at most 64 bits, such as x.astype('float32')"
