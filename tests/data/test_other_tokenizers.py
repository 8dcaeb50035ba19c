"""Tokenizers as other programs write them: byte fallback, and expressions that never end."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tests import runs
from trainer import data
from trainer.data.tokenizer import SubwordTokenizer, load_tokenizer

WORDS = "the quick brown fox jumps over the lazy dog\nwhile the dog sleeps, 3 times\n"
TEXTS = [
    WORDS * 30,
    "two  spaces, and\ttabs\r\n" * 40,
    "né 学 🦊 ﬁ Ａ e\u0301 the end\x00 " * 40,
    "x",
    "the fox " * 200,
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def llama(prepend: bool = True) -> dict[str, Any]:
    """A tokenizer.json like that of Llama 2, or without the space before each text of Gemma."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained.train_from_iterator([WORDS.replace("\n", " ")], trainer)
    content = json.loads(trained.to_str())
    learned = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    every = ["<unk>", "<s>", "</s>", *BYTES, *learned]
    content["model"] |= {
        "vocab": {token: number for number, token in enumerate(every)},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] = [
        {"id": number, "content": token, "special": True, **special}
        for number, token in enumerate(every[:3])
    ]
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}] if prepend else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
    content["normalizer"] = {"type": "Sequence", "normalizers": [*before, space]}
    content["pre_tokenizer"] = None
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    kinds = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]
    content["decoder"] = {"type": "Sequence", "decoders": kinds}
    return content


def unigram() -> dict[str, Any]:
    """One of the kind of SentencePiece's unigram models, with byte fallback."""
    scores = [("<unk>", 0.0), ("</s>", 0.0), *((byte, -20.0) for byte in BYTES)]
    words = {*WORDS.split(), *"abcdefghijklmnopqrstuvwxyz"}
    scores += [(f"▁{word}", -3.0) for word in sorted(words)] + [("▁", -5.0)]
    scores += [(letter, -9.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    made = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return json.loads(made.to_str())


def load(folder: Path, content: dict[str, Any]) -> SubwordTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(folder / "tokenizer.json")  # type: ignore[return-value]


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS * 2):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(text.encode() + b"." * number)
    return tmp_path / "texts"


CONTENTS = [(llama(), 1), (llama(prepend=False), 0), (unigram(), 1)]


@pytest.mark.parametrize(("content", "prefix"), CONTENTS, ids=["llama", "gemma", "unigram"])
def test_the_bytes_of_a_text_are_counted_with_byte_fallback(
    tmp_path: Path, texts: Path, content: dict, prefix: int
):
    loaded = load(tmp_path, content)
    assert loaded.prefix_bytes == prefix and loaded.token_bytes is not None
    # SentencePiece's models in the package put no space before a text that begins with one.
    own = content["pre_tokenizer"] is not None
    for text in [*TEXTS, "  two  spaces at the start"]:
        counted = int(loaded.token_bytes[loaded.encode(text)].sum())
        assert counted == len(text.encode()) + (0 if own and text[0] == " " else prefix)
    file = str(tmp_path / "tokenizer.json")
    read = data.text(str(texts), tokenizer=file, length=32, batch_size=4, validation=0.4, test=0.2)
    sizes = {}
    for split in ("validation", "test"):
        batches = list(read.evaluate(split))
        sizes[split] = int(sum((batch["bytes"] * batch["mask"]).sum() for batch in batches))
        assert all(batch["bytes"].min() >= 0 for batch in batches)
    epoch = itertools.islice(read.train(0, 0), math.ceil(read.num_examples / 4))
    trained = sum(int(batch["bytes"].sum()) for batch in epoch)
    whole = sum(file.stat().st_size for file in texts.iterdir())
    # What is left at the end of the training stream, and what the last batch has of a next epoch.
    assert abs(whole - sum(sizes.values()) - trained) < 4 * 32 * 8
    documents = [path.read_bytes() for path in sorted(texts.iterdir())]
    possible = {
        sum(map(len, some)) for n in range(1, 6) for some in itertools.combinations(documents, n)
    }
    assert set(sizes.values()) <= possible  # a split has whole documents here


def test_a_tokenizer_that_changes_its_text_has_no_byte_counts(tmp_path: Path):
    for kind in ("NFKC", "Lowercase", "StripAccents"):
        content = llama()
        content["normalizer"]["normalizers"].insert(0, {"type": kind})
        assert load(tmp_path, content).token_bytes is None
    content = llama()
    del content["model"]["vocab"]["<0xE4>"]  # the characters with this byte have no token
    content["model"]["vocab"] = {word: i for i, word in enumerate(content["model"]["vocab"])}
    assert load(tmp_path, content).token_bytes is None


def test_a_document_of_many_megabytes_is_not_cut_with_byte_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("trainer.data.tokenizer._PIECE", 100)
    loaded = load(tmp_path, llama())
    stream = np.concatenate(list(loaded.stream([TEXTS[0].encode()])))
    assert stream.tolist() == [loaded.end_of_text, *loaded.encode(TEXTS[0])]


# Expressions that take exponential time, where the package panics.

CATASTROPHIC = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}


def catastrophic(folder: Path) -> SubwordTokenizer:
    return load(folder, {**llama(), "pre_tokenizer": {**CATASTROPHIC, "invert": False}})


@pytest.mark.long
def test_a_text_for_which_the_package_panics_is_named(tmp_path: Path, texts: Path):
    loaded = catastrophic(tmp_path)
    bad = "a" * 40 + "!"
    said = r"tokenizer.json fails for the text that begins with 'aaaa.*'.*exponential time there"
    with pytest.raises(ValueError, match=said):
        loaded.encode(bad)
    with pytest.raises(ValueError, match=said):
        list(loaded.stream([b"the fox", bad.encode(), b"the dog"]))
    (texts / "bad.txt").write_text(bad)
    with pytest.raises(ValueError, match=said):
        data.text(str(texts), tokenizer=str(tmp_path / "tokenizer.json"), length=32)
    assert not list((tmp_path / "data").glob(".preparing-*"))


def test_a_text_with_an_unknown_part_is_named_where_the_model_has_no_such_token(tmp_path: Path):
    content = unigram()
    content["model"] |= {"unk_id": None, "byte_fallback": False}
    loaded = load(tmp_path, content)
    assert loaded.encode("the fox") and loaded.token_bytes is None
    for convert in (loaded.encode, lambda text: list(loaded.stream([text.encode()]))):
        with pytest.raises(ValueError, match="that begins with 'né': .*unknown token but `unk_id`"):
            convert("né")


@pytest.mark.long
def test_a_run_ends_with_a_sentence_where_the_package_panics(tmp_path: Path, texts: Path):
    catastrophic(tmp_path)
    (texts / "bad.txt").write_text("a" * 40 + "!")
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: !models.gpt {vocab_size: 500, width: 8, depth: 1, num_heads: 1}\n"
        f"data: !data.text\n  files: {texts}\n  tokenizer: {tmp_path / 'tokenizer.json'}\n"
        "loss: !losses.softmax_cross_entropy {}\noptimizer: !optax.sgd {learning_rate: 0.1}\n"
        "steps: 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "explain", f"--config={config}"],
        env=runs.environment(RUST_BACKTRACE="0"),
        capture_output=True,
        text=True,
    )
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and said.startswith(f"error: {config}:") and "Trace" not in said
    assert "fails for the text that begins with 'aaaaa" in said
