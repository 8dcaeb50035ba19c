"""A data set of sequences of tokens, whose batches are pure functions of seed and step."""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data.order import examples_at, process_rows
from trainer.data.shards import TokenStream
from trainer.messages import UserError, check_positive

if TYPE_CHECKING:
    from trainer.protocols import Tokenizer

ORDERS = ("shuffled", "stream")
"""The values of the argument `order` of `TokenDataset`."""


class TokenDataset:
    """A data set of sequences that are cut from streams of tokens.

    An example is a window of `length` + 1 tokens of a stream. Windows overlap by one token, so that
    an epoch predicts every token but the first once; in training, what is left at the end of the
    stream, less than `length` tokens, is not used. The order of the windows in an epoch is a
    function of seed and epoch (see `order.shuffled`); a batch may span two epochs.

    With order="stream" the batches of training are those of modded-nanogpt: the sequences of a
    batch follow each other in the stream, and no batch crosses the end of one of its arrays. Of an
    array of n tokens, (n - 2) // (batch_size * length) batches are read; the rest is not used.
    After the last array, the first one is read again.

    A batch has the fields

    - `tokens`, int32 [batch, length];
    - `label`, the next tokens, int32 [batch, length];
    - `documents`, int32 [batch, length], how many times `end_of_text` was in the window so far,
      which is the number of the document in it; absent if `end_of_text` is None, or without
      the argument `documents`;
    - `bytes`, int32 [batch, length], how many bytes of text the label stands for; absent if
      `token_bytes` is None;
    - `mask`, float32 [batch, length], in evaluation only: 0 for padding.

    The arguments are those of `data.tokens`, with streams in place of shards, and what is known of
    their tokenizer.

    Example:
        >>> stream = TokenStream.of_arrays([np.arange(10)])
        >>> sizes = {"length": 3, "batch_size": 2, "vocab_size": 10}
        >>> dataset = TokenDataset(stream, {"test": stream}, **sizes)
        >>> next(dataset.train(batch_index=0, seed=0))["label"].shape
        (2, 3)
        >>> [batch["label"].tolist() for batch in dataset.evaluate()]
        [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 0, 0]]]
    """

    def __init__(
        self,
        train: TokenStream,
        evaluated: Mapping[str, TokenStream],
        *,
        length: int,
        batch_size: int,
        vocab_size: int,
        end_of_text: int | None = None,
        # How many bytes of text each token stands for, int32 [vocab_size], and by how many those of
        # a document exceed its own, which its first token does not count.
        token_bytes: np.ndarray | None = None,
        prefix_bytes: int = 0,
        tokenizer: "Tokenizer | None" = None,
        eval_batch_size: int | None = None,
        eval_tokens: int | None = None,
        order: str = "shuffled",
        documents: bool = True,
        name: str = "data.TokenDataset",
    ):
        self.batch_size, self.tokens_per_example = batch_size, length
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        self._train, self._eval = train, dict(evaluated)
        self._end_of_text, self._token_bytes = end_of_text, token_bytes
        self._prefix_bytes, self._documents = prefix_bytes, documents
        self._name = name
        self.plan_warnings: list[str] = []
        sizes = {"length": length, "batch_size": batch_size, "vocab_size": vocab_size}
        sizes["eval_batch_size"] = self.eval_batch_size
        sizes["eval_tokens"] = 1 if eval_tokens is None else eval_tokens
        check_positive(name, **sizes)
        if end_of_text is not None and not 0 <= end_of_text < vocab_size:
            raise ValueError(
                f"{name} has end_of_text={end_of_text}, but its vocab_size is {vocab_size}: the "
                f"tokens are 0 to {vocab_size - 1}. Give the number of the token that begins each "
                "document and the vocab_size of the tokenizer that made it, or leave end_of_text "
                "out."
            )
        if order not in ORDERS:
            raise ValueError(
                f"{name} got order={order!r}, which does not exist: give 'shuffled' or 'stream'."
            )
        _check_sizes(len(train), self._eval, length, batch_size, name)
        self._places = Places.of(train.sizes, batch_size, length) if order == "stream" else None
        self.num_examples = (len(train) - 1) // length
        if self._places is not None:
            self.num_examples = self._places.count
            _check_places(self._places, max(train.sizes), length, batch_size, name)
        self._predicted = {
            split: min(len(stream) - 1, eval_tokens or len(stream))
            for split, stream in self._eval.items()
        }
        self.splits = {split: -(-count // length) for split, count in self._predicted.items()}

    @property
    def element_spec(self) -> dict[str, Any]:
        """Key -> shape and dtype of a training batch, over all processes."""
        import jax  # the arrays themselves need no jax

        shape = (self.batch_size, self.tokens_per_example)
        return {
            key: jax.ShapeDtypeStruct(shape, np.int32)
            for key in self._fields(np.zeros((1, 2), np.int32))
        }

    @property
    def eval_spec(self) -> dict[str, Any]:
        """Key -> shape and dtype of an evaluation batch, over all processes."""
        import jax

        shape = (self.eval_batch_size, self.tokens_per_example)
        spec = {key: jax.ShapeDtypeStruct(shape, x.dtype) for key, x in self.element_spec.items()}
        return {**spec, "mask": jax.ShapeDtypeStruct(shape, np.float32)}

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the fingerprints of the streams, and of what decides the fields."""
        digest = hashlib.sha256(f"{self.tokens_per_example} {self._end_of_text}\n".encode())
        digest.update(b"" if self._documents else b"one document\n")
        digest.update(b"" if self._places is None else f"stream {self.batch_size}\n".encode())
        for split, stream in (("train", self._train), *sorted(self._eval.items())):
            predicted = self._predicted.get(split)
            digest.update(f"{split} {len(stream)} {predicted} {stream.fingerprint}\n".encode())
        if self._token_bytes is not None:
            digest.update(self._token_bytes.astype("<i4").tobytes())
            digest.update(f"{self._prefix_bytes}\n".encode() if self._prefix_bytes else b"")
        return digest.hexdigest()

    def train(
        self, batch_index: int = 0, seed: int = 0, rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of the training batches from `batch_index` on, without end."""
        # With order="shuffled" their order depends on `seed`. It is part `rank` of `size` equal
        # parts of each batch; None for that of this process. Raises UserError if a token is not
        # less than `vocab_size`.
        length = self.tokens_per_example
        rows = process_rows(self.batch_size, self._name, rank, size)
        # From batch index and seed alone, so that a resumed run reads the same batches.
        for index in itertools.count(batch_index):
            first = index * self.batch_size + rows.start
            count = rows.stop - rows.start
            if self._places is None:
                starts = examples_at(seed, first, count, self.num_examples) * length
            else:
                starts = self._places.starts((first + np.arange(count)) % self.num_examples)
            yield self._fields(self._train.windows(starts, length + 1))

    def evaluate(
        self, split: str = "test", rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of each batch of a split in order, once."""
        # The last batch is padded to full size, and the last example to `length`: the field `mask`,
        # float32 [batch, length], is 1 for a token of the split and 0 for padding. For `rank`,
        # `size` and the error, see `train`.
        length, count = self.tokens_per_example, self._predicted[split]
        rows = process_rows(self.eval_batch_size, self._name, rank, size)
        for start in range(0, self.splits[split], self.eval_batch_size):
            first = np.arange(start, start + self.eval_batch_size)[rows] * length
            batch = self._fields(self._eval[split].windows(first, length + 1))
            real = first[:, None] + np.arange(length) < count
            # The windows may have further tokens of the stream.
            for key in batch:
                batch[key] *= real
            yield {**batch, "mask": real.astype(np.float32)}

    def _fields(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the fields of windows, int32 [batch, length + 1]."""
        # As unsigned numbers, negative ones are large.
        largest = int(windows.view(np.uint32).max(initial=0))
        if largest >= self.vocab_size:
            raise UserError(
                f"{self._name} found the token {largest}, but its vocab_size is "
                f"{self.vocab_size}: the tokens are 0 to {self.vocab_size - 1}. Give the tokenizer "
                "or the vocab_size with which the shards were made."
            )
        tokens, label = windows[:, :-1].copy(), windows[:, 1:].copy()
        fields = {"tokens": tokens, "label": label}
        if self._end_of_text is not None and self._documents:
            ends = tokens == self._end_of_text
            fields["documents"] = np.cumsum(ends, axis=1, dtype=np.int32)
        if self._token_bytes is not None:
            counts = fields["bytes"] = self._token_bytes[label]
            if self._prefix_bytes:
                first = (tokens == self._end_of_text) & (counts > 0)
                counts[first] -= self._prefix_bytes
        return fields


class Places(NamedTuple):
    """Where the sequences of a stream are, read in order, in batches within its arrays."""

    firsts: np.ndarray  # the first token of each array from which there are sequences, int64
    ends: np.ndarray  # how many sequences there are up to the end of each of these arrays, int64
    length: int  # tokens from one sequence to the next

    @classmethod
    def of(cls, sizes: Sequence[int], batch_size: int, length: int) -> "Places":
        """Finds the sequences of arrays with these numbers of tokens.

        >>> places = Places.of([10, 4, 14], batch_size=2, length=2)  # batches of 4 tokens
        >>> places.starts(np.arange(places.count)).tolist()
        [0, 2, 4, 6, 14, 16, 18, 20, 22, 24]
        """
        counts = (np.asarray(sizes, np.int64) - 2) // (batch_size * length) * batch_size
        firsts = np.cumsum([0, *sizes[:-1]])
        used = counts > 0
        return cls(firsts[used], np.cumsum(counts[used]), length)

    @property
    def count(self) -> int:
        """The number of sequences."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def starts(self, examples: np.ndarray) -> np.ndarray:
        """Returns the first token in the stream of each of these sequences, int64."""
        arrays = np.searchsorted(self.ends, examples, side="right")
        before = np.concatenate([[0], self.ends])[arrays]
        return self.firsts[arrays] + (examples - before) * self.length


def _check_places(places: Places, largest: int, length: int, batch_size: int, name: str) -> None:
    if not places.count:
        raise ValueError(
            f"{name} reads batches in the order of the stream within a file, but the largest file "
            f"has {largest} tokens, and a batch takes batch_size * length + 2 = {batch_size} * "
            f"{length} + 2 = {batch_size * length + 2}. Choose a smaller batch_size or length, or "
            "order='shuffled'."
        )


def _check_sizes(
    train: int, evaluated: Mapping[str, TokenStream], length: int, batch_size: int, name: str
) -> None:
    if not evaluated:
        raise ValueError(
            f"{name} has neither a validation nor a test split, and every evaluation needs one. "
            "Give the shards of one as validation= or test=, such as 'val_*.bin'."
        )
    if train <= length:
        raise ValueError(
            f"{name} has {train} training tokens, but a sequence has length + 1 = {length + 1}. "
            f"Give more text, or choose a length of at most {max(train - 1, 1)}."
        )
    if (train - 1) // length < batch_size:
        raise ValueError(
            f"{name} has {(train - 1) // length} training sequences of length={length}, fewer than "
            f"the batch_size of {batch_size}. Choose a smaller batch_size or length."
        )
    for split, stream in evaluated.items():
        if len(stream) < 2:
            raise ValueError(
                f"{name} has {len(stream)} tokens in its {split} split, but needs at least 2, of "
                "which one is predicted."
            )
