"""Any local text as a data set of tokens, which are kept on disk: its documents and its splits.

Start with `text`. `TextPlan` says what decides the tokens, and `Documents` reads the files.
"""

import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainer.data import shakespeare
from trainer.data.folders import data_root, matching, prepare_aside
from trainer.data.order import random_words
from trainer.data.shards import TokenStream, write_shards
from trainer.data.tokenizer import (
    FILE,
    ByteTokenizer,
    NotUtf8,
    SubwordTokenizer,
    load_tokenizer,
    token_dtype,
    train_bpe,
)
from trainer.data.tokens import KnownTokens, Sizes, TokenDataset

SHARD_TOKENS = 100_000_000
_BPE_VOCABULARY = 4096
_SPLITS = "splits.json"
_UNCHANGED = ".unchanged"  # a folder with hashes of texts, by the stamps of their files
_FORMAT = 1  # change it when the same text gives other tokens or files


def text(
    files: str | Sequence[str] | None = None,
    length: int = 256,
    batch_size: int = 32,
    tokenizer: str = "bytes",
    vocab_size: int | None = None,
    separator: str | None = None,
    validation: float | None = 0.05,
    test: float | None = 0.05,
    split_seed: int = 0,
    eval_batch_size: int | None = None,
    eval_tokens: int | None = None,
    end_of_text: int | None = None,
    data_dir: str | None = None,
) -> TokenDataset:
    """Returns a text as sequences of tokens, with the fields of a `TokenDataset`.

    Whole documents, drawn at random, are the validation and the test split, as long as each of them
    brings the size of its split nearer to the share that was asked for. If documents are too long
    for that (a text of one document is), a split is cut from the end of the longest document
    that is left: validation before test, each at the end of a line if there is one nearby.

    The tokens are made once, and kept in `data_dir`/text in a folder whose name is a hash of the
    text and of all that decides the tokens. A BPE is trained on the training documents alone.
    Files whose size, times and inode are those of an earlier start are not read again.

    Args:
        files: paths of files, of folders (with all files below, except those whose name begins with
            a dot) or globs; a file that several of them name is read once. None for the works of
            Shakespeare, 5 MB in 42 documents, which are in the public domain and come with
            Lockstep.
        length: number of positions of an example.
        batch_size: examples per training batch, over all processes.
        tokenizer: "bytes", for 256 bytes and `end_of_text`; "bpe", for a byte-level BPE that is
            trained on the text; or the path of a tokenizer.json of the package `tokenizers`.
        vocab_size: the most tokens of the BPE, at least 257; None for 4096. The model needs at
            least the `vocab_size` of the data set, which may be smaller for a short text.
        separator: the text between two documents of a file, such as "<|endoftext|>"; None if each
            file is one document.
        validation: the share of the bytes that is the validation split; None for no such split.
        test: the share of the bytes that is the test split; None for no such split.
        split_seed: seed of the choice of the documents of both.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        eval_tokens: number of tokens of a split, the first, to predict in an evaluation; None for
            all.
        end_of_text: the token before each document, for a tokenizer.json; None for its usual names.
        data_dir: the folder of data sets; None for $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.

    Raises:
        ValueError: there are no such files, a document is empty or not UTF-8, the text is shorter
            than a sequence, the tokenizer cannot be read, or an argument is out of its range.

    Example:
        >>> from trainer import data
        >>> text = data.text(length=64, batch_size=8)
        >>> batch = next(text.train(batch_index=0, seed=0))
        >>> batch["tokens"].shape, text.vocab_size, text.splits["test"] > 1000
        ((8, 64), 257, True)
    """
    documents = find_documents(files, separator)
    plan = TextPlan(documents, tokenizer, vocab_size, validation, test, split_seed, end_of_text)
    size, number = documents.size, len(documents.files)
    # Each document adds one token; its separator took at least one byte.
    if tokenizer in ("bytes", "bpe") and number and size + number <= length:
        raise ValueError(
            f"A sequence has length + 1 = {length + 1} tokens, but the text ({documents}) has "
            f"{size} bytes. Give more text as `files`, or choose a smaller length."
        )
    root = data_root(data_dir)
    folder = root / "text" / plan.key(root / "text" / _UNCHANGED)
    if (opened := _open(folder, end_of_text)) is None:
        try:
            prepare_aside(root, lambda aside: _build(plan, aside / "text" / folder.name))
        except OSError as error:
            raise ValueError(
                f"The tokens of the text cannot be kept in {root} ({error}). Set "
                "LOCKSTEP_DATA_DIR, or the argument data_dir of data.text, to a folder that can be "
                "written."
            ) from error
        opened = _open(folder, end_of_text)
    if opened is None:
        raise ValueError(f"The tokens in {folder} cannot be read. Remove it, and start again.")
    streams, loaded = opened
    dataset = TokenDataset(
        streams.pop("train"),
        streams,
        KnownTokens.of(loaded),
        Sizes(length, batch_size, eval_batch_size, eval_tokens),
        name=f"data.text ({documents})",
    )
    dataset.plan_warnings = plan.too_few(loaded.vocab_size)
    return dataset


