"""The command line as a user meets it: mistakes end with exit 2, a few lines, and nothing lost."""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import optax
import pytest

from tests import runs, short
from tests.runs import ROOT
from trainer.__main__ import main
from trainer.cli import commands, options
from trainer.config import ConfigError, diff, dump, load, wording
from trainer.engine.experiment import Experiment
from trainer.messages import UserError
from trainer.train import peers
from trainer.workdir import WorkdirLock

GOOD = """models.mlp.depth = 1
experiment:
  model = @models.mlp()
  data = @data.digits()
  loss = @losses.softmax_cross_entropy()
  optimizer = @optim.optimizer()
  steps = %steps
  writers = ['console']
steps = 4
models.mlp.width = 8
data.digits.batch_size = 32
optim.optimizer.groups = {'kernels': @a/optim.group(), 'rest': @b/optim.group()}
a/optim.group:
  match = '.*/kernel'
  optimizer = @optax.adamw()
b/optim.group:
  match = '.*'
  optimizer = @optax.sgd()
optax.adamw.learning_rate = 1e-3
optax.sgd.learning_rate = 1e-2
"""

GOOD_YAML = """
model: !models.mlp {width: 8, depth: 1}
data: !data.digits {batch_size: 32}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
steps: 4
writers: [console]
"""


def run(tmp_path, text, *options, name="config.gin", command="train"):
    """Runs a config in this process; returns the exit code and the workdir."""
    file = tmp_path / name
    if isinstance(text, bytes):
        file.write_bytes(text)
    elif text is not None:
        file.write_text(text)
    workdir = tmp_path / "run"
    more = [f"--workdir={workdir}"] if command == "train" else []
    return main([command, f"--gin_file={file}", *more, *options]), workdir


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


def renamed(function, new):
    """Names another function wherever one is called or bound."""
    assert f"@{function}()" in GOOD
    return GOOD.replace(f"@{function}()", f"@{new}()").replace(f"{function}.", f"{new}.")


