"""`import lockstep as ls`: configs, plans, programs, runs and sweeps from Python."""

import functools
import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import lockstep as ls
from tests import runs, short
from trainer import models
from trainer.__main__ import main
from trainer.config import Call

MLP = """
model: !models.mlp {width: 16, depth: 2}
data: !data.digits {batch_size: 64, validation: 0.2}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
best_metric: validation/accuracy
optimizer: !optim.optimizer
  clip_norm: 1.0
  groups:
    matrices: !optim.group
      match: .*/kernel
      optimizer: !optim.muon
        learning_rate: !schedules.warmup_cosine {peak_value: 0.02, warmup_steps: 0}
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 3e-3}}
steps: 24
log_every: 1
eval_every: 8
save_every: 12
writers: []
"""


def mlp() -> ls.Config:
    call = ls.call
    rate = call.schedules.warmup_cosine(peak_value=0.02, warmup_steps=0)
    return ls.make_config(
        model=call.models.mlp(width=16, depth=2),
        data=call.data.digits(batch_size=64, validation=0.2),
        loss=call.losses.softmax_cross_entropy(),
        metrics={"accuracy": call.metrics.accuracy()},
        best_metric="validation/accuracy",
        optimizer=call.optim.optimizer(
            clip_norm=1.0,
            groups={
                "matrices": call.optim.group(
                    match=".*/kernel", optimizer=call.optim.muon(learning_rate=rate)
                ),
                "rest": call.optim.group(
                    match=".*", optimizer=call.optax.adamw(learning_rate=3e-3)
                ),
            },
        ),
        steps=24,
        log_every=1,
        eval_every=8,
        save_every=12,
        writers=(),
    )


def python(code: str, cwd: Path, *path: Path | str, **more: str) -> subprocess.CompletedProcess:
    """Runs a script in a folder of its own, with what is in `path` and the project."""
    script = cwd / "script.py"
    script.write_text(textwrap.dedent(code))
    found = os.pathsep.join(map(str, (*path, runs.ROOT)))
    env = os.environ | {"PYTHONPATH": found} | more
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=runs.LONG,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ls.Run:
    return ls.train(mlp(), tmp_path_factory.mktemp("library") / "run", quiet=True)


# The package.


def test_the_import_is_free_of_jax_and_numpy(tmp_path: Path):
    code = """
    import sys
    import lockstep as ls
    print([name for name in ("jax", "numpy", "scipy", "flax") if name in sys.modules])
    assert sorted(name for name in dir(ls) if getattr(ls, name) is None) == []
    assert ls.optim.muon.__module__ == "optim.muon"
    """
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_all_names_of_the_package_exist_and_are_documented():
    for name in ls.__all__:
        assert getattr(ls, name).__doc__, name
    with pytest.raises(AttributeError, match="trian"):
        _ = ls.trian


