"""Shards of tokens that were prepared before, such as those of FineWeb."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainer.data.absent import DataAbsent
from trainer.data.shards import NoShards, TokenStream, find_shards
from trainer.data.token_dataset import TokenDataset
from trainer.data.tokenizer import FILE, load_tokenizer
from trainer.messages import check_positive

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
    raises `shard_reader.DataChanged`.

    The fingerprint covers names and sizes of the shards, and all tokens of a shard of up to 16 MiB;
    of a larger one, 16 samples of 4 KiB.

    Args:
        train: one path or glob such as "fineweb_train_*.bin", or several, of the shards to train
            on, which are read in this order, and by name in a glob.
        validation: those of the validation split; None for no such split.
        test: those of the test split; None for no such split.
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
        length=length,
        batch_size=batch_size,
        eval_batch_size=eval_batch_size,
        eval_tokens=eval_tokens,
        order=order,
        documents=documents,
        name="data.tokens",
    )
    try:
        paths = {"train": find_shards(train, "The shards of train=")}
    except NoShards as error:
        if train_tokens is None or vocab_size is None:
            raise
        count = (eval_tokens or length) + 1
        declared = {split: _declared(count) for split in evaluated}
        like = make(
            _declared(train_tokens), declared, vocab_size=vocab_size, end_of_text=end_of_text
        )
        absent = DataAbsent("data.tokens", str(error), like)
        if eval_tokens is None:
            absent.declared.splits = dict.fromkeys(evaluated)
        raise absent from error
    for split, given in evaluated.items():
        paths[split] = find_shards(given, f"The shards of {split}=")
    owners: dict[Path, str] = {}
    for split, file in ((split, file) for split, files in paths.items() for file in files):
        if (owner := owners.setdefault(file.resolve(), split)) != split:
            raise ValueError(
                f"{file} is a shard of both {owner} and {split}. Give each split its own files."
            )
    streams = {split: TokenStream.of_files(files) for split, files in paths.items()}
    file = paths["train"][0].with_name(FILE) if tokenizer is None else Path(tokenizer).expanduser()
    loaded = None
    if tokenizer is not None or file.is_file():
        loaded = load_tokenizer(file, end_of_text)
        end_of_text = loaded.end_of_text
    if vocab_size is not None:
        check_positive("data.tokens", vocab_size=vocab_size)
    known = vocab_size if loaded is None else loaded.vocab_size
    largest = _largest(streams, known)
    known = largest + 1 if known is None else known
    if largest >= known:
        raise ValueError(
            f"The shards have the token {largest}, but "
            + (f"vocab_size is {known}" if loaded is None else f"{file} has {known} tokens")
            + f", 0 to {known - 1}. Give the tokenizer or the vocab_size they were made with."
        )
    if vocab_size not in (None, known):
        raise ValueError(
            f"vocab_size is {vocab_size}, but {file} has {known} tokens. Leave vocab_size out."
        )
    return make(
        streams.pop("train"),
        streams,
        vocab_size=known,
        end_of_text=end_of_text,
        token_bytes=None if loaded is None else loaded.token_bytes,
        prefix_bytes=0 if loaded is None else loaded.prefix_bytes,
        tokenizer=loaded,
    )


def _declared(count: int) -> TokenStream:
    """Returns a stream of which only the length is known."""
    return TokenStream([count], lambda _: iter(()), lambda: "")


def _largest(streams: dict[str, TokenStream], vocab_size: int | None) -> int:
    """Returns the largest token; of more tokens than `_SCANNED`, that of samples."""
    count = sum(map(len, streams.values()))
    if count <= _SCANNED:
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
