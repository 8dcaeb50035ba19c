"""Plans for devices that are not here: what explain_cases.py found, and the options in between."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.runs import environment, python
from trainer import config as configs
from trainer.__main__ import main
from trainer.engine.collectives import Collective, axes_of_devices, find_collectives
from trainer.engine.memory import planned_memory
from trainer.engine.plan import make_plan
from trainer.engine.program import load_located


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("explained")
    printed = python("-m", "tests.explain_cases", str(folder), JAX_COMPILATION_CACHE_DIR="")
    cases = [json.loads(line) for line in printed.splitlines()]
    return {each.pop("case"): each for each in cases} | {"folder": folder}


def cells(text: str, start: str) -> list[str]:
    """The words of the line that begins with a text, which only one does after the plan."""
    (line,) = [
        each for each in text.partition("What each of")[2].splitlines() if each.startswith(start)
    ]
    return line.removeprefix(start).split()


@pytest.mark.long
def test_the_bytes_of_a_device_are_those_of_the_closed_form(found: dict[str, Any]):
    said = found["plan"]["out"]
    # 64 inputs, 8 hidden, 10 classes. Four devices split each first or longest dimension that they
    # divide, and not the 10 biases of the head; Adam keeps two float32 a parameter.
    kernels, biases = (64 * 8 + 8 * 8 + 8 * 10) // 4, (8 + 8) // 4 + 10
    params = 4 * (kernels + biases)
    assert cells(said, "embed/kernel") == (
        ["float32", "64x8", "fsdp", "-", "16x8", "512", "1,024", "512"]
    )
    assert cells(said, "head/bias") == ["float32", "10", "-", "10", "40", "80", "40"]
    assert cells(said, "parameters ") == [str(params)]
    # Of Adam's scalars, its count, the number of steps and that of skipped ones.
    assert cells(said, "optimizer state") == [f"{2 * params + 3 * 4:,}"]
    assert cells(said, "gradients (float32, if split as their parameters)") == [str(params)]
    batch = 32 // 8 * (64 * 4 + 4)
    assert cells(said, "one batch") == [f"{batch:,}"]
    assert "on 8 simulated devices" in said and found["plan"]["code"] == 0
    total = 4 * params + 3 * 4 + batch + 36
    assert f"{total:,} bytes of the 1 MB of a device: {10**6 - total:,} bytes remain" in said


@pytest.mark.long
def test_gradients_of_microbatches_are_held_in_float32(found: dict[str, Any]):
    said = found["compiled"]["out"]
    assert cells(said, "parameters ") == ["356"] and cells(said, "gradients (float32")[-1] == "712"


GPT = """
model: !models.gpt
  {vocab_size: 64, width: 64, depth: 5, num_heads: 4, max_length: 16, activation: swiglu,
   mlp_dim: 176}
