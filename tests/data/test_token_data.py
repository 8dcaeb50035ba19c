"""Sequences of tokens: their order, their fields, and the shards in llm.c's layout."""

import itertools
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import data
from trainer.data import shards
from trainer.data.order import examples_at, random_words, shuffled
from trainer.data.shards import TokenStream
from trainer.data.tokens import KnownTokens, Sizes, TokenDataset
from trainer.messages import UserError

# The order.


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 4097, 65536])
def test_every_epoch_has_every_example_once(size: int):
    stream = examples_at(7, 0, 3 * size, size).reshape(3, size)
    assert (np.sort(stream, axis=1) == np.arange(size)).all()
    if size > 16:
        assert not np.array_equal(stream[0], stream[1])
        assert not np.array_equal(stream[0], examples_at(8, 0, size, size))


def test_a_place_needs_no_others():
    whole = examples_at(3, 0, 5000, 700)
    for start, count in [(0, 1), (699, 2), (1234, 50), (4000, 1000)]:
        assert examples_at(3, start, count, 700).tolist() == whole[start : start + count].tolist()


def test_the_orders_of_few_examples_are_about_equally_frequent():
    orders = [tuple(shuffled(seed, 0, np.arange(4), 4).tolist()) for seed in range(2400)]
    counts = [orders.count(order) for order in itertools.permutations(range(4))]
    assert sum((count - 100) ** 2 / 100 for count in counts) < 60  # chi squared, 23 degrees


def feistel(index: int, size: int, keys: list[int]) -> int:
    """The order by plain integers, from Black and Rogaway 2002 and the end of SplitMix64."""
    word = 2**64
    rows = next(n for n in itertools.count(math.isqrt(size)) if n * n >= size)
    columns = math.ceil(size / rows)
    left, right = divmod(index, columns)
    for number, key in enumerate(keys):
        z = right ^ key
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % word
        z = (z ^ z >> 27) * 0x94D049BB133111EB % word
        left, right = right, (left + (z ^ z >> 31)) % (columns if number % 2 else rows)
    found = left * columns + right
    return found if found < size else feistel(found, size, keys)


