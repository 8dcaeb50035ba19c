"""metrics.jsonl changed by another program: noticed, put back where possible, and never silent."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs, short
from trainer import writers
from trainer.engine.program import Program
from trainer.train.rows import LoggedRows, expected_rows
from trainer.writers import JsonlWriter, TensorBoardWriter, record_file


def steps(path: Path) -> list[int]:
    """Reads the steps with no code of ours; fails where a line is torn or stands twice."""
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


# While the run writes.


def delete(path: Path) -> None:
    path.unlink()


def replace_by_an_old_copy(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.with_name("copy").write_bytes(b"".join(lines[:1]) + lines[1][:9])
    os.replace(path.with_name("copy"), path)


def edit_as_sed_does(path: Path) -> None:
    path.with_name("copy").write_text(path.read_text().replace('"x": 1', '"x": 100'))
    os.replace(path.with_name("copy"), path)


def put_a_pipe_there(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_the_middle(path: Path) -> None:
    os.truncate(path, 20)


def append_a_line(path: Path) -> None:
    with open(path, "a") as file:
        file.write("a note of the user's\n")


CHANGES: dict[Callable[[Path], None], str] = {
    delete: "was deleted",
    replace_by_an_old_copy: "was replaced",
    edit_as_sed_does: "was replaced",
    put_a_pipe_there: "was replaced",
    truncate: "was cut short",
    cut_in_the_middle: "was cut short",
    append_a_line: "was changed in place",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("resumed", [False, True], ids=["begun here", "begun before"])
def test_rows_are_put_back(change: Any, resumed: bool, tmp_path: Path) -> None:
    path, log, lost = tmp_path / "metrics.jsonl", [], []
    options = {"log": log.append, "lost": lambda *told: lost.append(told)}
    writer = JsonlWriter(path, **options)
    for step in (1, 2, 3):
        writer.write_scalars(step, {"x": step})
        writer.flush()
    if resumed:
        writer.close()
        writer = JsonlWriter(path, **options)
        writer.truncate_after(3)
    change(path)
    writer.write_scalars(3, {"eval/loss": 0.5})  # belongs to the last row
    writer.write_scalars(4, {"x": 4})
    writer.close()
    assert steps(path) == [1, 2, 3, 4]
    written = [json.loads(line) for line in path.read_text().splitlines()]
    first = 100 if change is edit_as_sed_does else 1
    assert [row["x"] for row in written] == [first, 2, 3, 4]
    assert written[2]["eval/loss"] == 0.5
    assert len(log) == 1 and CHANGES[change] in log[0] and "\n" not in log[0], log
    assert "no row is lost" in log[0] and lost == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lost_rows_that_are_no_longer_in_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "_REMEMBERED", 100)
    path, log, lost = tmp_path / "metrics.jsonl", [], []
    writer = JsonlWriter(path, log=log.append, lost=lambda *told: lost.append(told))
    for step in range(1, 101):
        writer.write_scalars(step, {"x": step})
        writer.flush()
    truncate(path)
    writer.write_scalars(101, {"x": 101})
    writer.close()
    kept = steps(path)
    assert kept == list(range(kept[0], 102)) and 90 < kept[0] < 101
    ((sentence, count),) = lost
    assert count == 101 - len(kept) and f"{count} rows" in sentence
    assert "lost for good" in sentence and log == [sentence]


def test_a_change_after_the_last_row_is_noticed(tmp_path: Path) -> None:
    writer, log = JsonlWriter(tmp_path, log=lambda line: log.append(line)), []
    writer.write_scalars(1, {"x": 1})
    writer.flush()
    (tmp_path / "metrics.jsonl").unlink()
    writer.flush()
    assert steps(tmp_path / "metrics.jsonl") == [1] and len(log) == 1
    (tmp_path / "metrics.jsonl").unlink()
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [1] and len(log) == 2


def test_changes_made_by_the_writer_itself_are_not_reported(tmp_path: Path) -> None:
    log: list[str] = []
    writer = writers.create(["tensorboard"], tmp_path, resumed=0, log=log.append)
    for step in range(1, 5):
        writer.write_scalars(step, {"x": step})
        writer.flush()
        writer.write_scalars(step, {"y": step})  # replaces the file
        writer.flush()
    writer.close()
    assert log == [] and steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4]


def test_rows_are_put_back_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    writer = JsonlWriter(tmp_path, log=log.append)
    writer.write_scalars(1, {"x": 1})
    writer.flush()
    delete(tmp_path / "metrics.jsonl")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(record_file, "replace_file", full)
        writer.write_scalars(2, {"x": 2})
        writer.flush()
        assert writer.behind and "No space left" in writer.behind
    writer.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 2] and writer.behind is None


@pytest.mark.parametrize("change", [delete, truncate])
def test_tensorboards_events_are_put_back(change: Any, tmp_path: Path) -> None:
    log: list[str] = []
    writer = TensorBoardWriter(tmp_path, log=log.append)
    writer.write_scalars(1, {"x": 1})
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    change(path)
    writer.write_scalars(2, {"x": 2})
    writer.close()
    assert path.read_bytes().startswith(before) and len(path.read_bytes()) > len(before)
    assert len(log) == 1 and CHANGES[change] in log[0]


# How many rows there must be.

EVERY = {"log_every": 3, "eval_every": 5, "steps": 20}


@pytest.mark.long
def test_the_expected_rows_are_those_that_the_loop_writes(tmp_path, lab):
    config = runs.write_config(tmp_path, "experiment.save_every = 100\n")
    for until in (2, 3, 10, 14, 15, 20):
        workdir = tmp_path / str(until)
        assert runs.train(config, workdir, f"--until={until}") in (0, 75)
        rows = len(steps(workdir / "metrics.jsonl")) if until > 2 else 0
        # An evaluation at the last step itself may have been interrupted by a signal.
        sure = rows - (until == 10)
        assert expected_rows([LoggedRows(0, 0, **EVERY)], until) == sure, until


@pytest.mark.parametrize(
    ("spans", "restored", "rows"),
    [
        ([], 10, None),  # run.json of a version that did not count
        ([LoggedRows(0, 0, **EVERY), LoggedRows(9, 5, **EVERY)], 12, 7),
        (
            [LoggedRows(0, 0, **EVERY), LoggedRows(9, 4, **EVERY)],
            9,
            4,
        ),  # one was lost and told before
        ([LoggedRows(0, 0, **EVERY), LoggedRows(16, 7, **EVERY)], 9, 4),  # 16 was damaged
        ([LoggedRows(0, 0, **EVERY), LoggedRows(16, 7, 1, 5, 20)], 9, None),
        ([LoggedRows(0, 0, **EVERY), LoggedRows(9, 4, 1, 5, 20)], 12, 7),
    ],
)
def test_rows_are_counted_from_the_last_start(spans, restored, rows):
    assert expected_rows(spans, restored) == rows


# When a run starts again.


@pytest.fixture(scope="module")
def begun(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    assert runs.train(runs.write_config(folder), folder / "run", "--until=9") == 75
    assert steps(folder / "run" / "metrics.jsonl") == [3, 5, 6, 9]
    return folder


@pytest.fixture
def stopped(begun: Path, tmp_path: Path) -> tuple[Path, Path]:
    return begun / "run.gin", Path(shutil.copytree(begun / "run", tmp_path / "run"))


def lose_the_file(path: Path) -> None:
    path.unlink()


def lose_all(path: Path) -> None:
    os.truncate(path, 0)


def lose_the_last(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def lose_the_first(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


def lose_one_to_zeros(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * len(lines[1]) + b"".join(lines[2:]))


LOST = {lose_the_file: 4, lose_all: 4, lose_the_last: 1, lose_the_first: 1, lose_one_to_zeros: 2}


@short.parametrize("lose", LOST)
def test_rows_lost_between_two_starts_are_reported(stopped, capfd, lose):
    config, workdir = stopped
    lose(workdir / "metrics.jsonl")
    capfd.readouterr()
    said = runs.said(capfd, config, workdir, "--until=10", code=75)
    words = "was removed: a new file starts" if lose is lose_the_file else f"{LOST[lose]} are lost"
    assert said.count("metrics.jsonl") == 1 and words in said, said
    # It stays open until the run ends, and is told then, once.
    said = runs.said(capfd, config, workdir, code=1)
    assert "Done: 20 steps" in said and words in said and "error: " in said, said
    assert "Traceback" not in said
    assert steps(workdir / "metrics.jsonl")[-5:] == [10, 12, 15, 18, 20]
    assert "Nothing to do" in runs.said(capfd, config, workdir)


@pytest.mark.long
def test_a_run_without_lost_rows_reports_none(stopped, capfd):
    config, workdir = stopped
    capfd.readouterr()
    assert "gone" not in runs.said(capfd, config, workdir)


@pytest.mark.long
def test_lost_rows_of_a_finished_run_are_reported_once(stopped, capfd):
    config, workdir = stopped
    assert runs.train(config, workdir) == 0
    (workdir / "metrics.jsonl").unlink()
    assert "metrics.jsonl was removed" in runs.said(capfd, config, workdir, code=1)
    assert runs.train(config, workdir) == 0


@pytest.mark.long
def test_a_run_recorded_by_an_earlier_version_resumes(stopped, capfd):
    config, workdir = stopped
    record = json.loads((workdir / "run.json").read_text())
    for entry in record["lineage"]:
        del entry["rows"], entry["lost_rows"]
    (workdir / "run.json").write_text(json.dumps(record))
    assert runs.train(config, workdir) == 0


@pytest.mark.long
def test_changed_log_intervals_do_not_count_as_lost_rows(stopped, capfd):
    config, workdir = stopped
    more = ["--set=log_every=2", "--set=eval_every=7"]
    allowed = ["--allow_changed=log_every", "--allow_changed=eval_every"]
    assert runs.train(config, workdir, *more, *allowed, "--until=11") == 75
    assert runs.train(config, workdir, *more, "--until=13") == 75
    assert "gone" not in runs.said(capfd, config, workdir, *allowed)
    assert steps(workdir / "metrics.jsonl") == [3, 5, 6, 9, 10, 12, 15, 18, 20]


# In a run.


def in_mid_run(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], at: int = 12) -> None:
    """Does something to the files while a run is at a step."""
    advance, made = Program.advance, []

    def changing(self, state, batches):
        if len(made) < at <= len(made) + len(batches):
            change()
        made.extend(batches)
        return advance(self, state, batches)

    monkeypatch.setattr(Program, "advance", changing)


@short.parametrize("change", [delete, truncate])
def test_a_run_puts_its_rows_back(tmp_path, monkeypatch, lab, capfd, change):
    path = tmp_path / "run" / "metrics.jsonl"
    in_mid_run(monkeypatch, lambda: change(path))
    assert runs.train(runs.write_config(tmp_path), tmp_path / "run") == 0
    assert steps(path) == [3, 5, 6, 9, 10, 12, 15, 18, 20]
    assert capfd.readouterr().err.count(CHANGES[change]) == 1


def test_a_run_that_loses_rows_for_good_ends_with_1(tmp_path, monkeypatch, lab, capfd):
    monkeypatch.setattr(record_file, "_REMEMBERED", 200)
    path = tmp_path / "run" / "metrics.jsonl"
    in_mid_run(monkeypatch, lambda: truncate(path))
    said = runs.said(capfd, runs.write_config(tmp_path), tmp_path / "run", code=1)
    assert said.count("lost for good") == 2 and "Done: 20 steps" in said, said
    assert steps(path)[-5:] == [10, 12, 15, 18, 20]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["lineage"][-1]["exit"] == "failed"
    assert runs.train(tmp_path / "run.gin", tmp_path / "run") == 0


@pytest.mark.long
def test_a_rollback_that_cannot_cut_its_rows_is_reported(tmp_path, monkeypatch, lab, capfd):
    more = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (10,)\n"
    config = runs.write_config(tmp_path, more + "experiment.on_nonfinite = 'rollback'\n")
    cut, cuts = writers.lines.truncate_after, []

    def failing(*given: Any) -> Any:
        cuts.append(1)
        if len(cuts) == 2:
            raise OSError(5, "Input/output error")
        return cut(*given)

    monkeypatch.setattr(writers.lines, "truncate_after", failing)
    said = runs.said(capfd, config, tmp_path / "run", code=1)
    assert "Traceback" not in said and "Input/output error" in said, said
    assert "error: " in said and "metrics.jsonl" in said
    assert runs.train(config, tmp_path / "run") == 0
    assert steps(tmp_path / "run" / "metrics.jsonl") == [3, 5, 6, 9, 10, 12, 15, 18, 20]