@pytest.mark.long
def test_an_empty_folder_optim_beside_the_script_does_not_hide_the_package(tmp_path: Path):
    (tmp_path / "optim").mkdir()
    done = python("import lockstep as ls; print(ls.optim.muon.__name__)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "muon\n"), done.stderr


@pytest.mark.parametrize("before", ["", "import optim; "])
def test_another_optim_that_python_finds_first_is_named(tmp_path: Path, before: str):
    (tmp_path / "optim.py").write_text("mine = 1\n")
    done = python(f"{before}import lockstep", tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    verb = "has imported" if before else "finds first"
    assert last.startswith("ImportError: Lockstep needs its own package 'optim'")
    assert f"{verb} is '{tmp_path / 'optim.py'}'" in last and "Rename that file or folder" in last


def test_an_installed_package_with_our_name_is_named_by_its_owner(tmp_path: Path):
    site = tmp_path / "site"
    (site / "trainer").mkdir(parents=True)
    (site / "trainer/__init__.py").write_text("")
    info = site / "coqui_trainer-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: coqui-trainer\nVersion: 0.1\n")
    (info / "top_level.txt").write_text("trainer\n")
    (info / "RECORD").write_text("trainer/__init__.py,,\n")
    done = python("import lockstep", tmp_path, site)
    assert done.returncode == 1
    assert "of the installed package coqui-trainer. Rename" in done.stderr.splitlines()[-1]


# Configs.


def test_a_config_written_in_python_is_that_of_the_file(tmp_path: Path):
    (tmp_path / "mlp.yaml").write_text(MLP)
    read = ls.load_config(tmp_path / "mlp.yaml")
    assert mlp() == read
    assert mlp().to_yaml() == read.to_yaml()
    mlp().save(tmp_path / "again.yaml")
    assert ls.load_config(tmp_path / "again.yaml") == read


def test_a_config_is_read_and_edited_by_paths(tmp_path: Path):
    (tmp_path / "mlp.yaml").write_text(MLP)
    config = ls.load_config(tmp_path / "mlp.yaml", set={"steps": 7, "model.width": 32})
    assert (config["steps"], config["model.width"]) == (7, 32)
    assert config["model"] == Call("models.mlp", {"width": 32, "depth": 2})
    before = config.copy()
    config["optimizer.groups.rest.optimizer.b2"] = np.float64(0.9)
    config["optimizer.groups.matrices.optimizer"] = ls.call.optim.soap(learning_rate=3e-3)
    assert config["optimizer.groups.rest.optimizer.b2"] == 0.9
    assert "b2: 0.9" in config.to_yaml() and "soap" in repr(config)
    assert config != before and "optimizer.groups.rest.optimizer.b2" not in before
    del config["optimizer.groups.rest.optimizer.b2"]
    config["optimizer.groups.matrices.optimizer"] = before["optimizer.groups.matrices.optimizer"]
    assert config == before
    config["model"].kwargs["width"] = 5  # of a copy
    assert config["model.width"] == 32
    assert "<code>models.mlp</code>" in config._repr_html_()


def my_model(width: int) -> Any: ...


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda c: c["modle.width"], "no 'modle.width'. Did you mean 'model.width'?"),
        (lambda c: c.__delitem__("optimiser"), "Did you mean 'optimizer'?"),
        (
            lambda c: c.__setitem__("model.depth.x", 3),
            "config['model.depth.x']: model.depth is the integer 2",
        ),
        (lambda c: c.__setitem__("model", ls.call.models.mlp), "is not called. Write ls.call."),
        (lambda c: c.__setitem__("model", object()), "a config cannot contain"),
        (lambda c: c.__setitem__("model", my_model), "is a function itself: write ls.call."),
        (lambda c: c.__setitem__("loss", lambda x: x), "write ls.call.my_lab.my_function() with"),
        (lambda c: c.__setitem__("loss", print), "cannot name print, a function of the module bu"),
        (
            lambda c: c.__setitem__("optimizer", optax.adam(1e-3)),
            "cannot contain a value of the type GradientTransformationExtraArgs",
        ),
        (
            lambda c: c.__setitem__("optimizer", optax.adamw),
            "is a function itself: write ls.call.optax.adamw(...), or ls.call.optax.adamw.partial(",
        ),
        (
            lambda c: c.__setitem__("optimizer.clip_norm", optax.cosine_decay_schedule(1.0, 9)),
            "that optax.cosine_decay_schedule returned: write the call itself, ls.call.optax.cosi",
        ),
        (lambda c: ls.call.models.mlp(3), "write ls.call.models.mlp(name=3)"),
        (lambda c: c.save("config.gin"), "does not end in .yaml"),
    ],
)
def test_mistakes_in_edits_are_sentences(mistake: Any, said: str):
    with pytest.raises(ls.UserError) as caught:
        mistake(mlp())
    assert said.lower() in str(caught.value).lower()


def test_a_plan_has_the_parameters_groups_and_warnings():
    plan = ls.explain(mlp())
    assert plan.parameters["embed/kernel"].group == "matrices"
    assert set(plan.groups) == {"matrices", "rest"} and plan.steps == 24
    assert "embed/kernel" in repr(plan) and "learning rate by step" in repr(plan)
    assert "<td>embed/kernel</td>" in plan._repr_html_()
    assert '<table class="dataframe"' in plan._repr_html_()  # what themes of pages style
    config = mlp()
    config["model.widht"] = 3
    with pytest.raises(ls.UserError, match="config\\['model.widht'\\]: .* Did you mean 'width'"):
        ls.explain(config)


# Runs.


def test_a_run_from_python_has_the_rows_of_the_command(trained: ls.Run, tmp_path: Path):
    (tmp_path / "mlp.yaml").write_text(MLP)
    assert main([f"--config={tmp_path / 'mlp.yaml'}", f"--workdir={tmp_path / 'run'}"]) == 0
    assert runs.lines(trained.folder) == runs.lines(tmp_path / "run")
    assert trained.config == mlp() and trained.summary.end == "done"
    assert repr(trained) == f"Run({str(trained.folder)!r}), done at step 24"


