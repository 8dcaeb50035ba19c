"""How many bytes of text the tokens of a tokenizer of the package `tokenizers` stand for."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import tokenizers

_FALLBACK = "byte_fallback"
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
    if tokenizer.decoder is None or not json.loads(tokenizer.to_str())["model"].get(_FALLBACK):
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
