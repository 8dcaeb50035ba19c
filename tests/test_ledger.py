"""The ledger of a sweep: what its hashes show, and what a killed worker may leave."""

import hashlib
import json
from pathlib import Path

import pytest

from trainer.sweep.ledger import LEDGER_FILE, append, digests, read_ledger


def written(folder: Path, count: int = 4) -> Path:
    for number in range(count):
        append(folder, [{"event": "trial", "trial": f"trials/a/{number:04d}/0", "files": {}}])
    return folder / LEDGER_FILE


def test_each_line_has_the_hash_of_the_line_before_and_its_own(tmp_path):
    file = written(tmp_path)
    before = ""
    for line in file.read_text().splitlines():
        content = json.loads(line)
        own = content.pop("hash")
        assert content["before"] == before
        text = json.dumps(content, separators=(",", ":"))
        assert own == hashlib.sha256(text.encode()).hexdigest()
        before = own
    ledger = read_ledger(tmp_path)
    assert ledger is not None
    assert (len(ledger.entries), ledger.damage, ledger.head) == (4, "", before)


def test_any_byte_that_is_changed_is_found(tmp_path):
    file = written(tmp_path, 2)
    content = file.read_bytes()
    for index in range(len(content)):
        for flip in (0x01, 0x20):
            changed = bytearray(content)
            changed[index] ^= flip
            file.write_bytes(bytes(changed))
            ledger = read_ledger(tmp_path)
            assert ledger is not None
            assert ledger.damage or ledger.torn, (index, flip)


@pytest.mark.parametrize(
    ("keep", "damage"),
    [
        ([1, 2, 3], "what stood before line 1 was changed or removed"),
        ([0, 2, 3], "what stood before line 2 was changed or removed"),
        ([0, 1, 1, 2, 3], "what stood before line 3 was changed or removed"),
        ([0, 2, 1, 3], "what stood before line 2 was changed or removed"),
        ([0, 1, 2], ""),  # a cut is found by the trials that it lacks, not by the chain
    ],
)
def test_lines_that_are_removed_repeated_or_moved_are_found(tmp_path, keep, damage):
    file = written(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[index] for index in keep))
    ledger = read_ledger(tmp_path)
    assert ledger is not None and ledger.damage == damage


def test_a_torn_line_is_replaced_and_nothing_else_is(tmp_path):
    file = written(tmp_path, 3)
    whole = file.read_bytes()
    for cut in range(1, 40):
        file.write_bytes(whole[:-cut])
        ledger = read_ledger(tmp_path)
        assert ledger is not None and ledger.torn and len(ledger.entries) == 2
        append(tmp_path, [json.loads(whole.splitlines()[-1]) | {"trial": "again"}])
        assert file.read_bytes().splitlines()[:2] == whole.splitlines()[:2]
        after = read_ledger(tmp_path)
        assert after is not None and not after.torn
        file.write_bytes(whole)
    # A line that was changed is not mended by the next one.
    file.write_bytes(whole.replace(b"trials/a/0001/0", b"trials/a/0009/0"))
    append(tmp_path, [{"event": "final"}])
    ledger = read_ledger(tmp_path)
    assert ledger is not None and ledger.damage == "line 2 was changed"


def test_digests_are_those_of_sha256sum(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "x").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert dict(digests(tmp_path, without=("checkpoints",))) == {"a": empty}
    assert [name for name, _ in digests(tmp_path)] == ["a", "checkpoints/x"]


def test_a_sweep_of_an_earlier_version_has_no_ledger(tmp_path):
    assert read_ledger(tmp_path) is None