def test_metrics_are_a_table(trained: ls.Run):
    assert trained.metrics("validation/accuracy")["step"].tolist() == [8, 16, 24]
    assert trained.metrics()["train/loss"].shape == (24,)
    assert np.isnan(trained.metrics()["eval/loss"]).sum() == 21
    with pytest.raises(ls.UserError, match="no metric 'train/los'. Did you mean 'train/loss'?"):
        trained.metrics("train/los")


def test_a_run_without_rows_says_so(trained: ls.Run, tmp_path: Path):
    shutil.copytree(trained.folder, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(ls.UserError, match="has no metrics yet"):
        ls.load_run(tmp_path / "run").metrics()


@pytest.mark.long
def test_parameters_in_a_notebook_give_the_metrics_of_the_run(trained: ls.Run):
    again = ls.load_run(trained.folder)
    data = ls.compile(again.config).experiment.data
    batches = list(data.evaluate("test"))
    images = np.concatenate([each["image"] for each in batches])
    labels = np.concatenate([each["label"] for each in batches])
    mask = np.concatenate(
        [np.asarray(each.get("mask", np.ones(len(each["label"]))), bool) for each in batches]
    )
    logits, _ = again.model.apply(
        again.params(), again.model_state(), {"image": images}, key=None, train=False
    )
    right = np.mean((np.argmax(logits, -1) == labels)[mask])
    last = again.metrics("eval/accuracy")["eval/accuracy"].tolist()[-1]
    assert right == pytest.approx(last) == pytest.approx(again.evaluate("test")["accuracy"])
    flax = again.module.apply(again.variables(), images)
    np.testing.assert_array_equal(flax, logits)
    scores = again.metrics("validation/accuracy")["validation/accuracy"].tolist()
    best = again.evaluate("validation", step="best")["accuracy"]
    assert best == pytest.approx(max(scores[1], scores[2]), abs=1e-6) or scores[0] > best
    with pytest.raises(ls.UserError, match="no checkpoint of step 7"):
        again.params(step=7)
    with pytest.raises(ls.UserError, match="'bestt' is neither 'latest' nor 'best', nor"):
        again.params(step="bestt")  # type: ignore[arg-type]
    with pytest.raises(ls.UserError, match="no split 'tset' to evaluate. Did you mean 'test'"):
        again.evaluate("tset")


@pytest.mark.long
@pytest.mark.parametrize("name", ["vit", "gpt"])
@pytest.mark.parametrize("stacked", [True, False])
def test_the_attention_weights_of_our_transformers_can_be_captured(name: str, stacked: bool):
    """With them, numpy computes what a layer of attention returns."""
    random = np.random.default_rng(0)
    kwargs: dict[str, Any] = {"width": 16, "depth": 2, "num_heads": 4, "scan_layers": stacked}
    if name == "vit":
        model = models.vit(**kwargs, dropout=0.5)
        batch = {"image": random.normal(size=(3, 8, 8, 1)).astype("float32")}
        inputs: dict[str, Any] = {"images": batch["image"], "train": False}
    else:
        model = models.gpt(11, **kwargs, num_kv_heads=2)
        documents = np.repeat([[0, 0, 0, 1, 1, 1, 1]], 3, axis=0)
        batch = {"tokens": random.integers(11, size=(3, 7)), "documents": documents}
        inputs = batch
    params, _ = model.init(jax.random.key(0), batch)
    apply = functools.partial(model.module.apply, {"params": params}, **inputs)
    outputs, kept = apply(mutable=["intermediates"], capture_intermediates=True)
    for x, y in zip(jax.tree.leaves(outputs), jax.tree.leaves(apply()), strict=True):
        np.testing.assert_array_equal(x, y)

    layer: Any = kept["intermediates"]["blocks" if stacked else "block_1"]["attn"]
    kernel = params["blocks" if stacked else "block_1"]["attn"]["out"]["kernel"]
    layer, kernel = jax.tree.map(lambda x: np.asarray(x[1] if stacked else x), (layer, kernel))
    weights, returned = layer["weights"][0], layer["__call__"][0]
    batch_size, tokens, width = returned.shape
    assert weights.shape == (batch_size, 4, tokens, tokens)
    value = layer["qkv" if name == "vit" else "kv"]["__call__"][0]
    value = value.reshape(batch_size, tokens, -1, 4)[:, :, -4 if name == "vit" else -2 :]
    value = np.repeat(value, 4 // value.shape[2], axis=2)
    mixed = np.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch_size, tokens, width)
    np.testing.assert_allclose(mixed @ kernel, returned, atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    if name == "gpt":
        assert not np.triu(weights, 1).any() and not weights[:, :, 3:, :3].any()


NNX = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 10, rngs=rngs)])

    def __call__(self, image):
        image = image.reshape(len(image), -1)
        return self.layers[0](self.dropout(self.norm(image)))
