"""Plans for GPUs and TPUs that are not here; target_cases.py compiles for them."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep as ls
from tests import runs
from tests.runs import ROOT, python
from trainer.__main__ import main
from trainer.engine import targets
from trainer.engine.targets import KINDS, Gpu, Target, parse
from trainer.messages import UserError

INSTALLED = targets.compilers_folder().is_dir()
compilers = pytest.mark.skipif(
    not INSTALLED, reason="XLA's compilers are not installed: `make targets` adds them."
)


def found(case: str) -> dict[str, Any]:
    """Runs a case in a process of its own."""
    printed = python("-m", "tests.target_cases", case, JAX_COMPILATION_CACHE_DIR="")
    return json.loads(printed.splitlines()[-1])


# The devices of each are those that `jax.experimental.topologies` lists with libtpu 0.0.42.
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("h100", 1),
        ("h100:8", 8),
        ("v5e", 1),
        ("v5e:4x4", 16),
        ("v3:2x2", 8),
        ("v4:2x2x1", 8),
        ("v5p:4x4x4", 64),
        ("tpu7x:2x2x1", 8),
    ],
)
def test_a_target_has_the_devices_that_its_compiler_lists(text: str, count: int) -> None:
    assert parse(text).count == count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10", "'h10' is no target. Did you mean 'h100'?"),
        ("v5litepod", "There are: a100, b200, h100, h200, tpu7x, v2, v3, v4, and 3 more"),
        ("abacus", "There are: a100, b200,"),
        ("v5e:16", "after v5e: the number of chips in each direction, as in v5e:4x4."),
        ("v5p:4x4", "as in v5p:4x4x4."),
        ("h100:0", "after h100: the number of GPUs, as in h100:8."),
        ("h100:2x4", "the number of GPUs"),
    ],
)
def test_a_text_that_is_no_target_is_a_mistake(text: str, said: str, capsys: Any) -> None:
    with pytest.raises(UserError) as raised:
        parse(text)
    assert said in str(raised.value)
    with pytest.raises(SystemExit, match="2"):
        main(["explain", f"--target={text}"])
    assert said in capsys.readouterr().err


def test_the_list_has_every_target_with_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--target=list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0].partition(":")[0] for row in rows] == list(KINDS)
    assert [parse(row[0]).kind for row in rows] == list(KINDS)
    # 85 * 10**9 bytes, and what XLA says when a program is too large for a v5e.
    assert {row[0]: row[-1] for row in rows}["h100:8"] == "79.16"
    assert {row[0]: row[-1] for row in rows}["v5e:4x4"] == "15.75"


def test_a_run_may_use_the_part_of_a_gpu_that_jax_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert Target("h100", "1").limit == 0.75 * 85 * 10**9
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    assert Target("h100", "1").limit == 0.5 * 85 * 10**9
    assert Target("v5e", "1x1").limit == 15.75 * 2**30


def test_pip_is_told_the_versions_that_belong_to_this_jax() -> None:
    needs = importlib.metadata.requires("jax") or []
    (tpu,) = [re.split("[=;]+", each)[1] for each in needs if each.startswith("libtpu")]
    wanted = targets.packages()
    assert f"libtpu=={tpu}" in wanted
    version = importlib.metadata.version("jax")
    assert {f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"} < {*wanted}


@pytest.mark.parametrize(("target", "name"), [("h100", "jax-cuda13-plugin"), ("v5e:2x2", "libtpu")])
def test_compilers_that_are_missing_or_of_another_jax_are_named_with_the_command(
    target: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(targets.FOLDER, str(tmp_path / "compilers"))
    with pytest.raises(UserError, match=f"has no {name}. Install it with `make targets`, or"):
        targets.find_compilers(parse(target))
    folder = tmp_path / "compilers" / f"{name.replace('-', '_')}-0.0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.1\n")
    with pytest.raises(UserError, match=rf"(?s)has {name} 0.0.1, not {name}==.* --target .*cudnn"):
        targets.find_compilers(parse(target))
    assert str(tmp_path / "compilers") not in sys.path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target=h100:8", "--devices=8"], "leave out --devices"),
        (["--target=h100:8", "--device_memory=80GB"], "leave out --device_memory"),
    ],
)
def test_options_that_say_the_same_are_refused(options: list[str], said: str, capsys: Any) -> None:
    assert said in runs.refused(capsys, "explain", "--config=lockstep:muon_vit.yaml", *options)


@pytest.mark.parametrize("options", [[], ["--check"], ["--dry_run", "--target=list"]])
def test_a_sweep_is_only_planned_for_a_target(options: list[str], capsys: Any) -> None:
    file = ROOT / "experiments" / "muon_mlp" / "sweep.yaml"
    assert main(["sweep", f"--config={file}", "--target=h100", *options]) == 2
    assert "write --dry_run --target=h100, or another" in capsys.readouterr().err


def test_a_call_from_python_names_its_arguments() -> None:
    file = ROOT / "configs" / "muon_vit.yaml"
    with pytest.raises(UserError, match="^'h10' is no target. Did you mean 'h100'"):
        ls.explain(file, target="h10")
    with pytest.raises(UserError, match="^target has .* leave out devices.$"):
        ls.explain(file, target="h100:8", devices=8)


def test_other_commands_do_not_import_targets() -> None:
    code = "import sys; from trainer.cli import commands, options; options.parser()\n"
    code += "from trainer.engine import explanation; print('trainer.engine.targets' in sys.modules)"
    assert python("-c", code) == "False\n"


def test_what_describes_a_gpu_has_its_numbers() -> None:
    h100 = KINDS["h100"]
    assert isinstance(h100, Gpu)
    fields = dict(re.findall(r"(\w+): (\S+)$", h100.described, re.MULTILINE))
    assert (fields["core_count"], fields["device_memory_size"]) == ("132", "85000000000")
    assert (fields["memory_bandwidth"], fields["l2_cache_size"]) == ("3350000000000", "52428800")
    assert fields["shared_memory_per_block_optin"] == "232448"  # as CUDA reports it
    for gpu in (device for device in KINDS.values() if isinstance(device, Gpu)):
        fields = dict(re.findall(r"(\w+): (.+)$", gpu.described, re.MULTILINE))
        assert fields["device_description_str"] == f'"{gpu.name}"'
        assert fields["device_memory_size"] == str(gpu.memory)


@compilers
@pytest.mark.long
def test_a_step_for_eight_gpus_is_compiled_and_fits() -> None:
    said = found("gpus")
    assert said["code"] == 0, said["err"]
    assert "A step was compiled for 8 NVIDIA H100 80GB HBM3 devices in " in said["out"]
    assert (
        "a device (NVIDIA H100 80GB HBM3, of which jax takes 75%) has 63.8 GB: it fits"
        in said["out"]
    )
    assert "fsdp" in said["out"].partition("What the devices exchange in a step")[2]
    assert "compiler for CPUs" not in said["out"]


@compilers
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "devices"),
    [("hosts of tpus", "16 TPU v5e devices"), ("one tpu", "1 TPU v6e device")],
)
def test_tpus_of_several_hosts_and_a_single_one_are_planned(case: str, devices: str) -> None:
    said = found(case)
    assert said["code"] == 0, said["err"]
    assert f"A step was compiled for {devices} in " in said["out"]


@compilers
@pytest.mark.long
def test_what_does_not_fit_is_refused_with_microbatches_that_do() -> None:
    said = found("too large")
    assert said["code"] == 2
    assert re.search(r"does not fit. With --set microbatches=\d+ it needs .*and fits", said["err"])


@compilers
@pytest.mark.long
def test_a_function_that_asks_jax_for_its_devices_is_named_with_what_to_ask() -> None:
    said = found("asking")
    assert said["code"] == 2
    assert "jax.default_backend() tells of this machine, and the program is for NV" in said["err"]
    assert "trainer.constraints.device(), which is what will compute it" in said["err"]
    assert "asking.py:6)" in said["err"]


@compilers
@pytest.mark.long
def test_a_sweep_says_how_many_trials_fit_side_by_side() -> None:
    said = found("sweep")
    assert said["code"] == 0, said["err"]
    rest = said["out"].partition("on a device (NVIDIA H100 80GB HBM3, of which jax takes")[2]
    assert "a step" not in rest.splitlines()[1]
    fit = int(rest.splitlines()[2].split()[-1].replace(",", ""))
    # Parameters and two moments of 64 inputs, 64 and 64 units and 10 classes, in float32; and half
    # of the memory for states, which counters of some 50 bytes are a part of.
    numbers = 3 * (64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10)
    assert fit == pytest.approx(0.5 * 0.75 * 85e9 / (4 * numbers), rel=0.002)


@compilers
@pytest.mark.long
def test_a_sweep_of_runs_that_do_not_fit_is_refused() -> None:
    said = found("sweep too large")
    assert said["code"] == 2
    text = r"The run adamw/0000\S* does not fit: it needs ([\d.]+) GB, and .* has 16.9 GB."
    needed = re.search(text, said["err"])
    assert needed is not None and 17 < float(needed[1]) < 40
    assert re.search(r"^ +1 .* none$", said["out"], re.MULTILINE)


@compilers
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "said"),
    [("uneven", "there are 8 gpu devices"), ("no such shape", "no v5e of the shape 3x3")],
)
def test_meshes_and_shapes_that_do_not_exist_are_mistakes(case: str, said: str) -> None:
    answer = found(case)
    assert answer["code"] == 2 and said in answer["err"]
    assert len(answer["err"].splitlines()) <= 12


@compilers
@pytest.mark.long
@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
def test_collectives_have_the_bytes_of_their_results_and_count_in_loops(target: str) -> None:
    # A device has float32 [8, 16], of which four devices make [32, 16]. The compiler for TPUs adds
    # up whole arrays and keeps a part.
    scattered = ("reduce-scatter", (1, 512)) if target == "h100:8" else ("all-reduce", (1, 2048))
    assert {(kind, axes): (count, size) for kind, axes, count, size in found(target)} == {
        ("all-gather", "fsdp"): (6, 6 * 2048),
        ("all-reduce", "data, fsdp"): (1, 512),
        (scattered[0], "fsdp"): scattered[1],
        ("all-to-all", "fsdp"): (1, 512),
        ("collective-permute", "fsdp"): (1, 512),
    }


@compilers
@pytest.mark.long
def test_attention_by_cudnn_compiles_and_other_dtypes_and_odd_lengths_go_without() -> None:
    cases = found("attention")
    for case in cases.values():
        assert case["shapes"] == case["plain"]
    calls = {name: case["calls"] for name, case in cases.items()}
    with_cudnn = {name for name, count in calls.items() if count >= 2}  # forward and backward
    assert with_cudnn == {"bfloat16", "chosen", "grouped", "heads divided", "keys whole"}
    assert calls["float32"] == calls["odd"] == 0
