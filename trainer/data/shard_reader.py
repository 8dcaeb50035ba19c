"""Reads the tokens of files in the layouts of llm.c, and notices when a file changes.

A file has a header of 256 int32, of which the first three are a magic number, a version and the
number of tokens, and then the tokens: uint16 with magic 20240520 and version 1 (modded-nanogpt
reads these, too), or uint32 with magic 20240801 and version 7. All numbers are little-endian.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.messages import UserError

HEADER = 1024  # bytes
LAYOUTS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_HASHED_WHOLE = 16 * 2**20  # bytes
_SAMPLES, _SAMPLE = 16, 4096
_OPEN = 128  # files that are kept open
_TOGETHER = 128  # pieces that are read side by side


class DataChanged(UserError):
    """A file of tokens that changed, or cannot be read any more, after a run began to read it."""


class Piece(NamedTuple):
    """A range of tokens, from start to stop, of the array or file `index` of a stream."""

    # The array or file has the range in full.

    index: int
    start: int
    stop: int


class _Stamp(NamedTuple):
    """Values of which at least one changes when a file is changed."""

    size: int
    modified: int  # ns
    linked: bool  # whether it has a name

    @classmethod
    def of(cls, stat: os.stat_result) -> "_Stamp":
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_nlink > 0)


class Shard(NamedTuple):
    """A file of tokens."""

    path: Path
    dtype: np.dtype
    count: int  # of its tokens
    stamp: _Stamp  # when it was found


class _Opened:
    """A file descriptor that is closed with its last reference."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class ShardReader:
    """Reads tokens of files, and raises DataChanged where a file is not as it was found."""

    # The files are not mapped into memory. Pages of a map are read ahead and stay resident, 100 MB
    # for 3 MB of tokens; and where a mapped file was cut short, a signal ends the process.

    def __init__(self, shards: Sequence[Shard]):
        self._shards = shards
        # A file that leaves the cache while another thread reads from it stays open until then.
        self._open = functools.lru_cache(maxsize=_OPEN)(self._opened)

    def read(self, pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
        """Yields the tokens of pieces of any files; DataChanged if one changed or is unreadable."""
        for first in range(0, len(pieces), _TOGETHER):
            yield from self._read_together(pieces[first : first + _TOGETHER])

    def _read_together(self, pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
        files = {index: self._open(index) for index in {piece.index for piece in pieces}}
        places = []  # of each piece: file descriptor, first byte, number of bytes
        for index, start, stop in pieces:
            width = self._shards[index].dtype.itemsize
            places.append((files[index].number, HEADER + width * start, width * (stop - start)))
        # With this advice the disk fetches them side by side, in a quarter of the time.
        with contextlib.suppress(AttributeError, OSError):  # macOS has no posix_fadvise
            for number, start, size in places:
                os.posix_fadvise(number, start, size, os.POSIX_FADV_WILLNEED)
        read = [
            self._pread(piece.index, *place) for piece, place in zip(pieces, places, strict=True)
        ]
        for index, file in files.items():
            self._check(index, os.fstat(file.number))
        for piece, content, (_, _, size) in zip(pieces, read, places, strict=True):
            if len(content) != size:
                raise self._changed(piece.index, "ends before its last token")
            yield np.frombuffer(content, self._shards[piece.index].dtype)

    def _opened(self, index: int) -> _Opened:
        try:
            file = _Opened(os.open(self._shards[index].path, os.O_RDONLY))
        except FileNotFoundError as error:
            raise self._changed(index, "was removed while it was in use") from error
        except OSError as error:
            raise self._changed(index, f"cannot be read any more ({error.strerror})") from error
        self._check(index, os.fstat(file.number))
        return file

    def _pread(self, index: int, number: int, start: int, size: int) -> bytes:
        try:
            return os.pread(number, size, start)
        except OSError as error:
            raise self._changed(index, f"cannot be read any more ({error.strerror})") from error

    def _check(self, index: int, stat: os.stat_result) -> None:
        """Raises DataChanged if a file is not as it was found."""
        before, now = self._shards[index].stamp, _Stamp.of(stat)
        if now == before:
            return
        what = "was written to or replaced while it was in use"
        if now.size < before.size:
            sizes = f"it had {before.size:,} bytes, and has {now.size:,}"
            what = f"was cut short while it was in use: {sizes}"
        elif not now.linked:
            what = "was removed or replaced while it was in use"
        raise self._changed(index, what)

    def _changed(self, index: int, what: str) -> DataChanged:
        return DataChanged(
            f"{self._shards[index].path} {what}. All steps of a run read the same tokens: put the "
            "file back as it was, and start the same command again, which resumes from the newest "
            "checkpoint."
        )


def find_layout(path: Path) -> Shard:
    """Reads the header of a file; raises ValueError if it is not a whole file of tokens."""
    try:
        with path.open("rb") as file:
            header, stat = file.read(HEADER), os.fstat(file.fileno())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error
    size = stat.st_size
    known = ", ".join(f"{magic} with version {version}" for magic, version in LAYOUTS)
    numbers = np.frombuffer(header[: len(header) // 4 * 4], "<i4")
    start = tuple(numbers[:2].tolist())
    if start in LAYOUTS and len(header) < HEADER:
        raise ValueError(
            f"{path} was cut short: it has {size} bytes, and the header of a file of tokens alone "
            f"has {HEADER}. Copy or prepare it again."
        )
    if start not in LAYOUTS:
        said = f"begins with {start[0]} and {start[1]}" if len(start) == 2 else f"has {size} bytes"
        raise ValueError(
            f"{path} {said}, and is not a file of tokens in llm.c's layout, whose header of 1024 "
            f"bytes begins with the int32 {known}. `python -m trainer.data.prepare text` writes "
            "such files."
        )
    dtype, count = LAYOUTS[start], int(numbers[2])
    if count < 1 or size != HEADER + count * dtype.itemsize:
        state = "was cut short" if size < HEADER + count * dtype.itemsize else "is not whole"
        raise ValueError(
            f"{path} {state}: its header says {count} tokens of {dtype.itemsize} bytes, which are "
            f"{HEADER + count * dtype.itemsize} bytes with the header, but it has {size}. Copy or "
            "prepare it again."
        )
    return Shard(path, dtype, count, _Stamp.of(stat))


def file_fingerprint(path: Path) -> str:
    """Returns the sha256 of a file's name, size, header and tokens; of a large file, of samples."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        if size <= _HASHED_WHOLE:
            digest.update(file.read())
        else:
            for start in np.linspace(0, size - _SAMPLE, _SAMPLES).astype(np.int64).tolist():
                file.seek(start)
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