@dataclass(frozen=True)
class TextPlan:
    """What decides the tokens of a text; the arguments are those of `text`."""

    documents: "Documents"
    tokenizer: str
    vocab_size: int | None
    validation: float | None
    test: float | None
    split_seed: int
    end_of_text: int | None

    def __post_init__(self) -> None:
        for split, share in self.shares.items():
            if not 0 < share < 1:
                raise ValueError(
                    f"{split} is {share}, but is a share of the text between 0 and 1, such as "
                    "0.05. None makes no such split."
                )
        if not 0 < sum(self.shares.values()) < 1:
            raise ValueError(
                f"validation={self.validation} and test={self.test} must leave a part of the text "
                "to train on, and at least one of them is needed: every evaluation uses one."
            )
        if self.tokenizer == "bytes" and self.vocab_size not in (None, 257):
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but the tokenizer 'bytes' has 257 tokens. Leave "
                "vocab_size out, or choose tokenizer='bpe'."
            )
        if self.end_of_text is not None and self.tokenizer in ("bytes", "bpe"):
            raise ValueError(
                f"end_of_text is {self.end_of_text}, but only a tokenizer.json needs it. Leave it "
                f"out for tokenizer={self.tokenizer!r}."
            )

    @property
    def shares(self) -> dict[str, float]:
        """Split -> its share, of the splits other than the one to train on."""
        shares = {"validation": self.validation, "test": self.test}
        return {split: share for split, share in shares.items() if share is not None}

    def key(self, known: Path | None = None) -> str:
        """Returns a hash of the text and of what decides its tokens; see `Documents.digest`."""
        tokenizer: list[object] = [self.tokenizer]
        if self.tokenizer == "bpe":
            tokenizer.append(self.bpe_size)
        elif self.tokenizer != "bytes":
            tokenizer = [hashlib.sha256(self._path().read_bytes()).hexdigest()]
            tokenizer += [self.vocab_size, self.end_of_text]
        splits = [sorted(self.shares.items()), self.split_seed]
        content = json.dumps([_FORMAT, self.documents.digest(known), tokenizer, splits])
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def write(self, folder: Path, shard_tokens: int) -> dict[str, int]:
        """Writes all shards and tokenizer.json; returns split -> number of tokens."""
        parts = divide_documents(self.documents, self.shares, self.split_seed)
        counts = {}
        try:
            loaded = self._load(read_parts(self.documents, parts["train"]))
            dtype = token_dtype(loaded.vocab_size)
            for split in parts:
                arrays = loaded.stream(read_parts(self.documents, parts[split]))
                paths = write_shards(folder, split, arrays, dtype, shard_tokens)
                counts[split] = len(TokenStream.of_files(paths))
        except NotUtf8 as error:
            raise ValueError(self.documents.not_utf8() or str(error)) from error
        loaded.save(folder / FILE)
        return counts

    def _load(self, train: Iterator[bytes]) -> ByteTokenizer | SubwordTokenizer:
        if self.tokenizer == "bytes":
            return ByteTokenizer()
        if self.tokenizer == "bpe":
            return train_bpe(train, self.bpe_size)
        loaded = load_tokenizer(self._path(), self.end_of_text)
        if self.vocab_size not in (None, loaded.vocab_size):
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but {self.tokenizer} has {loaded.vocab_size} "
                "tokens. Leave vocab_size out: it is for tokenizer='bpe'."
            )
        return loaded

    @property
    def bpe_size(self) -> int:
        """The most tokens of the BPE; a text without so many pairs gives fewer."""
        return _BPE_VOCABULARY if self.vocab_size is None else self.vocab_size

    def too_few(self, found: int) -> list[str]:
        """Returns a sentence if a BPE of the text has fewer tokens than it may have."""
        if self.tokenizer != "bpe" or found >= self.bpe_size:
            return []
        return [
            f"The training text has enough pairs for only {found:,} tokens, and vocab_size is "
            f"{self.bpe_size:,}. Ask for {found:,}, here and in the model, or give more text."
        ]

    def _path(self) -> Path:
        path = Path(self.tokenizer).expanduser()
        if not path.is_file():
            raise ValueError(
                f"tokenizer is {self.tokenizer!r}, which is neither 'bytes' nor 'bpe' nor a file. "
                "Choose one of them, or give the path of a tokenizer.json."
            )
        return path


