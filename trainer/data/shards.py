"""Files of tokens in the layouts of llm.c, and the stream of tokens that they hold.

A file has a header of 256 int32, of which the first three are a magic number, a version and the
number of tokens, and then the tokens: uint16 with magic 20240520 and version 1 (modded-nanogpt
reads these, too), or uint32 with magic 20240801 and version 7. All numbers are little-endian.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.data.folders import matching

_HEADER = 1024  # bytes
_LAYOUTS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_HASHED_WHOLE = 16 * 2**20  # bytes
_SAMPLES, _SAMPLE = 16, 4096
_OPEN = 128  # memory maps, of which each holds a file descriptor


class NoShards(ValueError):
    """A pattern that matches no file."""


class TokenStream:
    """The tokens of several arrays, one after the other.

    Args:
        sizes: number of tokens of each array, at least 1.
        load: `load(index)` returns an array, which may be a memory map; it is called often.
        fingerprint: returns a hash of all tokens.

    Example:
        >>> import numpy as np
        >>> from trainer.data.shards import TokenStream
        >>> stream = TokenStream.of_arrays([np.arange(3), np.arange(10, 14)])
        >>> len(stream), stream.windows(np.array([1, 5]), 3).tolist()
        (7, [[1, 2, 10], [12, 13, 0]])
    """

    def __init__(
        self,
        sizes: Sequence[int],
        load: Callable[[int], np.ndarray],
        fingerprint: Callable[[], str],
    ):
        self._ends = np.cumsum(np.asarray(sizes, np.int64))
        self._load, self._fingerprint = load, fingerprint

    @classmethod
    def of_arrays(cls, arrays: Sequence[np.ndarray]) -> TokenStream:
        """Returns the stream of arrays in memory.

        Args:
            arrays: arrays of integers [tokens].
        """

        def fingerprint() -> str:
            digest = hashlib.sha256()
            for array in arrays:
                digest.update(np.ascontiguousarray(array, "<u4").data)
            return digest.hexdigest()

        return cls([len(array) for array in arrays], lambda index: arrays[index], fingerprint)

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> TokenStream:
        """Returns the stream of files, which are mapped into memory and not read as a whole.

        Args:
            paths: the files, in the order of the stream.

        Raises:
            ValueError: one of them is not a whole file of tokens.
        """
        found = [_layout(path) for path in paths]

        @functools.lru_cache(maxsize=_OPEN)
        def load(index: int) -> np.ndarray:
            dtype, count = found[index]
            # Slices of an array take a fifth of the time of slices of a memmap.
            return np.asarray(np.memmap(paths[index], dtype, "r", _HEADER, (count,)))

        counts = [count for _, count in found]
        return cls(counts, load, lambda: "".join(map(_file_fingerprint, paths)))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the tokens in memory, or of samples of the files (see `data.tokens`)."""
        return hashlib.sha256(self._fingerprint().encode()).hexdigest()

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Copies windows of the stream, which may cross the ends of its arrays.

        Args:
            starts: the index of the first token of each window, int [windows].
            length: number of tokens of a window.

        Returns:
            int32 [windows, length], with 0 for tokens behind the end of the stream.
        """
        windows = np.zeros((len(starts), length), np.int32)
        arrays = np.searchsorted(self._ends, starts, side="right")
        for window, start, index in zip(windows, starts.tolist(), arrays.tolist(), strict=True):
            filled = 0
            while filled < length and index < len(self._ends):
                array = self._load(index)
                offset = start + filled - int(self._ends[index]) + len(array)
                piece = array[offset : offset + length - filled]
                window[filled : filled + len(piece)] = piece
                filled, index = filled + len(piece), index + 1
        return windows

    def blocks(self, size: int = 2**24) -> Iterator[np.ndarray]:
        """Yields all tokens in order, in arrays.

        Args:
            size: the most tokens of an array.
        """
        for index in range(len(self._ends)):
            array = self._load(index)
            for start in range(0, len(array), size):
                yield array[start : start + size]


def find_shards(patterns: str | Sequence[str], name: str) -> list[Path]:
    """Returns the files that paths and globs name, in the order of the patterns, then by name.

    Args:
        patterns: one path or glob such as "fineweb_train_*.bin", or several.
        name: what the files are for, in the message: "the shards of `train`".

    Raises:
        NoShards: a pattern matches no file.
        ValueError: a match is not a regular file, or there is no pattern.
    """
    found: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = matching(pattern)
        if not matches:
            raise NoShards(
                f"{name} are {pattern!r}, which matches no file in {Path.cwd()}. Give a path or a "
                "glob of files in llm.c's layout, such as those that `python -m "
                "trainer.data.prepare text` writes."
            )
        found += matches
    for path in found:
        if path.is_dir():
            raise ValueError(f"{name} include the folder {str(path)!r}. {_globs(path)}")
        if not path.is_file():  # opening a pipe would wait for its writer
            raise ValueError(f"{name} include {str(path)!r}, which is not a regular file.")
    if not found:
        raise ValueError(f"{name} are an empty list. Give at least one path or glob.")
    return found


def _globs(folder: Path) -> str:
    """Returns a sentence with the globs of the shards in a folder."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".bin")
    globs = dict.fromkeys(repr(str(folder / re.sub(r"\d+\.bin$", "*.bin", x))) for x in names)
    if not globs:
        return "It has no files whose names end in .bin. Give a path or a glob of shards."
    return f"Give a path or a glob of the files in it, such as {' or '.join([*globs][:4])}."