"""


@pytest.mark.long
def test_the_module_of_an_nnx_model_has_the_values_of_the_run(tmp_path: Path, monkeypatch):
    (tmp_path / "nets_of_mine.py").write_text(NNX)
    monkeypatch.syspath_prepend(tmp_path)
    config = mlp()
    net = ls.call.nets_of_mine.Net.partial()
    config["model"] = ls.call.models.from_nnx(constructor=net, inputs="image")
    config["steps"] = 12
    run = ls.train(config, tmp_path / "run", vocabulary=["nets_of_mine"], quiet=True)
    images = next(ls.compile(config, vocabulary=["nets_of_mine"]).batches())["image"][:3]
    module, state = run.module, run.model_state()
    wide = images.reshape(3, -1)
    normal = (wide - state["norm"]["mean"]) / np.sqrt(state["norm"]["var"] + 1e-5)
    params = run.params()
    normal = normal * params["norm"]["scale"] + params["norm"]["bias"]
    layer = params["layers"]["0"]
    wanted = normal @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(module(images), wanted, atol=1e-4)  # without dropout


EDITED = """
import pathlib, sys, warnings
import lockstep as ls
net = pathlib.Path("net_of_mine.py")
net.write_text(SOURCE)
config = ls.load_config("mlp.yaml", set={"steps": 4})
config["model"] = ls.call.models.from_linen(module=ls.call.net_of_mine.Net(), inputs="image")
first = ls.train(config, "a", vocabulary=["net_of_mine"], quiet=True)
before = first.evaluate("test")
net.write_text(SOURCE.replace("relu", "tanh"))
assert first.evaluate("test") == before  # by the functions that trained it
second = ls.train(config, "b", vocabulary=["net_of_mine"], quiet=True)  # in a new process
for use in (second.evaluate, lambda: second.module, lambda: second.module):
    try:
        use()
    except ls.UserError as error:
        print("refused:", error)
del sys.modules["net_of_mine"]
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    ls.load_run("a", vocabulary=["net_of_mine"]).evaluate("test")
    print(*(str(each.message) for each in told if "computed" in str(each.message)))
    told.clear()
    again = ls.load_run("b", vocabulary=["net_of_mine"]).evaluate("test")["loss"]
    assert again == second.summary.metrics["eval/loss"], told
