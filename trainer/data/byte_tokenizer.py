"""The tokenizer whose tokens are the bytes of a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

END_OF_TEXT = "<|endoftext|>"


class ByteTokenizer:
    """The bytes of a text in UTF-8 are its tokens, 0 to 255, and 256 is `end_of_text`.

    Attributes:
        token_bytes: how many bytes of text each token stands for, int32 [vocab_size].
        prefix_bytes: 0; see `trainer.data.tokenizer.SubwordTokenizer`.

    Example:
        >>> from trainer.data.byte_tokenizer import ByteTokenizer
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né')
    """

    vocab_size = 257
    end_of_text = 256
    token_bytes = np.array([1] * 256 + [0], np.int32)
    prefix_bytes = 0

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text.

        Args:
            text: any text.

        Raises:
            ValueError: the text has half a surrogate pair, which has no bytes in UTF-8.
        """
        return list(to_utf8(text))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes; what is not valid UTF-8 becomes U+FFFD.

        Args:
            tokens: numbers; those above 255 have no text.
        """
        return bytes(token for token in tokens if 0 <= token < 256).decode(errors="replace")

    def stream(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of documents, each after `end_of_text`, in arrays.

        Args:
            documents: any bytes.
        """
        for document in documents:
            yield np.array([self.end_of_text], np.uint16)
            yield np.frombuffer(document, np.uint8).astype(np.uint16)

    def save(self, path: Path) -> None:
        """Writes a tokenizer.json, from which the package `tokenizers` makes the same tokens.

        Args:
            path: the file.
        """
        path.write_text(json.dumps(byte_json(), ensure_ascii=False, indent=1), "utf-8")


def to_utf8(text: str) -> bytes:
    """Returns the bytes of a text.

    Args:
        text: any text.

    Raises:
        ValueError: the text has half a surrogate pair, which has no bytes.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"The text {text[:100]!r} has no bytes in UTF-8 ({error}).") from error


def _alphabet() -> list[str]:
    """Returns GPT-2's printable character for each byte."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def byte_json() -> dict[str, Any]:
    """Returns the tokenizer.json of a `ByteTokenizer`: a BPE without merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocabulary = {letter: byte for byte, letter in enumerate(_alphabet())}
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
