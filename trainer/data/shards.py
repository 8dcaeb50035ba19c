"""Streams of tokens, in memory or in files, and how these files are found and written.

The layout of the files is described in `trainer.data.shard_reader`.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from trainer.data.folders import matching
from trainer.data.shard_reader import (
    HEADER,
    LAYOUTS,
    Piece,
    ShardReader,
    file_fingerprint,
    find_layout,
)


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
        # `starts` has the index of the first token of each window. Tokens behind the end of the
        # stream are 0.
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
    # `name` says in the message what the files are for: "The shards of train=". Raises NoShards if
    # a pattern matches no file; ValueError if a match is not a regular file, or there is no
    # pattern.
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
