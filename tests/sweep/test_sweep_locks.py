"""What keeps two machines from the trials of one sweep, on file systems with and without locks."""

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import runs, short
from tests.sweep.test_sweep import folders, replaced, rows, sweep, write_sweep
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.sweep import presence
from trainer.sweep.presence import Mode, Presence
from trainer.writers import locks

HOUR = 3600.0


@pytest.fixture(autouse=True)
def quick(lab: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.1)
    monkeypatch.setattr(presence, "SILENT", 1.0)
    # Two threads that undo the patches of `Machine` in another order leave one of them.
    monkeypatch.setattr(locks, "machine", locks.machine)
    monkeypatch.setattr("socket.gethostname", socket.gethostname)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes locks that other hosts do not see: of each there is one process in these tests."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


class Machine(Presence):
    """A process on a host of its own."""

    def __init__(self, folder: Path, host: str, mode: Mode = "flock"):
        super().__init__(folder, mode)
        self.host = host

    def _announce(self) -> None:
        with self._there():
            super()._announce()

    def find_living(self) -> None:
        with self._there():
            super().find_living()

    @contextlib.contextmanager
    def _there(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "machine", lambda: self.host)
            patch.setattr("socket.gethostname", lambda: self.host)
            yield


def test_locks_that_other_machines_do_not_see_are_noticed_before_anything_is_claimed(
    tmp_path, unseen
):
    with Machine(tmp_path, "one") as one:
        with pytest.raises(UserError) as error, Machine(tmp_path, "two"):
            pass
        text = str(error.value)
        assert f"process {os.getpid()} on one (since " in text and "this process on two" in text
        assert text.endswith("start them again with --locks=heartbeat.") and text.count(".") <= 6
        one.find_living()  # goes on
    assert not (tmp_path / "workers").exists()


def test_locks_that_are_not_seen_are_noticed_later_too(tmp_path, unseen, monkeypatch):
    with Machine(tmp_path, "one") as one, contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(Machine, "_probe", lambda self: None)  # as if both began at once
            stack.enter_context(Machine(tmp_path, "two"))
        with pytest.raises(UserError, match="does not see its locks"):
            for _ in range(20):
                one.find_living()
                time.sleep(0.05)


@pytest.mark.long
def test_locks_that_are_seen_are_relied_on(tmp_path):
    (tmp_path / "wave").touch()
    with open(tmp_path / "wave") as first, open(tmp_path / "wave") as second:
        with Machine(tmp_path, "one") as one, Machine(tmp_path, "two") as two:
            assert one.take("wave", first.fileno())
            one.announce("wave")
            one._heartbeat._end.set()  # type: ignore[union-attr]  # it is stopped, and not dead
            for _ in range(20):
                two.find_living()
                assert not two.take("wave", second.fileno())
                time.sleep(0.06)


def written(folder: Path, host: str, locks: Mode, **more: object) -> Path:
    """Writes what a process on another host has left that was killed."""
    record = {"host": host, "pid": 1, "machine": host, "started": "1", "locks": locks, **more}
    (folder / "workers").mkdir(exist_ok=True)
    file = folder / "workers" / f"{host}-1"
    file.write_text(json.dumps({"wave": None, "count": 7, **record}))
    return file


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flock", "heartbeat"])
def test_the_wave_of_a_dead_process_on_another_machine_is_free_after_a_while(tmp_path, mode):
    dead = written(tmp_path, "two", mode, wave="abc")
    with open(os.devnull) as file, Machine(tmp_path, "one", mode) as one:
        start = time.monotonic()
        while not one.take("abc", file.fileno()):
            assert one.take("def", file.fileno())
            assert time.monotonic() - start < runs.LONG
            time.sleep(0.05)
            one.find_living()
        assert time.monotonic() - start > 0.5 and not dead.exists()


def test_a_pause_of_the_observer_says_nothing_about_the_other(tmp_path, monkeypatch):
    written(tmp_path, "two", "heartbeat", wave="abc")
    with open(os.devnull) as file, Machine(tmp_path, "one", "heartbeat") as one:
        now = time.monotonic
        for minutes in range(1, 4):
            monkeypatch.setattr(time, "monotonic", lambda m=minutes: now() + 60 * m)
            one.find_living()
            assert not one.take("abc", file.fileno())


def test_a_process_of_this_machine_that_was_killed_is_forgotten_at_once(tmp_path):
    code = "import sys, time; from pathlib import Path\n"
    code += "from trainer.sweep.presence import Presence\n"
    code += "with Presence(Path(sys.argv[1])) as p: p.announce('abc'); print('ready', flush=True); "
    code += "time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=runs.ROOT
    )
    assert process.stdout is not None and process.stdout.readline()
    with open(os.devnull) as file, Presence(tmp_path) as here:
        assert len(os.listdir(tmp_path / "workers")) == 2
        process.kill()  # and nobody asks for its exit code
        time.sleep(0.3)
        here.tidy()
        assert here.take("abc", file.fileno())
        assert len(os.listdir(tmp_path / "workers")) == 1
    process.communicate()


