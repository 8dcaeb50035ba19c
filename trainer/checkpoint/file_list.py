"""The list of a step's files with their sizes and checksums, which detects damaged files.

Steps that orbax wrote have one, so that orbax never parses a damaged file.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from trainer.checkpoint import integrity

FILES = "integrity/files.json"
ARRAYS = "state/manifest.ocdbt"  # the index of the arrays
COMMITTED = "commit_success.txt"
STEP_METADATA = "_CHECKPOINT_METADATA"
_LATER = (STEP_METADATA, COMMITTED)  # must exist with any content, so they are not listed

SizeAndCrc = tuple[int, str]  # bytes, and CRC-32 as eight hex digits; a list when read from JSON


def write_file_list(directory: Path, final: Path) -> None:
    """Writes the list of the files of a step that gets the path `final`, and orbax's last mark."""
    # Raises OSError if the disk cannot be written or the folder has no arrays.

    # tensorstore encodes paths in UTF-8; under another encoding it writes to another folder.
    if not (directory / ARRAYS).is_file():
        raise OSError(f"the index of its arrays, {ARRAYS}, was not written to {directory}")
    listing = {"format": integrity.ORBAX, "files": file_list(directory)}
    (directory / FILES).write_text(integrity.seal(listing))
    (directory / COMMITTED).write_text(f"Committed as {final.name}.\n")


def file_list(directory: Path) -> dict[str, SizeAndCrc]:
    """Returns the size and CRC-32 of every file of a step, by path relative to its folder."""
    # Raises OSError if a file or folder cannot be read.
    listing = {}
    for folder, _, names in os.walk(directory, onerror=_raise):  # rglob() ignores errors
        for path in (Path(folder, name) for name in names):
            name = path.relative_to(directory).as_posix()
            if name not in (FILES, *_LATER) and path.is_file():
                listing[name] = size_and_crc(path)
    return listing


def file_problems(directory: Path, listing: Mapping[str, SizeAndCrc]) -> list[str]:
    """Returns a line for each listed file that is missing or differs from what was saved."""
    # Raises OSError if a file or folder cannot be read.

    # A damaged listing may name any path: its names are compared, and never opened.
    present = file_list(directory)
    problems = [
        f"the file {name} is missing" for name in _LATER if not (directory / name).is_file()
    ]
    for name, (size, crc) in listing.items():
        if name not in present:
            problems.append(f"the file {name} is missing")
        elif present[name][0] != size:
            problems.append(f"the file {name} has {present[name][0]} bytes instead of {size}")
        elif present[name][1] != crc:
            problems.append(f"the file {name} was changed: its checksum differs")
    return problems


def _raise(error: OSError) -> None:
    raise error


def size_and_crc(path: Path) -> SizeAndCrc:
    """Reads a file, and returns its size in bytes and its CRC-32."""
    size, crc = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 18):  # small enough for a cache of the processor
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, f"{crc:08x}"
