"""The seed of the data, which may differ from the seed of the parameters and of dropout."""

import json

import numpy as np
import pytest

from tests import runs
from trainer import checkpoint

pytestmark = pytest.mark.usefixtures("lab")


def trained(folder, name, *more):
    config = runs.write_config(folder)
    assert runs.train(config, folder / name, "--set=steps=2", "--set=log_every=1", *more) == 0
    return [row["train/loss"] for row in runs.lines(folder / name) if "train/loss" in row]


@pytest.mark.long
def test_without_a_data_seed_the_seed_is_that_of_the_data(tmp_path):
    plain = trained(tmp_path, "plain", "--set=seed=3")
    assert trained(tmp_path, "same", "--set=seed=3", "--set=data_seed=3") == plain
    assert trained(tmp_path, "other", "--set=seed=3", "--set=data_seed=4") != plain


def test_the_data_seed_changes_the_batches_and_not_the_parameters(tmp_path):
    def first(name, *more):
        more = (*more, "--set=save_every=1", "--set=optimizer.learning_rate=0.0")
        trained(tmp_path, name, *more)
        kernels = runs.leaves(checkpoint.load_params(tmp_path / name))
        return {path: np.asarray(x) for path, x in kernels.items()}

    # AdamW at rate 0 leaves the parameters as the seed made them.
    one, two, three = (
        first("one"),
        first("two", "--set=data_seed=9"),
        first("three", "--set=seed=9"),
    )
    assert all((one[path] == two[path]).all() for path in one)
    assert any((one[path] != three[path]).any() for path in one)


@pytest.mark.long
def test_replay_reads_the_batch_of_the_data_seed(tmp_path, capsys):
    more = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (6,)\n"
    config = runs.write_config(tmp_path, more + "experiment.data_seed = 7\n")
    assert runs.train(config, tmp_path / "run") == 1
    event = json.loads((tmp_path / "run" / "nonfinite.json").read_text())[0]
    assert (event["seed"], event["data_seed"]) == (0, 7)
    said = runs.printed(capsys, "replay", str(tmp_path / "run"), "--vocabulary=unruly", code=1)
    assert "Step 7 with batch 6" in said and "the data changed" not in said


@pytest.mark.long
def test_a_run_is_not_resumed_with_another_data_seed(tmp_path, capfd):
    trained(tmp_path, "run", "--set=data_seed=7")
    config = runs.write_config(tmp_path)
    again = ["--set=steps=2", "--set=log_every=1", "--set=data_seed=8"]
    assert "data_seed: 7 -> 8" in runs.said(capfd, config, tmp_path / "run", *again, code=2)


def test_a_data_seed_out_of_range_is_refused(tmp_path, capfd):
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run", "--set=data_seed=-1") == 2
    assert "data_seed must be between 0 and 2**32 - 1, got -1." in capfd.readouterr().err
