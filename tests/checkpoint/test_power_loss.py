"""Loss of power: what a disk may hold after it, and what a restart makes of that."""

import os
import random
from pathlib import Path

import pytest

from tests import power_loss, runs
from tests.crash_states import (
    ANY,
    EVERYTHING,
    NAMES,
    NOTHING,
    NULS,
    OUTCOMES,
    Operation,
    Recorder,
    crash_state,
)


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


ROOT, FILE, FOLDER = 1, 2, 3


def states(*log: Operation) -> list[object]:
    """All that a crash may leave, as far as 300 draws find it."""
    found = []
    for outcome in OUTCOMES:
        for seed in range(50):
            tree = crash_state(log, frozenset({ROOT, FOLDER}), ROOT, outcome, random.Random(seed))
            if tree not in found:
                found.append(tree)
    return found


def test_unsynced_contents_may_be_missing_cut_off_or_zero():
    write = Operation("content", FILE, content=b"abc")
    link = Operation("link", ROOT, "f", FILE)
    found = states(write, link)
    assert {} in found and {"f": b"abc"} in found
    assert {"f": b""} in found and {"f": b"a"} in found and {"f": b"a\0\0"} in found
    assert all(tree in ({}, {"f": b"abc"}) for tree in states(write, Operation("sync", FILE), link))


def test_a_sync_keeps_only_earlier_writes():
    write, link = Operation("content", FILE, content=b"abc"), Operation("link", ROOT, "f", FILE)
    synced = Operation("sync", FILE), Operation("sync", ROOT)
    assert states(write, link, *synced) == [{"f": b"abc"}]
    # Appended bytes are at risk; what they were appended to is not.
    more = states(write, link, *synced, Operation("content", FILE, content=b"abcdef"))
    assert {"f": b"abc"} in more and {"f": b"abcdef"} in more and {"f": b"abc\0\0\0"} in more
    assert all(tree["f"].startswith(b"abc") for tree in more)  # type: ignore[index]
    # Written over, all of it is.
    assert {"f": b""} in states(write, link, *synced, Operation("content", FILE, content=b"xyz"))


def test_a_rename_is_atomic_and_may_reach_the_disk_before_the_contents():
    """The zero-length file of a rename that was not preceded by a sync."""
    temporary = Operation("content", FILE, content=b"abc"), Operation("link", ROOT, ".tmp", FILE)
    rename = Operation("rename", ROOT, "f", FILE, old=".tmp")
    found = states(*temporary, Operation("sync", ROOT), rename)
    assert {"f": b""} in found and {".tmp": b""} in found
    assert all(len(tree) == 1 for tree in found)  # type: ignore[arg-type]


def test_a_folder_whose_name_was_not_synced_is_lost_with_its_contents():
    inside = Operation("content", FILE, content=b"abc"), Operation("link", FOLDER, "f", FILE)
    synced = Operation("sync", FILE), Operation("sync", FOLDER)
    found = states(Operation("link", ROOT, "d", FOLDER), *inside, *synced)
    assert sorted(map(str, found)) == ["{'d': {'f': b'abc'}}", "{}"]


def test_a_move_between_folders_may_leave_both_names_or_neither():
    log = (
        Operation("link", ROOT, "d", FOLDER),
        Operation("link", ROOT, "f", FILE),
        Operation("sync", ROOT),
        Operation("unlink", ROOT, "f"),
        Operation("link", FOLDER, "f", FILE),
    )
    found = states(*log)
    for tree in ({"d": {}, "f": b""}, {"d": {"f": b""}}, {"d": {"f": b""}, "f": b""}, {"d": {}}):
        assert tree in found


def test_the_recorder_lists_all_file_operations(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with Recorder(disk) as recorder:
        (disk / "d").mkdir()
        (disk / ".f").write_bytes(b"abc")
        with open(disk / ".f", "rb") as file:
            os.fsync(file.fileno())
        os.rename(disk / ".f", disk / "f")
        descriptor = os.open(disk, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(disk / "f", disk / "d" / "f")
        os.unlink(disk / "d" / "f")
    assert [(op.kind, op.name, op.old) for op in recorder.log] == [
        ("link", "d", ""),
        ("content", "", ""),
        ("link", ".f", ""),
        ("sync", "", ""),
        ("rename", "f", ".f"),
        ("sync", "", ""),
        ("unlink", "f", ""),
        ("link", "f", ""),
        ("unlink", "f", ""),
    ]
    folders = frozenset(recorder.folders)

    def after(count: int, outcome: str) -> object:
        return crash_state(recorder.log[:count], folders, recorder.root, outcome, random.Random(0))

    assert after(5, EVERYTHING) == {"d": {}, "f": b"abc"}
    assert after(5, NOTHING) == {}
    assert after(6, NOTHING) == after(6, ANY) == {"d": {}, "f": b"abc"}
    assert after(3, NAMES) == {"d": {}, ".f": b""}
    assert after(3, NULS) == {"d": {}, ".f": b"\0\0\0"}


def test_a_run_survives_a_loss_of_power(tmp_path: Path):
    """A loss after every fortieth operation; `make power_loss` tries more."""
    counts = power_loss.power_loss(tmp_path, draws=1, seed=1, every=40, finished=1)
    assert counts["restarts from a checkpoint"] > 20
