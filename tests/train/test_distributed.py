"""Runs of three processes: how they meet, and how all of them end when one is gone.

Most of this runs without jax, on the connections alone. `make chaos_distributed` sets CHAOS=1,
which adds whole runs that are disturbed in every way.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import runs
from tests.processes import Several, explicit, free_port
from trainer import checkpoint
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.train import multihost, peers


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Callable[..., Several]]:
    """Starts three processes; none of them outlives the test."""
    started = []

    def start(make: Callable[[int], list[str]], **environment: str) -> Several:
        started.append(Several(tmp_path, make, explicit(3), **environment))
        return started[-1]

    yield start
    for one in started:
        one.kill()


# How they meet.


def together(*calls: Callable[[], object]) -> list[str]:
    """Makes calls at the same time, all of which must be refused; returns the sentences."""
    said = [""] * len(calls)

    def call(index: int) -> None:
        with pytest.raises(UserError) as refused:
            calls[index]()
        said[index] = str(refused.value)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(runs.LONG)
    return said


def join(port: int, index: int, count: int = 3, wait: float = 1) -> Callable[[], object]:
    address = f"127.0.0.1:{port}"
    return lambda: peers.connect(address, count, index, wait=wait, silence=60)


@pytest.mark.long
@pytest.mark.parametrize(("index", "count"), [(0, 3), (2, 3), (0, 1)])
def test_a_coordinator_port_in_use_is_a_user_error(tmp_path, monkeypatch, capsys, index, count):
    monkeypatch.syspath_prepend(runs.LAB)
    monkeypatch.setattr(peers, "_HELLO", 0.2)
    config = runs.write_config(tmp_path)
    # As a coordinator of jax does, which another one can join on its port.
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{port}")
        monkeypatch.setenv("JAX_NUM_PROCESSES", str(count))
        monkeypatch.setenv("JAX_PROCESS_ID", str(index))
        assert runs.train(config, tmp_path / "run", "--distributed", "--join_timeout=1") == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said and not (tmp_path / "run").exists()
    if index == 0:
        assert f"Process 0 cannot listen at [::]:{port}: Address already in use." in said
    else:
        assert f"did not find process 0 at 127.0.0.1:{port} within 1 s (--join_timeout)" in said


def test_a_port_in_use_a_moment_ago_is_accepted():
    with peers._listener(port := free_port()):
        client = socket.create_connection(("127.0.0.1", port))
    with client:
        pass
    peers._listener(port).close()


@pytest.mark.long
def test_a_process_that_never_joins_is_named_in_all_others():
    port = free_port()
    said = together(join(port, 0), join(port, 1))
    host = re.escape(socket.gethostname())
    for sentence in said:
        assert re.search(
            rf"Of the 3 processes of the run, number 2 did not connect to 127.0.0.1:{port} within "
            rf"1 s \(--join_timeout\); 0 \(on {host}\), 1 \(on {host}\) did\.",
            sentence,
        )


@pytest.mark.long
def test_a_process_0_that_never_joins_is_named():
    (said,) = together(join(free_port(), 1))
    assert "did not find process 0" in said and "Connection refused" in said


def test_two_processes_with_the_same_index_are_refused():
    port = free_port()
    said = together(join(port, 0, wait=30), join(port, 1, wait=30), join(port, 1, wait=30))
    assert all("Two processes have the number 1" in sentence for sentence in said), said


def test_processes_with_different_process_counts_are_refused():
    port = free_port()
    said = together(join(port, 0, wait=30), join(port, 1, count=2, wait=30))
    assert all("number 1 of 2" in sentence for sentence in said), said


@pytest.mark.long
def test_an_unrelated_connection_to_the_port_is_ignored():
    port, refused = free_port(), []
    thread = threading.Thread(target=lambda: refused.extend(together(join(port, 0, wait=2))))
    thread.start()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"lockstep": "1"}\n', b""):
        until = time.monotonic() + runs.LONG
        while time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(text)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
    thread.join(runs.LONG)
    assert "numbers 1, 2 did not connect" in refused[0]


@pytest.mark.parametrize("address", ["node", "node:", ":1", "node:70000", "node:1x"])
def test_an_address_without_a_port_is_a_user_error(monkeypatch, address):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", address)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    with pytest.raises(UserError, match="must be HOST:PORT"), multihost.joined_processes(1, 1):
        pass


def test_a_peer_timeout_below_five_seconds_is_a_user_error(tmp_path, capsys):
    config = runs.write_config(tmp_path)
    options = runs.options(config, tmp_path / "run", "--distributed", "--peer_timeout=4")
    assert main(options) == 2
    assert "--peer_timeout must be at least 5 seconds, got 4." in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--peer_timeout=5", "--join_timeout=5"])
def test_timeouts_without_distributed_are_a_user_error(tmp_path, capsys, option):
    config = runs.write_config(tmp_path)
    assert main(runs.options(config, tmp_path / "run", option)) == 2
    assert "are read with --distributed only" in capsys.readouterr().err


# How all end when one is gone, on the connections alone.

PEER = """
import os, sys, time
from trainer.train import peers as module
from trainer.train.peers import connect

