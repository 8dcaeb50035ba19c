"""`ls.explain` of devices that are not here, from a process that already uses its own."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import lockstep as ls
from tests import compiled_programs, short
from tests.runs import LONG, ROOT, environment
from trainer import config as configs
from trainer.engine.explanation import explain, from_json, to_json
from trainer.engine.program import load_located

MLP = """
model: !models.mlp {width: 8}
data: !data.digits {batch_size: 32, crop: 0}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw
  learning_rate: !schedules.warmup_cosine {peak_value: 1e-3, warmup_steps: 0}
mesh: {data: 2, fsdp: 4}
steps: 4
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("planned") / "mlp.yaml"
    file.write_text(MLP)
    return file


@pytest.fixture(scope="module")
def compiled(file: Path) -> ls.Plan:
    return ls.explain(ls.load_config(file), devices=8, device_memory=10**6, compile=True)


@pytest.mark.long
def test_the_bytes_of_a_device_are_numbers_of_the_closed_form(compiled: ls.Plan):
    # 64 inputs, 8 hidden, 10 classes. Four devices split each first or longest dimension that they
    # divide, and not the 10 biases of the head; Adam keeps two float32 a parameter, and three
    # scalars are its count, the number of steps and that of skipped ones.
    params = 4 * ((64 * 8 + 8 * 8 + 8 * 10) // 4 + (8 + 8) // 4 + 10)
    batch = 32 // 8 * (64 * 4 + 4)
    found = compiled.placement
    assert (found.parameters, found.state, found.gradients) == (params, 2 * params + 12, params)
    assert found.batch == batch and found.total == sum(found.sizes.values())
    assert found.total == 4 * params + 12 + batch + found.sizes["counters and inputs"]
    assert found.mesh == {"data": 2, "fsdp": 4} and found.memory == 10**6
    row = found.leaves.loc["embed/kernel"]
    assert (row["shape"], row["shard"], row["sharding"]) == ((64, 8), (16, 8), "fsdp -")
    assert (row["bytes"], row["state_bytes"], row["gradient_bytes"]) == (512, 1024, 512)
    assert found.leaves.loc["image", "bytes"] == 32 // 8 * 64 * 4
    assert compiled.parameters["embed/kernel"].sharding == "fsdp, -"
    assert compiled.parameters["embed/kernel"].shape == (64, 8)


@pytest.mark.long
def test_the_compiled_step_is_that_of_a_cpu_and_its_collectives_have_axes(compiled: ls.Plan):
    step = compiled.compiled
    assert step.platform == "cpu" and step.seconds > 0 and step.memory.temporary > 0
    assert {each.kind for each in step.traffic} >= {"all-gather", "all-reduce"}
    assert all(each.size > 0 and each.axes != "?" for each in step.traffic)
    assert compiled.fits is True and step.memory.total <= 10**6
    assert "as a CPU's compiler plans it" in repr(compiled)
    assert "as a CPU&#x27;s compiler plans it" in compiled._repr_html_()


@pytest.mark.long
def test_this_process_keeps_its_devices(compiled: ls.Plan):
    assert len(jax.devices()) == 1 and compiled.placement.mesh == {"data": 2, "fsdp": 4}
    assert jax.config.values["jax_num_cpu_devices"] != 8


@pytest.mark.long
def test_a_plan_prints_what_the_command_prints(compiled: ls.Plan, file: Path):
    words = ["--devices=8", "--device_memory=1MB", "--compile", f"--config={file}"]
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "explain", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def timeless(text: str) -> list[str]:
        """The lines without that of the seconds."""
        return [x for x in text.splitlines() if x and " was compiled for 8 simulated" not in x]

    assert timeless(repr(compiled)) == timeless(done.stdout)
    assert set(timeless(compiled.text)) < set(timeless(done.stdout))


@pytest.mark.long
def test_what_lies_where_is_drawn_in_a_notebook_and_saved(compiled: ls.Plan, tmp_path: Path):
    for drawn in (compiled.placement._repr_svg_(), compiled._repr_html_()):
        for words in ("One of 8 devices (mesh data 2 x fsdp 4)", "of its 1 MB", "64 / 4"):
            assert words in drawn
    assert "<?xml" not in compiled._repr_html_()
    compiled.placement.save(tmp_path / "mesh.png")
    assert (tmp_path / "mesh.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ls.UserError, match="its suffix is not one of .png, .pdf, .svg"):
        compiled.placement.save(tmp_path / "mesh.txt")
    assert "What each of 8 devices holds" in repr(compiled.placement)


@pytest.mark.long
def test_what_does_not_fit_a_device_is_refused_and_gradients_alone_are_not(file: Path):
    config = ls.load_config(file)
    config["model"] = ls.call.models.mlp(width=8)
    with pytest.raises(ls.UserError) as refused:
        ls.explain(config, devices=8, device_memory=3235)
    said = str(refused.value)
    assert said.startswith("config['model']: The parameters and the state of the optimizer take")
    assert "a device has 3,235 bytes of memory" in said
    tight = ls.explain(config, devices=8, device_memory="3.236kB")
    assert tight.fits is False and tight.placement.memory == 3236 and tight.compiled is None
    assert "they do not fit beside each other" in tight.text


@pytest.mark.long
def test_a_mesh_that_does_not_divide_the_devices_is_an_error_of_the_call(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    # As in a notebook that has reserved the memory of its GPU, which a plan does not need.
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    config = ls.load_config(file, set={"mesh": {"data": -1, "fsdp": 3}})
    with pytest.raises(ls.UserError, match="product 3 does not divide") as refused:
        ls.explain(config, devices=8)
    assert "ls.explain(config, devices=N) plans it" in str(refused.value)
    assert "--" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"devices": 0}, "devices: '0' is not a number of devices; write a whole number from 1"),
        ({"devices": 2.5}, "devices: '2.5' is not a number of devices"),
        ({"devices": 8, "device_memory": "80"}, "device_memory: '80' is not the memory of a devi"),
        ({"devices": 8, "device_memory": 0}, "such as 80GB or 79.6GiB, or the number of its bytes"),
        ({"devices": 8, "device_memory": True}, "'True' is not the memory of a device"),
        ({"devices": 8, "device_memory": float("nan")}, "'nan' is not the memory of a device"),
        ({"device_memory": "80GB"}, "write devices=N, device_memory='80GB', with the number of"),
        (
            {"devices": 8, "vocabulary": "no_lab"},
            "vocabulary=['no_lab']: The package no_lab cannot",
        ),
    ],
)
def test_mistakes_in_the_arguments_are_named(arguments: dict, words: str, file: Path):
    with pytest.raises(ls.UserError) as refused:
        ls.explain(ls.load_config(file), **arguments)
    assert words in str(refused.value)