"""

NET = """
import flax.linen as nn

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(8)(x.reshape(len(x), -1))))
"""


@pytest.mark.long
def test_a_model_whose_code_was_edited_is_not_evaluated_in_silence(tmp_path: Path):
    (tmp_path / "mlp.yaml").write_text(MLP)
    done = python(f"SOURCE = {NET!r}\n{EDITED}", tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    refused = "net_of_mine.py was edited after this process imported the module"
    lines = [line for line in done.stdout.splitlines() if "net_of_mine.py" in line]
    assert [refused in line for line in lines] == [True, True, True, False]
    assert "a was computed with another content of net_of_mine.py" in lines[3]


@pytest.mark.long
@short.parametrize("way", ["config", "text", "variable"])
def test_all_functions_take_the_vocabulary_and_the_file_of_a_config(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / f"said_by_{way}.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    file, package = tmp_path / "mlp.yaml", f"said_by_{way}"
    net = f"!models.from_linen {{module: !{package}.Net, inputs: image}}"
    file.write_text(MLP.replace("!models.mlp {width: 16, depth: 2}", net).replace("24", "1"))
    words: dict[str, Any] = {"vocabulary": package} if way == "text" else {}
    if way == "variable":
        monkeypatch.setenv("LOCKSTEP_VOCABULARY", f"{package}, {package}")
    config: Any = ls.load_config(file, vocabulary=package) if way == "config" else file
    assert "Dense_0/kernel" in ls.explain(config, **words).parameters
    assert int(ls.compile(config, **words).init().step) == 0
    edited = (config if way == "config" else ls.load_config(file, **words)).copy()
    edited["steps"] = 2
    assert (
        edited.vocabulary
        == (package,)
        == ls.make_config(**words or {"vocabulary": package}).vocabulary
    )
    assert "steps  1  2" in ls.compare(ls.load_config(file, **words), edited, **words).text
    run = ls.train(config, tmp_path / "run", quiet=True, **words)
    assert run.module is not None and ls.compile(run.config)
    head = f"# Commands that use this config need the option --vocabulary={package}\n"
    written = (run.folder / "config.yaml").read_text()
    assert written.startswith(head) and written.count("#") == 1
    assert ls.load_config(run.folder / "config.yaml") == run.config
    assert ls.load_run(run.folder, **words or {"vocabulary": package}).model is not None


def test_a_vocabulary_is_names_or_none(tmp_path: Path):
    file = tmp_path / "mlp.yaml"
    file.write_text(MLP)
    assert ls.load_config(file, vocabulary=None).vocabulary == ()
    plot = functools.partial(ls.plot, metric="loss")
    module: Any = np
    for wrong, found in ((module, "the module numpy"), ([module], "the module numpy"), (3, "3")):
        for call in (ls.load_config, ls.explain, ls.report, plot):
            with pytest.raises(ls.UserError, match=f"'my_lab', or a list of.* given {found}"):
                call(file, vocabulary=wrong)


def test_packages_are_found_in_the_current_folder_of_a_script_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "net_of_the_folder.py").write_text(NET)
    net = "!models.from_linen {module: !net_of_the_folder.Net, inputs: image}"
    (tmp_path / "mlp.yaml").write_text(MLP.replace("!models.mlp {width: 16, depth: 2}", net))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])  # as that of a script
    monkeypatch.chdir(tmp_path)
    plan = ls.explain("mlp.yaml", vocabulary="net_of_the_folder")
    assert "Dense_0/kernel" in plan.parameters


@pytest.mark.long
def test_a_setting_of_a_sweep_is_named_in_one_line(tmp_path: Path):
    (tmp_path / "sweep.yaml").write_text("base: mlp.yaml\narms: {}\n")
    for value in (2, {"seeds": 2}):
        with pytest.raises(ls.UserError) as refused:
            file, sets = tmp_path / "sweep.yaml", {"finl.seeds": value}
            ls.sweep(file, tmp_path / "out", set=sets, quiet=True)
        assert len(str(refused.value).splitlines()) == 1, refused.value
        assert "finl.seeds=" in str(refused.value)


def test_folders_that_are_no_runs_are_named(tmp_path: Path):
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ls.UserError, match="is the folder of a sweep: read it with ls.load_sweep"):
        ls.load_run(tmp_path)
    with pytest.raises(ls.UserError, match="There is no folder"):
        ls.load_run(tmp_path / "none")
    (tmp_path / "plan.json").unlink()
    with pytest.raises(ls.UserError, match="it is not the folder of a run"):
        ls.load_run(tmp_path)


def test_mistakes_of_a_run_are_raised_with_the_places_of_the_user(
    trained: ls.Run, tmp_path: Path, capsys: pytest.CaptureFixture
):
    file = tmp_path / "mlp.yaml"
    file.write_text(MLP.replace("width: 16", "widht: 16"))
    with pytest.raises(ls.UserError) as caught:
        ls.train(file, tmp_path / "run", quiet=True)
    assert str(caught.value).startswith(f"{file}:2: models.mlp has no argument 'widht'.")
    config = mlp()
    config["steps"] = 30
    with pytest.raises(ls.UserError, match="another config.*\n  steps: 24 -> 30") as caught:
        ls.train(config, trained.folder)
    said = str(caught.value).splitlines()[-1]
    assert said.startswith("Choose another workdir, or resume with allow_changed=['steps']")
    assert caught.value._render_traceback_() == [f"UserError: {caught.value}"]  # of notebooks
    assert "steps: 24 -> 30" in capsys.readouterr().err
    with pytest.raises(ls.UserError, match="Put them into a file"):
        ls.train(config, tmp_path / "run", vocabulary=["__main__"])
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("setting", ["", "true", "false"])
def test_a_notebook_that_holds_the_memory_of_a_gpu_is_told_how_to_share_it(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By default jax reserves most of the memory, and a run in another process finds none."""
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    if setting:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", setting)
    config = mlp()
    config["model.widht"] = 3
    said = "Did you mean 'width'" if setting == "false" else "XLA_PYTHON_CLIENT_PREALLOCATE.*inline"
    with pytest.raises(ls.UserError, match=said):
        ls.train(config, tmp_path / "run", quiet=True)


