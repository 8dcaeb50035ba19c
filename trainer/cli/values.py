"""Converts the values of options; raises errors that say what to write instead."""

import argparse
import math
import os
import re
import sys
from fractions import Fraction
from typing import Any

from trainer.messages import UserError
from trainer.report import FORMATS

MOST_DEVICES = 4096  # each simulated device has threads of its own

GONE = (
    "the current folder does not exist any more; go to another one with cd, or name the folder "
    "by its full path"
)
# Of an option, or an argument of `lockstep.explain`, that is given without a number of devices.
NOT_HERE = (
    "{} is about devices that are not here: write {}, with the number of devices that the run will"
    " have."
)


def _refused(text: str, why: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"{text!r} {why}")


def positive(text: str) -> int:
    """Converts an argument to an integer of at least 1."""
    if (number := step(text)) < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, got {number}")
    return number


def names(text: str) -> list[str]:
    """Converts an argument to names, such as those of packages, which commas separate."""
    return [each.strip() for each in text.split(",") if each.strip()]


def devices(text: str) -> int:
    """Converts an argument to a number of devices."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_DEVICES:
        raise _refused(
            text, f"is not a number of devices; write a whole number from 1 to {MOST_DEVICES}"
        )
    return int(text)


def memory(text: str) -> int:
    """Converts an argument such as "80GB" or "79.6GiB" to the bytes of a device."""
    return _bytes(text, "the memory of a device")


def size(text: str) -> int:
    """Converts an argument such as "5GB" to the bytes of a file."""
    return _bytes(text, "the size of a file")


def _bytes(text: str, what: str) -> int:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kKMGT])(i?)B", text)
    if match is None or float(match[1]) == 0:
        raise _refused(
            text,
            f"is not {what}; write a number with MB or GB (powers of 1,000), or MiB"
            " or GiB (powers of 1,024), such as 80GB or 79.6GiB",
        )
    return int(
        Fraction(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1)
    )


def target(text: str) -> Any:
    """Converts an argument such as "h100:8" to a target; "list" stays."""
    from trainer.engine.targets import parse

    try:
        return text if text == "list" else parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def workers(text: str) -> int:
    """Converts an argument to a number of workers."""
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise _refused(text, "is not a number of workers; write a whole number of at least 1")
    return int(text)


def integers(text: str) -> list[int]:
    """Converts an argument such as "64,128" to integers of at least 1, in increasing order."""
    found = text.split(",")
    if not all(re.fullmatch("[1-9][0-9]{0,8}", each) for each in found):
        raise _refused(
            text, "is not a list of whole numbers of at least 1; write one such as 64,128"
        )
    if (twice := next((x for x in found if found.count(x) > 1), None)) is not None:
        raise _refused(text, f"has {twice} twice; write each number once")
    return sorted(map(int, found))


def power(text: str) -> tuple[str, float]:
    """Converts an argument such as "model.num_heads=1" to a path and a power."""
    path, _, exponent = text.rpartition("=")
    if not path.strip():
        raise _refused(text, "is not a path and a power; write them as in model.num_heads=1")
    return path.strip(), number(exponent)


def step(text: str) -> int:
    """Converts an argument to an integer, a number of steps."""
    try:
        return int(text)
    except ValueError:
        why = "is not a number of steps; write a whole number, without a unit"
        raise _refused(text, why) from None


def profiled(text: str) -> tuple[int | None, int]:
    """Converts "20" or "100-120" to the first step, None for "20", and the number of steps."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?", text)
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        raise _refused(
            text,
            "names no steps; write their number, such as 20, or the first and the last, such as"
            " 100-120",
        )
    if match[2] is None:
        return None, int(match[1])
    return int(match[1]), int(match[2]) - int(match[1]) + 1


def checkpoint_step(text: str) -> int | str:
    """Converts an argument to "best", "latest" or the step of a checkpoint."""
    if text in ("best", "latest"):
        return text
    if not re.fullmatch("[0-9]{1,12}", text):
        raise _refused(text, "is no checkpoint; write best, latest or the number of its step")
    return int(text)


def seed(text: str) -> int:
    """Converts an argument to a seed."""
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) >= 2**32:
        raise _refused(text, "is not a seed; write a whole number from 0 to 2**32 - 1")
    return int(text)


def number(text: str) -> float:
    """Converts an argument to a finite number."""
    value = _float(text)
    if not math.isfinite(value):
        raise _refused(text, "is not a number; write one such as 0.1")
    return value


def weight(text: str) -> float:
    """Converts an argument to a weight of at least 0 and below 1."""
    value = _float(text)
    if not 0 <= value < 1:
        raise _refused(
            text, "is not a weight; write a number of at least 0 and below 1, such as 0.9"
        )
    return value


def _float(text: str) -> float:
    """Converts a text to a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def report_formats(text: str) -> list[str]:
    """Converts an argument such as "html,csv" to formats of a report."""
    names = text.split(",")
    for name in names:
        if name not in FORMATS:
            raise _refused(name, f"is not a format of reports; there are {', '.join(FORMATS)}")
    return names


def folders(text: str) -> list[str]:
    """Converts an argument such as "a,b" to folders."""
    return [folder(each) for each in text.split(",")]


def folder(text: str) -> str:
    """Checks that an argument names a folder of this machine, and returns it unchanged."""
    if not text.strip():
        raise argparse.ArgumentTypeError(
            "it is empty, maybe from a shell variable that is not set; name a folder"
        )
    # Path('gs://bucket/run') would be the folder gs:/bucket/run of this machine.
    if "://" in text:
        raise _refused(
            text, "is not a folder of this machine; name one, on a disk that is mounted here"
        )
    if not os.path.isabs(text) and not current_folder_exists():
        raise _refused(text, f"is a relative path, and {GONE}")
    return text


def search_current_folder() -> None:
    """Lets Python find the packages of a vocabulary in the current folder, after all others."""
    if current_folder_exists() and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: no file in it replaces an installed module


def current_folder_exists() -> bool:
    """Returns whether the current folder exists, which relative paths need."""
    try:
        return bool(os.getcwd())
    except OSError:
        return False
