"""Tokenizers: bytes, and those of the package `tokenizers`, which is imported when one is used."""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"


class ByteTokenizer:
    """The bytes of a text in UTF-8 are its tokens, 0 to 255, and 256 is `end_of_text`.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_text = 256
    token_bytes = np.array([1] * 256 + [0], np.int32)  # of text, for each token
    prefix_bytes = 0  # see `SubwordTokenizer`

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text; raises ValueError as `to_utf8` does."""
        return list(to_utf8(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes; what is not valid UTF-8 becomes U+FFFD."""
        # Numbers above 255 have no text.
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")

    def stream(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of documents, each after `end_of_text`, in arrays."""
        for document in documents:
            yield np.array([self.end_of_text], np.uint16)
            yield np.frombuffer(document, np.uint8).astype(np.uint16)

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json, from which the package `tokenizers` makes the same tokens."""
        path.write_text(json.dumps(byte_json(), ensure_ascii=False, indent=1), "utf-8")


def to_utf8(text: str) -> bytes:
    """Returns the bytes of a text; raises ValueError for half a surrogate pair, which has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The text {text[:100]!r} has no bytes in UTF-8 ({error}).") from error


def byte_json() -> dict[str, Any]:
    """Returns the tokenizer.json of a `ByteTokenizer`: a BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # GPT-2's printable character for each byte.
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in shown else next(others)): byte for byte in range(256)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END_OF_TEXT, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": False},
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {"type": "BPE", "vocab": {**vocabulary, END_OF_TEXT: 256}, "merges": []},
    }


FILE = "tokenizer.json"
# What tokenizers put between documents. The first of these that a tokenizer has is `end_of_text`.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|begin_of_text|>")
_PIECE = 2**20  # bytes that are encoded at a time
_TOGETHER = 32  # pieces that the threads of the package share


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`; ValueError if it lacks tokens or `end_of_text`."""

    # `end_of_text` is the token before each document; None for the first that there is of
    # "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>" and "<|begin_of_text|>".
    # `token_bytes` has how many bytes of text each token stands for, int32 [vocab_size]; None if
    # the tokenizer is neither byte-level nor has byte fallback, or changes its text. `prefix_bytes`
    # is how many bytes the tokens of a document stand for in excess of its own: 1 for a tokenizer
    # that begins each document with a space, such as that of Llama 2.

    def __init__(self, tokenizer: "tokenizers.Tokenizer", end_of_text: int | None, name: str):
        self._tokenizer, self._name = tokenizer, name
        # Otherwise the text "<|endoftext|>" would become the special token.
        tokenizer.encode_special_tokens = True
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        if not vocabulary:
            raise ValueError(f"{name} has no tokens. Train it, or give the file of another one.")
        ends = [vocabulary[each] for each in _ENDS if each in vocabulary]
        if end_of_text is None and not ends:
            raise ValueError(
                f"{name} has none of the tokens {', '.join(_ENDS)}, one of which begins each "
                "document. Give the number of the token that does as `end_of_text`."
            )
        self.end_of_text = ends[0] if end_of_text is None else end_of_text
        if not 0 <= self.end_of_text < self.vocab_size:
            raise ValueError(
                f"end_of_text is {end_of_text}, but {name} has {self.vocab_size} tokens. Give a "
                f"number from 0 to {self.vocab_size - 1}."
            )
        self._byte_level = is_byte_level(tokenizer)
        with _failures_reported(name):
            self.token_bytes, self.prefix_bytes = bytes_of_tokens(tokenizer, self.vocab_size)
        if self.token_bytes is not None:
            self.token_bytes[self.end_of_text] = 0

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, none of which is special."""
        # Raises ValueError if the text has half a surrogate pair, or a part that has no token.
        to_utf8(text)
        with _failures_reported(self._name, text):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        unknown = self._unknown()
        if unknown is not None and unknown in ids:
            raise ValueError(f"{self._name} has no token for a part of the text {text[:100]!r}.")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; what is not valid UTF-8 becomes U+FFFD."""
        # Special tokens have no text.
        with _failures_reported(self._name):
            return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of documents, each after `end_of_text`, in arrays."""
        # Long documents of a byte-level tokenizer are encoded in pieces of about 1 MiB, which end
        # between a letter and the end of its line, where no token goes across. Raises NotUtf8 if a
        # document is not UTF-8; ValueError if a part of one has no token, or the package fails.
        pieces = pieces_of(documents, _PIECE if self._byte_level else None)
        dtype, unknown = token_dtype(self.vocab_size), self._unknown()
        while batch := list(itertools.islice(pieces, _TOGETHER)):
            encoded = self._encode_together([text for text, _ in batch])
            for (text, first), encoding in zip(batch, encoded, strict=True):
                tokens = np.array(encoding.ids, dtype)
                if unknown is not None and (tokens == unknown).any():
                    raise ValueError(
                        f"{self._name} has no token for a part of the document that begins with "
                        f"{text[:60]!r}. A byte-level tokenizer has tokens for any text."
                    )
                if first:
                    yield np.array([self.end_of_text], dtype)
                yield tokens

    def _encode_together(self, texts: Any) -> "list[tokenizers.Encoding]":
        try:
            with _failures_reported(self._name):
                return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except _Failure:
            for text in texts:  # one of them raises again, with its beginning in the message
                self.encode(text)
            raise

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json."""
        self._tokenizer.save(str(path))

    def _unknown(self) -> int | None:
        token = getattr(self._tokenizer.model, "unk_token", None)
        return None if token is None else self._tokenizer.token_to_id(token)


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> SubwordTokenizer:
    """Trains a byte-level BPE, with the words of GPT-2; equal texts give equal tokenizers."""
    # Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words with Subword
    # Units"; Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    # `vocab_size` is the most tokens, at least 257: all bytes, and `end_of_text`. A short text has
    # fewer. Raises NotUtf8 for a document that is not UTF-8.
    if vocab_size < 257:
        raise ValueError(
            f"vocab_size is {vocab_size}, but a BPE has at least 257 tokens: 256 bytes and the "
            "end of a text."
        )
    package: Any = _package()
    tokenizer = package.Tokenizer(package.models.BPE())
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    trainer = package.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(package.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for text, _ in pieces_of(documents, _PIECE)), trainer)
    return SubwordTokenizer(tokenizer, None, "the trained BPE")


def load_tokenizer(path: Path, end_of_text: int | None = None) -> ByteTokenizer | SubwordTokenizer:
    """Reads a tokenizer.json; raises ValueError if it cannot, or no token begins a document."""
    try:
        if _content(path) == byte_json() and end_of_text in (None, 256):
            return ByteTokenizer()
        tokenizer = _package().Tokenizer.from_file(str(path))
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_of_package(error):
            raise  # an interrupt
        raise ValueError(
            f"{path} cannot be read as a tokenizer.json: {error}. Give the path of a file that the "
            "package tokenizers has written, such as that of a byte-level BPE."
        ) from error
    return SubwordTokenizer(tokenizer, end_of_text, str(path))


def _content(path: Path) -> dict[str, Any]:
    """Returns the content of a tokenizer.json."""
    if not path.is_file():  # a folder, or a pipe whose writer would be waited for
        raise ValueError("it is not a file" if path.exists() else "there is no such file")
    try:
        content = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise ValueError(str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise ValueError("it is not JSON") from error
    if not (isinstance(content, dict) and isinstance(content.get("model"), dict)):
        raise ValueError("it is JSON, but not that of a tokenizer, which has a 'model'")
    return content


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of tokens in files, uint16 or uint32."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _package() -> Any:
    """Imports the package, without its warning about forks: child processes do not use it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    return tokenizers


class _Failure(ValueError):
    """The package cannot convert a text."""


def _is_of_package(error: BaseException) -> bool:
    """Returns whether the package has raised an error: Exception itself, or a panic of Rust."""
    return type(error) is Exception or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _failures_reported(name: str, text: str | None = None) -> Iterator[None]:
    """Raises ValueError where the package fails, perhaps by a panic, which is no Exception."""
    # `text` is what is converted; None if it is not one text.
    try:
        yield
    except BaseException as error:
        if not _is_of_package(error):
            raise
        where = "" if text is None else f" for the text that begins with {text[:60]!r}"
        hint = ""
        if "retry-limit" in str(error):
            hint = (
                " A regular expression of the file takes exponential time there: write it without "
                "nested repetitions such as (a+)+."
            )
        raise _Failure(f"{name} fails{where}: {str(error).rstrip('.')}.{hint}") from error


# How many bytes of text the tokens of a tokenizer stand for.

_BYTE = re.compile("<0x[0-9A-F]{2}>")
# Texts that normalizers change: spaces, line ends, capitals, accents, ligatures, full width.
_PROBES = ("a", "a  b ", "Don't\r\nSTOP\t7", "é e\u0301 ñ", "ﬁ Ａ ½", "世界 🧪\u200b", "\x00\x7f")


def is_byte_level(tokenizer: "tokenizers.Tokenizer") -> bool:
    """Returns whether each character of a token is a byte, as in the tokenizer of GPT-2."""
    import tokenizers

    return isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)


def bytes_of_tokens(
    tokenizer: "tokenizers.Tokenizer", vocab_size: int
) -> tuple[np.ndarray | None, int]:
    """Returns the bytes of text of each token, int32 [vocab_size]; None if not known."""
    # The second result is how many bytes the tokens of a document stand for in excess of its own,
    # such as 1 for a tokenizer that puts a space before each document.
    if is_byte_level(tokenizer):
        return _counts(tokenizer, vocab_size, len), 0  # a character for each byte
    model = json.loads(tokenizer.to_str())["model"]
    if tokenizer.decoder is None or not model.get("byte_fallback"):
        return None, 0
    decode = tokenizer.decoder.decode

    def size(token: str) -> int:
        # Behind another token, because a decoder may remove the space before the first.
        return 1 if _BYTE.fullmatch(token) else len(decode(["a", token]).encode()) - 1

    counts = _counts(tokenizer, vocab_size, size)
    encoded = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in _PROBES}
    # Some tokenizers put a space before a text only if it does not begin with one.
    same = all(tokenizer.decode(ids).lstrip(" ") == text for text, ids in encoded.items())
    prefix, *others = {int(counts[ids].sum()) - len(text.encode()) for text, ids in encoded.items()}
    return (counts, prefix) if same and not others and prefix >= 0 else (None, 0)


def _counts(tokenizer: Any, vocab_size: int, size: Callable[[str], int]) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int32)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        counts[number] = size(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if added.special else len(added.content.encode())
    return counts


# Long documents are cut into pieces that a byte-level tokenizer converts as it does the whole.


class NotUtf8(ValueError):
    """A document that is not a text in UTF-8."""


def pieces_of(documents: Iterable[bytes], limit: int | None) -> Iterator[tuple[str, bool]]:
    """Yields pieces of documents as text, and whether each is the first of its document."""
    # `limit` is about how many bytes a piece has, at least; None does not cut documents. Raises
    # NotUtf8 if a document is not UTF-8.
    for document in documents:
        for piece, first in _cut(document, limit):
            try:
                yield piece.decode(), first
            except UnicodeDecodeError as error:
                raise NotUtf8(
                    f"The document that begins with {document[:60]!r} is not a text in UTF-8 "
                    f"({error.reason}: {error.object[error.start : error.end]!r}). Convert it, or "
                    "use the tokenizer 'bytes', which takes any file."
                ) from error


def _cut(document: bytes, limit: int | None) -> Iterator[tuple[bytes, bool]]:
    """Yields pieces of a document, and whether each is its first."""
    start = 0
    while limit is not None and len(document) - start > limit:
        end = start + limit
        # Only a cut between a letter and the end of its line is sure to divide no token.
        while end < len(document) and not (
            document[end] == 10 and document[end - 4 : end].decode(errors="ignore")[-1:].isalpha()
        ):
            found = document.find(b"\n", end + 1)
            end = len(document) if found < 0 else found
        yield document[start:end], start == 0
        start = end
    if start < len(document) or not start:
        yield document[start:], start == 0
