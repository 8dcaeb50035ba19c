"""Sequences of tokens, whose batches are pure functions of seed and step.

`tokens` reads shards that were prepared before, such as those of FineWeb.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.data.absent import DataAbsent
from trainer.data.order import examples_at, process_rows
from trainer.data.shards import NoShards, TokenStream, find_shards
from trainer.data.tokenizer import FILE, ByteTokenizer, SubwordTokenizer, load_tokenizer
from trainer.messages import UserError, check_positive

if TYPE_CHECKING:
    from trainer.protocols import Tokenizer


ORDERS = ("shuffled", "stream")
"""The values of the argument `order` of `TokenDataset`."""


class KnownTokens(NamedTuple):
    """What a data set knows of its tokens, which are 0 to `size` - 1."""

    size: int
    end_of_text: int | None = None  # the token before each document; None if there is none
    # How many bytes of text each token stands for, int32 [size], and by how many those of a
    # document exceed its own, which its first token does not count.
    token_bytes: np.ndarray | None = None
    prefix_bytes: int = 0
    tokenizer: "Tokenizer | None" = None  # None if only the numbers of the tokens are known

    @classmethod
    def of(cls, tokenizer: ByteTokenizer | SubwordTokenizer) -> "KnownTokens":
        """Returns what a tokenizer knows."""
        size, end = tokenizer.vocab_size, tokenizer.end_of_text
        return cls(size, end, tokenizer.token_bytes, tokenizer.prefix_bytes, tokenizer)


class Sizes(NamedTuple):
    """The sizes of batches of sequences, and of an evaluation; see `tokens`."""

    length: int
    batch_size: int
    eval_batch_size: int | None = None
    eval_tokens: int | None = None


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

    The arguments are those of `data.tokens`, with streams in place of shards.

    Example:
        >>> stream = TokenStream.of_arrays([np.arange(10)])
        >>> sizes = Sizes(length=3, batch_size=2)
        >>> dataset = TokenDataset(stream, {"test": stream}, KnownTokens(10), sizes)
        >>> next(dataset.train(batch_index=0, seed=0))["label"].shape
        (2, 3)
        >>> [batch["label"].tolist() for batch in dataset.evaluate()]
        [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 0, 0]]]
    """

    def __init__(
        self,
        train: TokenStream,
        evaluated: Mapping[str, TokenStream],
        known: KnownTokens,
        sizes: Sizes,
        *,
        order: str = "shuffled",
        documents: bool = True,
        name: str = "data.TokenDataset",
    ):
        length, batch_size, eval_batch_size, eval_tokens = sizes
        self.batch_size, self.tokens_per_example = batch_size, length
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.vocab_size, self.tokenizer = known.size, known.tokenizer
        self._train, self._eval, self.known = train, dict(evaluated), known
        self._documents, self._name = documents, name
        self.plan_warnings: list[str] = []
        vocab_size, end_of_text = known.size, known.end_of_text
        check_positive(name, **sizes._asdict(), vocab_size=vocab_size)
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
        self._check_sizes(len(train), length)
        self._places = Places.of(train.sizes, batch_size, length) if order == "stream" else None
        self.num_examples = (len(train) - 1) // length
        if self._places is not None:
            self.num_examples = self._places.count
        if not self.num_examples:
            raise ValueError(
                f"{name} reads batches in the order of the stream within a file, but the largest "
                f"file has {max(train.sizes)} tokens, and a batch takes batch_size * length + 2 = "
                f"{batch_size} * {length} + 2 = {batch_size * length + 2}. Choose a smaller "
                "batch_size or length, or order='shuffled'."
            )
        self._predicted = {
            split: min(len(stream) - 1, eval_tokens or len(stream))
            for split, stream in self._eval.items()
        }
        self.splits = {split: -(-count // length) for split, count in self._predicted.items()}

    def _check_sizes(self, train: int, length: int) -> None:
        """Raises ValueError if a split has too few tokens."""
        name, batch_size = self._name, self.batch_size
        if train <= length:
            raise ValueError(
                f"{name} has {train} training tokens, but a sequence has length + 1 = "
                f"{length + 1}. Give more text, or choose a length of at most {max(train - 1, 1)}."
            )
        if (train - 1) // length < batch_size:
            raise ValueError(
                f"{name} has {(train - 1) // length} training sequences of length={length}, fewer "
                f"than the batch_size of {batch_size}. Choose a smaller batch_size or length."
            )
        for split, stream in self._eval.items():
            if len(stream) < 2:
                raise ValueError(
                    f"{name} has {len(stream)} tokens in its {split} split, but needs at least 2, "
                    "of which one is predicted."
                )

    @property
    def element_spec(self) -> dict[str, Any]:
        """Key -> shape and dtype of a training batch, over all processes."""
        import jax  # the arrays themselves need no jax

        shape = (self.batch_size, self.tokens_per_example)
        return {
            key: jax.ShapeDtypeStruct(shape, np.int32)
            for key in self.fields(np.zeros((1, 2), np.int32))
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
        known = self.known
        digest = hashlib.sha256(f"{self.tokens_per_example} {known.end_of_text}\n".encode())
        digest.update(b"" if self._documents else b"one document\n")
        digest.update(b"" if self._places is None else f"stream {self.batch_size}\n".encode())
        for split, stream in (("train", self._train), *sorted(self._eval.items())):
            predicted = self._predicted.get(split)
            digest.update(f"{split} {len(stream)} {predicted} {stream.fingerprint}\n".encode())
        if known.token_bytes is not None:
            digest.update(known.token_bytes.astype("<i4").tobytes())
            digest.update(f"{known.prefix_bytes}\n".encode() if known.prefix_bytes else b"")
        return digest.hexdigest()

    def train(
        self, batch_index: int = 0, seed: int = 0, rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of the training batches from `batch_index` on, without end."""
        # With order="shuffled" their order depends on `seed`. It is part `rank` of `size` equal
        # parts of each batch; None for that of this process. Raises UserError if a token is not
        # less than `vocab_size`.
        rows = process_rows(self.batch_size, self._name, rank, size)
        # From batch index and seed alone, so that a resumed run reads the same batches.
        for index in itertools.count(batch_index):
            first = index * self.batch_size + rows.start
            yield self.fields(self.windows(self.starts(first, rows.stop - rows.start, seed)))

    def starts(self, first: int, count: int, seed: int) -> np.ndarray:
        """Returns the first token of `count` training examples from a place of their order on."""
        if self._places is None:
            return examples_at(seed, first, count, self.num_examples) * self.tokens_per_example
        return self._places.starts((first + np.arange(count)) % self.num_examples)

    def windows(self, starts: np.ndarray) -> np.ndarray:
        """Returns training examples by their first tokens, int32 [examples, length + 1]."""
        return self._train.windows(starts, self.tokens_per_example + 1)

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
            batch = self.fields(self._eval[split].windows(first, length + 1))
            real = first[:, None] + np.arange(length) < count
            # The windows may have further tokens of the stream.
            for key in batch:
                batch[key] *= real
            yield {**batch, "mask": real.astype(np.float32)}

    def fields(self, windows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the fields of windows, int32 [batch, length + 1]."""
        # As unsigned numbers, negative ones are large.
        if (largest := int(windows.view(np.uint32).max(initial=0))) >= self.vocab_size:
            raise UserError(
                f"{self._name} found the token {largest}, but its vocab_size is "
                f"{self.vocab_size}: the tokens are 0 to {self.vocab_size - 1}. Give the tokenizer "
                "or the vocab_size with which the shards were made."
            )
        tokens, label = windows[:, :-1].copy(), windows[:, 1:].copy()
        fields = {"tokens": tokens, "label": label}
        known = self.known
        if known.end_of_text is not None and self._documents:
            fields["documents"] = np.cumsum(tokens == known.end_of_text, axis=1, dtype=np.int32)
        if known.token_bytes is not None:
            counts = fields["bytes"] = known.token_bytes[label]
            if known.prefix_bytes:
                first = (tokens == known.end_of_text) & (counts > 0)
                counts[first] -= known.prefix_bytes
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


_SCANNED = 2**27  # tokens, up to which all are read to find the largest


def tokens(
    train: str | Sequence[str],
    validation: str | Sequence[str] | None = None,
    test: str | Sequence[str] | None = None,
    length: int = 1024,
    batch_size: int = 32,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
    eval_batch_size: int | None = None,
    eval_tokens: int | None = None,
    train_tokens: int | None = None,
    order: str = "shuffled",
    documents: bool = True,
) -> TokenDataset:
    """Returns shards of tokens as sequences, with the fields of a `TokenDataset`.

    A shard is a file in the layout of llm.c and modded-nanogpt: uint16 with magic 20240520, or
    uint32 with magic 20240801, as `python -m trainer.data.prepare text` writes. Of the shards only
    the sequences of a batch are read. They may cross from one shard to the next, so that each token
    but the first of a split is predicted. A shard that is changed or removed while it is used
    raises `shards.DataChanged`.

    The fingerprint covers names and sizes of the shards, and all tokens of a shard of up to 16 MiB;
    of a larger one, 16 samples of 4 KiB.

    Args:
        train: one path or glob such as "fineweb_train_*.bin", or several, of the shards to train
            on, which are read in this order, and by name in a glob.
        validation: those of the validation split; None for no such split.
        test: those of the test split; None for no such split. A run needs one of the two; of the
            parts of a `mixture`, one part does.
        length: number of positions of an example.
        batch_size: examples per training batch, over all processes.
        tokenizer: the path of the tokenizer.json that made the shards; None for the one beside the
            first shard of `train`, if there is one. Without a tokenizer there is no field `bytes`.
        vocab_size: number of different tokens; None for that of the tokenizer. Without a tokenizer,
            it is the largest token of the shards and 1, if they have at most 134 million tokens.
        end_of_text: the token before each document, 50256 for GPT-2's tokenizer; None for that of
            the tokenizer. Without both, there is no field `documents`.
        eval_batch_size: examples per evaluation batch, over all processes; None for `batch_size`.
        eval_tokens: number of tokens of a split, the first, to predict in an evaluation; None for
            all.
        order: "shuffled" takes the training sequences in a random order that depends on the seed.
            "stream" takes them in the order of the shards, as modded-nanogpt does: a batch is one
            piece of a shard, and what is left of a shard after its last whole batch is not used
            (see `TokenDataset`); runs of all seeds then read the same batches.
        documents: False leaves out the field `documents`, so that sequences attend to tokens of
            other documents although `end_of_text` is known.
        train_tokens: number of training tokens, with which a run is planned where the shards are
            not on this machine; `vocab_size` must then be given, too, and `end_of_text` for a plan
            with the field `documents`. Without `eval_tokens`, the plan does not know the number of
            examples of the other splits. Where the shards are, it is not read. With order="stream"
            it is planned as one shard.

    Raises:
        DataAbsent: there are no shards of `train`, and `train_tokens` and `vocab_size` are given.
        ValueError: there are no such files, a file is not a whole shard or in two splits, the
            tokenizer cannot be read or does not fit, or an argument is out of its range.
    """
    evaluated = {"validation": validation, "test": test}
    evaluated = {split: given for split, given in evaluated.items() if given is not None}
    make = functools.partial(
        TokenDataset,
        sizes=Sizes(length, batch_size, eval_batch_size, eval_tokens),
        order=order,
        documents=documents,
        name="data.tokens",
    )
    try:
        paths = {"train": find_shards(train, "The shards of train=")}
    except NoShards as error:
        if train_tokens is None or vocab_size is None:
            raise
        splits = {split: _declared((eval_tokens or length) + 1) for split in evaluated}
        like = make(_declared(train_tokens), splits, KnownTokens(vocab_size, end_of_text))
        absent = DataAbsent("data.tokens", str(error), like)
        if eval_tokens is None:
            absent.declared.splits = dict.fromkeys(evaluated)
        raise absent from error
    for split, given in evaluated.items():
        paths[split] = find_shards(given, f"The shards of {split}=")
    _check_apart(paths)
    streams = {split: TokenStream.of_files(files) for split, files in paths.items()}
    file = paths["train"][0].with_name(FILE) if tokenizer is None else Path(tokenizer).expanduser()
    has_tokenizer = tokenizer is not None or file.is_file()
    loaded = load_tokenizer(file, end_of_text) if has_tokenizer else None
    check_positive("data.tokens", vocab_size=vocab_size)
    vocab_size = _vocab_size(streams, vocab_size, loaded, file)
    known = KnownTokens(vocab_size, end_of_text) if loaded is None else KnownTokens.of(loaded)
    return make(streams.pop("train"), streams, known)


def _check_apart(paths: Mapping[str, Sequence[Path]]) -> None:
    """Raises ValueError if a file is a shard of two splits."""
    owners: dict[Path, str] = {}
    for split, files in paths.items():
        for file in files:
            if (owner := owners.setdefault(file.resolve(), split)) != split:
                raise ValueError(
                    f"{file} is a shard of both {owner} and {split}. Give each split its own files."
                )


def _vocab_size(
    streams: dict[str, TokenStream], given: int | None, tokenizer: Any, file: Path
) -> int:
    """Returns the number of different tokens; raises ValueError if that of the shards is larger."""
    known = given if tokenizer is None else tokenizer.vocab_size
    largest = _largest(streams, known)
    known = largest + 1 if known is None else known
    if largest >= known:
        raise ValueError(
            f"The shards have the token {largest}, but "
            + (f"vocab_size is {known}" if tokenizer is None else f"{file} has {known} tokens")
            + f", 0 to {known - 1}. Give the tokenizer or the vocab_size they were made with."
        )
    if given not in (None, known):
        raise ValueError(
            f"vocab_size is {given}, but {file} has {known} tokens. Leave vocab_size out."
        )
    return known


def _declared(count: int) -> TokenStream:
    """Returns a stream of which only the length is known."""
    return TokenStream([count], lambda _: iter(()), lambda: "")


def _largest(streams: dict[str, TokenStream], vocab_size: int | None) -> int:
    """Returns the largest token; of more tokens than `_SCANNED`, that of samples."""
    if (count := sum(map(len, streams.values()))) <= _SCANNED:
        blocks = (block for stream in streams.values() for block in stream.blocks())
        return max(int(block.max()) for block in blocks)
    if vocab_size is None:
        raise ValueError(
            f"The shards have {count} tokens, too many to look for the largest at every start. "
            "Give the tokenizer.json that they were made with as `tokenizer`, or `vocab_size`: "
            "50257 for GPT-2's."
        )
    # Every batch is checked, too: this finds a wrong tokenizer before the run has a folder.
    starts = {
        split: np.linspace(0, max(len(stream) - 4096, 0), 256).astype(np.int64)
        for split, stream in streams.items()
    }
    return max(int(streams[x].windows(starts[x], 4096).view(np.uint32).max()) for x in streams)