@pytest.mark.long
def test_in_a_notebook_messages_are_not_shown_as_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A notebook shows what is written to stderr on a red ground, also when all is well."""

    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    config = mlp()
    config["model.widht"] = 3
    with monkeypatch.context() as patch, pytest.raises(ls.UserError):
        patch.setattr(sys, "stderr", red := OutStream())
        ls.train(config, tmp_path / "run")
    assert "Did you mean 'width'?" in capsys.readouterr().out and not red.getvalue()


@pytest.mark.long
def test_a_run_that_diverges_has_failed(tmp_path: Path):
    config = mlp()
    config["optimizer"] = ls.call.optax.sgd(learning_rate=1e30)
    with pytest.raises(ls.RunFailed, match="train/loss is nan"):
        ls.train(config, tmp_path / "run", quiet=True)
    assert ls.load_run(tmp_path / "run").summary.end == "diverged"


FAILING = """
import jax.numpy as jnp
from clu import metrics
from trainer.data import digits

def of_waves():
    def largest(*, outputs, **_):
        return jnp.argmax(outputs + 0j, axis=-1).astype(float)  # jax compares no complex numbers
    return metrics.Average.from_fun(largest)

class Digits:
    def __init__(self):
        self.whole = digits(batch_size=64)
    def __getattr__(self, name):
        return getattr(self.whole, name)
    def train(self, batch_index, seed):
        for index, batch in enumerate(self.whole.train(batch_index, seed)):
            if index == 4:
                error = RuntimeError("The disk is gone.\\nIt was here before.")
                error.add_note("Ask for another one.")
                raise error from OSError("no such disk")
            yield batch