# (config, options, words that the message must have, where it must point)
MISTAKES = {
    "unknown function": (
        renamed("optax.sgd", "optax.sdg"),
        [],
        ["optax.sdg", "optax.sgd"],
        18,
    ),
    "unknown argument": (GOOD + "optax.sgd.momentun = 0.9\n", [], ["momentun", "momentum"], 21),
    "unknown argument of a function with **kwargs": (
        renamed("optax.sgd", "zoo_of_tests.open_ended").replace(
            "ended.learning_rate", "ended.learning_rte"
        ),
        ["--vocabulary=zoo_of_tests"],
        ["learning_rte", "learning_rate"],
        20,
    ),
    "missing argument": (
        changed("optax.sgd.learning_rate = 1e-2\n", ""),
        [],
        ["learning_rate"],
        18,
    ),
    "string for a float": (changed("= 1e-2", "= 'fast'"), [], ["'fast'", "learning_rate"], 20),
    "list for a float": (changed("= 1e-2", "= [1e-2]"), [], ["learning_rate", "float"], 20),
    "float for an int": (changed("width = 8", "width = 8.5"), [], ["8.5", "width"], 10),
    "duplicate binding": (GOOD + "models.mlp.width = 9\n", [], ["second time", "width"], 21),
    "undefined macro": (changed("steps = 4\n", ""), [], ["steps"], 7),
    "unused macro": (GOOD + "stesp = 5\n", [], ["stesp", "steps"], 21),
    "cyclic macro": (changed("steps = 4\n", "steps = %more\nmore = %steps\n"), [], ["cycle"], 10),
    "unused scope": (GOOD + "c/optax.sgd.momentum = 0.9\n", [], ["c/"], 21),
    "import": ("import my_lab.zoo\n" + GOOD, [], ["import", "--vocabulary"], 1),
    "private name": (renamed("optax.sgd", "optax._src.alias.sgd"), [], ["_src"], 18),
    "os.system": (renamed("optax.sgd", "os.system"), [], ["os.system", "optim, optax"], 18),
    "module through ours": (renamed("models.mlp", "models.nn.Dense"), [], ["models.nn"], 3),
    "jax through optax": (
        renamed("models.mlp", "optax.jax.numpy.ones"),
        [],
        ["optax.jax"],
        3,
    ),
    "missing include": ("include 'gone.gin'\n" + GOOD, [], ["gone.gin"], 1),
    "include cycle": ("include 'config.gin'\n" + GOOD, [], ["include each other"], 1),
    "empty file": ("", [], ["empty"], None),
    "binary file": (bytes(range(256)), [], ["text"], None),
    "ten megabytes in a line": ("x = '" + "a" * 10_000_000 + "'\n", [], ["config.gin"], None),
    "pattern that matches nothing": (
        changed("'.*/kernel'", "'kernels/.*'"),
        [],
        ["'kernels/.*'", "kernel"],
        14,
    ),
    "model that no machine holds": (
        GOOD,
        ["--set", "model.width=1_000_000_000_000"],
        [
            "the optimizer take",
            "largest parameters, each with its state, are embed/kernel",
            "of memory",
        ],
        3,
    ),
    "size beyond 64 bits with a sign": (
        GOOD,
        ["--set", "model.width=9_223_372_036_854_775_808"],
        ["model.width is 9223372036854775808, and a size in a program is at most 2**63 - 1"],
        None,
    ),
    "pattern that takes exponential time": (
        changed("'.*/kernel'", "'(([a-z_/]*)*)*X'"),
        [],
        ["In group 'kernels': Comparing the pattern '(([a-z_/]*)*)*X' with", "takes too long"],
        14,
    ),
    "parameter without a group": (
        changed("match = '.*'\n", "match = 'head/.*'\n"),
        [],
        ["embed/bias", "'head/.*'"],
        12,
    ),
    "invalid regex": (changed("'.*/kernel'", "'(kernel'"), [], ["regular expression"], 14),
    "batch larger than the data": (
        changed("batch_size = 32", "batch_size = 5000"),
        [],
        ["5000", "1437"],
        11,
    ),
    "schedule that goes below zero": (
        changed("= 1e-2", "= @optax.linear_schedule()")
        + "optax.linear_schedule.init_value = 0.1\noptax.linear_schedule.end_value = -0.1\n"
        + "optax.linear_schedule.transition_steps = 3\n",
        [],
        ["schedule of learning_rate", "-0.1", "negative"],
        20,
    ),
    "full-batch optimizer on minibatches": (
        renamed("optax.sgd", "optax.rprop"),
        [],
        ["optax.rprop", "32 of 1437", "batch_size"],
        18,
    ),
    "data that is not called": (
        changed("@data.digits()", "@data.digits"),
        [],
        ["no 'batch_size'", "call it: @data.digits()"],
        4,
    ),
    "model for a group": (
        changed("'rest': @b/", "'x': @models.mlp(), 'rest': @b/"),
        [],
        ["The group 'x' must be made by optim.group(match, optimizer)"],
        6,
    ),
    "no steps": (changed("steps = 4", "steps = 0"), [], ["steps is 0, but must be at least 1"], 9),
    "no steps of a schedule": (
        changed("= 1e-2", "= @schedules.warmup_cosine()").replace("steps = 4", "steps = '0 epochs'")
        + "schedules.warmup_cosine.peak_value = 0.1\nschedules.warmup_cosine.warmup_steps = 0\n",
        [],
        ["steps is 0, '0 epochs', but must be at least 1"],
        9,
    ),
    "more steps than int32 holds": (
        changed("steps = 4", "steps = '1_000_000_000 epochs'"),
        [],
        ["steps is 44906250000", "'1_000_000_000 epochs'", "at most 2**31 - 1"],
        9,
    ),
    "negative steps": (GOOD, ["--set", "steps=-3"], ["steps", "-3"], None),
    "unknown path in --set": (
        GOOD,
        ["--set", "optimiser.clip_norm=1.0"],
        ["optimiser", "optimizer"],
        None,
    ),
    "unknown writer": (changed("['console']", "['tensorbord']"), [], ["tensorboard"], 8),
    "unknown vocabulary": (GOOD, ["--vocabulary=no_such_lab"], ["no_such_lab"], None),
    "mesh without devices": (GOOD, ["--set", "mesh={data: 64}"], ["64 devices"], None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_in_a_few_lines_and_creates_no_files(
    name, tmp_path, capsys, monkeypatch
):
    (tmp_path / "zoo_of_tests.py").write_text(
        "import optax\n"
        "def open_ended(learning_rate: float, **kwargs): return optax.sgd(learning_rate)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text, options, words, line = MISTAKES[name]
    code, workdir = run(tmp_path, text, *options)
    said = capsys.readouterr().err
    assert code == 2, said
    assert 1 <= len(said.splitlines()) <= 8, said
    assert max(map(len, said.splitlines())) < 600
    assert "Traceback" not in said
    for word in words:
        assert word in said
    if line is not None:
        assert f"config.gin:{line}:" in said
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("lines", "options", "place"),
    [
        ("", ["--set", "model.width=-4"], "--set model.width=-4:"),
        ("", ["--set", "seed=-1"], "--set seed=-1:"),
        ("", ["--set", "optimizer.layer_decay=2.0"], "--set optimizer.layer_decay=2.0:"),
        ("experiment.microbatches = 7\n", [], "config.gin:21:"),
        ("experiment.save_every = 0\n", [], "config.gin:21:"),
        ("experiment.ema_decay = 1.5\n", [], "config.gin:21:"),
        ("experiment.best_metric = 'speed'\n", [], "config.gin:21:"),
        ("experiment.watchdog = 0.5\n", [], "config.gin:21:"),
        ("optim.optimizer.clip_norm = -1.0\n", [], "config.gin:21:"),
        ("data.digits.crop = -1\n", [], "config.gin:21:"),
        ("data.digits.crop = 50\n", [], "config.gin:21:"),
    ],
)
def test_an_error_raised_by_a_function_names_the_line_of_the_value(
    lines, options, place, tmp_path, capsys
):
    code, _ = run(tmp_path, GOOD + lines, *options, command="explain")
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1
    assert place in said.split(" ", 1)[1][: 20 + len(str(tmp_path)) + len(place)], said


@pytest.mark.parametrize("value", ["/nowhere", "nowhere/at/all"])
@pytest.mark.parametrize("path", ["data.data_dir", "data.path"])
def test_a_folder_that_a_flag_names_and_that_does_not_exist_is_blamed_on_the_flag(
    path, value, tmp_path, capsys, monkeypatch
):
    (tmp_path / "files_of_tests.py").write_text(
        "import numpy as np\ndef points(path: str): np.load(path)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = path == "data.data_dir"
    text = renamed("data.digits", "data.fashion_mnist" if ours else "files_of_tests.points")
    text = text if ours else text.replace("files_of_tests.points.batch_size = 32\n", "")
    options = ["--set", f"{path}={value}", "--vocabulary=files_of_tests"]
    assert run(tmp_path, text, *options)[0] == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --set {path}={value}: ") and len(said.splitlines()) == 1


def test_an_error_raised_by_a_models_first_call_names_the_line_of_the_value(tmp_path, capsys):
    text = renamed("models.mlp", "models.vit") + "models.vit.patch_size = 3\n"
    assert run(tmp_path, text, command="explain")[0] == 2
    assert "config.gin:21: " in capsys.readouterr().err


YAML_MISTAKES = {
    "duplicate key": (GOOD_YAML + "steps: 5\n", ["steps", "twice"]),
    "alias bomb": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        ["config.yaml"],
    ),
    "python object": (
        GOOD_YAML + "seed: !!python/object/apply:os.system ['true']\n",
        ["os.system"],
    ),
    "unknown key": (GOOD_YAML + "sead: 3\n", ["sead", "seed"]),
}


@pytest.mark.parametrize("name", YAML_MISTAKES)
def test_a_mistake_in_yaml_is_reported_with_its_line(name, tmp_path, capsys):
    text, words = YAML_MISTAKES[name]
    code, workdir = run(tmp_path, text, name="config.yaml")
    said = capsys.readouterr().err
    assert code == 2 and len(said.splitlines()) <= 8 and not workdir.exists()
    for word in words:
        assert word in said


@pytest.mark.parametrize("name", ["optax.chain", "optax.named_chain", "partial:optax.chain"])
def test_a_list_given_to_a_chain_gets_a_hint_to_args(name, tmp_path, capsys):
    step = "!optax.sgd {learning_rate: 0.1}"
    listed = f"[{step}, {step}]" if "named" not in name else f"[[a, {step}], [b, {step}]]"
    text = GOOD_YAML.replace("!optax.adamw {learning_rate: 1e-3}", f"!{name} {listed}")
    assert run(tmp_path, text, name="config.yaml", command="config")[0] == 2
    said = capsys.readouterr().err
    assert "config.yaml:5: " in said
    assert f"was given a list: write !{name} {{args: [...]}}.\n" in said
    text = text.replace(listed, f"{{args: {listed}}}")
    assert run(tmp_path, text, name="config.yaml", command="config")[0] == 0


def test_the_hint_to_args_knows_the_functions_of_optax_that_take_a_list():
    """Of all that optax has, these return a transformation and take `*args`."""
    found = {
        f"optax.{name}"
        for name, function in vars(optax).items()
        if inspect.isfunction(function)
        and any(
            each.kind is each.VAR_POSITIONAL
            for each in inspect.signature(function).parameters.values()
        )
        and not function.__module__.startswith("optax.tree_utils")
    }
    assert found == {name for name in wording._LISTS if name.startswith("optax.")}


def test_a_list_given_to_another_function_gets_a_hint_to_name_the_argument(tmp_path, capsys):
    text = GOOD_YAML.replace("!models.mlp {width: 8, depth: 1}", "!models.mlp [8]")
    assert run(tmp_path, text, name="config.yaml", command="config")[0] == 2
    assert "write !models.mlp {argument: [...]}, with the argument's name." in (
        capsys.readouterr().err
    )


ADAM = "optimizer.groups.kernels.optimizer"
MUON = f"{ADAM}=!optim.muon {{learning_rate: 0.1, %s: %s}}"


@pytest.mark.parametrize(
    ("setting", "given", "meant"),
    [
        (f"{ADAM}.mu_dtype=bf16", "the string 'bf16'", "bfloat16"),
        (f"{ADAM}.mu_dtype=fp16", "the string 'fp16'", "float16"),
        (f"{ADAM}.mu_dtype=f16", "the string 'f16'", "float16"),  # numpy's float128
        (f"{ADAM}.mu_dtype=Float32", "the string 'Float32'", "float32"),
        (f"{ADAM}.mu_dtype=jnp.bfloat16", "the string 'jnp.bfloat16'", "bfloat16"),
        (f"{ADAM}.mu_dtype=16", "the integer 16", None),
        (MUON % ("ns_dtype", "bf16"), "the string 'bf16'", "bfloat16"),
        (MUON % ("momentum_dtype", "fp32"), "the string 'fp32'", "float32"),
        (
            f"{ADAM}=!optax.adafactor {{dtype_momentum: bf16}}",
            "the string 'bf16'",
            "bfloat16",
        ),
    ],
)
def test_an_unknown_dtype_name_gets_a_list_of_the_known_ones(
    setting, given, meant, tmp_path, capsys
):
    assert run(tmp_path, GOOD, "--set", setting, command="config")[0] == 2
    said = capsys.readouterr().err
    assert "takes the name of a dtype for '" in said and f"and was given {given}. " in said
    assert "The dtypes are bfloat16, float16, float32, float64, int8" in said
    assert ("Did you mean" in said) == bool(meant)
    assert meant is None or f"Did you mean {meant!r}? " in said


@pytest.mark.parametrize("name", ["bfloat16", "float32", "half", "f4", "null"])
def test_every_dtype_name_of_jax_is_accepted(name, tmp_path, capsys):
    assert run(tmp_path, GOOD, "--set", f"{ADAM}.mu_dtype={name}", command="explain")[0] == 0


def test_a_dtype_that_a_package_of_the_users_does_not_know_gets_the_hint_as_well(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "nets_of_tests.py").write_text(
        "import flax.linen as nn\nimport jax\n"
        "def any_dtype(dtype=None): return nn.Dense(10, dtype=dtype)\n"
        "def annotated(dtype: jax.typing.DTypeLike = 'float32'): return nn.Dense(10, dtype=dtype)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("any_dtype", "annotated"):
        model = f"model=!models.from_linen {{module: !nets_of_tests.{name} {{dtype: bf16}}}}"
        options = ["--vocabulary=nets_of_tests", "--set", model]
        assert run(tmp_path, GOOD, *options, command="explain")[0] == 2
        assert "Did you mean 'bfloat16'? The dtypes are bfloat16, " in capsys.readouterr().err


def test_an_unknown_choice_gets_the_nearest_one_as_a_hint(tmp_path, capsys):
    assert run(tmp_path, GOOD, "--set", "precision=bf16", command="config")[0] == 2
    assert "given the string 'bf16'. Did you mean 'bfloat16'?\n" in capsys.readouterr().err


def test_a_directory_or_an_empty_path_as_config_is_refused(tmp_path, capsys):
    assert "directory" in runs.refused(capsys, f"--gin_file={tmp_path}")
    assert "gone.gin" in runs.refused(capsys, f"--gin_file={tmp_path}/gone.gin")


@pytest.mark.long
def test_a_run_resumes_from_its_latest_checkpoint_and_refuses_another_config(tmp_path, capsys):
    code, workdir = run(tmp_path, GOOD)
    assert code == 0
    names = {p.name for p in workdir.iterdir()}
    assert {"config.yaml", "plan.txt", "run.json", "metrics.jsonl", "checkpoints"} <= names
    [entry] = json.loads((workdir / "run.json").read_text())["lineage"]
    file = tmp_path / "config.gin"
    assert entry["config_files"] == [
        {
            "name": str(file),
            "resolved": str(file.resolve()),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "included": False,
        }
    ]
    before = {p: p.stat().st_mtime_ns for p in workdir.iterdir() if p.is_file()}
    code, _ = run(tmp_path, GOOD, "--set", "optimizer.groups.rest.optimizer.learning_rate=0.5")
    said = capsys.readouterr().err
    assert code == 2
    assert "optimizer.groups.rest.optimizer.learning_rate: 0.01 -> 0.5" in said
    assert {p: p.stat().st_mtime_ns for p in workdir.iterdir() if p.is_file()} == before
    assert run(tmp_path, GOOD)[0] == 0
    assert "Nothing to do" in capsys.readouterr().err
    # It has no step to make by the other config, whose values its folder must not claim.
    before = {p: p.read_bytes() for p in workdir.iterdir() if p.is_file()}
    other = "--set", "optimizer.groups.rest.optimizer.learning_rate=0.5"
    assert run(tmp_path, GOOD, *other, "--allow_changed=learning_rate")[0] == 2
    said = capsys.readouterr().err
    assert "so that this config would change none of its results" in said
    assert "optimizer.groups.rest.optimizer.learning_rate: 0.01 -> 0.5" in said
    assert {p: p.read_bytes() for p in workdir.iterdir() if p.is_file()} == before
    assert run(tmp_path, GOOD, "--set", "writers=[console]", "--allow_changed=writers")[0] == 0


def test_a_workdir_that_cannot_be_created_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("here")
    (tmp_path / "config.gin").write_text(GOOD)
    code = main([f"--gin_file={tmp_path}/config.gin", f"--workdir={tmp_path}/file/run"])
    said = capsys.readouterr().err
    assert code == 2 and "--workdir" in said and len(said.splitlines()) <= 8


def test_a_workdir_that_holds_other_things_is_refused_and_left_alone(tmp_path, capsys):
    config = tmp_path / "config.gin"
    config.write_text(GOOD)
    said = runs.refused(capsys, f"--gin_file={config}", f"--workdir={tmp_path}")
    assert (
        f"error: The workdir {tmp_path} is not the folder of a run: it holds config.gin, " in said
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.gin"]


def test_the_resolved_config_loads_again_to_the_same_tree(tmp_path, capsys):
    assert run(tmp_path, GOOD, command="config")[0] == 0
    first = capsys.readouterr().out
    assert run(tmp_path, first, command="config", name="again.yaml")[0] == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("stepz=5", "experiment has no argument 'stepz'. Did you mean 'steps'?"),
        ("optimizer=optax.adam(learning_rate=0.1)", "A call is written"),
        ("model.width=wide", "models.mlp takes an integer for 'width'"),
        ("model=!my_lab.nets.Spiralnet", "--vocabulary=my_lab"),
    ],
)
def test_a_config_is_checked_before_it_is_printed(setting, words, tmp_path, capsys):
    assert run(tmp_path, GOOD, "--set", setting, command="config")[0] == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --set ") and words in err


@pytest.mark.parametrize(
    ("setting", "paths"),
    [
        ("models.mlp.width=9", ["model.width"]),
        ("mlp.width=9", ["model.width"]),
        ("data.digits.batch_size=9", ["data.batch_size"]),
        ("experiment.steps=9", ["steps"]),
        ("optax.adamw.b2=9.0", ["optimizer.groups.kernels.optimizer.b2"]),
        ("a/optax.adamw.b2=9.0", ["optimizer.groups.kernels.optimizer.b2"]),
        ("optim.group.match=9", [f"optimizer.groups.{name}.match" for name in ("kernels", "rest")]),
    ],
)
def test_a_setting_of_a_function_gets_its_paths_in_the_config_as_a_hint(
    setting, paths, tmp_path, capsys
):
    """`--set models.mlp.width=9` is Gin's spelling; the tree has the argument at model.width."""
    assert run(tmp_path, GOOD, "--set", setting, command="config")[0] == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --set {setting}: A setting takes a path in the config tree")
    value = setting.partition("=")[2]
    suggested = re.findall(r"--set (\S+?)[.]?$", said.partition(" write ")[2], re.MULTILINE)
    assert suggested == [f"{path}={value}" for path in paths]
    before = load([tmp_path / "config.gin"]).root
    after = load([tmp_path / "config.gin"], sets=suggested).root
    assert [line.partition(":")[0] for line in diff(before, after)] == paths


def test_a_setting_of_a_function_that_is_not_called_gets_the_called_ones_as_a_hint(
    tmp_path, capsys
):
    assert run(tmp_path, GOOD, "--set", "optim.muon.learning_rate=1", command="config")[0] == 2
    said = capsys.readouterr().err
    assert "This config does not call optim.muon. It calls: data.digits, experiment, " in said


def test_a_metric_is_added_by_a_setting(tmp_path, capsys):
    more = ["--set", "metrics={}", "--set", "metrics.top=!metrics.top_k_accuracy {k: 2}"]
    assert run(tmp_path, GOOD, *more, command="config")[0] == 0
    assert "top: !metrics.top_k_accuracy" in capsys.readouterr().out


def test_gin_bindings_yaml_and_set_build_the_same_config(capsys):
    for sets in ([], ["--set", "steps=100"]):
        trees = []
        for suffix in ("gin", "yaml"):
            assert main(["config", f"--gin_file={ROOT}/configs/muon_vit.{suffix}", *sets]) == 0
            trees.append(capsys.readouterr().out)
        assert trees[0] == trees[1]
        assert not sets or "steps: 100" in trees[0]


def test_explain_prints_the_plan_and_draws_it(tmp_path, capsys):
    png = tmp_path / "schedules.png"
    assert run(tmp_path, GOOD, f"--png={png}", command="explain")[0] == 0
    said = capsys.readouterr().out
    assert png.read_bytes()[:4] == b"\x89PNG"
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.strip()}
    # 64 inputs, 8 hidden, 10 classes; Adam keeps two float32 a parameter.
    assert rows["embed/kernel"][1:7] == [
        "64x8",
        "float32",
        "kernels",
        "optax.adamw",
        "0.001",
        "0.0001",
    ]
    assert rows["embed/bias"][3:7] == ["rest", "optax.sgd", "0.01", "-"]
    weights = 64 * 8 + 8 * 10
    assert rows["kernels"][1:] == [f"{weights:,}", f"{8 * weights:,}"]
    assert rows["rest"][1:] == ["18", "0"]
    # Forward and twice for the gradient, but for the gradient of the inputs of the first layer.
    flops = 2 * 32 * (3 * weights - 64 * 8)
    assert f"{flops:,} FLOPs" in said


def test_every_command_has_a_function_and_a_page_that_shows_it():
    page = (ROOT / "docs" / "commands.md").read_text().partition("<!-- list: end -->")[0]
    rows = dict(re.findall(r"^\| \[`(\w+)`\].* \| (.*) \|$", page, re.MULTILINE))
    (names,) = [
        action.choices
        for action in options.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    for name in names:
        try:
            assert callable(commands.find(name))
        except AttributeError:
            pytest.fail(f"trainer/cli/commands.py and reporting.py have no function {name}.")
        assert name in rows, "docs/commands.md lacks it: python -m tests.reference_pages"
        assert rows[name], f"No page of docs/ shows how `python -m trainer {name}` is used."


def test_help_answers_without_jax():
    code = (
        "import sys; sys.argv = ['trainer', '--help']\n"
        "import runpy\n"
        "try: runpy.run_module('trainer', run_name='__main__')\n"
        "except SystemExit as e: assert e.code == 0\n"
        "slow = {'jax', 'numpy', 'gin', 'tensorflow', 'trainer.report.document'}\n"
        "assert not slow & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    assert "--help" in result.stdout


def test_a_misspelt_option_is_an_error_with_a_hint(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--gin_fiel=configs/muon_vit.gin"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) <= 8


@pytest.mark.parametrize("command", ["train", "config", "explain", "verify"])
def test_help_and_messages_name_config_before_gin_file(command, capsys):
    assert main([command]) == 2
    missing = "error: The config of a run is missing: name it with --config=FILE.\n"
    assert capsys.readouterr().err == missing
    said = refused_options([command, "--confg=a.yaml"], capsys)
    assert f"{command} does not take --confg=a.yaml. Did you mean --config?" in said
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert 0 < said.index("--config FILE") < said.index("--gin_file FILE")


def refused_options(options, capsys):
    """Returns what is printed where the command line cannot be read."""
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.long
@short.parametrize("command", ["train", "config", "explain", "verify"])
def test_a_value_of_the_config_given_as_an_option_gets_a_hint_to_set(command, capsys):
    names = {each.name for each in dataclasses.fields(Experiment)}
    for name in names - ({"steps"} if command == "verify" else set()):  # which is its own option
        for given in ([f"--{name}=100"], [f"--{name}", "100"], [f"{name}=100"]):
            said = refused_options([command, "--config=a.yaml", *given], capsys)
            assert f"does not take {' '.join(given)}." in said and len(said.splitlines()) == 2
            assert f"To set a value of the config, write --set {name}=100\n" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps=5", "--seed", "3"], "write --set steps=5 --set seed=3\n"),
        (["--mesh={data: 2}"], "write --set 'mesh={data: 2}'\n"),
        (["--optimizer.clip_norm=1.0"], "write --set optimizer.clip_norm=1.0\n"),
        (["--workdr=runs/a"], "train does not take --workdr=runs/a. Did you mean --workdir?\n"),
        (["--resume"], "train does not take --resume.\n"),
        (["--set", "steps", "100"], "train does not take 100. A config is named by --config=FILE,"),
        (["--set", "steps", "100"], "and a setting is one word: --set steps=100.\n"),
        (["--devices=8"], "take --devices=8. It is an option of explain. To set a value of the"),
    ],
)
def test_an_unknown_option_is_named_with_similar_ones(options, words, capsys):
    assert words in refused_options(["train", "--config=a.yaml", *options], capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["show", "a", "b", "--workers=2"], "sweep show: error: sweep show does not take --work"),
        (["status", "a", "--wrkers=2"], "sweep status does not take --wrkers=2."),
        (["work", "a", "--wrkers=2"], "sweep work does not take --wrkers=2. Did you mean --work"),
        (["--wrkers=2"], "sweep does not take --wrkers=2. Did you mean --workers?"),
    ],
)
def test_an_unknown_option_of_an_action_is_compared_with_its_own(words, told, capsys):
    said = refused_options(["sweep", *words], capsys)
    assert told in said and len(said.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["smaple", "runs/a"],
            "there is no command 'smaple'. Did you mean 'sample'? There are: tr",
        ),
        (["zzz"], "there is no command 'zzz'. There are: train, config, "),
        (
            ["checkpoint", "difff", "a"],
            "there is no action 'difff'. Did you mean 'diff'? There are",
        ),
    ],
)
def test_a_misspelt_command_is_told_with_the_nearest(words, told, capsys):
    said = refused_options(words, capsys)
    assert told in said and len(said.splitlines()) == 2