def test_the_devices_of_this_machine_are_explained_and_compiled_here(file: Path):
    config = ls.load_config(file, set={"mesh": {"data": -1}})
    plan = ls.explain(config)
    assert plan.compiled is None and plan.fits and "What each of" not in plan.text
    assert plan.placement.parameters == 4 * (64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10)
    assert "<svg" not in plan._repr_html_() and "<svg" in plan.placement._repr_svg_()
    here = ls.explain(config, compile=True)
    assert here.compiled.traffic == () and here.compiled.memory.arguments > plan.state_bytes
    assert here.text == f"{plan.text}\n{here.text.partition(plan.text)[2][1:]}"
    assert "compiled for 1 cpu in" in here.text and "memory on this CPU: " in repr(here)


@short.parametrize("name", ["muon_vit.yaml", "muon_gpt.gin", "mlp_lbfgs.yaml"])
def test_a_plan_is_the_same_after_the_way_through_a_file(name: str):
    config = configs.load([str(ROOT / "configs" / name)])
    sent = explain(load_located(config, declared=True), config)
    read = from_json(to_json(sent))
    for field in dataclasses.fields(sent.plan):
        if field.name != "schedules":
            assert getattr(read.plan, field.name) == getattr(sent.plan, field.name), field.name
    for group, (steps, rates) in sent.plan.schedules.items():
        found = read.plan.schedules[group]
        assert found[0].tolist() == steps.tolist() and found[1].tolist() == rates.tolist()
    assert read.holdings == sent.holdings and read.memory == sent.memory
    assert (read.elsewhere, read.compiled) == (None, None)


@pytest.mark.long
def test_an_interrupt_ends_the_other_process_while_it_compiles(tmp_path: Path):
    """When Python runs no handler of signals; 32 layers apart compile for a minute."""
    programs, begun = tmp_path / "programs", tmp_path / "begun"
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, subprocess, sys, threading, time\n"
        "import lockstep as ls\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background\n"
        "started = subprocess.Popen\n"
        "def interrupt():  # when XLA has written what it is about to compile\n"
        "    while not list(pathlib.Path(sys.argv[1]).glob('*jit_packed_step*')):\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(1)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "def start(*words, **more):\n"
        "    child = started(*words, **more)\n"
        "    threading.Thread(target=interrupt, daemon=True).start()\n"
        "    print(child.pid, flush=True)\n"
        "    return child\n"
        "subprocess.Popen = start\n"
        "sets = {'model.depth': 32, 'model.scan_layers': False, 'mesh': {'fsdp': 8}}\n"
        "config = ls.load_config('lockstep:muon_vit.yaml', set=sets)\n"
        "try:\n"
        "    ls.explain(config, devices=8, compile=True)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    dump = f"{compiled_programs.xla_flags()} --xla_dump_to={begun} --xla_dump_hlo_as_text"
    done = subprocess.run(
        [sys.executable, str(script), str(begun)],
        env=environment(JAX_COMPILATION_CACHE_DIR=str(programs), XLA_FLAGS=dump),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    pid, said = done.stdout.split()
    assert said == "interrupted", done.stderr
    assert not list(programs.glob("jit_packed_step*"))  # it was not compiled to its end
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)  # sends nothing, and finds whether it exists
