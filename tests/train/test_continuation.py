"""Runs that continue another run from one of its checkpoints."""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from tests import runs, short
from tests.sweep.test_sweep import rows
from tests.train.test_warm_start import params, stop_at_once
from trainer import checkpoint, config
from trainer.__main__ import main
from trainer.engine.metric_sums import compute_losses
from trainer.engine.program import load_located
from trainer.engine.step import apply_model
from trainer.report.comparison import read_workloads
from trainer.train.rollback import Counters, rollback_target
from trainer.train.warm_start import count_warm_starts

pytestmark = pytest.mark.usefixtures("lab")

ALL = "experiment.keep_latest = 50\nexperiment.save_every = {every}\n"
MUON = """experiment.optimizer = @optim.optimizer()
optim.optimizer.groups = {'matrices': @a/optim.group(), 'rest': @b/optim.group()}
optim.optimizer.clip_norm = 1.0
a/optim.group.match = '.*/kernel'
a/optim.group.optimizer = @optim.muon()
optim.muon.learning_rate = @schedules.warmup_cosine()
b/optim.group.match = '.*'
b/optim.group.optimizer = @optax.adamw()
"""
ROLLBACK = """experiment.data = @unruly.poisoned()
unruly.poisoned.at = (5, 13)
experiment.on_nonfinite = 'rollback'
"""
DROPOUT = """experiment.model = @models.vit()
experiment.data = @data.digits()
data.digits.batch_size = 16
data.digits.validation = 0.2
models.vit.width = 8
models.vit.depth = 2
models.vit.num_heads = 2
models.vit.patch_size = 2
models.vit.num_classes = 10
models.vit.dropout = 0.2
"""


