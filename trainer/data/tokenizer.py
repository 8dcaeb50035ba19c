"""Tokenizers of the package `tokenizers`, which is imported when one is used."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.byte_tokenizer import END_OF_TEXT, ByteTokenizer, byte_json, to_utf8

if TYPE_CHECKING:
    import tokenizers

FILE = "tokenizer.json"
# What other tokenizers put between documents, the first that there is.
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|begin_of_text|>")
_PIECE = 2**20  # bytes that are encoded at a time
_TOGETHER = 32  # pieces that the threads of the package share


class NotUtf8(ValueError):
    """A document that is not a text in UTF-8."""


class SubwordTokenizer:
    """A tokenizer of the package `tokenizers`.

    Args:
        tokenizer: of the package.
        end_of_text: the token before each document; None for the first that there is of
            "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>" and "<|begin_of_text|>".
        name: of the tokenizer in messages.

    Attributes:
        token_bytes: how many bytes of text each token stands for, int32 [vocab_size]; None if the
            tokenizer is not byte-level.

    Raises:
        ValueError: there is no such token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_of_text: int | None, name: str):
        self._tokenizer, self._name = tokenizer, name
        # Else the text "<|endoftext|>" would be the token.
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
        self.token_bytes = _bytes_of_tokens(tokenizer, self.vocab_size)
        if self.token_bytes is not None:
            self.token_bytes[self.end_of_text] = 0

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, none of which is special.

        Args:
            text: any text.

        Raises:
            ValueError: the text has half a surrogate pair, or a part that has no token.
        """
        to_utf8(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        unknown = self._unknown()
        if unknown is not None and unknown in ids:
            raise ValueError(f"{self._name} has no token for a part of the text {text[:100]!r}.")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; what is not valid UTF-8 becomes U+FFFD.

        Args:
            tokens: numbers; special tokens have no text.
        """
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def stream(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of documents, each after `end_of_text`, in arrays.

        Long documents of a byte-level tokenizer are encoded in pieces of about 1 MiB, which end
        between a letter and the end of its line, where no token goes across.

        Args:
            documents: texts in UTF-8.

        Raises:
            NotUtf8: a document is not UTF-8.
            ValueError: a part of a document has no token.
        """
        limit = None if self.token_bytes is None else _PIECE
        pieces = _texts(documents, limit)
        dtype, unknown = token_dtype(self.vocab_size), self._unknown()
        while batch := list(itertools.islice(pieces, _TOGETHER)):
            texts: Any = [text for text, _ in batch]
            encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
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

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json.

        Args:
            path: the file.
        """
        self._tokenizer.save(str(path))

    def _unknown(self) -> int | None:
        token = getattr(self._tokenizer.model, "unk_token", None)
        return None if token is None else self._tokenizer.token_to_id(token)


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> SubwordTokenizer:
    """Trains a byte-level BPE, with the words of GPT-2; equal texts give equal tokenizers.

    Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare Words with Subword Units";
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    Args:
        documents: texts in UTF-8.
        vocab_size: the most tokens, at least 257: all bytes, and `end_of_text`. A short text has
            fewer.

    Raises:
        NotUtf8: a document is not UTF-8.
        ValueError: `vocab_size` is too small.
    """
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
    tokenizer.train_from_iterator((text for text, _ in _texts(documents, _PIECE)), trainer)
    return SubwordTokenizer(tokenizer, None, "the trained BPE")


def load_tokenizer(path: Path, end_of_text: int | None = None) -> ByteTokenizer | SubwordTokenizer:
    """Reads a tokenizer.json.

    Args:
        path: the file.
        end_of_text: the token before each document; None for its usual names.

    Raises:
        ValueError: the file cannot be read, or has no token that begins a document.
    """
    try:
        content = _content(path)
        if content == byte_json() and end_of_text in (None, 256):
            return ByteTokenizer()
        tokenizer = _package().Tokenizer.from_file(str(path))
    # The package raises Exception itself.
    except Exception as error:
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
    """Returns the dtype of tokens in files, uint16 or uint32.

    Args:
        vocab_size: number of tokens.
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _package() -> Any:
    """Imports the package; its warning about forks is off, as children do not use it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    return tokenizers


def _texts(documents: Iterable[bytes], limit: int | None) -> Iterator[tuple[str, bool]]:
    """Yields pieces of documents as text, and whether each is the first of its document."""
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
        # An end that is not between a letter and the end of a line could divide a token.
        while end < len(document) and not (
            document[end] == 10 and document[end - 4 : end].decode(errors="ignore")[-1:].isalpha()
        ):
            found = document.find(b"\n", end + 1)
            end = len(document) if found < 0 else found
        yield document[start:end], start == 0
        start = end
    if start < len(document) or not start:
        yield document[start:], start == 0


def _bytes_of_tokens(tokenizer: Any, vocab_size: int) -> np.ndarray | None:
    """Returns how many bytes each token stands for; None if the tokenizer is not byte-level."""
    if not isinstance(tokenizer.decoder, _package().decoders.ByteLevel):
        return None
    counts = np.zeros(vocab_size, np.int32)
    for token, number in tokenizer.get_vocab(with_added_tokens=False).items():
        counts[number] = len(token)  # a character for each byte
    for number, added in tokenizer.get_added_tokens_decoder().items():
        counts[number] = 0 if added.special else len(added.content.encode())
    return counts
