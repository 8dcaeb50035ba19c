"""The command that proves exact resume: what it finds equal, and that it finds what is not."""

import json
from pathlib import Path

import pytest

from tests import runs, short
from trainer.__main__ import main
from trainer.diagnose import verify as verifying

pytestmark = pytest.mark.usefixtures("lab")


def verify(config: Path, *more: str) -> int:
    return main(["verify", *runs.files(config), "--vocabulary=unruly", "--steps=3", *more])


LBFGS = """
experiment.optimizer = @optax.lbfgs()
experiment.model = @models.mlp()
models.mlp.depth = 1
models.mlp.num_classes = 10
experiment.data = @data.digits()
data.digits.batch_size = None
"""
LOW_PRECISION = """
experiment.model = @models.convnet()
models.convnet.num_classes = 3
experiment.precision = 'bfloat16'
experiment.on_nonfinite = 'skip'
experiment.optimizer = @optim.optimizer()
optim.optimizer.low_precision = 'stochastic'
optim.optimizer.groups = {'all': @optim.group()}
optim.group.match = '.*'
optim.group.optimizer = @optax.adamw()
"""
ROLLBACK = """
experiment.data = @unruly.poisoned()
unruly.poisoned.at = (3, 4)
experiment.on_nonfinite = 'rollback'
experiment.microbatches = 2
"""
ONE_STEP = """
experiment.steps = 1
experiment.optimizer = @optax.sgd()
optax.sgd.learning_rate = 0.1
"""


@short.parametrize(
    ("more", "held"),
    [(ROLLBACK, "run_state 2"), (LBFGS, "ema 4"), (LOW_PRECISION, "model_state")],
    ids=["rollback", "lbfgs and ema", "batch statistics, bfloat16 and skip"],
)
def test_verify_shows_that_a_killed_run_ends_with_the_same_bits(tmp_path, capsys, more, held):
    assert verify(runs.write_config(tmp_path, more)) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert "Verified: 6 single steps, and 3 + kill -9 + restore + 3 in blocks, are" in said
    assert held in said and "at every step: the batch" in said and "rows of metrics" in said
    assert len(said.splitlines()) <= 4


@pytest.mark.long
def test_verify_finds_data_that_do_not_depend_on_the_step_alone(tmp_path, capsys):
    config = runs.write_config(tmp_path, "experiment.data = @unruly.impure()\n")
    assert verify(config, f"--workdir={tmp_path / 'kept'}") == 1
    said = capsys.readouterr().out
    assert "differ first at step 4: batch." in said and "pure function" in said
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"whole", "killed"}
    lineage = json.loads((tmp_path / "kept" / "killed" / "run.json").read_text())["lineage"]
    assert [entry["exit"] for entry in lineage] == ["killed", "stopped"]
    assert verify(config, f"--workdir={tmp_path / 'kept'}") == 2  # not over another


def test_the_first_leaf_that_differs_is_named():
    one = {s: {"batch": "b", "leaves": {"step": str(s), "params/a": "x"}} for s in (1, 2, 3)}
    two = {s: {"batch": "b", "leaves": dict(row["leaves"])} for s, row in one.items()}
    assert verifying.first_difference(one, two) is None
    two[3]["leaves"]["step"] = two[2]["leaves"]["params/a"] = "y"
    assert verifying.first_difference(one, two) == (2, "params/a")
    two[2]["batch"] = "c"
    assert verifying.first_difference(one, two) == (2, "batch")
    del two[1]
    assert verifying.first_difference(one, two).step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("more", "words"),
    [(ONE_STEP, "at least 2"), ("models.mlp.widht = 3\n", "widht")],
)
def test_a_config_that_cannot_be_verified_is_a_user_error(tmp_path, capsys, more, words):
    assert verify(runs.write_config(tmp_path, more)) == 2
    assert words in capsys.readouterr().err


@pytest.mark.long
def test_a_trace_stays_in_its_folder_when_the_data_change_directory(tmp_path, monkeypatch):
    import unruly  # type: ignore[import-not-found]

    def batch(self, step, batch):
        monkeypatch.chdir("/")
        return batch

    monkeypatch.setattr(unruly.Points, "batch", batch)
    monkeypatch.chdir(tmp_path)
    config = runs.write_config(tmp_path)
    assert runs.train(config, Path("run"), "--trace", "--until=3") == 75
    assert sorted(verifying.read_trace(tmp_path / "run")) == [1, 2, 3]


def test_a_run_finds_its_checkpoint_when_the_data_change_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    killed = []
    monkeypatch.setattr("os.kill", lambda *given: killed.append(given))
    watching = verifying.kill_after_checkpoint("run", 1, 2)
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    monkeypatch.chdir("/")
    watching(2, {}, None)  # type: ignore[arg-type]
    assert len(killed) == 1