"""


@pytest.mark.long
@short.parametrize(
    ("path", "call", "said"),
    [
        (
            "metrics",
            "of_waves",
            r"^TypeError: .*dtype complex64 .*\(.*failing\.py:8\)$",
        ),
        (
            "data",
            "Digits",
            r"^RuntimeError: The disk is gone\. It was here before \(.*failing\.py:21\)$",
        ),
    ],
)
def test_an_exception_in_code_of_the_user_is_that_of_the_failed_run(
    path: str, call: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    config = mlp()
    config["best_metric"] = None
    value = getattr(ls.call.failing, call)()
    config[path] = {"largest": value} if path == "metrics" else value
    with pytest.raises(ls.RunFailed, match=said):
        ls.train(config, tmp_path / "run", vocabulary=["failing"], quiet=True)


def test_a_run_in_this_process_is_the_same(trained: ls.Run, tmp_path: Path):
    inline = ls.train(mlp(), tmp_path / "run", inline=True)
    assert runs.lines(inline.folder) == runs.lines(trained.folder)
    config = mlp()
    config["model.widht"] = 3
    with pytest.raises(ls.UserError, match="config\\['model.widht'\\]"):
        ls.train(config, tmp_path / "bad", inline=True)


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script in tmp_path whose `ls.train` is at its first steps."""
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "import lockstep as ls\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background\n"
        "config = ls.load_config('mlp.yaml', set={'steps': 200_000, 'writers': ['console']})\n"
        "try:\n"
        "    ls.train(config, 'run')\n"
        "except ls.Stopped as stopped:\n"
        "    print('stopped:', stopped)\n"
    )
    (tmp_path / "mlp.yaml").write_text(MLP)
    started = subprocess.Popen(
        [sys.executable, "-u", str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(runs.ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        for line in started.stdout:
            if line.startswith("step "):
                break
        yield started
        started.kill()


@pytest.mark.long
def test_an_interrupt_leaves_a_run_that_the_same_call_finishes(
    long_run: subprocess.Popen[str], tmp_path: Path
):
    long_run.send_signal(signal.SIGINT)  # to this process alone, as a notebook's button does
    out, err = long_run.communicate(timeout=runs.LONG)
    assert long_run.returncode == 0, err
    assert "stopped:" in out and "SIGINT: stopping once what is computed is saved" in err
    assert ls.load_run(tmp_path / "run").summary.end == "stopped"
    step = ls.load_run(tmp_path / "run").summary.step
    with pytest.raises(ls.Stopped):
        ls.train(
            ls.load_config(tmp_path / "mlp.yaml", set={"steps": 200_000, "writers": ["console"]}),
            tmp_path / "run",
            until=step + 24,
            quiet=True,
        )
    rows = ls.load_run(tmp_path / "run").metrics("train/loss")
    assert rows["step"].tolist() == [*range(1, step + 25)]


@pytest.mark.long
def test_a_run_saves_and_ends_with_the_process_that_started_it(
    long_run: subprocess.Popen[str], tmp_path: Path
):
    """As with the restart of a notebook's kernel."""
    long_run.kill()
    run = ls.load_run(tmp_path / "run")
    runs.wait_for(lambda: run.summary is not None)
    assert run.summary is not None and run.summary.end == "stopped"
    assert run.params()["head"]


# Programs.


def test_steps_by_hand_have_the_bits_of_the_run(trained: ls.Run):
    """The run computes blocks of steps in a loop on the device, and this one step by step."""
    program = ls.compile(mlp())
    state, batches, rows = program.init(), program.batches(), []
    for _ in range(24):
        state, row = program.step(state, next(batches))
        rows.append(row)
    kept = trained.metrics()
    for name in ("train/loss", "grad_norm", "learning_rate/matrices"):
        assert [row[name] for row in rows] == kept[name].tolist(), name
    ours, theirs = jax.tree.leaves(state.params), jax.tree.leaves(trained.params(raw=True))
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    last = {name: x for name, x in trained.summary.metrics.items() if "/" in name}
    evaluated = program.evaluate(state)
    assert evaluated == {name: last[name] for name in evaluated}
    assert program.evaluate(state, "test")["loss"] == evaluated["eval/loss"]


@pytest.mark.long
def test_a_repeated_step_keeps_the_state_unless_it_is_donated():
    program = ls.compile(mlp())
    first, batch = program.init(), next(program.batches())
    _, row = program.step(first, batch)
    donated = program.init()
    after, again = program.step(donated, batch, donate=True)
    assert program.step(first, batch)[1] == row == again
    with pytest.raises(ls.UserError, match="donate=True"):
        program.step(donated, batch)
    with pytest.raises(ls.UserError, match="image"):
        program.step(after, {"image": batch["image"]})


@pytest.mark.long
def test_a_state_of_another_program_is_refused():
    wider = mlp()
    wider["model.width"] = 24
    program, state = ls.compile(mlp()), ls.compile(wider).init()
    batch = next(program.batches())
    said = "params/embed/bias: float32\\[24\\], and here float32\\[16\\]"
    for use in (lambda: program.step(state, batch), lambda: program.evaluate(state, "test")):
        with pytest.raises(ls.UserError, match=said) as caught:
            use()
        assert len(str(caught.value).splitlines()) == 6
    with pytest.raises(ls.UserError, match="no split 'tset'"):
        program.evaluate(program.init(), "tset")
    assert int(state.step) == 0  # nothing of it was donated


# Sweeps and results.


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> ls.Sweep:
    folder = tmp_path_factory.mktemp("library_sweep")
    (folder / "mlp.yaml").write_text(MLP)
    (folder / "sweep.yaml").write_text(
        "base: mlp.yaml\n"
        "arms:\n"
        "  low: {set: {model.depth: 1}, space: &space {optimizer.clip_norm: !space.values"
        " {values: [0.5, 1.0, 2.0]}}}\n"
        "  high: {space: *space}\n"
        "goal: {metric: accuracy, mode: max}\n"
        "final: {seeds: 2}\n"
    )
    return ls.sweep(folder / "sweep.yaml", folder / "runs", set={"final.seeds": 3}, quiet=True)


@pytest.mark.long
def test_trials_are_rows_with_paths_and_metrics(swept: ls.Sweep):
    trials = swept.trials()
    assert list(trials["arm"]) == ["low"] * 3 + ["high"] * 3
    assert list(trials["optimizer.clip_norm"]) == [0.5, 1.0, 2.0] * 2
    assert list(trials["end"]) == ["done"] * 6
    assert "validation/accuracy" in trials and "eval/accuracy" not in trials
    assert np.isfinite(trials["validation/accuracy"]).all()
    finals = swept.finals()
    assert len(finals["name"]) == 6 and "eval/accuracy" in finals
    values = dict(zip(trials["number"], trials["validation/accuracy"], strict=True))
    assert trials["validation/accuracy"][swept.winners["low", 0]] == max(
        x
        for arm, x in zip(trials["arm"], trials["validation/accuracy"], strict=True)
        if arm == "low"
    )
    assert len(values) == 3
    for name in ("low/0001/0", "trials/low/0001/0", "low/0001", "low/1", "low/0.1"):
        run = swept.run(name)
        assert run.config["optimizer.clip_norm"] == 1.0 and run.summary.end == "done"
    with pytest.raises(
        ls.UserError, match="a sweep keeps those of its trials only if its file has"
    ):
        run.params()
    seed = finals["seed"][0]
    assert swept.run(finals["name"][0]).folder == swept.folder / "final" / "low" / str(seed)
    with pytest.raises(ls.UserError, match="has several runs, 'final/low/10000', "):
        swept.run("final/low")
    with pytest.raises(
        ls.UserError, match="There is no trial 'low/0009/0': there are low/0000 to low/0002"
    ):
        swept.run("low/0009/0")
    assert "low" in repr(ls.load_sweep(swept.folder))


@pytest.mark.long
def test_reports_comparisons_and_plots_show_and_save_themselves(
    swept: ls.Sweep, trained: ls.Run, tmp_path: Path
):
    report = ls.report(swept)
    assert report.verdict == "\n".join(report.sentences) and report.verdict in repr(report)
    assert "<iframe srcdoc=" in report._repr_html_() and "&lt;svg" in report._repr_html_()
    files = report.save(tmp_path / "report", formats=["html", "csv"])
    assert files[0].name == "index.html" and "arms" in report.tables
    with pytest.raises(ls.UserError, match="no format 'docx'"):
        report.save(tmp_path / "report", formats=["docx"])
    other = mlp()
    other["model.width"] = 8
    compared = ls.compare(mlp(), other, program=False)
    assert "model.width" in repr(compared) and "config a" in compared.text
    drawn = ls.plot(swept, "validation/accuracy")
    assert set(drawn.lines) and "<svg" in drawn._repr_svg_()
    drawn.save(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ls.UserError, match="plot.xyz cannot be written"):
        drawn.save(tmp_path / "plot.xyz")
    with pytest.raises(ls.UserError, match="has no metric 'train/los'"):
        ls.plot(trained, "train/los")
    for x in ("step", "examples", "epochs", "seconds"):
        assert "<svg" in ls.plot(trained, "train/loss", x=x)._repr_svg_()


# The optimizer in loops of one's own.


def data(count: int = 64) -> tuple[jax.Array, jax.Array]:
    x = np.random.default_rng(0).normal(size=(count, 4)).astype("float32")
    return jnp.asarray(x), jnp.asarray(x @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32"))


def optimizer() -> optax.GradientTransformation:
    return ls.optim.optimizer(
        groups={
            "matrices": ls.optim.group(match=".*kernel", optimizer=ls.optim.muon(0.05)),
            "rest": ls.optim.group(match=".*", optimizer=optax.adamw(0.05)),
        }
    ).tx


def test_the_optimizer_trains_in_a_loop_written_by_hand():
    x, y = data()
    module: Any = nn.Dense(1)
    params = module.init(jax.random.key(0), x)["params"]
    tx = optimizer()
    state = tx.init(params)

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((module.apply({"params": params}, x) - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(100):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


def test_the_optimizer_trains_in_flaxs_train_state():
    x, y = data()
    module = nn.Dense(1)
    params = module.init(jax.random.key(0), x)["params"]
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optimizer())

    @jax.jit
    def step(state: TrainState) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(100):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]


def test_the_optimizer_trains_in_nnx():
    x, y = data()
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    state = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Linear, state: nnx.Optimizer) -> jax.Array:
        def loss_of(model: nnx.Linear) -> jax.Array:
            return jnp.mean((model(x) - y) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(model)
        state.update(model, grads)
        return loss

    losses = [float(step(model, state)) for _ in range(100)]
    assert losses[-1] < 0.1 * losses[0]
