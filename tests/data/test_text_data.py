"""Texts: tokenizers, documents and their splits, Shakespeare, the cache and the command."""

import collections
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs, short
from trainer import data
from trainer.data import prepare, shakespeare, shards, tokenizer
from trainer.data.text import divide_documents, find_documents, read_parts
from trainer.data.tokenizer import ByteTokenizer

texts = importlib.import_module("trainer.data.text")  # the package has a function of this name

WORDS = "the quick brown fox jumps over the lazy dog while the dog sleeps\n"
ODD = "né 学 🦊\n\n  the <|endoftext|> fox's\x00\t12345 \r\n"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of prepared data sets of one test."""
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def books(folder: Path, count: int = 20, lines: int = 40) -> str:
    (folder / "books").mkdir(exist_ok=True)
    for number in range(count):
        text = "".join(f"{number} {line} {WORDS}" for line in range(lines))
        (folder / "books" / f"{number:02d}.txt").write_text(text)
    return str(folder / "books")


def text_of(dataset: Any, split: str) -> list[str]:
    """Returns the documents of a split, joined from the batches of its evaluation."""
    tokens = [batch["label"][batch["mask"] == 1] for batch in dataset.evaluate(split)]
    flat = np.concatenate(tokens)
    ends = np.flatnonzero(flat == dataset.tokenizer.end_of_text)
    return [dataset.tokenizer.decode(each.tolist()) for each in np.split(flat, ends)]


# Tokenizers.


def bpe(size: int = 300) -> tokenizer.SubwordTokenizer:
    return tokenizer.train_bpe([(WORDS * 20).encode(), ODD.encode()], size)


def test_bytes_are_the_tokens_of_a_text():
    ours = ByteTokenizer()
    assert ours.encode(ODD) == list(ODD.encode())
    assert ours.decode([*ODD.encode(), 256]) == ODD
    assert ours.decode([195, 256, 65]) == "\ufffdA"
    with pytest.raises(ValueError, match="has no bytes in UTF-8"):
        ours.encode("a\ud800")


def test_the_file_of_the_byte_tokenizer_gives_the_same_tokens_in_the_package(tmp_path: Path):
    import tokenizers

    ByteTokenizer().save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    every = "".join(map(chr, range(0x800))) + ODD
    assert theirs.encode(every).ids == list(every.encode())
    assert theirs.decode(list(every.encode())) == every
    assert theirs.token_to_id("<|endoftext|>") == 256
    assert isinstance(tokenizer.load_tokenizer(tmp_path / "tokenizer.json"), ByteTokenizer)
    wrapped = tokenizer.SubwordTokenizer(theirs, None, "it")
    assert wrapped.token_bytes.tolist() == ByteTokenizer.token_bytes.tolist()


def test_a_bpe_is_that_of_the_package_and_reads_back(tmp_path: Path):
    import tokenizers

    ours = bpe()
    ours.save(tmp_path / "tokenizer.json")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    loaded = tokenizer.load_tokenizer(tmp_path / "tokenizer.json")
    for text in (WORDS, ODD.replace("<|endoftext|>", "")):
        assert ours.encode(text) == theirs.encode(text).ids == loaded.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode(WORDS)) < 30  # and not one token a byte
    assert theirs.encode("<|endoftext|>").ids == [ours.end_of_text]
    assert ours.end_of_text not in ours.encode(ODD) and ours.decode(ours.encode(ODD)) == ODD
    assert ours.vocab_size == 300 and ours.decode([ours.end_of_text]) == ""
    first = ours.encode("学")[:1]
    assert ours.decode(first) == "\ufffd"


@pytest.mark.long
def test_two_trainings_are_equal_whatever_the_number_of_threads(tmp_path: Path):
    code = "import pathlib, sys; from trainer.data import shakespeare, tokenizer\n"
    code += "trained = tokenizer.train_bpe(shakespeare.works()[:6], 700)\n"
    code += "trained.save(pathlib.Path(sys.argv[1]))"
    for threads in "14":
        command = [sys.executable, "-c", code, str(tmp_path / threads)]
        env = {**os.environ, "RAYON_NUM_THREADS": threads}
        subprocess.run(command, env=env, cwd=runs.ROOT, check=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()


@pytest.mark.parametrize("piece", [1, 50, 333, 10**6])
def test_pieces_of_a_long_document_have_the_tokens_of_the_whole(monkeypatch: Any, piece: int):
    ours = bpe()
    monkeypatch.setattr(tokenizer, "_PIECE", piece)
    documents = [(WORDS * 9 + "end.\n\n \n学\n\nx" + ODD) * 3, "a", WORDS, "\n\na\n\n\nb\n"]
    stream = np.concatenate(list(ours.stream([each.encode() for each in documents])))
    expected = [[ours.end_of_text, *ours.encode(each)] for each in documents]
    assert stream.tolist() == sum(expected, [])
    assert ours.token_bytes[stream].sum() == sum(len(each.encode()) for each in documents)


def test_the_end_of_text_of_a_tokenizer_is_found_or_given(tmp_path: Path):
    content = json.loads(bpe()._tokenizer.to_str())
    path = tmp_path / "tokenizer.json"

    def rename(name: str) -> None:
        old = content["added_tokens"][0]["content"]
        content["added_tokens"][0]["content"] = name
        content["model"]["vocab"][name] = content["model"]["vocab"].pop(old)
        path.write_text(json.dumps(content))

    rename("</s>")
    assert tokenizer.load_tokenizer(path).end_of_text == 0
    rename("<mine>")
    with pytest.raises(
        ValueError, match=r"has none of the tokens <\|endoftext\|>, .*`end_of_text`"
    ):
        tokenizer.load_tokenizer(path)
    assert tokenizer.load_tokenizer(path, 0).end_of_text == 0
    with pytest.raises(ValueError, match="end_of_text is 300, but .* has 300 tokens"):
        tokenizer.load_tokenizer(path, 300)


@pytest.mark.long
def test_only_a_bpe_imports_the_package(tmp_path: Path):
    code = "import sys; from trainer import data; d = data.text('books', tokenizer=sys.argv[1])\n"
    code += "next(d.train()); d.fingerprint; print('tokenizers' in sys.modules)"
    books(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(runs.ROOT)}
    for kind, imported in (("bytes", "False"), ("bpe", "True")):
        command = [sys.executable, "-c", code, kind]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert (done.stdout.strip(), done.stderr) == (imported, "")


# Documents and splits.


def test_whole_documents_are_validated_and_tested(tmp_path: Path):
    files = [(tmp_path / "books" / f"{i:02d}.txt") for i in range(20)]
    read = data.text(books(tmp_path), validation=0.1, test=0.15, length=64, batch_size=4)
    written = {path.read_text() for path in files}
    splits = {split: set(text_of(read, split)) for split in read.splits}
    assert list(read.splits) == ["validation", "test"]
    assert {split: len(found) for split, found in splits.items()} == {"validation": 2, "test": 3}
    assert splits["validation"] | splits["test"] < written
    assert not splits["validation"] & splits["test"]
    sizes = [
        path.stat().st_size + 1
        for path in files
        if path.read_text() not in set.union(*splits.values())
    ]
    assert read.num_examples == (sum(sizes) - 1) // 64
    for split, found in splits.items():
        total = sum(int(batch["bytes"].sum()) for batch in read.evaluate(split))
        assert total == sum(map(len, found))
    other = data.text("books", validation=0.1, test=0.15, length=64, batch_size=4, split_seed=1)
    assert set(text_of(other, "test")) != splits["test"]


def test_a_single_document_is_cut_at_ends_of_lines(tmp_path: Path):
    lines = "".join(f"line {number} né\n" for number in range(1000))
    (tmp_path / "one.txt").write_text(lines)
    read = data.text("one.txt", validation=0.1, test=0.2, length=16, batch_size=2)
    (validation,), (test,) = (text_of(read, split) for split in ("validation", "test"))
    assert lines.endswith(validation + test)
    assert validation.startswith("line ") and test.startswith("line ")
    size = len(lines.encode())
    assert abs(len(validation.encode()) / size - 0.1) < 0.01
    assert abs(len(test.encode()) / size - 0.2) < 0.01
    assert read.num_examples == (size - len((validation + test).encode())) // 16


def test_the_last_document_is_cut_and_not_taken(tmp_path: Path):
    books(tmp_path, 2)
    documents = find_documents("books", None)
    parts = divide_documents(documents, {"validation": 0.45, "test": 0.4}, 0)
    (taken,) = parts["validation"]
    assert taken[1:] == (None, None)
    assert [part[0] for part in parts["train"] + parts["test"]] == [1 - taken[0]] * 2
    kept = [b"".join(read_parts(documents, parts[split])) for split in parts]
    assert sorted(map(len, kept))[0] > 200 and sum(map(len, kept)) == sum(map(len, documents))


def test_a_cut_is_never_within_a_character(tmp_path: Path):
    (tmp_path / "one.txt").write_text("学" * 1000)
    for share in (0.1, 0.1003, 0.1006):
        documents = find_documents("one.txt", None)
        parts = divide_documents(documents, {"test": share}, 0)
        pieces = [list(read_parts(documents, parts[split])) for split in ("train", "test")]
        assert b"".join(sum(pieces, [])).decode() == "学" * 1000
        assert [len(each) for each in pieces] == [1, 1] and pieces[1][0].decode()


def test_a_separator_divides_files(tmp_path: Path):
    (tmp_path / "all.txt").write_text("<>".join(f"{i} {WORDS * 3}" for i in range(40)) + "<>\n")
    read = data.text("all.txt", separator="<>", validation=0.2, test=None, length=32, batch_size=4)
    found = text_of(read, "validation")
    assert len(found) == 8 and all(each.endswith(WORDS) and "<>" not in each for each in found)


def test_files_are_found_by_path_folder_and_glob(tmp_path: Path):
    folder = Path(books(tmp_path, 3))
    (folder / ".hidden").write_text("x")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("x")
    (folder / "more").mkdir()
    (folder / "more" / "a[1].txt").write_text("x")
    names = list(map(os.path.basename, find_documents("books", None).files))
    assert names == ["00.txt", "01.txt", "02.txt", "a[1].txt"]
    given = ["books/more/a[1].txt", "books/*1.txt", "books/**/*]*"]
    names = list(map(os.path.basename, find_documents(given, None).files))
    assert names == ["a[1].txt", "01.txt"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path):
    folder = Path(books(tmp_path, 4))
    (tmp_path / "link.txt").symlink_to(folder / "02.txt")
    once = find_documents("books", None).files
    for given in (["books", "books/01.txt"], ["books", "./books", "link.txt"], ["books", "b*/0*"]):
        assert find_documents(given, None).files == once
    given = ["books/02.txt", "books", str(folder / "02.txt")]
    names = list(map(os.path.basename, find_documents(given, None).files))
    assert names == ["02.txt", "00.txt", "01.txt", "03.txt"]
    ways = [["books/02.txt"], ["books/02.txt", "books/02.txt"]]
    first, second = (data.text(files, length=16, batch_size=2) for files in ways)
    assert first.fingerprint == second.fingerprint


def test_the_default_text_is_shakespeare(kept: Path):
    works = shakespeare.works()
    assert (len(works), sum(map(len, works))) == (42, 5_053_893)
    assert hashlib.sha256(b"\f".join(works)).hexdigest() == shakespeare.SHA256
    whole = b"".join(works).decode("ascii")
    assert "To be, or not to be,--that is the question:--" in whole
    for word in ("Gutenberg", "copyright", " etext", "@", "\r", "\t"):
        assert word.lower() not in whole.lower()
    read = data.text()
    tested = text_of(read, "test")
    assert all(each.encode() in works for each in tested) and len(tested) == 2
    assert abs(sum(map(len, tested)) / len(whole) - 0.05) < 0.015
    assert (read.vocab_size, read.tokens_per_example, read.batch_size) == (257, 256, 32)


# The cache.


def test_the_tokens_are_made_once_for_each_text_and_settings(tmp_path: Path, kept: Path):
    books(tmp_path)
    ways: list[dict[str, Any]] = [{}, {"tokenizer": "bpe", "vocab_size": 280}, {"split_seed": 1}]
    ways += [{"tokenizer": "bpe", "vocab_size": 290}, {"validation": 0.1}, {"test": None}]
    prints = [data.text("books", **way).fingerprint for way in ways]
    assert len(set(prints)) == len(ways) == len(list((kept / "text").glob("[!.]*")))
    times = {path: path.stat().st_mtime_ns for path in kept.rglob("[!.]*.*")}
    assert [data.text("books", **way).fingerprint for way in ways] == prints
    assert times == {path: path.stat().st_mtime_ns for path in kept.rglob("[!.]*.*")}
    (tmp_path / "books" / "03.txt").write_text("another text")
    assert data.text("books").fingerprint not in prints
    assert len(list((kept / "text").glob("[!.]*"))) == len(ways) + 1
    assert not list(kept.glob(".preparing-*"))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("train_000000.bin", lambda content: content[:-1], id="cut"),
        pytest.param("train_000000.bin", None, id="absent"),
        pytest.param("tokenizer.json", None, id="no tokenizer"),
        pytest.param("tokenizer.json", lambda _: b"", id="empty tokenizer"),
        pytest.param("splits.json", None, id="no splits"),
        pytest.param("splits.json", lambda _: b"nothing", id="not json"),
        pytest.param("splits.json", lambda _: b"null", id="null"),
        pytest.param("splits.json", lambda _: b"[]", id="a list"),
        pytest.param("splits.json", lambda _: b"{}", id="no split"),
    ],
)
def test_damaged_tokens_are_made_again(tmp_path: Path, kept: Path, name: str, damage: Any):
    before = data.text(books(tmp_path)).fingerprint
    (folder,) = (kept / "text").glob("[!.]*")
    file = folder / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert data.text("books").fingerprint == before


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        # The digest, the sizes and the tokens.
        ({}, [3] * 20),
        # The training documents once more, to train the BPE.
        ({"tokenizer": "bpe", "vocab_size": 280}, [3] * 2 + [4] * 18),
        # The longest document once more to find the cut, and once more for its other split.
        ({"validation": 0.001, "test": None}, [3] * 19 + [5]),
    ],
)
def test_files_are_read_as_few_times_as_the_tokens_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict, reads: list[int]
):
    books(tmp_path)
    counts = count_reads(monkeypatch)
    data.text("books", **options)
    assert sorted(counts.values()) == reads
    counts.clear()
    data.text("books", **options)  # the files were written just now
    assert sorted(counts.values()) == [1] * 20


def count_reads(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    read, counts = texts._read, collections.Counter[str]()

    def counted(path: str) -> bytes:
        counts[path] += 1
        return read(path)

    monkeypatch.setattr(texts, "_read", counted)
    return counts


def test_files_that_have_not_changed_are_not_read_again(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    books(tmp_path)
    monkeypatch.setattr(texts, "_RACY", -(10**10))  # as if they had been written long ago
    fingerprint = data.text("books").fingerprint
    counts = count_reads(monkeypatch)
    assert data.text("books").fingerprint == fingerprint and not counts
    os.chmod(tmp_path / "books" / "03.txt", 0o600)
    assert data.text("books").fingerprint == fingerprint and len(counts) == 20
    # The same size and the same time of the last change of its content, as `cp -p` leaves them.
    file = tmp_path / "books" / "03.txt"
    content, times = file.read_text(), file.stat()
    for change in (file.write_text, lambda text: (file.unlink(), file.write_text(text))):
        counts.clear()
        change(content.replace("quick", "slack"))
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert data.text("books").fingerprint != fingerprint and len(counts) == 20
        change(content)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert data.text("books").fingerprint == fingerprint
    (tmp_path / "books" / "more.txt").write_text(WORDS * 40)
    assert data.text("books").fingerprint != fingerprint
    with pytest.raises(ValueError, match="is in none of the 21 files"):
        data.text("books", separator="zzz")


def test_a_damaged_or_unwritable_record_of_unchanged_files_does_no_harm(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
):
    books(tmp_path)
    monkeypatch.setattr(texts, "_RACY", -(10**10))
    fingerprint = data.text("books").fingerprint
    (record,) = (kept / "text" / ".unchanged").iterdir()
    for content in (b"", b"zz", b"\xff" * 64, record.read_bytes()[:-1]):
        record.write_bytes(content)
        assert data.text("books").fingerprint == fingerprint
    shutil.rmtree(record.parent)
    record.parent.touch()
    assert data.text("books").fingerprint == fingerprint


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    books(tmp_path)
    (tmp_path / "books" / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(ValueError, match="books/loop.txt cannot be read .Too many levels"):
        find_documents("books", None)
    (tmp_path / "books" / "loop.txt").unlink()
    listed = os.scandir

    def scandir(path: str) -> Any:
        if os.path.basename(path) == "more":
            raise PermissionError(13, "Permission denied")
        return listed(path)

    (tmp_path / "books" / "more").mkdir()
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match="books/more cannot be listed .Permission denied"):
        find_documents("books", None)


def test_tokens_that_are_kept_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data.text(books(tmp_path))
    read, find = [], shards.find_layout
    monkeypatch.setattr(shards, "find_layout", lambda path: [read.append(path.name), find(path)][1])
    data.text("books")
    assert sorted(read) == ["test_000000.bin", "train_000000.bin", "validation_000000.bin"]


def test_tokens_that_cannot_be_kept_are_reported(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be kept in .*/file .*Set LOCKSTEP_DATA_DIR"):
        data.text(books(tmp_path), data_dir=str(tmp_path / "file"))


# Mistakes.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"files": "none*"}, ["files has the glob 'none*', which matches nothing in /"]),
        ({"files": "none.txt"}, ["'none.txt', but there is no such file or folder in /"]),
        ({"files": ["books", "bare"]}, ["the folder 'bare'", "with no file whose"]),
        ({"files": "bar*"}, ["the folder 'bare'", "with no file whose"]),
        ({"files": []}, ["empty list"]),
        (
            {"files": "empty.txt"},
            ["empty.txt is empty", "Remove the file, or leave it out of `files`"],
        ),
        ({"files": "pipe"}, ["'pipe', which is not a regular file"]),
        ({"separator": ""}, ["separator", "''"]),
        ({"files": None, "separator": "x"}, ["separator", "files=None"]),
        ({"separator": "absent"}, ["'absent' is in none of the 20 files"]),
        (
            {"files": "gap.txt", "separator": "--", "length": 4},
            ["an empty document, number 2 of the 3"],
        ),
        (
            {"length": 10**6},
            ["length + 1 = 1000001 tokens", "books/00.txt, books/01.txt, books/02.txt and 17 more"],
        ),
        (
            {"length": 55_000},
            ["(books/00.txt, ", "training tokens", "length + 1 = 55001", "length of at most"],
        ),
        ({"validation": 0.0}, ["validation is 0.0", "between 0 and 1"]),
        ({"validation": 0.6, "test": 0.4}, ["validation=0.6 and test=0.4 must leave"]),
        ({"validation": None, "test": None}, ["at least one of them is needed"]),
        ({"tokenizer": "word"}, ["'word', which is neither 'bytes' nor 'bpe' nor a file"]),
        (
            {"tokenizer": "gap.txt"},
            ["gap.txt cannot be read as a tokenizer.json: it is not JSON. Give", "byte-level BPE"],
        ),
        ({"tokenizer": "latin.txt"}, ["latin.txt cannot be read as", ": it is not JSON."]),
        ({"tokenizer": "list.json"}, ["it is JSON, but not that of a tokenizer, which has"]),
        ({"tokenizer": "model.json"}, ["tokenizer.json: Missing vocab/merges"]),
        ({"tokenizer": "untrained.json"}, ["untrained.json has no tokens. Train it, or give"]),
        ({"tokenizer": "untrained.json", "end_of_text": 0}, ["untrained.json has no tokens."]),
        ({"vocab_size": 300}, ["vocab_size is 300", "'bytes' has 257 tokens"]),
        ({"tokenizer": "bpe", "vocab_size": 200}, ["at least 257 tokens"]),
        ({"end_of_text": 3}, ["end_of_text is 3, but only a tokenizer.json needs it"]),
        (
            {"files": "latin.txt", "tokenizer": "bpe"},
            ["latin.txt is not a text in UTF-8", "0xe9 on"],
        ),
        (
            {"files": "latin.txt", "tokenizer": "tokenizer.json"},
            ["latin.txt is not a text in UTF-8", "line 1 ", "use the tokenizer 'bytes'"],
        ),
        (
            {"files": ["books", "third.txt"], "tokenizer": "bpe", "separator": "--"},
            ["Document 3 of third.txt is not a text in UTF-8", "0xff on line 2"],
        ),
        (
            {"files": "tiny.txt", "length": 128},
            ["length + 1 = 129 tokens, but the text (tiny.txt) has 2 bytes. Give more text"],
        ),
        (
            {"files": "tiny.txt", "length": 1},
            ["The text (tiny.txt) is too short", "has 2 bytes, of which 0.1 and 0.1 bytes"],
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, kept: Path, options: dict, words: list[str]):
    books(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "model.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    untrained = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "untrained.json").write_text(json.dumps(untrained))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / ".hidden").write_text("x")
    (tmp_path / "gap.txt").write_text("a--  --b")
    (tmp_path / "tiny.txt").write_text("ab")
    (tmp_path / "latin.txt").write_bytes(("é" * 500).encode("latin-1"))
    (tmp_path / "third.txt").write_bytes(b"first--second--th\nird \xff")
    os.mkfifo(tmp_path / "pipe")
    bpe().save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError) as caught:
        data.text(**{"files": "books", **options})
    for word in words:
        assert word in str(caught.value)
    assert not list(kept.glob(".preparing-*"))


def test_bytes_take_any_file(tmp_path: Path):
    content = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint8).tobytes()
    (tmp_path / "any.bin").write_bytes(content)
    read = data.text("any.bin", length=64, batch_size=2, validation=None, test=0.5)
    tested = np.concatenate([b["label"][b["mask"] == 1] for b in read.evaluate()])
    assert content.endswith(bytes(tested.tolist())) and len(tested) > 9000


# The command.


def test_the_command_without_files_writes_shakespeare(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert prepare.main(["text", "--out=made", "--test=0"]) == 0
    # A byte is a token, and each work has one more.
    count = sum(len(work) + 1 for work in shakespeare.works())
    written = re.findall(r"([\d,]+) (?:train|validation)", capsys.readouterr().out)
    assert sum(int(number.replace(",", "")) for number in written) == count


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_command_writes_shards_that_are_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture, kind: str
):
    books(tmp_path)
    options = ["books", "--out=made/it", f"--tokenizer={kind}", "--shard_tokens=2000"]
    options += ["--vocab_size=300"] if kind == "bpe" else []
    assert prepare.main(["text", *options]) == 0
    made = tmp_path / "made" / "it"
    assert "The text is ready in" in capsys.readouterr().out
    assert len(list(made.glob("train_*.bin"))) > 5 and (made / "tokenizer.json").is_file()
    read = data.tokens(
        "made/it/train_*.bin", "made/it/validation_*.bin", "made/it/test_*.bin", length=64
    )
    vocab_size = 300 if kind == "bpe" else None
    known = data.text("books", tokenizer=kind, vocab_size=vocab_size, length=64)
    assert (read.vocab_size, read.num_examples) == (known.vocab_size, known.num_examples)
    for ours, theirs in zip(read.evaluate("test"), known.evaluate("test"), strict=True):
        assert ours.keys() == theirs.keys() >= {"documents", "bytes"}
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key])
    assert text_of(read, "validation") == text_of(known, "validation")
    assert prepare.main(["text", *options]) == 2
    assert "exists. Name a new folder" in capsys.readouterr().err


def test_the_command_refuses_mistakes_before_it_makes_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    books(tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    for options, words in (
        (["none"], "'none', but there is no such file"),
        (["books", "--tokenizer=x.json"], "neither 'bytes' nor 'bpe' nor a file"),
        (["books", "--validation=2"], "validation is 2.0"),
        (["books", "--shard_tokens=0"], "--shard_tokens is 0"),
        (["books", "--separator=zzz"], "is in none of the 20 files"),
        (["books", "latin.txt", "--tokenizer=bpe"], "latin.txt is not a text in UTF-8"),
    ):
        assert prepare.main(["text", *options, "--out=made"]) == 2
        assert words in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"books", "latin.txt"}


def test_the_command_says_that_a_bpe_has_fewer_tokens_than_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    books(tmp_path)
    options = ["text", "books", "--tokenizer=bpe"]
    assert prepare.main([*options, "--out=small", "--vocab_size=300"]) == 0
    assert "pairs" not in capsys.readouterr().out
    assert prepare.main([*options, "--out=large", "--vocab_size=40000"]) == 0
    size = tokenizer.load_tokenizer(tmp_path / "large" / "tokenizer.json").vocab_size
    said = f"for only {size:,} tokens, and vocab_size is 40,000"
    assert 300 < size < 40_000 and said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["text", "books", "--outt=made"], "text does not take --outt=made. Did you mean --out?"),
        (["text", "books", "--out=made", "--vocab=x"], "invalid int value: 'x'"),
        (["text", "books"], "there is no --out. Name a new folder"),
        (["txt", "books", "--out=made"], "'txt' is no data set of TFDS. Did you mean text?"),
        (["mnist", "--data-dir=x"], "prepare does not take --data-dir=x. Did you mean --data_dir?"),
        ([], "required: name"),
    ],
)
def test_a_misspelled_command_is_answered_without_its_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], words: str
):
    with pytest.raises(SystemExit) as caught:
        prepare.main(options)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and words in said
    assert "usage" not in said and len(said.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    books(tmp_path)
    (tmp_path / "file").touch()
    assert prepare.main(["text", "books", "--out=file/x/y"]) == 2
    said = capsys.readouterr().err
    assert "file/x/y cannot be written (Not a directory). Name another --out." in said


def test_a_tokenizer_must_hold_the_tokens_of_the_shards(tmp_path: Path):
    books(tmp_path)
    prepare.main(["text", "books", "--out=made", "--tokenizer=bpe", "--vocab_size=300"])
    ByteTokenizer().save(tmp_path / "bytes.json")
    splits = {"train": "made/train_*.bin", "test": "made/test_*.bin"}
    with pytest.raises(ValueError, match="have the token 299, but bytes.json has 257 tokens"):
        data.tokens(**splits, tokenizer="bytes.json")
    with pytest.raises(ValueError, match="vocab_size is 400, but .*tokenizer.json has 300 tokens"):
        data.tokens(**splits, vocab_size=400)


# The model.


@short.parametrize(("asked", "warned"), [(300, False), (40_000, True)])
def test_the_plan_says_that_a_bpe_has_fewer_tokens_than_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture, asked: int, warned: bool
):

    (tmp_path / "run.yaml").write_text(
        f"data: !data.text {{files: {books(tmp_path)}, tokenizer: bpe, vocab_size: {asked},"
        " length: 32}\nmodel: !models.gpt {vocab_size: 40000, width: 8, num_heads: 1, depth: 1}\n"
        "loss: !losses.softmax_cross_entropy\noptimizer: !optax.adamw {learning_rate: 1e-3}\n"
        "steps: 2\n"
    )
    # The package gives every word of a text its token, and then no pair is left.
    size = tokenizer.train_bpe((path.read_bytes() for path in Path("books").iterdir()), 40_000)
    for _ in range(2):  # the second time, the tokens are those that the first has kept
        said = " ".join(runs.printed(capsys, "explain", "--config=run.yaml").split())
        assert ("has enough pairs for only" in said) is warned
        if warned:
            few = int(re.search(r"for only ([\d,]+) tokens, and vocab_size is 40,000", said)[1])
            assert 300 < few <= size.vocab_size


TOY = """
import jax, jax.numpy as jnp
from trainer import models
from trainer.models.model import LanguageModel