module._GRACE, module._GRACE_AFTER_ERROR, module._SUSPENDED = 1, 1, 2
index = int(os.environ["JAX_PROCESS_ID"])
address = os.environ["JAX_COORDINATOR_ADDRESS"]
peers = connect(address, 3, index, wait=100, silence=3)
print("met")
for order in sys.stdin:
    if order == "abort\\n":
        os.abort()
    if order == "1\\n":
        peers.fail("the disk broke")
    peers.leave(int(order), "the disk broke")
    time.sleep(0.5)
    sys.exit(int(order))
"""


@pytest.fixture
def met(three) -> Several:
    every = three(lambda index: [sys.executable, "-c", PEER])
    every.wait_for(lambda: all("met" in every.said(index) for index in range(3)))
    return every


@pytest.mark.parametrize("victim", [0, 2])
def test_the_other_processes_exit_when_one_is_killed(met, victim):
    met.all[victim].kill()
    others = [index for index in range(3) if index != victim]
    assert met.codes(*others) == [1, 1]
    for index in others:
        (line,) = [line for line in met.said(index).splitlines() if line != "met"]
        assert f"error: Process {victim} (on {socket.gethostname()}) is gone:" in line
        assert "Start the same command again on each" in line


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
def test_the_other_processes_exit_when_one_hangs(met, victim):
    met.all[victim].send_signal(signal.SIGSTOP)
    others = [index for index in range(3) if index != victim]
    assert met.codes(*others) == [1, 1]
    for index in others:
        (line,) = [line for line in met.said(index).splitlines() if line != "met"]
        assert f"error: Process {victim} (on {socket.gethostname()}) has sent no heartbeat" in line
        assert "for 3 s (--peer_timeout)" in line
    time.sleep(3.5)  # longer than it would have waited for the others
    met.all[victim].send_signal(signal.SIGCONT)
    assert met.codes(victim) == [1]
    assert ("is gone" if victim == 0 else "ended because this one") in met.said(victim)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("code", [1, 2])
def test_the_other_processes_exit_when_one_fails(met, victim, code):
    met.order(victim, str(code))
    assert met.codes(0, 1, 2) == [code, code, code]
    for index in {0, 1, 2} - {victim}:
        assert f"error: Process {victim} (on " in met.said(index)
        assert "ended with an error: the disk broke" in met.said(index)
        assert ("Start the same command again" in met.said(index)) == (code == 1)


@pytest.mark.long
def test_an_abort_of_jaxs_runtime_in_one_process_exits_1_in_all(met):
    met.order(1, "abort")
    assert met.codes(0, 1, 2) == [1, 1, 1]
    assert "jax's runtime aborted this process" in met.said(1)
    assert "Process 1" in met.said(0) and "Process 1" in met.said(2)


@pytest.mark.long
def test_processes_that_end_together_print_nothing(met):
    for index in range(3):
        met.order(index, "0")
    assert met.codes(0, 1, 2) == [0, 0, 0]
    assert [met.said(index) for index in range(3)] == ["met\n"] * 3


@pytest.mark.long
def test_processes_waiting_for_the_last_one_to_join_are_not_reported_as_gone(three):
    late = "import time; time.sleep(4)\n" + PEER
    every = three(lambda index: [sys.executable, "-c", late if index == 2 else PEER])
    every.wait_for(lambda: all("met" in every.said(index) for index in range(3)))
    time.sleep(1)
    assert [process.poll() for process in every.all] == [None] * 3, every.said(1)


@pytest.mark.long
def test_a_process_that_exits_0_before_the_others_is_named(met):
    met.order(2, "0")
    assert met.codes(0, 1) == [1, 1]
    assert "Process 2" in met.said(0) and "Process 2" in met.said(1)


def test_a_process_that_ends_waits_until_its_last_message_is_read():
    # The unread heartbeat resets the connection of a process that ends without waiting.
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    with other, accepted:
        other.sendall(b"\n")
        one = peers.Connection(accepted, 1)
        one.send({"gone": "why"})
        ending = threading.Thread(target=peers.finish, args=([one], runs.LONG))
        ending.start()
        ending.join(0.2)
        assert ending.is_alive()
        received = iter(lambda: other.recv(100), b"")  # until the end of the stream
        assert b"".join(received) == b'{"gone": "why"}\n'
        other.close()
        ending.join(runs.LONG)
        assert not ending.is_alive()


def test_a_process_that_ends_does_not_wait_for_one_that_hangs():
    one, hanging = socket.socketpair()
    with one, hanging:
        ending = threading.Thread(target=peers.finish, args=([peers.Connection(one, 1)], 0.1))
        ending.start()
        ending.join(runs.LONG)
        assert not ending.is_alive()


# Whole runs.

SLOW = """
import os, time, trainer.data

