"""Recognizes the names of dtypes, and suggests the nearest one."""

import re
import warnings
from typing import Any

from trainer.config.wording import nearest

# The names that messages list; jax takes others as well, such as "half" and "f4".
NAMES = (
    *("bfloat16", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "complex64", "complex128"),
)
_SHORT = re.compile(r"(bf|fp|f)_?(\d+)")  # spellings of other libraries, such as bf16
_UNKNOWN = re.compile(r"data type '([^']*)' not understood")  # a message of numpy


def exists(value: Any) -> bool:
    """Returns whether a value is the name of a dtype that jax supports.

    Args:
        value: any value of a config.

    Example:
        >>> exists("bfloat16"), exists("bf16")
        (True, False)
    """
    import jax
    import jax.numpy as jnp

    if not isinstance(value, str):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about float64 if x64 is disabled
            # jnp.dtype alone also accepts 'datetime64' and 'U8', of which jax has no arrays.
            jax.eval_shape(lambda: jnp.zeros((), jnp.dtype(value)))
    except TypeError:
        return False
    return True


def hint(value: Any) -> str:
    """Returns advice for a value that is not the name of a dtype.

    Args:
        value: any value of a config.

    Returns:
        The nearest name, if one is near, and a list of the names.
    """
    text = str(value).lower()
    short = _SHORT.fullmatch(text)
    if short:
        text = ("bfloat" if short[1] == "bf" else "float") + short[2]
    near = text if text in NAMES else nearest(text, NAMES)
    names = f"The dtypes are {', '.join(NAMES)}, and float8 types such as float8_e4m3fn."
    return f"Did you mean {near!r}? {names}" if near else names


def hint_in(message: str) -> str:
    """Returns advice for an exception of numpy about the name of a dtype.

    Args:
        message: the message of any exception.

    Returns:
        The advice of `hint`; "" for other messages.
    """
    found = _UNKNOWN.search(message)
    return hint(found[1]) if found else ""