def test_an_unknown_option_of_a_command_without_a_config_gets_no_hint_to_set(capsys):
    assert "--set" not in refused_options(["plot", "runs/a", "--steps=100"], capsys)


def test_an_argument_that_the_root_does_not_take_is_found_further_down(tmp_path, capsys):
    assert run(tmp_path, GOOD, "--set", "learning_rate=0.1", command="config")[0] == 2
    paths = [f"optimizer.groups.{name}.optimizer.learning_rate" for name in ("kernels", "rest")]
    assert f"This config has learning_rate at {', '.join(paths)}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--workdir="], "it is empty, maybe from a shell variable that is not set; name a folder"),
        (["--workdir=gs://bucket/run"], "'gs://bucket/run' is not a folder of this machine"),
        (["--workdir=s3://bucket"], "'s3://bucket' is not a folder"),
        (["--until=x"], "'x' is not a number of steps; write a whole number, without a unit"),
        (["--until=5%"], "'5%' is not a number of steps"),
        (["--until=0"], "must be at least 1, got 0"),
    ],
)
def test_an_invalid_option_is_refused_before_any_file_is_created(
    options, words, tmp_path, monkeypatch, capsys
):
    (tmp_path / "config.gin").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["--gin_file=config.gin", *options])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and words in said and len(said.splitlines()) <= 8
    assert [path.name for path in tmp_path.iterdir()] == ["config.gin"]