class Slow:
    def __init__(self):
        self._digits = trainer.data.digits(batch_size=99, crop=1)
    def __getattr__(self, name):
        return getattr(self._digits, name)
    def train(self, batch_index=0, seed=0):
        for batch in self._digits.train(batch_index, seed):
            if os.environ.get("BREAKS") == f"{batch_index} in {os.environ['JAX_PROCESS_ID']}":
                raise RuntimeError("the disk broke")
            time.sleep(float(os.environ["PAUSE"]))
            batch_index += 1
            yield batch

def slow() -> Slow:
    return Slow()
"""
DISTURBED = ["SIGKILL 1"]
if os.environ.get("CHAOS"):
    DISTURBED += ["SIGKILL 0", "SIGSTOP 0", "SIGSTOP 2", "12 in 0", "12 in 2"]


@pytest.fixture
def train(tmp_path, monkeypatch, three) -> Callable[..., Several]:
    (tmp_path / "lab_of_tests.py").write_text(SLOW)
    monkeypatch.setattr(runs, "LAB", f"{runs.LAB}:{tmp_path}")
    more = "experiment.data = @lab_of_tests.slow()\nmodels.mlp.num_classes = 10\n"
    config = runs.write_config(tmp_path, more + "experiment.steps = 40\n")

    def start(name: str, pause: float = 0, *more: str, **environment: str) -> Several:
        options = runs.options(config, tmp_path / name, "--vocabulary=lab_of_tests", *more)
        command = [sys.executable, "-m", "trainer", "--distributed", "--peer_timeout=10", *options]
        cache = str(tmp_path / "compiled")  # the same program in every one of these runs
        return three(
            lambda index: command,
            JAX_COMPILATION_CACHE_DIR=cache,
            PAUSE=str(pause),
            **environment,
        )

    return start


@pytest.mark.long
def test_a_run_of_three_processes_ends_with_the_same_bits_if_one_is_killed_stopped_or_fails(
    tmp_path, train
):
    whole = train("whole", 0, "--trace")
    assert whole.codes(0, 1, 2) == [0, 0, 0], whole.said(0)
    traced = (tmp_path / "whole" / "trace.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in traced] == list(range(1, 41))
    for number, disturbance in enumerate(DISTURBED):
        what, victim = disturbance.split()[0], int(disturbance.split()[-1])
        others = [index for index in range(3) if index != victim]
        workdir = tmp_path / f"run{number}"
        error = what.isdecimal()
        broken = train(workdir.name, 0.2, BREAKS=disturbance if error else "")
        if not error:
            steps = workdir / "checkpoints" / "8"
            broken.wait_for(steps.is_dir)
            broken.all[victim].send_signal(getattr(signal, what))
        assert broken.codes(*others) == [1, 1], disturbance
        for index in others:
            said = broken.said(index)
            assert len(re.findall("^error: ", said, re.MULTILINE)) == 1, said
            assert f"error: Process {victim} (on {socket.gethostname()}) " in said
            assert "Start the same command again on each" in said
            assert "Traceback" not in said
        if what == "SIGSTOP":
            broken.all[victim].send_signal(signal.SIGCONT)
        assert broken.codes(victim) == [-signal.SIGKILL if what == "SIGKILL" else 1]
        assert not any(checkpoint.check_leaves(workdir).values())
        again = train(workdir.name)
        assert again.codes(0, 1, 2) == [0, 0, 0], again.said(0)
        assert "Restored step " in again.said(0)
        assert checkpoint.diff_checkpoints(tmp_path / "whole", 40, 40, other=workdir) == []
        assert runs.lines(workdir) == runs.lines(tmp_path / "whole")