data: !data.tokens
  {train: no/*.bin, validation: no/*.bin, train_tokens: 10000, vocab_size: 64, length: 16,
   batch_size: 16, eval_batch_size: 16, eval_tokens: 1000}
loss: !losses.softmax_cross_entropy
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group {match: block.*/kernel, optimizer: !optim.muon {learning_rate: 0.02}}
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 0.001}}
mesh: {data: 2, fsdp: 4, tensor: 2}
steps: 4
"""


@pytest.mark.long
def test_no_device_of_a_gpt_with_muon_gathers_all_matrices(tmp_path: Path):
    # XLA says so on standard error.
    (tmp_path / "gpt.yaml").write_text(GPT)
    options = [f"--config={tmp_path}/gpt.yaml", "--devices=16", "--compile"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "explain", *options],
        cwd=tmp_path,
        env=environment(JAX_COMPILATION_CACHE_DIR=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "A step was compiled for 16 simulated devices" in done.stdout
    assert "rematerialization" not in done.stderr


@pytest.mark.long
def test_a_compiled_plan_says_whose_compiler_it_is_and_what_devices_exchange(found: dict[str, Any]):
    said = found["compiled"]["out"]
    assert "memory of a device, as a CPU's compiler plans it: " in said
    assert "A step was compiled for 8 simulated devices in " in said and "and not run." in said
    assert cells(said, "all-gather")[0] == "fsdp"
    assert "This is the program of XLA's compiler for CPUs" in said


@pytest.mark.long
def test_what_does_not_fit_a_device_is_refused_and_gradients_alone_are_not(found: dict[str, Any]):
    small, tight = found["small"], found["tight"]
    assert small["code"] == 2 and "a device has 3,223 bytes of memory" in small["err"]
    assert "take 2,184 bytes on a device, a batch takes 1,040 bytes" in small["err"]
    assert "The largest parameters, each with its state, are embed/kernel (1,536 b" in small["err"]
    assert tight["code"] == 0 and "they do not fit beside each other" in tight["out"]


def test_a_mesh_that_does_not_fit_the_devices_is_refused_or_said(found: dict[str, Any]):
    assert "uses 2 of the 8 devices." in found["fewer"]["out"]
    assert found["uneven"]["code"] == 2 and "product 3 does not divide" in found["uneven"]["err"]
    assert "needs a process of its own" in found["others"]["err"] and found["others"]["code"] == 2


def test_factors_of_a_state_have_lines_of_their_own(found: dict[str, Any]):
    said = found["factors"]["out"]
    assert any("left" in line and "64x64" in line for line in said.splitlines())


def test_what_lies_where_is_drawn(found: dict[str, Any]):
    drawn = (found["folder"] / "mesh.svg").read_text()
    for words in ("One of 8 devices (mesh data 2 x fsdp 4)", "embed/kernel", "64 / 4", "fsdp (4)"):
        assert words in drawn
    assert (found["folder"] / "mesh.png").read_bytes()[:4] == b"\x89PNG"
    assert found["suffix"]["code"] == 2
    assert "its suffix is not one of .png, .pdf, .svg." in found["suffix"]["err"]


def test_the_collectives_of_a_program_are_counted_with_their_loops_and_axes(found: dict[str, Any]):
    block = 4 * 8 * 4  # bytes of [4, 8] in float32
    assert sorted(found["collectives"]["found"]) == sorted(
        [
            ["all-reduce", "tensor", 5, 5 * block],
            ["all-reduce", "data, tensor", 1, block // 2],
            ["all-gather", "fsdp", 1, 2 * block],
            ["collective-permute", "data", 1, block],
            ["all-to-all", "fsdp", 1, block],
            ["reduce-scatter", "tensor", 1, block // 2],
        ]
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),  # 0 and 4, 1 and 5
        ("[2,4]<=[8]", ("fsdp", "tensor")),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("[4,2]<=[2,2,2]", ("tensor",)),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("fsdp",)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data", "fsdp")),
    ],
)
def test_every_notation_of_groups_is_read(groups: str, axes: tuple[str, ...]):
    line = f"  %x = bf16[3,5]{{1,0}} all-gather(%y), channel_id=1, replica_groups={groups}, a=b"
    (one,) = find_collectives(f"ENTRY %main (y: f32[]) -> f32[] {{\n{line}\n}}\n")
    assert (one.size, one.times) == (30, 1)
    assert axes_of_devices(one, {"data": 2, "fsdp": 2, "tensor": 2}) == axes
    assert axes_of_devices(Collective("all-gather", 1, 1, None), {"data": 2}) is None


CONFIG = """
model: !models.mlp {width: 8}
data: !data.digits {batch_size: 32}
loss: !losses.softmax_cross_entropy
optimizer: !optim.optimizer
  groups:
    kernels: !optim.group
      match: .*kernel
      optimizer: !optim.chain
        learning_rate: 1.0e-3
        before: [!parts.momentum {}]
        after: [!parts.pin_radius {}]
    rest: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.1}}
steps: 4
"""


def test_first_parameters_are_not_computed_for_other_devices(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    program = load_located(configs.load([str(file)]))
    told = [x for x in make_plan(program).warnings if "keeps the norms of matrices" in x]
    assert not told
    elsewhere = make_plan(program, memory=planned_memory(None))
    assert sum("keeps the norms of matrices" in x for x in elsewhere.warnings) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--devices=0"], "'0' is not a number of devices; write a whole number from 1 to 4096"),
        (["--devices=-8"], "'-8' is not a number of devices"),
        (["--devices=4097"], "'4097' is not a number of devices"),
        (["--devices=8", "--device_memory=80"], "'80' is not the memory of a device; write a n"),
        (["--devices=8", "--device_memory=0GB"], "'0GB' is not the memory of a device"),
        (["--devices=8", "--device_memory=80Gb"], "'80Gb' is not the memory of a device"),
        (["--device_memory=80GB"], "write --devices=N --device_memory=SIZE"),
        (["--devices_figure=a.svg"], "write --devices=N --devices_figure=a.svg"),
        (["--devices=8"], "--devices=8 needs a process of its own"),  # jax runs in this one
    ],
)
def test_mistakes_in_the_options_are_named(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    (tmp_path / "config.yaml").write_text(CONFIG)
    jax.devices()  # from here on, this process keeps the devices that it has
    try:
        code = main(["explain", f"--config={tmp_path}/config.yaml", *options])
    except SystemExit as caught:
        code = caught.code
    said = capsys.readouterr().err
    assert code == 2 and words in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("79.6GiB", 85_469_849_190),
        ("500MB", 5 * 10**8),
        ("1.5 TB", 1_500_000_000_000),
    ],
)
def test_sizes_of_memory(text: str, size: int):
    from trainer.cli import values

    assert values.memory(text) == size
