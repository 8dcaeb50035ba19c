"""Runs whose mesh crosses processes: deaths at every moment, and restarts with other processes.

`make chaos_distributed` sets CHAOS=1, which adds the deaths.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from tests import compiled_programs, runs
from tests.processes import Several, explicit, free_port
from trainer import checkpoint
from trainer.messages import UserError
from trainer.train import multihost
from trainer.workdir import fingerprint_differences
from trainer.workdir.fingerprint import RunChanged, refuse_changes

CONFIG = """
experiment.data = @data.digits()
data.digits.batch_size = 96
data.digits.crop = 1
models.mlp.num_classes = 10
experiment.steps = 12
experiment.mesh = {'data': 2, 'fsdp': 2}
"""
chaos = pytest.mark.skipif("CHAOS" not in os.environ, reason="make chaos_distributed runs it")
Start = Callable[..., Several]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes of a run with 4 devices in all; none of them outlives the test."""
    config = runs.write_config(tmp_path, CONFIG)
    started: list[Several] = []

    def begin(
        name: str,
        variables: list[dict[str, str]],
        *more: str,
        devices: int | None = None,
        victim: int | None = None,
        dying: str = "",
    ) -> Several:
        many = compiled_programs.xla_flags(devices or 4 // len(variables))
        distributed = ["--distributed", "--peer_timeout=20"] if len(variables) > 1 else []
        words = [*distributed, *runs.options(config, tmp_path / name, *more)]

        def command(index: int) -> list[str]:
            begins = ["-c", dying] if index == victim else ["-m", "trainer"]
            return [sys.executable, *begins, *words]

        every = Several(
            tmp_path,
            command,
            variables,
            XLA_FLAGS=many,
            # A process that dies while it compiles needs programs that are not kept.
            JAX_COMPILATION_CACHE_DIR="" if "compile" in dying else str(tmp_path / "compiled"),
        )
        started.append(every)
        return every

    yield begin
    for one in started:
        one.kill()


def slurm(count: int) -> list[dict[str, str]]:
    """Returns what srun sets for tasks on this machine, and a port."""
    every = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    return [every | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(count)]


def open_mpi(count: int) -> list[dict[str, str]]:
    """Returns what mpirun of Open MPI 4 sets for processes on this machine, and a port."""
    every = {
        "OMPI_MCA_orte_hnp_uri": "514195456.0;tcp://127.0.0.1:53623;tcp6://[fd00::2]:40417",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [every | {name: str(i) for name in names} for i in range(count)]


def values(workdir: Path, step: int) -> dict[str, Any]:
    return runs.leaves(checkpoint.load_params(workdir, step, "params"))


@pytest.mark.long
def test_processes_found_by_slurm_and_by_open_mpi_and_four_instead_of_two_have_the_same_bits(
    tmp_path: Path, start: Start
) -> None:
    whole = start("whole", slurm(2))
    assert whole.codes() == [0, 0], whole.said(0)
    assert start("parts", open_mpi(2), "--until=6").codes() == [75, 75]
    four = start("parts", explicit(4), "--allow_changed=processes")
    assert four.codes() == [0] * 4, four.said(0)
    assert "Restored step 6." in four.said(0)
    assert checkpoint.diff_checkpoints(tmp_path / "whole", 12, 12, other=tmp_path / "parts") == []
    assert runs.lines(tmp_path / "parts") == runs.lines(tmp_path / "whole")


@pytest.mark.long
def test_two_processes_begin_with_the_parameters_of_another_run(
    tmp_path: Path, start: Start
) -> None:
    assert start("first", explicit(1), "--set", "steps=4").codes() == [0]
    begun = "warm_start=" + str({"from": str(tmp_path / "first")})
    two, one = (start(f"of {n}", explicit(n), "--set", begun) for n in (2, 1))
    assert two.codes() == [0, 0], two.said(1)
    assert one.codes() == [0], one.said(0)
    assert checkpoint.diff_checkpoints(tmp_path / "of 2", 0, 0, other=tmp_path / "of 1") == []


# Restarts: what is refused.


def _print(processes: int, shards: int, devices: str = "4 x cpu cpu") -> dict[str, Any]:
    return {"processes": processes, "data_shards": shards, "devices": devices}


def test_another_number_of_processes_is_allowed_only_with_equal_parts_and_devices() -> None:
    def kinds(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
        return {change.key: change.kind for change in fingerprint_differences(old, new)}

    assert kinds(_print(2, 1), _print(4, 1)) == {"processes": "bits"}
    assert kinds(_print(2, 2), _print(4, 4))["processes"] == "data"
    # The devices of one process add in another order.
    assert kinds(_print(2, 1), _print(1, 1))["processes"] == "data"
    assert kinds(_print(1, 1), _print(2, 1))["processes"] == "data"
    assert kinds(_print(2, 1), _print(4, 1, "8 x cpu cpu"))["processes"] == "data"
    # A run of an earlier version, which did not record the parts.
    assert kinds({"processes": 2, "devices": "4 x cpu cpu"}, _print(4, 1))["processes"] == "data"
    assert kinds({"processes": 2}, {"processes": 2, "data_shards": 2}) == {}


def test_a_refusal_of_other_processes_says_what_may_differ(tmp_path: Path) -> None:
    changes = fingerprint_differences(_print(2, 2), _print(1, 1))
    with pytest.raises(RunChanged) as refused:
        refuse_changes(tmp_path, changes, [])
    said = str(refused.value).splitlines()
    assert said[1] == "  processes: 2 -> 1"
    assert said[2].startswith("With another number of processes, sums over devices may be rounded")
    assert said[-1].endswith("--allow_changed=processes.")
    refuse_changes(tmp_path, changes, ["processes"])


@chaos
def test_a_run_of_two_processes_goes_on_in_one_and_on_another_mesh(
    tmp_path: Path, start: Start
) -> None:
    assert start("whole", explicit(2)).codes() == [0, 0]
    expected = values(tmp_path / "whole", 12)
    for name, count, options in (
        ("one", 1, ["--allow_changed=processes"]),
        ("mesh", 2, ["--set", "mesh={'data': 1, 'fsdp': 4}", "--allow_changed=mesh"]),
        ("less", 2, ["--set", "mesh={'data': 4}", "--allow_changed=mesh"]),
    ):
        assert start(name, explicit(2), "--until=6").codes() == [75, 75]
        if name != "one":
            refused = start(name, explicit(2), *options[:2])
            assert refused.codes() == [2, 2]
            assert "mesh.fsdp: 2 -> " in refused.said(0), refused.said(0)
        again = start(name, explicit(count) if count > 1 else [{}], *options)
        assert set(again.codes()) == {0}, again.said(0)
        for path, value in values(tmp_path / name, 12).items():
            np.testing.assert_allclose(value, expected[path], rtol=1e-4, atol=1e-6)


# Processes that disagree.


def test_processes_with_other_numbers_or_kinds_of_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def devices(*each: str) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(process_index=index, platform=kind)
            for index, kinds in enumerate(each)
            for kind in kinds.split()
        ]

    monkeypatch.setattr(jax, "devices", lambda: devices("gpu gpu", "gpu gpu"))
    multihost._check_devices()
    monkeypatch.setattr(jax, "devices", lambda: devices("gpu gpu", "gpu gpu", "gpu"))
    with pytest.raises(UserError, match="Process 0 has 2 gpu devices, and process 2 has 1 gpu dev"):
        multihost._check_devices()
    monkeypatch.setattr(jax, "devices", lambda: devices("gpu", "cpu"))
    with pytest.raises(UserError, match="Process 0 has 1 gpu device, and process 1 has 1 cpu dev"):
        multihost._check_devices()


def test_a_workdir_that_a_process_does_not_see_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    file.write_text("{}")
    monkeypatch.setattr(multihost, "_VISIBLE", 0.2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost, "raise_on_all", lambda make: make())
    monkeypatch.setattr(multihost, "broadcast_from_host0", lambda own: own)
    multihost.check_seen(file)
    monkeypatch.setattr(multihost, "broadcast_from_host0", lambda own: own + 1)
    with pytest.raises(UserError, match=r"does not see the run.json .* machines share\."):
        multihost.check_seen(file)


# Deaths. Each of these is where a process of four kills itself, at the n-th call of a function.

DEATHS = {
    "joining": ("jax.distributed", "initialize", 1),
    "compiling": ("trainer.engine.program", "Program.compile", 1),
    "step": ("trainer.engine.program", "Program.advance", 3),
    "before a checkpoint": ("trainer.checkpoint", "Checkpoints.save", 2),
    "in a checkpoint": ("trainer.checkpoint", "Checkpoints.save", 2),
    "evaluation": ("trainer.engine.evaluation", "Evaluation.run_splits", 2),
    "end": ("trainer.train.peers", "Peers.leave", 1),
}
DYING = """
import importlib, os, signal, sys

moment, module, path, left = {moment!r}, {module!r}, {path!r}, {left!r}
*owners, name = path.split(".")
place = importlib.import_module(module)
for owner in owners:
    place = getattr(place, owner)
original = getattr(place, name)

def dies(*given, **named):
    global left
    left -= 1
    if not left:
        if moment.startswith("in "):
            original(*given, **named)
        print("dies in", moment, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*given, **named)

setattr(place, name, dies)
from trainer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@chaos
@pytest.mark.timeout(3600)
def test_a_death_at_any_moment_ends_all_four_and_a_restart_has_the_same_bits(
    tmp_path: Path, start: Start
) -> None:
    assert start("whole", explicit(4)).codes() == [0] * 4
    for number, (moment, (module, path, left)) in enumerate(DEATHS.items()):
        for victim in (0, 3):
            name, others = f"run{number}{victim}", sorted({0, 1, 2, 3} - {victim})
            dying = DYING.format(moment=moment, module=module, path=path, left=left)
            broken = start(name, explicit(4), victim=victim, dying=dying)
            assert broken.codes(*others) == [1, 1, 1], (moment, victim, broken.said(others[0]))
            assert broken.codes(victim) == [-signal.SIGKILL], (moment, broken.said(victim))
            for index in others:
                (line,) = [x for x in broken.said(index).splitlines() if x.startswith("error: ")]
                assert f"Process {victim} (on {socket.gethostname()}) is gone" in line, moment
                assert "Start the same command again on each" in line
                assert "Traceback" not in broken.said(index)
            again = start(name, explicit(4))
            assert again.codes() == [0] * 4, (moment, victim, again.said(0))
            assert (
                checkpoint.diff_checkpoints(tmp_path / "whole", 12, 12, other=tmp_path / name) == []
            )
            assert runs.lines(tmp_path / name) == runs.lines(tmp_path / "whole")