def _layout(path: Path) -> tuple[np.dtype, int]:
    """Returns the dtype and the number of tokens of a file."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error
    known = ", ".join(f"{magic} with version {version}" for magic, version in _LAYOUTS)
    numbers = np.frombuffer(header[: len(header) // 4 * 4], "<i4")
    start = tuple(numbers[:2].tolist())
    if start in _LAYOUTS and len(header) < _HEADER:
        raise ValueError(
            f"{path} was cut short: it has {size} bytes, and the header of a file of tokens alone "
            f"has {_HEADER}. Copy or prepare it again."
        )
    if start not in _LAYOUTS:
        said = f"begins with {start[0]} and {start[1]}" if len(start) == 2 else f"has {size} bytes"
        raise ValueError(
            f"{path} {said}, and is not a file of tokens in llm.c's layout, whose header of 1024 "
            f"bytes begins with the int32 {known}. `python -m trainer.data.prepare text` writes "
            "such files."
        )
    dtype, count = _LAYOUTS[start], int(numbers[2])
    if count < 1 or size != _HEADER + count * dtype.itemsize:
        state = "was cut short" if size < _HEADER + count * dtype.itemsize else "is not whole"
        raise ValueError(
            f"{path} {state}: its header says {count} tokens of {dtype.itemsize} bytes, which are "
            f"{_HEADER + count * dtype.itemsize} bytes with the header, but it has {size}. Copy or "
            "prepare it again."
        )
    return dtype, count


def _file_fingerprint(path: Path) -> str:
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


def write_shards(
    folder: Path, split: str, arrays: Iterable[np.ndarray], dtype: np.dtype, most: int
) -> list[Path]:
    """Writes tokens as files `<split>_000000.bin`, `<split>_000001.bin`, ...

    Args:
        folder: where to write.
        split: begins the names of the files.
        arrays: the tokens, arrays of integers [tokens]; together at least one.
        dtype: uint16 or uint32.
        most: the most tokens of a file, at least 1 and less than 2**31.

    Returns:
        The files.
    """
    magic, version = next(key for key, known in _LAYOUTS.items() if known == dtype)
    paths: list[Path] = []
    rest = (array for array in arrays if len(array))
    array = next(rest, None)
    while array is not None:
        paths.append(folder / f"{split}_{len(paths):06d}.bin")
        with paths[-1].open("wb") as file:
            file.write(bytes(_HEADER))
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
