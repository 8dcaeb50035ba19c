"""Streams of tokens, in memory or in files in the layouts of llm.c, which are found and written.

A file has a header of 256 int32, of which the first three are a magic number, a version and the
number of tokens, and then the tokens: uint16 with magic 20240520 and version 1 (modded-nanogpt
reads these, too), or uint32 with magic 20240801 and version 7. All numbers are little-endian.
"""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data.folders import matching
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
        read = []
        for piece, (number, start, size) in zip(pieces, places, strict=True):
            try:
                read.append(os.pread(number, size, start))
            except OSError as error:
                what = f"cannot be read any more ({error.strerror})"
                raise self._changed(piece.index, what) from error
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
    if (start := tuple(numbers[:2].tolist())) in LAYOUTS and len(header) < HEADER:
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


class NoShards(ValueError):
    """A pattern that matches no file."""


class TokenStream:
    """The tokens of several arrays of `sizes`, each at least 1, one after the other.

    Example:
        >>> stream = TokenStream.of_arrays([np.arange(3), np.arange(10, 14)])
        >>> len(stream), stream.windows(np.array([1, 5]), 3).tolist()
        (7, [[1, 2, 10], [12, 13, 0]])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        read: Callable[[Sequence[Piece]], Iterator[np.ndarray]],
        fingerprint: Callable[[], str],
    ):
        self._ends = np.cumsum(np.asarray(sizes, np.int64))
        self.sizes, self._read, self._fingerprint = list(sizes), read, fingerprint

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray]) -> "TokenStream":
        """Returns the stream of arrays of integers [tokens] in memory."""

        def fingerprint() -> str:
            digest = hashlib.sha256()
            for array in arrays:
                digest.update(np.ascontiguousarray(array, "<u4").data)
            return digest.hexdigest()

        def read(pieces: Sequence[Piece]) -> Iterator[np.ndarray]:
            return (arrays[index][start:stop] for index, start, stop in pieces)

        return cls([len(array) for array in arrays], read, fingerprint)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> "TokenStream":
        """Returns the stream of files in this order, of which only what is asked for is read."""
        # A file that changes later raises `DataChanged` where it is read. Raises ValueError if one
        # of them is not a whole file of tokens.
        shards = [find_layout(path) for path in paths]
        counts = [shard.count for shard in shards]
        return cls(counts, ShardReader(shards).read, lambda: "".join(map(file_fingerprint, paths)))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokens in memory, or of samples of the files (see `data.tokens`)."""
        return hashlib.sha256(self._fingerprint().encode()).hexdigest()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies windows of the stream, int32 [windows, length], which may cross its arrays."""
        # `starts` has the index of the first token of each window. Tokens behind the end are 0.
        windows = np.zeros((len(starts), length), np.int32)
        places: list[np.ndarray] = []
        pieces: list[Piece] = []
        arrays = np.searchsorted(self._ends, starts, side="right")
        for window, start, index in zip(windows, starts.tolist(), arrays.tolist(), strict=True):
            filled = 0
            while filled < length and index < len(self._ends):
                size = self.sizes[index]
                offset = start + filled - int(self._ends[index]) + size
                piece = Piece(index, offset, min(offset + length - filled, size))
                pieces.append(piece)
                count = piece.stop - piece.start
                places.append(window[filled : filled + count])
                filled, index = filled + count, index + 1
        for place, tokens in zip(places, self._read(pieces), strict=True):
            place[:] = tokens
        return windows

    def blocks(self, size: int = 2**24) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in arrays of at most `size` tokens."""
        for index, count in enumerate(self.sizes):
            for start in range(0, count, size):
                yield from self._read([Piece(index, start, min(start + size, count))])


def find_shards(patterns: str | Sequence[str], name: str) -> list[Path]:
    """Returns the files of paths and globs, in the order of the patterns, then by name."""
    # `name` says in messages what files are for: "The shards of train=". Raises NoShards if a
    # pattern matches no file; ValueError if a match is not a regular file, or there is no pattern.
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not (matches := matching(pattern)):
            raise NoShards(
                f"{name} are {pattern!r}, which matches no file in {Path.cwd()}. Give a path or a "
                "glob of files in llm.c's layout, such as those that `python -m "
                "trainer.data.prepare text` writes."
            )
        found += matches
    for path in found:
        if path.is_dir():
            names = sorted(each.name for each in path.iterdir() if each.suffix == ".bin")
            globs = dict.fromkeys(repr(str(path / re.sub(r"\d+\.bin$", "*.bin", x))) for x in names)
            advice = "It has no files whose names end in .bin. Give a path or a glob of shards."
            if globs:
                some = " or ".join([*globs][:4])
                advice = f"Give a path or a glob of the files in it, such as {some}."
            raise ValueError(f"{name} include the folder {str(path)!r}. {advice}")
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{name} include {str(path)!r}, which is not a regular file.")
    if not found:
        raise ValueError(f"{name} are an empty list. Give at least one path or glob.")
    return found


def write_shards(
    folder: Path, split: str, arrays: Iterable[np.ndarray], dtype: np.dtype, most: int
) -> list[Path]:
    """Writes tokens as files `<split>_000000.bin`, `<split>_000001.bin`, ..., returned."""
    # Each array has integers [tokens]; together they have at least one. The dtype is uint16 or
    # uint32. A file has at most `most` tokens, which is at least 1 and less than 2**31.
    magic, version = next(key for key, known in LAYOUTS.items() if known == dtype)
    paths: list[Path] = []
    rest = (array for array in arrays if len(array))
    array = next(rest, None)
    while array is not None:
        paths.append(folder / f"{split}_{len(paths):06d}.bin")
        with paths[-1].open("wb") as file:
            file.write(bytes(HEADER))
            count = 0
            while array is not None and count < most:
                piece = array[: most - count]
                file.write(piece.astype(dtype).tobytes())
                count += len(piece)
                array = array[len(piece) :] if len(piece) < len(array) else next(rest, None)
            file.seek(0)
            file.write(np.array([magic, version, count], "<i4").tobytes())
            file.flush()
            os.fsync(file.fileno())  # before the folder is renamed to its final name
    return paths
