"""Processes that a mesh's axis "tensor" divides read the same examples.

shard_cases.py trains one config on one mesh and another, in one process and in two.
"""

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import compiled_programs, runs, shard_cases

pytestmark = pytest.mark.long


def start(folder: Path, *meshes: str, devices: int, **variables: str) -> subprocess.Popen[str]:
    env = runs.environment(
        XLA_FLAGS=compiled_programs.xla_flags(devices),
        JAX_COMPILATION_CACHE_DIR="",  # see runs.findings
        **variables,
    )
    command = [sys.executable, "-m", "tests.shard_cases", str(folder), *meshes]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=runs.ROOT, env=env, stdout=pipe, stderr=pipe, text=True)


def found(process: subprocess.Popen[str]) -> dict[str, dict[str, Any]]:
    """Waits for a process; returns mesh -> what it found."""
    try:
        out, said = process.communicate(timeout=runs.LONG)
    finally:
        process.kill()
    assert process.returncode == 0, said[-3000:]
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {row["mesh"]: row for row in rows}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Any, list[Any]]:
    """Runs of one process with four devices, and then of two with two each."""
    folder = tmp_path_factory.mktemp("shards")
    for name in ("alone", "together"):
        (folder / name).mkdir()
        (folder / name / "config.yaml").write_text(shard_cases.CONFIG)
    alone = found(start(folder / "alone", "one", "across", devices=4))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}"}
    variables["JAX_NUM_PROCESSES"] = "2"
    meshes = ("across", "within")
    both = [
        start(folder / "together", *meshes, devices=2, JAX_PROCESS_ID=str(index), **variables)
        for index in range(2)
    ]
    with contextlib.ExitStack() as started:
        for process in both:
            started.enter_context(process)
            started.callback(process.kill)
        return folder, alone, [found(process) for process in both]


def samples(workdir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_processes_that_tensor_divides_read_the_same_examples(trained):
    _, alone, (first, second) = trained
    assert first["across"]["shard"] == second["across"]["shard"] == [0, 1]
    whole = alone["one"]["batches"]
    assert len(set(whole)) == 8
    assert first["across"]["batches"] == second["across"]["batches"] == whole
    assert (first["within"]["shard"], second["within"]["shard"]) == ([0, 2], [1, 2])
    for one, other in zip(first["within"]["batches"], second["within"]["batches"], strict=True):
        assert one != other


def test_the_fingerprint_of_the_data_is_that_of_one_process_in_every_process(trained):
    folder, alone, both = trained
    of_one = alone["one"]["fingerprint"]
    assert of_one.startswith("batches ")
    for process in both:
        assert {mesh["fingerprint"] for mesh in process.values()} == {of_one}
        assert all(mesh["same"] for mesh in process.values())  # a batch beside the stream
    for run in ("alone/one", "together/across", "together/within"):
        record = json.loads((folder / run / "run.json").read_text())
        assert record["fingerprint"]["data"] == of_one


@pytest.mark.parametrize("mesh", ["across", "within"])
def test_a_run_of_two_processes_with_a_tensor_axis_is_that_of_one(trained, mesh):
    """Training, evaluation and texts, also of a run that stopped and was resumed."""
    folder, alone, both = trained
    assert [process[mesh]["ends"] for process in both] == [[75, 0]] * 2
    assert alone["one"]["ends"] == alone["across"]["ends"] == [0]
    rows = runs.lines(folder / "together" / mesh)
    assert rows == runs.lines(folder / "alone" / "across")  # the bits of one process
    one = runs.lines(folder / "alone" / "one")  # and up to rounding those of one device
    assert [list(row) for row in rows] == [list(row) for row in one]
    for ours, known in zip(rows, one, strict=True):
        assert list(ours.values()) == pytest.approx(list(known.values()), rel=2e-5)
    evaluated = [row["validation/loss"] for row in rows if "validation/loss" in row]
    assert len(evaluated) == 2 and np.isfinite(evaluated).all()
    texts = samples(folder / "together" / mesh)
    assert [row["step"] for row in texts] == [4, 8]
    assert texts == samples(folder / "alone" / "one") == samples(folder / "alone" / "across")


OLD = """
import letters
class Old(letters.Text):
    def evaluate(self, split):
        return super().evaluate(split)
def old() -> Old:
    return Old()
"""


@pytest.mark.long
def test_a_data_set_that_takes_no_part_is_refused_where_tensor_divides_processes(
    tmp_path, monkeypatch
):
    (tmp_path / "lab_of_tests.py").write_text(OLD)
    monkeypatch.setattr(runs, "LAB", f"{runs.LAB}:{tmp_path}")
    config = tmp_path / "old.yaml"
    config.write_text(
        shard_cases.CONFIG.replace("!letters.uneven", "!lab_of_tests.old") + "mesh: {tensor: 2}\n"
    )
    options = [f"--config={config}", "--vocabulary=letters", "--vocabulary=lab_of_tests"]
    both = runs.start_two([*options, f"--workdir={tmp_path / 'run'}"], tmp_path)
    assert runs.ends(both) == [2, 2]
    for index in range(2):
        said = (tmp_path / f"log{index}").read_text()
        assert "error:" in said, said
        assert f"error: {config}:3: On this mesh, process {index} of 2 needs part 0 of 1" in said
        assert "But evaluate() of the data set cannot be asked for a part." in said
        assert "evaluate(self, split, rank=0, size=1)" in said
        assert "which has 1 device." in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()