def train_whole(folder: Path, more: str = "", every: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = runs.write_config(folder, more + ALL.format(every=every))
    assert runs.train(file, folder / "run") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def other(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 steps with the checkpoints of steps 4, 8, ..., 20."""
    return train_whole(tmp_path_factory.mktemp("other"))


def continued(folder: Path, run: Path, entries: str, more: str, *options: str) -> int:
    """Continues a run from step 8 in `folder`/run, with its config and what `more` changes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = f"experiment.warm_start = {{'from': '{run}', 'continue': True, {entries}}}\n"
    file = runs.write_config(folder, text + more)
    return runs.train(file, folder / "run", *options)


def assert_same_end(run: Path, other: Path, after: int = 8) -> None:
    assert checkpoint.diff_checkpoints(run, 20, 20, other=other) == []
    assert rows(run) == [row for row in rows(other) if row["step"] > after]


CASES = {
    "adamw with an average": "",
    "muon": MUON,
    "batches that were skipped": ROLLBACK,
    "dropout": DROPOUT,
}


@short.parametrize("more", CASES.values(), ids=CASES)
def test_a_continuation_has_the_bits_of_the_run_that_it_continues(tmp_path, more):
    whole = train_whole(tmp_path / "whole", more)
    text = more + ALL.format(every=4)
    assert continued(tmp_path / "same", whole, "'step': 8", text) == 0
    run = tmp_path / "same" / "run"
    assert_same_end(run, whole)
    assert [info.step for info in checkpoint.ls(run)] == [8, 12, 16, 20]
    assert count_warm_starts(run) == 1
    # A new state that follows all gradients from the first on is the state of the run.
    reset = "'step': 8, 'optimizer': 'reset', 'follow': 8"
    if more not in (ROLLBACK, DROPOUT):  # whose path to step 8 is not one, or takes long
        assert continued(tmp_path / "followed", whole, reset, text) == 0
        assert_same_end(tmp_path / "followed" / "run", whole)


@pytest.mark.long
def test_a_continuation_resumes_without_the_other_run(tmp_path):
    """Step 8, with which it begins, was evaluated by the other run."""
    other = train_whole(tmp_path / "whole", "experiment.eval_every = 4\n")
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    text = "experiment.eval_every = 4\n" + ALL.format(every=4)
    folder = tmp_path / "same"
    assert continued(folder, copy, "'step': 8", text, "--until=8") == 75
    assert [info.step for info in checkpoint.ls(folder / "run")] == [8]
    shutil.rmtree(copy)
    for until in ("--until=9", "--until=14", ""):
        assert continued(folder, copy, "'step': 8", text, *filter(None, [until])) in (0, 75)
    assert_same_end(folder / "run", other)
    shutil.rmtree(folder / "run" / "checkpoints")
    assert continued(folder, copy, "'step': 8", text) == 2  # and there is no other run


@pytest.mark.long
def test_another_seed_takes_other_batches_from_the_same_state(tmp_path, other):
    assert continued(tmp_path / "a", other, "'step': 8", "experiment.seed = 5\n") == 0
    run = tmp_path / "a" / "run"
    # keep_latest is 3, and the first state is kept as well, because it cannot be computed again.
    assert [info.step for info in checkpoint.ls(run)] == [8, 12, 16, 20]
    first = checkpoint.diff_checkpoints(run, 8, 8, other=other)
    assert [line.partition(":")[0] for line in first] == ["run_state/seed"]
    wanted = [row for row in rows(other) if row["step"] > 8]
    assert [row["step"] for row in rows(run)] == [row["step"] for row in wanted]
    assert all(a != b for a, b in zip(rows(run), wanted, strict=True))
    # Schedules go on as well.
    for a, b in zip(rows(run), wanted, strict=True):
        assert a.get("learning_rate/all") == b.get("learning_rate/all")


def gradients_of(run: Path, steps: range) -> list[dict[str, np.ndarray]]:
    """Differentiates the loss at the checkpoints of a run, without its step and its optimizer."""
    program = load_located(config.load([str(run / "config.yaml")]), ["unruly"])
    experiment = program.experiment
    found = []
    for step in steps:
        saved = checkpoint.load_parts(run, step, ["params"])["params"]
        batch = next(experiment.batches(step))

        def loss(params, batch=batch):
            outputs = apply_model(experiment, params, {}, batch, key=None, train=True)[0]
            return compute_losses(experiment.loss, outputs, batch).counted(batch).mean()

        found.append(jax.grad(loss)(jax.tree.map(jax.numpy.asarray, saved)))
    return found


@pytest.mark.long
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_state_that_follows_k_gradients_is_that_of_bare_optax(tmp_path, monkeypatch, count):
    whole = train_whole(tmp_path / "whole", every=1)
    stop_at_once(monkeypatch)
    more = "experiment.optimizer = @optax.nadamw()\noptax.nadamw.b1 = 0.8\n"
    more += "optax.nadamw.learning_rate = @schedules.warmup_cosine()\n"
    entries = f"'step': 8, 'optimizer': 'reset', 'follow': {count}"
    assert continued(tmp_path / "new", whole, entries, more) == 75
    run = tmp_path / "new" / "run"
    bare = optax.scale_by_adam(b1=0.8, b2=0.999, nesterov=True)
    start = checkpoint.load_parts(whole, 8, ["params"])["params"]
    state = bare.init(jax.tree.map(jax.numpy.asarray, start))
    for grads in gradients_of(whole, range(8 - count, 8)):
        _, state = bare.update(grads, state)
    found = params(run, 8, "opt_state")
    for name in ("mu", "nu"):
        wanted = runs.leaves(getattr(state, name))
        for path, value in wanted.items():
            np.testing.assert_allclose(
                found[f"groups/all/0/{name}/{path}"], value, rtol=2e-5, atol=1e-9
            )
        assert any(x.any() for x in wanted.values()) is (count > 0)
    # The count of Adam's bias correction is that of the gradients; the schedule goes on at step 8.
    assert found["scalars/int32"].tolist() == [count, 0, 8]
    theirs = params(whole, 8)
    assert {k: x.tobytes() for k, x in params(run, 8).items()} == {
        k: x.tobytes() for k, x in theirs.items()
    }


@pytest.mark.long
def test_a_run_that_is_computed_again_with_other_bits_is_refused(tmp_path, other, capsys):
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    file = copy / "config.yaml"
    text = file.read_text()
    assert "peak_value: 0.01" in text
    file.write_text(text.replace("peak_value: 0.01", "peak_value: 0.02"))
    entries = "'step': 8, 'optimizer': 'reset', 'follow': 4"
    capsys.readouterr()
    assert continued(tmp_path / "a", copy, entries, "") == 2
    said = capsys.readouterr().err
    assert "do not lead to its checkpoint of step 8" in said and "leave out follow" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_a_changed_checkpoint_is_refused(tmp_path, other, capsys):
    digest = checkpoint.leaves_digest(other, 8)
    assert continued(tmp_path / "a", other, f"'step': 8, 'sha256': '{digest}'", "") == 0
    copy = tmp_path / "copy"
    shutil.copytree(other, copy)
    shutil.rmtree(copy / "checkpoints" / "8")
    shutil.copytree(copy / "checkpoints" / "12", copy / "checkpoints" / "8")
    capsys.readouterr()
    assert continued(tmp_path / "b", copy, f"'step': 8, 'sha256': '{digest}'", "") == 2
    said = capsys.readouterr().err
    assert "not the one that sha256 names" in said and not (tmp_path / "b" / "run").exists()


def test_a_rollback_does_not_go_behind_the_first_step():
    assert rollback_target(Counters(1, 1, 9, 2), 9).step == 1
    assert rollback_target(Counters(1, 1, 9, 2), 9, 8).step == 8
    assert rollback_target(Counters(1, 1, 9, 2), 9, 8).counters.skipped_batches == 2


MISTAKES = [
    ("'step': 7", "", "There is no checkpoint of step 7"),
    ("", "", "step must be the step of a checkpoint"),
    ("'step': True", "", "step must be the step of a checkpoint"),
    ("'step': 20", "", "This run has 20 steps in all"),
    ("'step': 8, 'rename': {}", "", "an entry 'rename'"),
    ("'step': 8, 'schedule': 'keep'", "", "an entry 'schedule'"),
    ("'step': 8, 'optimizer': 'new'", "", "optimizer must be 'keep' or 'reset'"),
    ("'step': 8, 'follow': 2", "", "write optimizer: reset, or remove follow"),
    ("'step': 8, 'optimizer': 'reset', 'follow': -1", "", "a number of gradients, at least 0"),
    ("'step': 8, 'optimizer': 'reset', 'follow': 9", "", "has 8 gradients before step 8"),
    (
        "'step': 8, 'optimizer': 'reset', 'follow': 5",
        "",
        "has those of 4, 8, 12, 16, 20. follow can be at most 4, or 8, all of them.",
    ),
    ("'step': 8", "models.mlp.width = 9\n", "params/embed/bias"),
    ("'step': 8", "experiment.ema_decay = None\n", "Give both runs an ema_decay, or none"),
    (
        "'step': 8",
        "experiment.optimizer = @optax.rmsprop()\noptax.rmsprop.learning_rate = 0.1\n",
        "reset",
    ),
    (
        "'step': 8, 'optimizer': 'reset', 'follow': 2",
        "experiment.optimizer = @optax.contrib.schedule_free_adamw()\n"
        "optax.contrib.schedule_free_adamw.learning_rate = 0.1\nexperiment.ema_decay = 0.9\n",
        "cannot follow the parameters of another optimizer",
    ),
]


@pytest.mark.parametrize(("entries", "more", "words"), MISTAKES)
def test_a_continuation_that_does_not_fit_is_a_user_error(
    tmp_path, other, capsys, entries, more, words
):
    capsys.readouterr()
    assert continued(tmp_path / "a", other, entries, more) == 2
    said = capsys.readouterr().err
    assert words in said and re.search(r"run\.gin:\d: ", said), said
    assert len(said.splitlines()) <= 8 and not (tmp_path / "a" / "run").exists()
    files = runs.files(tmp_path / "a" / "run.gin")
    assert main(["explain", *files, "--vocabulary=unruly"]) == 2


@pytest.mark.long
def test_skipped_batches_need_the_counters_of_rollback(tmp_path, capsys):
    whole = train_whole(tmp_path / "whole", ROLLBACK)
    more = ROLLBACK.replace("'rollback'", "'halt'")
    assert continued(tmp_path / "a", whole, "'step': 8", more) == 2
    said = capsys.readouterr().err
    assert "skipped 1 batch" in said and "on_nonfinite: rollback" in said
    follow = "'step': 8, 'optimizer': 'reset', 'follow': 4"
    assert continued(tmp_path / "b", whole, follow, ROLLBACK) == 2
    assert "went back between step 4 and step 8" in capsys.readouterr().err


@pytest.mark.long
def test_other_commands_know_where_a_continuation_began(tmp_path, other, capsys):
    assert continued(tmp_path / "a", other, "'step': 8", "") == 0
    run = tmp_path / "a" / "run"
    assert json.loads((run / "summary.json").read_text())["first_step"] == 8
    (workload,) = read_workloads([str(other), str(run)])
    assert [x.updates for x in workload.finals] == [20, 12]
    assert main(["replay", str(run), "--vocabulary=unruly", "--step=9"]) == 0
    assert main(["replay", str(run), "--vocabulary=unruly", "--step=8"]) == 2
    assert "replay that step in the folder of the other run" in capsys.readouterr().err
    assert main(["verify", *runs.files(tmp_path / "a" / "run.gin"), "--vocabulary=unruly"]) == 2
    assert "continues another run from step 8" in capsys.readouterr().err
