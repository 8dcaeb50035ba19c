"""The documents of local files, and their division into training, validation and test."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.data import shakespeare
from trainer.data.order import random_words
from trainer.data.text_files import Stamp, find_files

_DIGEST = re.compile("[0-9a-f]{64}")
_RACY = 2 * 10**9  # ns; the longest time between two ticks of the clock of a file system


@dataclass(frozen=True)
class Documents:
    """The documents of files, which are read one file at a time.

    Args:
        files: the paths; each file is a document, or several; empty for Shakespeare's works.
        separator: what stands between two documents of a file; None if a file is one document.
        stamps: of the files, when they were found.
    """

    files: tuple[str, ...]
    separator: str | None = None
    stamps: tuple[Stamp, ...] = ()

    def __iter__(self) -> Iterator[bytes]:
        """Yields the documents in the order of the files.

        Raises:
            ValueError: a file cannot be read, a document is empty, or the separator is nowhere.
        """
        yield from (document for _, document in self._named())

    def _named(self) -> Iterator[tuple[str, bytes]]:
        """Yields the name of each document in messages, and the document."""
        if not self.files:
            yield from (("One of Shakespeare's works", work) for work in shakespeare.works())
            return
        found = False
        for path in self.files:
            content = _read(path)
            if self.separator is None:
                yield path, content
                continue
            pieces = content.split(self.separator.encode())
            found = found or len(pieces) > 1
            if len(pieces) > 1 and not pieces[-1].strip():
                pieces.pop()  # the separator ends the last document
            for number, piece in enumerate(pieces, 1):
                if not piece.strip():
                    raise ValueError(
                        f"{path} has an empty document, number {number} of the {len(pieces)} that "
                        f"are separated by {self.separator!r}. Remove one of its separators."
                    )
                yield f"Document {number} of {path}", piece
        if self.separator is not None and not found:
            raise ValueError(
                f"The separator {self.separator!r} is in none of the {len(self.files)} files. "
                "Leave it out to make each file a document."
            )

    def pick(self, numbers: Collection[int]) -> Iterator[tuple[int, bytes]]:
        """Yields the numbers of some documents, in order, and these documents.

        If a file is one document, no other file is read.

        Args:
            numbers: those of the documents, from 0.
        """
        if self.files and self.separator is None:
            yield from ((number, _read(self.files[number])) for number in sorted(numbers))
        else:
            yield from ((n, document) for n, document in enumerate(self) if n in numbers)

    def __str__(self) -> str:
        """Returns the names of the files, at most three of them."""
        names = ", ".join(self.files[:3]) or "Shakespeare's works"
        more = len(self.files) - 3
        return f"{names} and {more} more" if more > 0 else names

    def not_utf8(self) -> str:
        """Returns a message about the first document that is not UTF-8; "" if there is none."""
        for name, document in self._named():
            try:
                document.decode()
            except UnicodeDecodeError as error:
                line = document.count(b"\n", 0, error.start) + 1
                return (
                    f"{name} is not a text in UTF-8: its byte {document[error.start]:#04x} on line "
                    f"{line} is not part of a character ({error.reason}). Convert the file to "
                    "UTF-8, or use the tokenizer 'bytes', which takes any file."
                )
        return ""

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(stamp.size for stamp in self.stamps)

    def digest(self, known: Path | None = None) -> str:
        """Returns the sha256 of all documents.

        Args:
            known: a folder that keeps it by the paths and stamps of the files, so that they are not
                read again where none has changed; None reads them.
        """
        if not self.files:
            return shakespeare.SHA256
        listing = repr((self.separator, self.files, self.stamps))
        record = None if known is None else known / hashlib.sha256(listing.encode()).hexdigest()
        with contextlib.suppress(OSError, UnicodeError):
            if record is not None and _DIGEST.fullmatch(found := record.read_text("ascii")):
                return found
        now = time.time_ns()
        digest = hashlib.sha256()
        for document in self:
            digest.update(hashlib.sha256(document).digest())
        # What was written just now may be written again without another time.
        newest = max(max(stamp.modified, stamp.changed) for stamp in self.stamps)
        if record is not None and newest < now - _RACY:
            _write_aside(record, digest.hexdigest())
        return digest.hexdigest()


def _write_aside(file: Path, text: str) -> None:
    """Writes a file that is not needed, if that is possible."""
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, "ascii")
        aside.replace(file)


def find_documents(files: str | Sequence[str] | None, separator: str | None) -> Documents:
    """Finds the files that paths, folders and globs name, each once.

    Args:
        files: paths of files, of folders (all files below them, but none whose name or folder
            begins with a dot) or globs; None for Shakespeare's works.
        separator: what stands between two documents of a file; None if a file is one document.

    Raises:
        ValueError: there is no such file, a file is empty or not a regular file, or the separator
            is empty or has no files.
    """
    if separator is not None and (not separator or files is None):
        raise ValueError(
            "separator divides the files into documents, and must be a text such as "
            f"'<|endoftext|>'; got {separator!r} for files={files!r}. Leave it out to make each "
            "file a document."
        )
    if files is None:
        return Documents(())
    found = find_files(files)
    return Documents(
        tuple(each.path for each in found), separator, tuple(each.stamp for each in found)
    )


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error


Part = tuple[int, int | None, int | None]
"""The number of a document, and the first byte and the end of the part of it; None for its own."""


def divide(documents: Documents, shares: Mapping[str, float], seed: int) -> dict[str, list[Part]]:
    """Divides documents into a training split and others.

    The others take whole documents in a random order, as long as each brings their bytes nearer to
    their share. A split for which the documents are too long is cut from the end of the longest
    document, at the end of a line if one is near.

    Args:
        documents: the documents.
        shares: split -> its share of the bytes, above 0; together less than 1.
        seed: of the random order.

    Returns:
        "train" and the splits -> their parts, in the order of the documents.

    Raises:
        ValueError: the text is too short for these shares.
    """
    sizes = [len(document) for document in documents]
    total = sum(sizes)
    order = np.argsort(random_words(seed, 0, 2, len(sizes)), kind="stable").tolist()
    owner: dict[int, str] = {}
    cut: list[str] = []
    for split, share in shares.items():
        target, taken = share * total, 0
        for document in order:
            if document in owner:
                continue
            if len(owner) == len(sizes) - 1:
                break  # the last one is to train on
            if abs(taken + sizes[document] - target) >= abs(taken - target):
                break
            owner[document] = split
            taken += sizes[document]
        if not taken:
            cut.append(split)
    parts: dict[str, list[Part]] = {split: [] for split in ("train", *shares)}
    longest = max((x for x in order if x not in owner), key=lambda x: (sizes[x], -x))
    bounds = _bounds(documents, longest, [shares[split] * total for split in cut]) if cut else []
    for document in range(len(sizes)):
        if document == longest and cut:
            for split, (start, stop) in zip(
                ["train", *cut], itertools.pairwise(bounds), strict=True
            ):
                parts[split].append((document, start, stop))
        else:
            parts[owner.get(document, "train")].append((document, None, None))
    return parts


def _bounds(documents: Documents, number: int, sizes: Sequence[float]) -> list[int]:
    """Returns where the parts of a document begin and end, of which the last have these sizes."""
    _, text = next(documents.pick([number]))
    bounds = [0]
    for index, size in enumerate(sizes):
        place = max(len(text) - round(sum(sizes[index:])), 0)
        line = text.find(b"\n", place, place + min(2000, round(size / 10))) + 1
        place = line or place
        while place < len(text) and text[place] & 0xC0 == 0x80:
            place += 1  # within a character
        bounds.append(place)
    bounds.append(len(text))
    if any(start >= stop for start, stop in itertools.pairwise(bounds)):
        raise ValueError(
            f"The text ({documents}) is too short: its longest document to train on has "
            f"{len(text)} bytes, of which {' and '.join(f'{size:.1f}' for size in sizes)} bytes "
            "for the other splits cannot be cut. Give more text, or other shares as `validation` "
            "and `test`."
        )
    return bounds


def read_parts(documents: Documents, parts: Sequence[Part]) -> Iterator[bytes]:
    """Yields the documents of a split.

    Args:
        documents: the documents.
        parts: those of the split, as `divide` returned them.
    """
    wanted = {number: slice(start, stop) for number, start, stop in parts}
    for number, document in documents.pick(wanted):
        yield document[wanted[number]]
