"""The hyperparameters in TensorBoard's files, read by TensorBoard's own tab HParams."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.sweep.test_sweep import replaced, swept
from trainer.writers.summary import read_summary

backend = pytest.importorskip("tensorboard.plugins.hparams.backend_context")
pytestmark = [
    pytest.mark.usefixtures("lab"),
    pytest.mark.filterwarnings("ignore"),  # of tensorboard's own code
]

TENSORBOARD = ["--set", "writers=[tensorboard]"]


class Tab:
    """What the tab HParams shows of the runs in a folder.

    Of a run's own folder it shows no metrics if no run wrote an "experiment", whose columns would
    be those of all others.
    """

    def __init__(self, folder: Path):
        from tensorboard import context
        from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
        from tensorboard.plugins import base_plugin
        from tensorboard.plugins.hparams import api_pb2, list_session_groups

        files = plugin_event_multiplexer.EventMultiplexer()
        files.AddRunsFromDirectory(str(folder))
        files.Reload()
        data = data_provider.MultiplexerDataProvider(files, str(folder))
        tab = backend.Context(base_plugin.TBContext(data_provider=data, logdir=str(folder)))
        request = context.RequestContext()
        found = tab.hparams_metadata(request, "")
        of_provider = tab.hparams_from_data_provider(request, "", limit=1000)
        experiment = tab.experiment_from_metadata(request, "", True, found, of_provider)
        self.columns = {each.name for each in experiment.hparam_infos}
        self.metrics = {each.name.tag for each in experiment.metric_infos}
        statuses = [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]
        asked = api_pb2.ListSessionGroupsRequest(
            start_index=0,
            slice_size=100,
            include_metrics=True,
            allowed_statuses=[*statuses, api_pb2.STATUS_UNKNOWN],
        )
        listed = list_session_groups.Handler(request, tab, "", asked).run().session_groups
        self.rows = [_row(group) for group in listed]
        assert all(len(group.sessions) == 1 for group in listed)
        self.status = [api_pb2.Status.Name(group.sessions[0].status)[7:] for group in listed]


def _row(group: Any) -> dict[str, Any]:
    """Returns the cells of a line of the table: hyperparameters and final metrics."""
    cells: dict[str, Any] = {}
    for name, value in group.hparams.items():
        kind = value.WhichOneof("kind")
        cells[name] = None if kind is None else getattr(value, kind)
    return cells | {each.name.tag: (each.value, each.training_step) for each in group.metric_values}


def same(cells: Mapping[str, Any], folder: Path) -> None:
    """Asserts that the cells have the final metrics of a run."""
    summary = read_summary(folder)
    assert summary is not None
    for name in ("train/loss", "eval/loss", "eval/accuracy"):
        value, step = cells[name]
        assert (value, step) == (pytest.approx(summary.metrics[name]), summary.step)


def test_the_tab_shows_the_config_and_the_final_metrics_of_a_run(tmp_path):
    config = runs.write_config(tmp_path)
    assert runs.train(config, tmp_path / "run", *TENSORBOARD) == 0
    tab = Tab(tmp_path)
    (cells,) = tab.rows
    assert cells["optimizer"] == "optax.adamw"
    assert cells["optimizer.learning_rate"] == "schedules.warmup_cosine"
    assert cells["optimizer.learning_rate.peak_value"] == 0.01
    assert cells["optimizer.learning_rate.warmup_steps"] == "10%"
    assert cells["steps"] == 20
    assert tab.status == ["SUCCESS"]
    assert {"eval/accuracy", "eval/loss", "train/loss"} <= tab.metrics
    same(cells, tmp_path / "run")


@pytest.mark.long
def test_runs_of_different_configs_have_the_columns_of_all(tmp_path):
    config = runs.write_config(tmp_path)
    for name, more in (
        ("adamw", "optimizer.b2=0.95"),
        ("sgd", "optimizer=!optax.sgd {learning_rate: 0.1, momentum: 0.9}"),
    ):
        assert runs.train(config, tmp_path / "runs" / name, *TENSORBOARD, "--set", more) == 0
    tab = Tab(tmp_path / "runs")
    assert {"optimizer.b2", "optimizer.momentum", "optimizer.learning_rate"} <= tab.columns
    by_name = {cells["optimizer"]: cells for cells in tab.rows}
    assert by_name["optax.adamw"]["optimizer.b2"] == 0.95
    assert by_name["optax.sgd"]["optimizer.momentum"] == 0.9
    same(by_name["optax.sgd"], tmp_path / "runs" / "sgd")


@pytest.mark.long
def test_a_resumed_run_is_one_line_with_its_last_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, folder = runs.write_config(tmp_path), tmp_path / "run"
    assert runs.train(config, folder, *TENSORBOARD, "--until=6") == 75
    assert Tab(tmp_path).status == ["UNKNOWN"]  # it has not ended
    assert runs.train(config, folder, *TENSORBOARD) == 0
    assert runs.train(config, folder, *TENSORBOARD) == 0  # nothing to do
    tab = Tab(tmp_path)
    assert tab.status == ["SUCCESS"]
    same(tab.rows[0], folder)
    files = EventAccumulator(str(folder)).Reload()
    assert set(files.PluginTagToContent("hparams")) == {
        "_hparams_/session_start_info",
        "_hparams_/session_end_info",
    }
    assert [event.step for event in files.Scalars("eval/loss")] == [5, 10, 15, 20]


@pytest.mark.long
def test_a_run_that_failed_before_its_first_step_shows_the_values_of_its_restart(tmp_path):
    raising = "experiment.data = @unruly.raising()\nunruly.raising.seed = 0\n"
    config = runs.write_config(tmp_path, raising + "unruly.raising.at = 1\n")
    assert runs.train(config, tmp_path / "run", *TENSORBOARD) == 1
    assert runs.train(config, tmp_path / "run", *TENSORBOARD, "--set", "data.seed=1") == 0
    tab = Tab(tmp_path)
    assert (tab.status, tab.rows[0]["data.seed"]) == (["SUCCESS"], 1)
    same(tab.rows[0], tmp_path / "run")


@pytest.mark.long
def test_a_run_that_diverged_is_marked_as_failed(tmp_path):
    poisoned = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (10,)\n"
    config = runs.write_config(tmp_path, poisoned)
    assert runs.train(config, tmp_path / "run", *TENSORBOARD) == 1
    assert Tab(tmp_path).status == ["FAILURE"]


@pytest.mark.long
def test_the_trials_of_a_sweep_are_the_lines_of_a_table_if_asked(tmp_path):
    swept(tmp_path, replaced("writers", "[tensorboard]"))
    tab = Tab(tmp_path / "sweep" / "trials")
    assert tab.status == ["SUCCESS"] * 3
    assert len({cells["optimizer.learning_rate"] for cells in tab.rows}) == 3
