"""The command `checkpoint export`, and the parameters that it finds."""

import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from flax.traverse_util import unflatten_dict

from tests import runs, short
from trainer import checkpoint, config
from trainer.__main__ import main
from trainer.checkpoint.manager import Retention
from trainer.engine.program import load_located
from trainer.train.trained import read_trained, restore


@pytest.fixture(scope="module")
def lab():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(runs.LAB)
        yield


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run with a moving average of its parameters, whose best checkpoint is not its last."""
    folder = tmp_path_factory.mktemp("export")
    more = "experiment.best_metric = 'loss'\nexperiment.best_mode = 'min'\n"
    more += "schedules.warmup_cosine.peak_value = 3.0\nexperiment.eval_every = 4\n"
    assert runs.train(runs.write_config(folder, more), folder / "run") == 0
    return folder / "run"


def export(run, file, *more):
    return main(["checkpoint", "export", str(run), str(file), "--vocabulary=unruly", *more])


def evaluated(run, step):
    """The parameters that the program of the run evaluates, by path."""
    program = load_located(config.load([run / "config.yaml"]), ["unruly"])
    checkpoints = checkpoint.Checkpoints(run / "checkpoints", read_only=True)
    return runs.leaves(program.evaluation.params(restore(program, checkpoints, step)))


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(np.asarray(a[name]), np.asarray(b[name]), name)


@pytest.mark.long
def test_the_parameters_that_are_evaluated_are_exported_with_the_config(run, tmp_path, capsys):
    file = tmp_path / "net.safetensors"
    assert export(run, file) == 0
    arrays = safetensors.numpy.load_file(file)
    same(arrays, evaluated(run, 20))
    same(safetensors.flax.load_file(file), evaluated(run, 20))
    with safetensors.safe_open(file, "numpy") as opened:
        about = opened.metadata()
    best = checkpoint.ls(run)[-1].metric
    assert about["step"] == "20" and about["parameters"] == "evaluated"
    assert about["best_metric"] == "loss" and float(about["metric"]) == best
    assert (tmp_path / "net.yaml").read_text() == (run / "config.yaml").read_text()
    assert about["config"] == config.digest(config.load([tmp_path / "net.yaml"]).root)
    assert "step 20, loss" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "net.yaml"}


def test_torch_reads_it(run, tmp_path, torch):
    import safetensors.torch

    assert export(run, tmp_path / "net.safetensors") == 0
    read = safetensors.torch.load_file(tmp_path / "net.safetensors")
    same({name: x.numpy() for name, x in read.items()}, evaluated(run, 20))


def test_raw_exports_the_parameters_that_are_trained(run, tmp_path):
    assert export(run, tmp_path / "net.safetensors", "--raw") == 0
    arrays = safetensors.numpy.load_file(tmp_path / "net.safetensors")
    same(arrays, runs.leaves(checkpoint.load_params(run, 20)))
    assert any((arrays[name] != np.asarray(x)).any() for name, x in evaluated(run, 20).items())


def test_the_best_step_or_a_numbered_one_is_exported(run, tmp_path):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    best = min(losses, key=lambda step: losses[step])
    assert best != 20
    for step in ("best", best, 16):
        file = tmp_path / "net.safetensors"
        assert export(run, file, f"--step={step}", "--force") == 0
        with safetensors.safe_open(file, "numpy") as opened:
            about = opened.metadata()
        number = best if step == "best" else step
        assert about["step"] == str(number) and float(about["metric"]) == losses[number]
        same(safetensors.numpy.load_file(file), evaluated(run, number))


@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equal_metrics_the_first_is_the_best_as_for_retention(run, tmp_path, mode):
    steps = [info.step for info in checkpoint.ls(run)]
    worse, *equal = steps[:3]
    metrics = {worse: 0.0 if mode == "max" else 2.0, **dict.fromkeys(equal, 1.0)}
    rows = [{"step": step, "eval/loss": value} for step, value in metrics.items()]
    rows += [{"step": step, "eval/loss": "NaN"} for step in steps[3:]]
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub("best_mode: min", f"best_mode: {mode}", text))
    retention = Retention(keep_latest=1, best_mode=mode)
    for step, value in metrics.items():
        retention.saving(step, value)
    kept = set(steps) - retention.superfluous(steps) - {max(steps)}
    assert kept == {equal[0]} and read_trained(folder, "best", ["unruly"]).step == equal[0]


@pytest.mark.long
def test_the_dtype_bfloat16_is_kept(lab, tmp_path):
    more = "experiment.precision = 'bfloat16'\nexperiment.ema_decay = None\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 0
    assert export(tmp_path / "run", tmp_path / "net.safetensors") == 0
    arrays = safetensors.flax.load_file(tmp_path / "net.safetensors")
    assert {x.dtype for x in arrays.values()} == {jnp.dtype("bfloat16")}
    same(arrays, runs.leaves(checkpoint.load_params(tmp_path / "run", 20)))


WRAPPERS = {
    "ema_nesterov": (
        "lookahead",
        "optim.ema_nesterov.step_size = 0.9\noptim.ema_nesterov.decay = 0.5\n",
    ),
    "weight_ema": ("readout", "optim.weight_ema.horizon = '10%'\n"),
}


@pytest.mark.long
@short.parametrize("kept", ["schedule_free", "lookahead", "ema_nesterov", "weight_ema"])
def test_the_averages_of_an_optimizer_are_exported(lab, kept, tmp_path):
    more = "experiment.ema_decay = None\n"
    if kept == "schedule_free":
        more += "experiment.optimizer = @optax.contrib.schedule_free_adamw()\n"
        more += "optax.contrib.schedule_free_adamw.learning_rate = 0.05\n"
    elif kept == "lookahead":
        more += "experiment.optimizer = @optax.lookahead()\noptax.lookahead:\n"
        more += "  fast_optimizer = @optax.adamw()\n  sync_period = 3\n  slow_step_size = 0.5\n"
    else:
        name, given = WRAPPERS[kept]
        more += (
            f"experiment.optimizer = @optim.optimizer()\noptim.optimizer.{name} = @optim.{kept}()\n"
        )
        more += "optim.optimizer.groups = {'all': @optim.group()}\noptim.group.match = '.*'\n"
        more += f"optim.group.optimizer = @optax.adamw()\n{given}"
    run = tmp_path / "run"
    assert runs.train(runs.write_config(tmp_path, more), run) == 0
    assert export(run, tmp_path / "net.safetensors") == 0
    arrays = safetensors.numpy.load_file(tmp_path / "net.safetensors")
    same(arrays, evaluated(run, 20))
    raw = runs.leaves(checkpoint.load_params(run, 20))
    assert any((arrays[name] != raw[name]).any() for name in raw)


def test_the_data_of_the_run_are_not_needed(run, tmp_path, monkeypatch):
    import unruly  # type: ignore[import-not-found]

    monkeypatch.setattr(unruly, "Points", None)
    assert export(run, tmp_path / "net.safetensors") == 0


def test_the_state_of_the_model_is_exported_too(run, tmp_path, monkeypatch):
    parts = checkpoint.load_parts(run, 20, ["params", "model_state", "ema"])
    parts["model_state"] = {"norm": {"mean": np.arange(3.0)}}
    monkeypatch.setattr(checkpoint, "load_parts", lambda *_: parts)
    assert export(run, tmp_path / "net.safetensors") == 0
    arrays = safetensors.numpy.load_file(tmp_path / "net.safetensors")
    assert arrays["model_state/norm/mean"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("most", ["0.3kB", "0.5kB"])
def test_large_parameters_are_divided_among_files_with_the_index_of_the_hub(run, tmp_path, most):
    assert export(run, tmp_path / "net.safetensors", "--max_shard=0.2kB") == 0
    assert export(run, tmp_path / "net.safetensors", f"--max_shard={most}", "--force") == 0
    index = json.loads((tmp_path / "net.safetensors.index.json").read_text())
    wanted = evaluated(run, 20)
    assert index["metadata"] == {"total_size": sum(x.nbytes for x in wanted.values())}
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"net-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    # No file of the first export is left.
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {*files, "net.safetensors.index.json", "net.yaml"} and count > 1
    read = {}
    for file in files:
        part = safetensors.numpy.load_file(tmp_path / file)
        assert {name for name, of in index["weight_map"].items() if of == file} == set(part)
        limit = {"0.3kB": 300, "0.5kB": 500}[most]
        assert sum(x.nbytes for x in part.values()) <= limit or len(part) == 1
        read |= part
        with safetensors.safe_open(tmp_path / file, "numpy") as opened:
            assert opened.metadata()["step"] == "20"
    same(read, wanted)
    assert export(run, tmp_path / "net.safetensors", "--max_shard=1GB", "--force") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"net.safetensors", "net.yaml"}
    same(safetensors.numpy.load_file(tmp_path / "net.safetensors"), wanted)


def test_orbax_restores_an_export_in_its_format(run, tmp_path, capsys):
    import orbax.checkpoint as ocp

    assert export(run, tmp_path / "net", "--format=orbax") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"net", "net.yaml"}
    same(ocp.PyTreeCheckpointer().restore(tmp_path / "net"), evaluated(run, 20))
    described = json.loads((tmp_path / "net/_METADATA").read_text())
    assert described["custom_metadata"]["parameters"] == "evaluated"
    capsys.readouterr()
    assert "net exists. Name a new folder" in refused(
        capsys, run, tmp_path / "net", "--format=orbax", "--force"
    )
    said = refused(capsys, run, tmp_path / "x.safetensors", "--format=orbax")
    assert "--format=orbax writes a folder" in said


def refused(capsys, run, file, *more):
    try:
        code = export(run, file, *more)
    except SystemExit as end:
        code = end.code
    assert code == 2
    return " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_exported_is_refused(run, tmp_path, capsys, lab):
    file = tmp_path / "net.safetensors"
    there = ", ".join(str(info.step) for info in checkpoint.ls(run))
    assert f"no checkpoint of step 7; there are {there}" in refused(capsys, run, file, "--step=7")
    assert "write best, latest or" in refused(capsys, run, file, "--step=newest")
    said = refused(capsys, run, tmp_path / "net.bin")
    assert "net.bin does not end in .safetensors" in said and "net.safetensors." in said
    said = refused(capsys, run, tmp_path / "gone" / "net.safetensors")
    assert "There is no folder" in said and "gone for net.safetensors" in said
    assert "There is no folder" in refused(capsys, tmp_path / "none", file)
    assert "has no config.yaml" in refused(capsys, tmp_path, file)
    assert list(tmp_path.iterdir()) == []
    file.write_text("mine")
    assert "net.safetensors exists" in refused(capsys, run, file) and file.read_text() == "mine"
    file.unlink()
    (tmp_path / "net.yaml").write_text("mine")
    assert "net.yaml exists" in refused(capsys, run, file)
    assert [path.name for path in tmp_path.iterdir()] == ["net.yaml"]


@pytest.mark.long
def test_a_run_without_a_best_metric_or_a_checkpoint_is_refused(lab, tmp_path, capsys):
    run, file = tmp_path / "run", tmp_path / "net.safetensors"
    assert runs.train(runs.write_config(tmp_path), run) == 0
    capsys.readouterr()
    said = refused(capsys, run, file, "--step=best")
    assert "is the best: its config has no best_metric. Write --step=latest" in said
    steps = [info.step for info in checkpoint.ls(run)]
    for step in steps:
        leaf = next((run / "checkpoints" / str(step)).glob("manifest.json"))
        leaf.write_text(leaf.read_text().replace('"', "'", 1))
    said = refused(capsys, run, file)
    assert "checkpoint of step 20" in said and "is damaged" in said
    (run / "checkpoints").rename(tmp_path / "away")
    assert "There is no checkpoint in" in refused(capsys, run, file)


def test_the_config_beside_builds_the_model_of_the_file(run, tmp_path):
    assert export(run, tmp_path / "net.safetensors") == 0
    params = unflatten_dict(safetensors.flax.load_file(tmp_path / "net.safetensors"), sep="/")
    builder = config.Builder(config.load([tmp_path / "net.yaml"]), ["unruly"])
    data = builder.build("data")
    batch = next(data.train(0, 0))
    outputs, _ = builder.build("model").apply(params, {}, batch, key=None, train=False)
    assert outputs.shape == (8, 3) and np.isfinite(outputs).all()