@pytest.mark.long
def test_a_run_of_one_step_says_so_in_the_singular(tmp_path, capsys):
    assert run(tmp_path, GOOD, "--set", "steps=1")[0] == 0
    said = capsys.readouterr().err
    assert re.search(r": 1 step of 32 examples on \d cpu", said) and "Done: 1 step. " in said, said
    assert run(tmp_path, GOOD, "--set", "steps=1")[0] == 0
    assert "Nothing to do: the run has its 1 step." in capsys.readouterr().err


def write_metrics(folder, *values):
    folder.mkdir(parents=True)
    lines = [f'{{"step": {step}, "train/loss": {value}}}\n' for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


def test_runs_with_the_same_folder_name_are_plotted_as_two_curves(tmp_path, capsys):
    runs = [write_metrics(tmp_path / name, 3, 2, 1) for name in ("t/mk1", "t/a/mk1", "t/b")]
    assert main(["plot", *runs, runs[0]]) == 0
    assert "* t/mk1   o a/mk1   + b\n" in capsys.readouterr().out
    assert main(["plot", runs[0], f"{runs[2]}/../mk1"]) == 0
    assert capsys.readouterr().out.endswith("  * mk1\n")


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", [], "has no metric 'train/loss'. It has no rows."),
        ("torn", [], "has no metric 'train/loss'. It has no rows."),
        ('{"step": 1, "a": 2}\n', [], "has no metric 'train/loss'. It has: a."),
        (
            '{"step": 1, "a": 2}\n',
            ["--metric=a", "--png=no/a.png"],
            "no/a.png cannot be written: No such",
        ),
        (
            '{"step": 1, "a": 2}\n',
            ["--metric=a", "--png=a.xyz"],
            "a.xyz cannot be written: its suffix",
        ),
    ],
)
def test_a_file_that_cannot_be_plotted_is_an_error(
    text, options, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    said = runs.refused(capsys, "plot", "run", *options)
    assert words in said and "Errno" not in said and len(said.splitlines()) <= 8


def test_a_mistake_outside_of_the_config_is_a_user_error_but_not_a_config_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 2}\n')
    lock = WorkdirLock(tmp_path)
    plot = ["plot", str(tmp_path), "--metric=a", f"--png={tmp_path}/no/a.png"]
    mistakes = {
        "cannot be written": lambda: commands.find("plot")(options.parser().parse_args(plot)),
        "is in use by process": lambda: WorkdirLock(tmp_path),
        "must be HOST:PORT": lambda: peers.connect("nowhere", 2, 0, wait=1, silence=1),
    }
    for said, make in mistakes.items():
        with pytest.raises(UserError, match=said) as caught:
            make()
        assert not isinstance(caught.value, ConfigError)
    assert issubclass(ConfigError, UserError)
    lock.close()