@pytest.mark.parametrize(("first", "second"), [("flock", "heartbeat"), ("heartbeat", "flock")])
def test_all_processes_of_a_sweep_use_the_same_locks(tmp_path, first, second):
    with Machine(tmp_path, "one", first):
        for host in ("one", "two"):
            text = f"with --locks={first}, and by this process with --locks={second}"
            with pytest.raises(UserError, match=text), Machine(tmp_path, host, second):
                pass


@pytest.mark.long
def test_with_heartbeats_one_process_at_a_time_claims(tmp_path, unseen):
    inside, most, turns = 0, 0, 0

    def claim(host: str) -> None:
        nonlocal inside, most, turns
        with Machine(tmp_path, host, "heartbeat") as machine:
            for _ in range(10):
                with machine.exclusive():
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0.01)
                    inside -= 1
                    turns += 1

    # Different processes of one host would have different process ids.
    threads = [threading.Thread(target=claim, args=(f"host {n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, turns) == (1, 30)
    assert not list(tmp_path.iterdir())


@short.parametrize("content", ["two-1", ""])
def test_what_a_process_holds_that_was_killed_does_not_block_the_others(tmp_path, content):
    written(tmp_path, "two", "heartbeat")
    (tmp_path / "held").write_text(content)
    start = time.monotonic()
    with Machine(tmp_path, "one", "heartbeat") as one, one.exclusive():
        assert time.monotonic() - start > 0.2
    assert not (tmp_path / "held").exists()


@pytest.mark.long
def test_a_process_that_was_taken_for_dead_while_it_waits_is_known_to_the_others_as_it_claims(
    tmp_path,
):
    with Machine(tmp_path, "one", "heartbeat") as one:
        (file,) = (tmp_path / "workers").iterdir()
        written(tmp_path, "two", "heartbeat")
        (tmp_path / "held").write_text("two-1")
        file.unlink()  # by the others, while this process was stopped
        with one.exclusive():
            (again,) = (tmp_path / "workers").iterdir()
            assert (tmp_path / "held").read_text() == again.name != file.name
        assert not (tmp_path / "held").exists()


def test_a_process_that_was_taken_for_dead_announces_itself_again(tmp_path):
    with Machine(tmp_path, "one", "heartbeat") as one:
        (file,) = (tmp_path / "workers").iterdir()
        file.unlink()
        one.find_living()
        (again,) = (tmp_path / "workers").iterdir()
        assert locks.read_holder(again)["host"] == "one"


# Workers.


def on(
    host: str, ahead: float, locks: Path, *command: str, hurry: int = 20
) -> "subprocess.Popen[str]":
    """Starts a command on a host whose clock is ahead, and whose locks no other one sees."""
    told = host, str(ahead), str(locks), str(hurry), "150"
    return runs.process(*told, *command, module="tests.hosts")


@pytest.mark.long
def test_two_hosts_that_do_not_see_each_others_locks_never_compute_the_same(tmp_path, capsys):
    """The clock of one is an hour ahead of that of the other."""
    base = replaced("steps", "300", replaced("log_every", "50"))
    base = replaced("eval_every", "50", replaced("save_every", "25", base))
    file = write_sweep(tmp_path, base, more="seeds: 2", trials=6)
    workdir, locks = tmp_path / "sweep", tmp_path / "locks"
    assert sweep(file, workdir, "--plan_only") == 0
    command = "sweep", "work", str(workdir), "--workers=2", "--vocabulary=unruly"
    first = on("one", 0, locks, *command)
    assert first.stdout is not None
    said = iter(first.stdout.readline, "")
    assert any("trials from" in line for line in said)
    second = on("two", HOUR, locks, *command)
    text = second.communicate(timeout=runs.LONG)[0]
    assert second.returncode == 2, text
    assert "does not see its locks" in text and "--locks=heartbeat" in text
    assert "Traceback" not in text and len(text.splitlines()) <= 2
    first.communicate(timeout=runs.LONG)
    assert first.returncode == 0
    other = tmp_path / "other"
    assert sweep(file, other, "--plan_only", "--locks=heartbeat") == 0
    command = "sweep", "work", str(other), *command[3:], "--locks=heartbeat"
    # On a loaded machine a process that lives may well be silent for a second or two.
    both = [on(*host, locks, *command, hurry=4) for host in (("one", 0), ("two", HOUR))]
    texts = [each.communicate(timeout=runs.LONG)[0] for each in both]
    assert [each.returncode for each in both] == [0, 0], texts
    hosts = set()
    for ours, theirs in zip(folders(workdir), folders(other), strict=True):
        assert rows(ours) == rows(theirs)
        (entry,) = json.loads((theirs / "run.json").read_text())["lineage"]  # nobody took it over
        hosts.add(entry["host"])
    assert hosts == {"one", "two"}
    assert not list((other / "waves").iterdir()) and not (other / "workers").exists()
    (other / "held").touch()  # of a process that was killed
    assert main([*command[:3], "--vocabulary=unruly", "--locks=heartbeat"]) == 0
    assert not (other / "held").exists() and not (other / "workers").exists()
    capsys.readouterr()
    assert main(["sweep", "status", str(other)]) == 0
    assert "14 of 14 runs: the sweep is complete" in capsys.readouterr().out
