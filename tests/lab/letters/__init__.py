"""A text of few letters and its tokenizer, for tests of what continues a text."""

import itertools

import jax
import numpy as np
import optax

from trainer.data.order import process_rows

__all__ = ["Text", "loss", "text", "uneven"]

LENGTH = 16


class Letters:
    """a to h are 1 to 8, and 0 is the end of a text."""

    vocab_size, end_of_text = 9, 0

    def encode(self, text):
        if bad := [letter for letter in text if letter not in "abcdefgh"]:
            raise ValueError(f"The letter {bad[0]!r} has no token; there are a to h.")
        return ["abcdefgh".index(letter) + 1 for letter in text]

    def decode(self, tokens):
        return "".join(" abcdefgh"[token] for token in tokens)


class Text:
    """The documents abcdefgh, each after the end of the one before it."""

    batch_size, num_examples, tokens_per_example, vocab_size = 8, 64, LENGTH, 9
    fingerprint = "letters"
    splits = {"validation": 8}
    element_spec = {
        name: jax.ShapeDtypeStruct((8, LENGTH), np.int32)
        for name in ("tokens", "label", "documents")
    }

    def __init__(self, tokenizer=True):
        self.tokenizer = Letters() if tokenizer else None

    def train(self, batch_index, seed, rank=None, size=None):
        for index in itertools.count(batch_index):
            starts = np.random.default_rng((seed, index)).integers(0, 9, 8)
            yield self.batch(starts[process_rows(8, "letters.text", rank, size)])

    def evaluate(self, split, rank=None, size=None):
        starts = np.arange(8)[process_rows(8, "letters.text", rank, size)]
        yield {**self.batch(starts), "mask": np.ones((len(starts), LENGTH), np.float32)}

    def batch(self, starts):
        windows = (starts[:, None] + np.arange(LENGTH + 1)).astype(np.int32) % 9
        tokens = windows[:, :-1]
        documents = np.cumsum(tokens == 0, axis=1, dtype=np.int32)
        return {"tokens": tokens, "label": windows[:, 1:], "documents": documents}


class Uneven(Text):
    """13 examples to evaluate, the last five in a batch as short as its parts allow."""

    fingerprint = None
    splits = {"validation": 13}

    def evaluate(self, split, rank=None, size=None):
        for first, count in ((0, 8), (8, 5)):
            rows = process_rows(count + -count % (size or 1), "letters.uneven", rank, size)
            starts = first + np.arange(rows.start, rows.stop)
            real = (starts < first + count).astype(np.float32)
            yield {**self.batch(starts), "mask": np.repeat(real[:, None], LENGTH, axis=1)}


def text(tokenizer: bool = True) -> Text:
    return Text(tokenizer)


def uneven() -> Uneven:
    return Uneven()


def loss(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs.whole(), batch["label"])