def leaves(parser):
    below = [leaf for each in parser.commands().values() for leaf in leaves(each)]
    return below or [parser]


def test_every_command_takes_a_vocabulary_also_from_the_variable(tmp_path, capsys, monkeypatch):
    found = leaves(options.parser())
    assert len(found) > 25
    assert all("--vocabulary" in each._option_string_actions for each in found)
    assert main(["report", str(tmp_path / "none"), "--vocabulary=zoo_of_tests"]) == 2
    assert "--vocabulary" not in capsys.readouterr().err
    monkeypatch.setenv("LOCKSTEP_VOCABULARY", "zoo_of_tests, other")
    given = ["config", "--config=a.yaml", "--vocabulary=more,other", "--vocabulary=last"]
    named = ["zoo_of_tests", "other", "more", "other", "last"]
    assert options.parser().parse_args(given).vocabulary == named
    (tmp_path / "zoo_of_tests.py").write_text("def open_ended(learning_rate: float): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = renamed("optax.sgd", "zoo_of_tests.open_ended")
    assert run(tmp_path, text, command="config")[0] == 2  # there is no package `other`
    assert "--vocabulary=other: " in capsys.readouterr().err
    monkeypatch.setenv("LOCKSTEP_VOCABULARY", "zoo_of_tests")
    assert run(tmp_path, text, command="config")[0] == 0


@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_the_config_of_a_run_says_which_packages_it_needs(tmp_path, capsys):
    config = runs.write_config(tmp_path, runs.CONFIG)
    workdir = tmp_path / "run"
    for _ in range(2):  # it goes on with its own file, whose digest is that of the config
        assert runs.train(config, workdir) == 0
    text = (workdir / "config.yaml").read_text()
    head, _, rest = text.partition("\n")
    assert head == "# Commands that use this config need the option --vocabulary=unruly"
    assert rest == dump(load([config]).root) == dump(load([workdir / "config.yaml"]).root)
    record = json.loads((workdir / "run.json").read_text())
    assert record["fingerprint"]["config"] == hashlib.sha256(rest.encode()).hexdigest()
    (workdir / "run.json").unlink()  # as after a crash: the folder is still that of a run
    shutil.rmtree(workdir / "checkpoints")
    for name in ("metrics.jsonl", "summary.json"):
        (workdir / name).unlink(missing_ok=True)
    assert runs.train(config, workdir, "--until=2") == 75
    asked = [sys.executable, "-m", "trainer", "config", f"--config={workdir}/config.yaml"]
    refused = subprocess.run(asked, env=runs.environment(), capture_output=True, text=True)
    said, _, command = refused.stderr.strip().rpartition("\n")
    assert refused.returncode == 2 and said.endswith("add --vocabulary=unruly to the command:")
    done = subprocess.run(command, shell=True, env=runs.environment(), capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, rest)
    two = ["--set", "loss=!other_lab.loss {}"]
    said = runs.refused(capsys, "config", f"--config={workdir}/config.yaml", *two).strip()
    both = "(from Python: vocabulary=['unruly', 'other_lab'])."
    assert f"add --vocabulary=unruly,other_lab to the command {both}" in said
    shutil.rmtree(workdir)
    assert run(tmp_path, GOOD)[0] == 0
    assert (tmp_path / "run" / "config.yaml").read_text()[0] != "#"


TRACED = """
import flax.linen as nn
import jax.numpy as jnp
import numpy as np

class Net(nn.Module):
    how: str
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(10)(x.reshape(len(x), -1))
        if self.how == "if" and x.mean() > 0:
            return 2 * x
        return x * (float(x.mean()) if self.how == "float" else np.asarray(x))
"""


@pytest.mark.parametrize(
    ("how", "line", "said"),
    [
        ("if", 11, "Attempted boolean conversion of traced array with shape bool[]."),
        ("float", 13, "concrete value is expected: traced array with shape float32[]."),
        ("numpy", 13, "__array__() was called on traced array with shape float32[32,10]."),
    ],
)
def test_an_error_of_a_traced_value_is_whole(how, line, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "traced_lab.py").write_text(TRACED)
    monkeypatch.syspath_prepend(tmp_path)
    net = f"model=!models.from_linen {{module: !traced_lab.Net {{how: {how}}}, inputs: image}}"
    options = ["--set", net, "--vocabulary=traced_lab"]
    assert run(tmp_path, GOOD_YAML, *options, name="a.yaml", command="explain")[0] == 2
    shown = capsys.readouterr().err
    assert said in shown and "write jnp.where in place of an if" in shown, shown
    assert shown.count("...") == 1 and "while tracing" not in shown  # of the setting
    assert re.search(rf"and leave out float\(\) and numpy \(\S*traced_lab.py:{line}\)\n$", shown)


@pytest.mark.parametrize("words", [[], ["sweep"], ["checkpoint", "export"]])
def test_every_command_prints_the_version(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lockstep {importlib.metadata.version('lockstep-jax')}\n"