@pytest.mark.parametrize("size", [1, 2, 10, 10**7, 10**10, 2**40])
def test_the_order_is_that_of_plain_integers(size: int):
    keys = random_words(5, 3, 0, 8).tolist()
    positions = sorted({*range(min(size, 50)), size // 2, size - 1})
    found = shuffled(5, 3, np.array(positions), size)
    assert found.tolist() == [feistel(position, size, keys) for position in positions]


# Shards, written by hand as the C program reads them.


def write(path: Path, tokens: Any, magic: int = 20240520, version: int = 1, kind: str = "H") -> str:
    header = struct.pack("<3i", magic, version, len(tokens)) + bytes(4 * 253)
    path.write_bytes(header + struct.pack(f"<{len(tokens)}{kind}", *tokens))
    return str(path)


def dataset(folder: Path, tokens: Any = range(100), **options: Any) -> TokenDataset:
    train = write(folder / "train.bin", tokens)
    options = {"length": 4, "batch_size": 3, "vocab_size": 1000, **options}
    return data.tokens(train, test=write(folder / "test.bin", tokens), **options)


@pytest.mark.parametrize("layout", [(20240520, 1, "H"), (20240801, 7, "I")])
def test_shards_of_llm_c_are_read_across_their_ends(tmp_path: Path, layout: tuple):
    for index, tokens in enumerate([range(7), range(7, 8), range(8, 30)]):
        write(tmp_path / f"train_{index}.bin", tokens, *layout)
    read = data.tokens(
        str(tmp_path / "train_*.bin"),
        test=write(tmp_path / "test.bin", range(12), *layout),
        length=5,
        batch_size=5,
    )
    batch = next(read.train())
    order = np.argsort(batch["tokens"][:, 0])
    assert batch["tokens"][order].ravel().tolist() == list(range(25))
    assert batch["label"][order].ravel().tolist() == list(range(1, 26))
    assert (read.vocab_size, read.num_examples, read.splits) == (30, 5, {"test": 3})
    assert set(batch) == {"tokens", "label"}  # nothing is known of documents or bytes


def test_a_shard_may_have_the_characters_of_a_glob_in_its_name(tmp_path: Path):
    train = write(tmp_path / "train[1].bin", range(30))
    write(tmp_path / "train1.bin", range(20))
    test = write(tmp_path / "test.bin", range(12))
    read = data.tokens(train, test=test, length=5, batch_size=5)
    assert read.num_examples == 5
    read = data.tokens(str(tmp_path / "train[0-9].bin"), test=test, length=5, batch_size=3)
    assert read.num_examples == 3


def test_written_shards_have_the_bytes_of_llm_cs_layout(tmp_path: Path):
    arrays = [np.arange(5), np.arange(5, 12), np.zeros(0, int)]
    for dtype, magic, version, kind in [("<u2", 20240520, 1, "H"), ("<u4", 20240801, 7, "I")]:
        paths = shards.write_shards(tmp_path, "train", arrays, np.dtype(dtype), 6)
        assert [path.name for path in paths] == ["train_000000.bin", "train_000001.bin"]
        for path, tokens in zip(paths, [range(6), range(6, 12)], strict=True):
            written = path.read_bytes()
            write(path, tokens, magic, version, kind)
            assert path.read_bytes() == written


# Batches.


@pytest.mark.parametrize(("count", "length"), [(101, 10), (110, 10), (111, 10), (50, 7)])
def test_an_epoch_predicts_every_token_once(tmp_path: Path, count: int, length: int):
    read = dataset(tmp_path, range(count), length=length, batch_size=1)
    windows = (count - 1) // length
    assert read.num_examples == windows
    labels = [batch["label"].ravel() for batch in itertools.islice(read.train(0, 1), 2 * windows)]
    for epoch in (labels[:windows], labels[windows:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(1, 1 + windows * length))
    seen = [batch["label"][batch["mask"] == 1] for batch in read.evaluate()]
    assert np.concatenate(seen).tolist() == list(range(1, count))  # in order, the end as well


@pytest.mark.parametrize("step", [0, 1, 7, 8, 9, 1000])
def test_training_may_begin_at_any_step(tmp_path: Path, step: int):
    read = dataset(tmp_path, end_of_text=5)
    stream = read.train(0, seed=9)
    for _ in range(step):
        next(stream)
    fresh = read.train(step, seed=9)
    for late, new in zip(itertools.islice(stream, 4), fresh, strict=False):
        for key in ("tokens", "label", "documents"):
            np.testing.assert_array_equal(late[key], new[key])


def test_batches_in_the_order_of_the_stream_end_with_their_shard(tmp_path: Path):
    # modded-nanogpt takes the next shard where position + batch + 1 >= tokens of the shard.
    for index, count in enumerate([30, 5, 49, 26]):
        write(tmp_path / f"train_{index}.bin", range(100 * index, 100 * index + count))
    test = write(tmp_path / "test.bin", range(12))
    options = {"length": 4, "batch_size": 3, "vocab_size": 1000, "order": "stream"}
    read = data.tokens(str(tmp_path / "train_*.bin"), test=test, **options)
    assert read.num_examples == 3 * (2 + 0 + 3 + 2)
    firsts = [0, 12, 200, 212, 224, 300, 312]
    for index, batch in enumerate(itertools.islice(read.train(seed=5), 21)):
        first = firsts[index % 7]  # after the last shard follows the first one
        assert batch["tokens"].ravel().tolist() == list(range(first, first + 12))
        assert batch["label"].ravel().tolist() == list(range(first + 1, first + 13))
    later = next(read.train(9, seed=6))  # another seed has the same order
    assert later["tokens"][0, 0] == firsts[2]
    whole = [*itertools.islice(read.train(), 7)]
    assert whole[0]["tokens"].shape == (3, 4) and {*whole[0]} == {"tokens", "label"}


@pytest.mark.parametrize(("count", "batches"), [(25, 1), (26, 2), (27, 2)])
def test_a_shard_has_one_token_more_than_the_labels_of_its_batches(
    tmp_path: Path, count: int, batches: int
):
    # As in the program: a batch at position 12 is read only if 12 + 12 + 1 < count.
    read = dataset(tmp_path, range(count), order="stream")
    assert read.num_examples == 3 * batches


def test_documents_may_be_left_out():
    stream = TokenStream.of_arrays([np.array([9, 1, 2, 9, 3, 9, 9, 4, 5, 6])])
    known = KnownTokens(10, end_of_text=9, token_bytes=np.full(10, 7, np.int32), prefix_bytes=2)
    both = [
        TokenDataset(stream, {"test": stream}, known, Sizes(3, 3), documents=documents)
        for documents in (True, False)
    ]
    (whole,), (without,) = ([*read.evaluate()] for read in both)
    assert set(whole) - set(without) == {"documents"}
    for key in without:  # the bytes of a document's first token, too
        np.testing.assert_array_equal(whole[key], without[key])
    assert both[0].fingerprint != both[1].fingerprint


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("order", ["shuffled", "stream"])
def test_a_batch_is_divided_into_parts(tmp_path: Path, monkeypatch: Any, order: str, asked: bool):
    """Into those that are asked for, or else one for each process."""
    read = dataset(tmp_path, batch_size=6, end_of_text=5, order=order)
    whole = list(itertools.islice(read.train(3, 1), 5)), list(read.evaluate())
    parts = []
    monkeypatch.setattr("jax.process_count", lambda: 5 if asked else 2)
    for rank in range(2):
        monkeypatch.setattr("jax.process_index", lambda rank=rank: 4 if asked else rank)
        part = {"rank": rank, "size": 2} if asked else {}
        trained = list(itertools.islice(read.train(3, 1, **part), 5))
        parts.append((trained, list(read.evaluate(**part))))
    for kind in (0, 1):
        for number, batch in enumerate(whole[kind]):
            for key in batch:
                shares = [part[kind][number][key] for part in parts]
                assert shares[0].shape == (3, 4)
                np.testing.assert_array_equal(np.concatenate(shares), batch[key])
    with pytest.raises(ValueError, match="among 2 .*, but the batch size is 3"):
        next(dataset(tmp_path).train(**part))


def test_documents_count_the_ends_of_texts_in_a_window():
    stream = TokenStream.of_arrays([np.array([9, 1, 2, 9, 3, 9, 9, 4, 5, 6])])
    counted = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19, 0], np.int32)
    known = KnownTokens(10, end_of_text=9, token_bytes=counted)
    read = TokenDataset(stream, {"validation": stream}, known, Sizes(3, 3))
    (batch,) = read.evaluate("validation")
    assert batch["tokens"].tolist() == [[9, 1, 2], [9, 3, 9], [9, 4, 5]]
    assert batch["documents"].tolist() == [[1, 1, 1], [1, 1, 2], [1, 1, 1]]
    assert batch["bytes"].tolist() == [[2, 3, 0], [5, 0, 0], [7, 11, 13]]
    spec = {key: (value.shape, value.dtype) for key, value in read.element_spec.items()}
    training = next(read.train())
    assert spec == {key: (value.shape, value.dtype) for key, value in training.items()}
    assert "mask" not in spec and (read.tokens_per_example, read.vocab_size) == (3, 10)


@pytest.mark.parametrize(
    ("eval_tokens", "masks"),
    [(None, [15, 15, 15, 15, 15, 15, 9]), (20, [15, 5]), (999, [15] * 6 + [9])],
)
def test_evaluation_takes_the_tokens_that_were_asked_for(
    tmp_path: Path, eval_tokens: int | None, masks: list[int]
):
    read = dataset(tmp_path, length=5, eval_tokens=eval_tokens, end_of_text=5)
    batches = list(read.evaluate())
    assert [batch["mask"].sum() for batch in batches] == masks
    assert {batch["mask"].shape for batch in batches} == {(3, 5)}
    assert batches[0]["mask"].dtype == np.float32
    for batch in batches:
        assert not any(batch[key][batch["mask"] == 0].any() for key in batch)
    assert read.splits == {"test": -(-sum(masks) // 5)}


def test_the_fingerprint_covers_what_the_model_sees(tmp_path: Path, monkeypatch: Any):
    def changed(tokens: Any = range(100), **options: Any) -> str:
        return dataset(tmp_path, tokens, **options).fingerprint

    assert changed() == changed(batch_size=2, eval_batch_size=7)
    in_order = changed(order="stream")
    assert in_order not in (changed(), changed(order="stream", batch_size=2))
    others = [changed(range(99)), changed(length=5), changed(end_of_text=3), changed(eval_tokens=9)]
    assert len({changed(), *others, changed([*range(50), 7, *range(51, 100)])}) == 6
    monkeypatch.setattr(shards, "_HASHED_WHOLE", 0)
    monkeypatch.setattr(shards, "_SAMPLE", 100)
    sampled = changed()
    assert sampled != changed([*range(99), 7]) and sampled == changed()


# Mistakes.


def broken(path: Path, how: str) -> str:
    write(path, range(50))
    content = path.read_bytes()
    changed = {
        "empty": b"",
        "short": content[:500],
        "odd": content[:9],
        "cut": content[:-3],
        "longer": content + b"x",
        "foreign": b"\x89PNG\r\n\x1a\n" + content[8:],
        "version": content[:4] + struct.pack("<i", 2) + content[8:],
        "no tokens": content[:8] + bytes(4 * 254),
        "negative": content[:8] + struct.pack("<i", -5) + content[12:],
    }
    path.write_bytes(changed[how])
    return str(path)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("empty", ["has 0 bytes", "20240520 with version 1"]),
        ("short", ["was cut short", "it has 500 bytes", "has 1024. Copy or prepare it again"]),
        ("odd", ["was cut short", "it has 9 bytes"]),
        ("cut", ["was cut short", "50 tokens of 2 bytes", "1124 bytes", "it has 1121"]),
        ("longer", ["is not whole", "it has 1125"]),
        ("foreign", ["begins with 1196314761 and", "20240801 with version 7"]),
        ("version", ["begins with 20240520 and 2"]),
        ("no tokens", ["0 tokens"]),
        ("negative", ["-5 tokens"]),
    ],
)
def test_a_file_that_is_not_a_whole_shard_is_named(tmp_path: Path, how: str, words: list[str]):
    good = write(tmp_path / "good.bin", range(50))
    with pytest.raises(ValueError) as caught:
        data.tokens(good, test=broken(tmp_path / "bad.bin", how), length=4)
    for word in ["bad.bin", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train": "none_*.bin"}, ["shards of train=", "'none_*.bin'", "matches no file"]),
        ({"train": []}, ["shards of train=", "empty list"]),
        ({"train": "."}, ["include the folder '.'.", "such as 'test.bin' or 'train.bin'."]),
        ({"train": "made"}, ["'made'. Give", "such as 'made/train_*.bin' or 'made/validation_"]),
        ({"test": "bare"}, ["shards of test= include the folder 'bare'. It has no files"]),
        ({"train": "pipe"}, ["'pipe', which is not a regular file"]),
        ({"validation": "test.bin"}, ["a shard of both validation and test"]),
        ({"length": 50}, ["50 training tokens", "length + 1 = 51", "at most 49"]),
        ({"length": 0}, ["length to be at least 1"]),
        ({"batch_size": 13}, ["12 training sequences", "batch_size of 13"]),
        ({"eval_tokens": 0}, ["eval_tokens to be at least 1"]),
        ({"vocab_size": 0}, ["vocab_size to be at least 1, but got 0"]),
        ({"vocab_size": 49}, ["the token 49", "vocab_size is 49", "0 to 48"]),
        ({"end_of_text": 50}, ["end_of_text=50", "vocab_size is 50", "0 to 49"]),
        ({"vocab_size": 512, "end_of_text": 900}, ["end_of_text=900", "vocab_size is 512"]),
        ({"end_of_text": -1}, ["end_of_text=-1"]),
        (
            {"train": "no.bin", "train_tokens": 90, "vocab_size": 0},
            ["vocab_size to be at least 1"],
        ),
        (
            {"train": "no.bin", "train_tokens": 90, "vocab_size": 512, "end_of_text": 900},
            ["end_of_text=900", "vocab_size is 512"],
        ),
        (
            {"order": "random"},
            ["order='random', which does not exist: give 'shuffled' or 'stream'"],
        ),
        (
            {"order": "stream", "batch_size": 7, "length": 7},
            ["largest file has 50 tokens", "= 7 * 7 + 2 = 51. Choose a smaller batch_size"],
        ),
        ({"tokenizer": "absent.json"}, ["absent.json cannot be read as", "there is no such file"]),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, words: list[str]
):
    monkeypatch.chdir(tmp_path)
    for name in ("train.bin", "test.bin"):
        write(tmp_path / name, range(50))
    for folder in ("bare", "made"):
        (tmp_path / folder).mkdir()
    for name in ("train_000000.bin", "train_000001.bin", "validation_000000.bin", "notes.txt"):
        (tmp_path / "made" / name).touch()
    os.mkfifo(tmp_path / "pipe")
    given = {"train": "train.bin", "test": "test.bin", "length": 4, "batch_size": 3, **options}
    with pytest.raises(ValueError) as caught:
        data.tokens(**given)
    for word in words:
        assert word in str(caught.value)


def test_a_large_token_is_found_in_a_batch_if_not_before(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(sys.modules["trainer.data.tokens"], "_SCANNED", 10)
    tokens = np.zeros(2_000_000, np.uint16)
    tokens[5000] = 700  # between two samples
    paths = [
        str(shards.write_shards(tmp_path, x, [tokens], np.dtype("<u2"), 10**9)[0]) for x in "ab"
    ]
    with pytest.raises(ValueError, match="4000000 tokens, too many .* `vocab_size`: 50257"):
        data.tokens(paths[0], test=paths[1])
    read = data.tokens(paths[0], test=paths[1], vocab_size=700, length=1000, batch_size=10)
    with pytest.raises(UserError, match="found the token 700, but its vocab_size is 700"):
        list(read.evaluate())