def _build(plan: TextPlan, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / _SPLITS).write_text(json.dumps(plan.write(folder, SHARD_TOKENS)))
    return folder


def _open(
    folder: Path, end_of_text: int | None
) -> tuple[dict[str, TokenStream], ByteTokenizer | SubwordTokenizer] | None:
    """Returns the streams of the splits and the tokenizer; None if they are absent or not whole."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        counts = json.loads((folder / _SPLITS).read_text())
        streams = {
            split: TokenStream.of_files(sorted(folder.glob(f"{split}_*.bin"))) for split in counts
        }
        if "train" in counts and counts == {x: len(streams[x]) for x in streams}:
            return streams, load_tokenizer(folder / FILE, end_of_text)
    return None


# Finding the files of texts, each once, with one look at each: there may be many.


class Stamp(NamedTuple):
    """Values of which at least one changes when a file is written, replaced or gets other times."""

    size: int
    modified: int  # ns
    changed: int  # ns; no program can set it
    inode: int


class TextFile(NamedTuple):
    """A file."""

    path: str  # as it was named, or below a folder that was named
    real: str  # the path with all links resolved
    stamp: Stamp


def find_files(files: str | Sequence[str]) -> list[TextFile]:
    """Returns the files that paths, folders and globs name, each once."""
    # Of a folder it takes all files below it, without those whose name or folder begins with a dot.
    # Raises ValueError if there is no such file, or one is empty, not regular or cannot be read.
    # By their real paths: one that is named twice would be in the training split and another one.
    found: dict[str, TextFile] = {}
    for pattern in [files] if isinstance(files, str) else files:
        below: list[TextFile] = []
        for path in map(str, matching(pattern)):
            if os.path.isdir(path):
                below += _files_of("" if path == "." else path, os.path.realpath(path))
            else:
                below.append(_found(path, os.path.realpath(path)))
        if not below:
            raise ValueError(
                f"files has {_nothing(pattern)}. Give paths of texts, of folders with texts, or "
                "globs such as 'books/*.txt'."
            )
        for each in below:
            found.setdefault(each.real, each)
    if not found:
        raise ValueError("files is an empty list. Give at least one file, folder or glob.")
    return list(found.values())


def _nothing(pattern: str) -> str:
    """Returns why a pattern names no file."""
    matches = matching(pattern)
    where = "" if os.path.isabs(os.path.expanduser(pattern)) else f" in {Path.cwd()}"
    if matches:
        names = ", ".join(repr(str(path)) for path in matches[:3])
        return (
            f"the folder{'s' * (len(matches) > 1)} {names}{where}, with no file whose name does "
            "not begin with a dot"
        )
    if glob.has_magic(pattern):
        return f"the glob {pattern!r}, which matches nothing{where}"
    return f"{pattern!r}, but there is no such file or folder{where}"


def _files_of(folder: str, real: str) -> Iterator[TextFile]:
    """Yields the files below a folder, whose real path is known, by name, with one stat of each."""
    # The real path of each folder is kept, because os.path.realpath of each file takes long.
    try:
        listed = [each for each in os.scandir(folder or ".") if each.name[0] != "."]
    except OSError as error:
        raise ValueError(f"{folder} cannot be listed ({error.strerror}).") from error
    for entry in sorted(listed, key=lambda each: each.name):
        path, below = os.path.join(folder, entry.name), os.path.join(real, entry.name)
        if entry.is_symlink():
            if not os.path.isdir(path):  # links to folders are not followed: they may form circles
                yield _found(path, os.path.realpath(path))
        elif entry.is_dir():
            yield from _files_of(path, below)
        else:
            yield _found(path, below)


def _found(path: str, real: str) -> TextFile:
    try:
        seen = os.stat(path)
    except FileNotFoundError:  # a link to nothing
        seen = None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from error
    if seen is None or not stat.S_ISREG(seen.st_mode):  # opening a pipe would wait for its writer
        raise ValueError(f"files has {path!r}, which is not a regular file.")
    if not seen.st_size:
        raise ValueError(
            f"{path} is empty, and an empty document has nothing to learn. Remove the file, or "
            "leave it out of `files`."
        )
    return TextFile(
        path, real, Stamp(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)
    )


# Documents, and dividing them into splits.

_DIGEST = re.compile("[0-9a-f]{64}")
_RACY = 2 * 10**9  # ns; the longest time between two ticks of the clock of a file system


@dataclass(frozen=True)
class Documents:
    """The documents of files, which are read one file at a time."""

    # the paths; each file is a document, or several; empty for Shakespeare's works
    files: tuple[str, ...]
    separator: str | None = None  # between two documents; None if a file is one document
    stamps: tuple[Stamp, ...] = ()  # those of the files, when they were found

    def __iter__(self) -> Iterator[bytes]:
        """Yields the documents in the order of the files; raises ValueError."""
        yield from (document for _, document in self._named())

    def _named(self) -> Iterator[tuple[str, bytes]]:
        """Yields each document after its name for messages."""
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
        """Yields the documents of some numbers, from 0, in order, each after its number."""
        # If a file is one document, no other file is read.
        if self.files and self.separator is None:
            yield from ((number, _read(self.files[number])) for number in sorted(numbers))
        else:
            yield from ((n, document) for n, document in enumerate(self) if n in numbers)

    def __str__(self) -> str:
        """Returns the names of the files, at most three of them."""
        names = ", ".join(self.files[:3]) or "Shakespeare's works"
        return f"{names} and {more} more" if (more := len(self.files) - 3) > 0 else names

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
        """Returns the sha256 of all documents."""
        # `known` is a folder that keeps it by the paths and stamps of the files, so that they are
        # not read again where none has changed; None reads them.
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
        # A file that was written just now may change again without another time: keep no hash.
        newest = max(max(stamp.modified, stamp.changed) for stamp in self.stamps)
        if record is not None and newest < now - _RACY:
            aside = record.with_name(f"{record.name}.{os.getpid()}")
            with contextlib.suppress(OSError):  # the file only saves time
                record.parent.mkdir(parents=True, exist_ok=True)
                aside.write_text(digest.hexdigest(), "ascii")
                aside.replace(record)
        return digest.hexdigest()


def find_documents(files: str | Sequence[str] | None, separator: str | None) -> Documents:
    """Finds the files that paths, folders and globs name, each once; see `text`."""
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
"""The number of a document, and start and stop of a slice of its bytes; None for the ends."""


def divide_documents(
    documents: Documents, shares: Mapping[str, float], seed: int
) -> dict[str, list[Part]]:
    """Divides documents into "train" and other splits; returns the parts of each, in order."""
    # The others take whole documents in a random order, as long as each brings their bytes nearer
    # to their share. A split for which the documents are too long is cut from the end of the
    # longest document, at the end of a line if one is near.
    # `shares` has for each split its share of the bytes, above 0; together less than 1. Raises
    # ValueError if the text is too short for these shares.
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
                break  # at least one document is left to train on
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
    """Returns where to cut a document so that its last parts have about these sizes."""
    # The first place is 0, and the last is the end.
    _, text = next(documents.pick([number]))
    bounds = [0]
    for index, size in enumerate(sizes):
        place = max(len(text) - round(sum(sizes[index:])), 0)
        place = text.find(b"\n", place, place + min(2000, round(size / 10))) + 1 or place
        while place < len(text) and text[place] & 0xC0 == 0x80:
            place += 1  # not within a character of UTF-8
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
    """Yields the documents of a split, whose parts `divide_documents` returned."""
    wanted = {number: slice(start, stop) for number, start, stop in parts}
    for number, document in documents.pick(wanted):
        yield document[wanted[number]]