def toy(vocab_size: int = 257, max_length: int = 64):
    def init(key, batch):
        return {"kernel": jnp.zeros((vocab_size, vocab_size))}, {}
    def apply(params, model_state, batch, *, key, train):
        return params["kernel"][batch["tokens"]], model_state
    return models.Model(init, apply, None, LanguageModel(vocab_size, max_length, None, None))
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("toys.toy.vocab_size = 256", "has 257 different tokens, but the model knows 256."),
        ("toys.toy.max_length = 31", "has sequences of 32 tokens, but the model takes at most 31."),
        ("data.text.tokenizer = 'absent'", "'absent', which is neither 'bytes' nor 'bpe' nor"),
        ("", ""),
    ],
)
def test_a_model_must_hold_the_tokens_and_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, setting: str, words: str
):
    from trainer.__main__ import main

    books(tmp_path)
    (tmp_path / "toys.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toys", raising=False)
    (tmp_path / "run.gin").write_text(
        "experiment.model = @toys.toy()\nexperiment.data = @data.text()\n"
        "experiment.loss = @losses.softmax_cross_entropy()\nexperiment.steps = 2\n"
        "experiment.optimizer = @optax.sgd()\noptax.sgd.learning_rate = 0.1\n"
        f"data.text.files = '{tmp_path / 'books'}'\ndata.text.length = 32\n{setting}\n"
    )
    options = ["--gin_file=run.gin", "--vocabulary=toys", f"--workdir={tmp_path / 'run'}"]
    assert main(options) == (2 if words else 0)
    assert words in capfd.readouterr().err
    assert (tmp_path / "run").exists() is (not words)
