"""Writers: every logged step stands once, and what is read back is what was written."""

import ast
import importlib.util
import inspect
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import short
from tests.runs import ROOT, python
from trainer import writers
from trainer.config import ConfigError
from trainer.writers import (
    ConsoleWriter,
    JsonlWriter,
    MultiWriter,
    TensorBoardWriter,
    Writer,
    files,
)


def rows(path: Path) -> list[dict[str, Any]]:
    """Reads the lines with no code of ours."""
    return [json.loads(line, parse_constant=_no) for line in path.read_text().splitlines()]


def _no(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


# ---------------------------------------------------------------------------------------------
# The interface is clu's


def _clu_methods() -> dict[str, list[str]]:
    """Reads clu's abstract class without importing it: that would import TensorFlow."""
    spec = importlib.util.find_spec("clu")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("clu is not installed")
    path = Path(spec.submodule_search_locations[0], "metric_writers", "interface.py")
    (writer,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "MetricWriter"
    ]
    return {
        node.name: [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        for node in writer.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize(
    "kind", [Writer, JsonlWriter, TensorBoardWriter, ConsoleWriter, MultiWriter]
)
def test_the_methods_of_a_writer_take_the_arguments_of_clus(kind: type) -> None:
    theirs = _clu_methods()
    for name in _our_methods():
        assert list(inspect.signature(getattr(kind, name)).parameters) == theirs[name], name


def _our_methods() -> list[str]:
    """Returns the names of the methods that a run calls on a writer."""
    names = [name for name, _ in inspect.getmembers(Writer, inspect.isfunction)]
    assert "write_scalars" in names
    return names


# ---------------------------------------------------------------------------------------------
# metrics.jsonl


def test_a_step_is_one_line(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path)
    writer.write_scalars(10, {"train/loss": jnp.float32(0.5), "n": 3})
    writer.write_scalars(10, {"learning_rate/all": np.float64(1e-3), "flag": np.bool_(True)})
    writer.write_scalars(20, {"train/loss": jnp.asarray([0.25], jnp.bfloat16)})
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 10, "train/loss": 0.5, "n": 3, "learning_rate/all": 1e-3, "flag": True}
    ], "A step is written when the next one begins."
    writer.flush()
    writer.write_scalars(20, {"eval/accuracy": 0.9})
    writer.flush()
    writer.flush()
    writer.write_scalars(30, {})
    writer.close()
    assert rows(tmp_path / "metrics.jsonl")[1:] == [
        {"step": 20, "train/loss": 0.25, "eval/accuracy": 0.9},
        {"step": 30},
    ]
    again = JsonlWriter(tmp_path)
    again.write_scalars(40, {"x": 1})
    again.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [10, 20, 30, 40]


def test_no_file_is_created_before_the_first_line(tmp_path: Path) -> None:
    for writer in (JsonlWriter(tmp_path), TensorBoardWriter(tmp_path)):
        writer.flush()
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_values_that_are_not_finite_are_valid_json_and_are_read_back(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path)
    writer.write_scalars(1, {"a": math.nan, "b": np.float32(np.inf), "c": -jnp.inf, "d": 0.1})
    writer.close()
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.1}
    ]
    (row,) = writers.read_metrics(tmp_path)
    assert math.isnan(row["a"]) and (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, 0.1)
    assert [float(rows(tmp_path / "metrics.jsonl")[0][k]) for k in "bcd"] == [
        math.inf,
        -math.inf,
        0.1,
    ]


@settings(max_examples=short.examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.dictionaries(
                st.text(min_size=1, max_size=6).filter(lambda key: key != "step"),
                st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.booleans()),
                max_size=4,
            ),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_written_values_are_read_back(calls: list[Any]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        writer, want = JsonlWriter(folder), {}
        for step, scalars, flush in calls:
            writer.write_scalars(step, scalars)
            want[step] = want.get(step, {"step": step}) | scalars
            if flush:
                writer.flush()
        writer.close()
        got = writers.read_metrics(folder) if calls else []
        assert repr(got) == repr([want[step] for step in sorted(want)])


@pytest.mark.parametrize(
    "value",
    [np.zeros(2), "0.5", None, 1j, np.array([object()]), np.zeros(0)],
    ids=["two", "text", "None", "complex", "object", "empty"],
)
@pytest.mark.parametrize("kind", [JsonlWriter, TensorBoardWriter])
def test_a_value_that_is_not_a_number_is_refused(value: Any, kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'loss'"):
        kind(tmp_path).write_scalars(1, {"loss": value})


def test_later_lines_and_torn_ones_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "x": step / 7}) + "\n" for step in (10, 20, 30, 40)]
    path.write_text("".join(lines) + '{"step": 50, "x": 1.2')
    assert writers.truncate_after(path, 20)[1] == 3
    assert path.read_text() == "".join(lines[:2])
    before = path.stat()
    assert writers.truncate_after(path, 20)[1] == 0
    assert path.stat().st_ino == before.st_ino, "Nothing to drop, nothing written."
    assert writers.truncate_after(tmp_path / "absent.jsonl", 5)[1] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert writers.truncate_after(path, 0)[1] == 2
    assert path.read_text() == ""


def test_the_last_lines_are_dropped_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = tmp_path / "metrics.jsonl", ['{"step": 10}\n', '{"step": 20}\n', '{"step": 30}\n']

    def full(path: Path, *content: Any) -> None:
        raise OSError(28, "No space left on device")

    path.write_text("".join(lines))
    with monkeypatch.context() as patch:
        patch.setattr(writers.lines, "replace_file", full)
        assert writers.truncate_after(path, 10)[1] == 2
    assert path.read_text() == lines[0]
    path.write_text("torn\n" + "".join(lines))
    assert writers.truncate_after(path, 20)[1] == 2, "One at each end."
    assert path.read_text() == "".join(lines[:2])


@pytest.mark.parametrize(
    "torn", [b'{"step": 50', b"\x00\x00\x00", b'{"step": "x"}', b"[" * 100_000, b"17", b"\xff\xfe"]
)
def test_a_torn_end_is_cut_before_the_next_line(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 40}\n' + torn)
    assert writers.read_metrics(path) == [{"step": 40}]
    writer = JsonlWriter(path)
    writer.write_scalars(50, {"x": 1})
    writer.close()
    assert rows(path) == [{"step": 40}, {"step": 50, "x": 1}]


def test_a_resumed_run_writes_each_step_once(tmp_path: Path) -> None:
    first = writers.create([], tmp_path)
    for step in (10, 20, 30):
        first.write_scalars(step, {"x": step})
    first.close()
    second = writers.create([], tmp_path, resumed=20)
    for step in (30, 40):
        second.write_scalars(step, {"x": -step})
    second.close()
    assert [(row["step"], row["x"]) for row in rows(tmp_path / "metrics.jsonl")] == [
        (10, 10),
        (20, 20),
        (30, -30),
        (40, -40),
    ]


def test_a_later_process_completes_the_last_line(tmp_path: Path) -> None:
    for scalars in ({"train/loss": 0.5, "odd": math.nan}, {"eval/loss": 0.25}):
        writer = writers.create([], tmp_path, resumed=20)
        writer.write_scalars(10, {"x": 1}) if "odd" in scalars else None
        writer.write_scalars(20, scalars)
        writer.close()
    assert rows(tmp_path / "metrics.jsonl") == [
        {"step": 10, "x": 1},
        {"step": 20, "train/loss": 0.5, "odd": "NaN", "eval/loss": 0.25},
    ]


class Killed(BaseException):
    pass


def killed(*given: Any) -> None:
    raise Killed


def test_a_kill_while_a_line_is_completed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(step: int, scalars: dict[str, float]) -> None:
        writer = JsonlWriter(tmp_path)
        writer.write_scalars(step, scalars)
        try:
            writer.flush()
        finally:
            writer._file.close()

    write(10, {"loss": 1.0})
    write(20, {"loss": 2.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, killed)
            with pytest.raises(Killed):
                write(20, {"eval/loss": 3.0})
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
    write(20, {"eval/loss": 3.0})
    assert rows(tmp_path / "metrics.jsonl")[1:] == [{"step": 20, "loss": 2.0, "eval/loss": 3.0}]


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_files_longer_than_a_block_are_read_from_the_end(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BLOCK", size)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 10, "x": 1}\n{"step": 20, "x": 2}\n{"step": 3')
    for values in ({"x": 3}, {"y": 4}):
        writer = JsonlWriter(path)
        writer.write_scalars(30, values)
        writer.close()
    assert rows(path) == [{"step": 10, "x": 1}, {"step": 20, "x": 2}, {"step": 30, "x": 3, "y": 4}]
    assert writers.truncate_after(path, 10)[1] == 2
    assert rows(path) == [{"step": 10, "x": 1}]


@pytest.mark.long
def test_a_long_file_is_opened_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(1, 40_001):
            file.write(json.dumps({"step": step, "train/loss": step / 7, "x" * 400: 1}) + "\n")
            if step % 10_000 == 0:
                file.write("torn\n")
    tracemalloc.start()
    evaluated = sum(1 for _ in writers.iterate_metrics(path, "eval/"))
    dropped = writers.truncate_after(path, 39_000)[1]
    writer = JsonlWriter(path)
    for step in (39_000, 39_001):
        writer.write_scalars(step, {"eval/loss": 1})
    writer.close()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (evaluated, dropped) == (0, 1_004)
    assert [row["step"] for row in rows(path)] == list(range(1, 39_002))
    assert most < path.stat().st_size / 3
    assert list(writers.iterate_metrics(path, "eval/"))[1:] == [{"step": 39_001, "eval/loss": 1}]


KILLED = """
    import sys
    from trainer.writers import JsonlWriter, read_metrics

    path, start = sys.argv[1], int(sys.argv[2])
    writer = JsonlWriter(path)
    writer.truncate_after(start)
    for step in range(start + 1, 10**9):
        if step == start + 30:
            print("writing", flush=True)
        writer.write_scalars(step, {"train/loss": 1 / step, "text": step})
        if step % 3 == 0:
            writer.flush()
        writer.write_scalars(step, {"eval/accuracy": step / 7})
"""


def test_a_process_killed_while_writing_leaves_whole_lines(tmp_path: Path) -> None:
    path, restored, rng = tmp_path / "metrics.jsonl", 0, np.random.default_rng(0)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path)]
    for _ in range(6):
        process = subprocess.Popen(
            [*command, str(restored)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.005, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        last = max(row["step"] for row in writers.read_metrics(path))
        restored = int(rng.integers(restored, last))
    writers.truncate_after(path, restored)
    written = rows(path)
    assert [row["step"] for row in written] == list(range(1, restored + 1))
    assert restored > 20
    assert all(row["train/loss"] == 1 / row["step"] for row in written)
    assert all(row["eval/accuracy"] == row["step"] / 7 for row in written)


class TakenOver(Exception):
    pass


def test_a_writer_that_lost_the_workdir_writes_nothing(tmp_path: Path) -> None:
    def fence() -> None:
        raise TakenOver

    for writer in (JsonlWriter(tmp_path, fence=fence), TensorBoardWriter(tmp_path, fence=fence)):
        with pytest.raises(TakenOver):
            writer.write_scalars(1, {"x": 1})
            writer.flush()
    with pytest.raises(TakenOver):
        JsonlWriter(tmp_path, fence=fence).truncate_after(0)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_loses_the_workdir_meanwhile_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "x": 1}\n{"step": 20, "x": 2}\n')
    before, asked = path.read_bytes(), []

    def fence() -> None:  # it is asked before anything is read, and again before the rename
        asked.append(1)
        if len(asked) == 2:
            raise TakenOver

    for attempt in (
        lambda writer: writer.truncate_after(10),
        lambda writer: (writer.write_scalars(20, {"y": 1}), writer.flush()),
    ):
        writer = JsonlWriter(path, fence=fence)
        with pytest.raises(TakenOver):
            attempt(writer)
        writer._file.close()
        asked.clear()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_lines_that_a_full_disk_refused_are_written_later(mounted: Callable[[str], Path]) -> None:
    log: list[str] = []
    small_disk = mounted("size=64k")
    writer = writers.create(["tensorboard"], small_disk, log=log.append)
    writer.write_scalars(1, {"x": 1})
    writer.flush()
    assert writer.error is None
    writer.write_scalars(1, {"first": 1})
    fill = open(small_disk / "fill", "wb", buffering=0)
    try:
        while True:
            fill.write(bytes(512))
    except OSError:
        pass
    for step in range(2, 200):
        writer.write_scalars(step, {"x": step, "y" * 100: 0.5})
        assert rows(small_disk / "metrics.jsonl")[0]["x"] == 1, "What was written stays."
    writer.flush()
    assert len(log) == 2 and all("No space left on device" in line for line in log)
    assert "No space" in str(writer.error)
    steps = [row["step"] for row in rows(small_disk / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "Whole lines, in order."
    fill.close()
    (small_disk / "fill").unlink()
    writer.close()
    assert writer.error is None
    assert len(log) == 4 and all("again" in line for line in log[2:])
    assert [row["step"] for row in rows(small_disk / "metrics.jsonl")] == list(range(1, 200))
    assert [event.step for event in _events(small_disk).Scalars("x")] == list(range(1, 200))


# ---------------------------------------------------------------------------------------------
# TensorBoard, read by TensorBoard's own reader


def _events(path: Path) -> Any:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="TensorBoard, which reads the files back, is not installed",
    )
    sizes = dict.fromkeys(("scalars", "tensors"), 0)
    reader = accumulator.EventAccumulator(str(path), size_guidance=sizes)
    reader.Reload()
    return reader


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("clocks", [(1.7e9, 1.6e9, 9.0), (9.0, 1.7e9, 1.7e9), (4.1e12, 1.7e9, 2e9)])
def test_tensorboard_shows_every_step_even_if_the_clock_is_set_back(
    clocks: tuple[float, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 80 steps in three starts, the second from step 40 and the third from step 60.
    for clock, restored, end in zip(clocks, (0, 40, 60), (50, 70, 80), strict=True):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        writer = writers.create(["tensorboard"], tmp_path, resumed=restored)
        for step in range(restored + 1, end + 1):
            writer.write_scalars(step, {"x": step + restored / 100})
        writer.close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 3
    wanted = [(step, step + (0.6 if step > 60 else 0.4 if step > 40 else 0)) for step in range(81)]
    read = [(event.step, event.value) for event in _events(tmp_path).Scalars("x")]
    assert read == [(step, float(np.float32(value))) for step, value in wanted[1:]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_written_values(tmp_path: Path) -> None:
    writer = MultiWriter([TensorBoardWriter(tmp_path)])
    for step in (1, 2, 3):
        writer.write_scalars(step, {"train/loss": jnp.float32(1 / step), "odd": math.nan})
    writer.write_texts(0, {"plan": "# Plan\n\n| a | b |"})
    writer.write_hparams({"learning_rate": 0.1, "name": "muon", "nested": [1, 2], "flag": True})
    writer.close()
    read = _events(tmp_path)
    losses = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert losses == [(step, float(np.float32(1 / step))) for step in (1, 2, 3)]
    assert all(math.isnan(event.value) for event in read.Scalars("odd"))
    assert b"# Plan" in read.Tensors("plan/text_summary")[0].tensor_proto.string_val[0]
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    content = read.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    hparams = metadata.parse_session_start_info_plugin_data(content).hparams
    assert hparams["learning_rate"].number_value == 0.1
    assert hparams["name"].string_value == "muon"
    assert hparams["nested"].string_value == "[1, 2]"
    assert hparams["flag"].bool_value is True


def test_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path: Path) -> None:
    first = TensorBoardWriter(tmp_path)
    for step in (10, 20, 30, 40):
        first.write_scalars(step, {"x": step})
    first.close()
    torn = next(tmp_path.iterdir())
    torn.write_bytes(torn.read_bytes()[:-3])  # as SIGKILL might leave it
    time.sleep(0.01)
    second = TensorBoardWriter(tmp_path, purge_step=21)
    for step in (30, 50):
        second.write_scalars(step, {"x": -step})
    second.close()
    assert len(list(tmp_path.iterdir())) == 2
    values = [(event.step, event.value) for event in _events(tmp_path).Scalars("x")]
    assert values == [(10, 10), (20, 20), (30, -30), (50, -50)]


# ---------------------------------------------------------------------------------------------
# The console


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_console_prints_one_line_a_step_with_speed_and_eta() -> None:
    stream, clock = io.StringIO(), Clock()
    writer = ConsoleWriter(1000, 32, more=["all"], stream=stream, clock=clock)
    writer.progress(1)
    for step in (101, 201):
        clock.now += 10
        writer.write_scalars(step, {"train/loss": 0.123456, "n": 7})
        writer.write_scalars(step, {"learning_rate/all": 1e-5, "bad": math.nan})
    clock.now += 1000
    writer.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 101/1000  train/loss 0.1235  learning_rate/all 1.000e-05  n 7")
    assert "bad nan" in first
    assert "10 steps/s  320 examples/s  ETA 01:30" in first
    assert second.startswith("step 201/1000")


def test_the_speed_reported_by_the_loop_is_printed() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(100, 4, more=["x", "speed"], stream=stream)
    writer.write_scalars(50, {"x": 1.0, "perf/steps_per_second": 5.0, "perf/flops": 1e12})
    writer.close()
    assert stream.getvalue() == "step 50/100  x 1  5 steps/s  20 examples/s  ETA 00:10\n"


def test_a_line_without_a_speed_repeats_the_last_reported_one() -> None:
    stream, clock = io.StringIO(), Clock()
    writer = ConsoleWriter(100, more=["all"], stream=stream, clock=clock)
    writer.write_scalars(50, {"x": 1.0, "perf/steps_per_second": 5.0})
    clock.now += 0.001
    writer.write_scalars(51, {"eval/x": 2.0})
    writer.close()
    assert [line.split("  ")[2] for line in stream.getvalue().splitlines()] == ["5 steps/s"] * 2


def test_without_a_total_the_eta_is_omitted() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(more=["x"], stream=stream)
    writer.write_scalars(5, {"x": 1.0})
    writer.close()
    assert stream.getvalue() == "step 5  x 1\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream, clock = Terminal(), Clock()
    writer = ConsoleWriter(100, 8, more=["all"], stream=stream, clock=clock, first_step=40)
    for step in range(41, 61):
        clock.now += 0.5
        writer.progress(step)
        if step % 10 == 0:
            writer.write_scalars(step, {"loss[a]": 0.5, "\x1b]0;x\x07": 0.5})
            writer.flush()
    writer.close()
    shown = stream.getvalue()
    assert r"\x1b]0;x\x07 0.5" in shown and "\x1b]0" not in shown
    assert "60/100" in shown and "2 steps/s" in shown and "16 examples/s" in shown
    assert "ETA" in shown and "loss[a] 0.5" in shown
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "cursor"


METRICS = {
    "beta/matrices": 0.95,
    "grad_norm": 1.795,
    "learning_rate/matrices": 0.01946,
    "learning_rate/rest": 0.002919,
    "train/loss": 2.137,
    "skipped": 0,
    "eval/loss": 1.914,
    "eval/accuracy": 0.3194,
}
BY_IMPORTANCE = [
    "step 100/1000",
    "train/loss 2.137",
    "eval/loss 1.914",
    "eval/accuracy 0.3194",
    "skipped 0",
    "learning_rate/matrices 0.01946",
    "learning_rate/rest 0.002919",
]
REST = ["beta/matrices 0.95", "grad_norm 1.795"]  # in the order in which they were written


@pytest.mark.parametrize(
    ("more", "shown"), [([], []), (["grad_norm"], REST[1:]), (["all"], REST), (["speed"], [])]
)
def test_a_pipe_gets_losses_metrics_rates_and_what_is_asked_for(more, shown) -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(1000, more=more, stream=stream)
    writer.write_scalars(100, METRICS)
    writer.close()
    assert stream.getvalue() == "  ".join([*BY_IMPORTANCE, *shown]) + "\n"


def test_what_is_not_finite_is_shown_without_being_asked_for() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(stream=stream)
    writer.write_scalars(1, {"train/loss": 1.0, "grad_norm": math.inf, "examples": 32})
    writer.close()
    assert stream.getvalue() == "step 1  train/loss 1  grad_norm inf\n"


def test_a_name_that_no_metric_has_is_named_at_the_end() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(more=["grad_nrom", "speed"], stream=stream)
    writer.write_scalars(1, {"train/loss": 1.0, "grad_norm": 2.0})
    writer.close()
    writer.close()
    assert stream.getvalue().splitlines()[1:] == [
        "The writer console:grad_nrom,speed found no metric 'grad_nrom'. Did you mean 'grad_norm'?"
    ]


def test_metrics_of_training_and_of_validation_come_before_those_of_the_test_split() -> None:
    stream = io.StringIO()
    writer = ConsoleWriter(1000, stream=stream)
    writer.write_scalars(100, {"train/accuracy": 0.25, **METRICS, "validation/loss": 1.5})
    writer.close()
    more = ["train/accuracy 0.25", "validation/loss 1.5"]
    assert stream.getvalue() == "  ".join([*BY_IMPORTANCE[:2], *more, *BY_IMPORTANCE[2:]]) + "\n"


def printed(stream: io.StringIO) -> list[str]:
    """The lines of a terminal, without its escape sequences; a bar that is drawn anew is a line."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n").split("\n")


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (20, BY_IMPORTANCE[:2]),  # cut off with an ellipsis
        (40, BY_IMPORTANCE[:2]),
        (60, [*BY_IMPORTANCE[:3], "skipped 0"]),  # for which there is room yet
        (80, BY_IMPORTANCE[:4]),
        (120, BY_IMPORTANCE[:6]),
        (200, [*BY_IMPORTANCE, *REST]),
    ],
)
def test_a_terminal_gets_one_line_a_log_interval_with_the_metrics_that_fit(
    columns: int, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    writer = ConsoleWriter(1000, 128, more=["all"], stream=stream)
    writer.progress(1)
    writer.write_scalars(100, METRICS)
    writer.close()
    lines = [line.rstrip() for line in printed(stream)]
    assert max(map(len, lines)) <= columns
    line = "  ".join(shown)
    line = line if len(line) <= columns else line[: columns - 1] + "\u2026"
    assert [each for each in lines if each.startswith("step ")] == [line]
    assert not any(name in each for each in lines for name in ("grad", "eval") if each not in line)


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_the_bar_is_as_wide_as_the_terminal_and_has_steps_and_eta(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = Terminal(), Clock()
    writer = ConsoleWriter(1000, 128, stream=stream, clock=clock)
    for step in (1, 100):
        clock.now += 10
        writer.progress(step)
        writer.write_scalars(step, {"train/loss": 1.0})
        writer.flush()
    writer.close()
    bars = [line for line in printed(stream) if "100/1000" in line and "step 100" not in line]
    assert {len(bar) for bar in bars} == {columns}
    assert re.match(r"[\u2501\u2578\u257a]+ +100/1000 .*ETA \d:\d\d:\d\d$", bars[-1])
    assert ("9.9 steps/s  1267 examples/s" in bars[-1]) == (columns >= 60)


# ---------------------------------------------------------------------------------------------
# Several writers, and writers by name


def test_several_writers_get_everything_even_if_one_fails() -> None:
    class Broken(Writer):
        def write_scalars(self, step: int, scalars: Any) -> None:
            raise RuntimeError("broken")

    class Noting(Writer):
        def __init__(self) -> None:
            self.calls: list[Any] = []

    for name in _our_methods():
        setattr(
            Noting,
            name,
            lambda self, *args, _name=name, **kwargs: self.calls.append((_name, args, kwargs)),
        )
    noting = Noting()
    writer = MultiWriter([Broken(), noting])
    with pytest.raises(RuntimeError, match="broken"):
        writer.write_scalars(1, {"x": 1})
    writer.write_texts(1, {})
    writer.write_hparams({"a": 1})
    writer.flush()
    writer.close()
    assert sorted(call[0] for call in noting.calls) == sorted(_our_methods())
    assert noting.calls[0] == ("write_scalars", (1, {"x": 1}), {})
    assert ("write_hparams", ({"a": 1},), {}) in noting.calls


def test_writers_are_created_by_name_once_each(tmp_path: Path) -> None:
    made = writers.create(["console", "tensorboard", "tensorboard", "jsonl"], tmp_path)
    kinds = [type(writer) for writer in made.writers]
    assert kinds == [JsonlWriter, ConsoleWriter, TensorBoardWriter]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        ("clu.SumaryWriter", "Did you mean 'clu.SummaryWriter'"),
        ("clu.metric_writers", "There are jsonl"),
        ("os.system", "There is no writer 'os.system'"),
    ],
)
def test_an_unknown_name_is_a_mistake_of_the_config(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        writers.check_names([name])


CLU = [name for name in writers.NAMES if name.startswith("clu.")]


@pytest.mark.parametrize("name", CLU)
def test_without_tensorflow_the_extra_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ConfigError, match=r"pip install lockstep-jax\[tensorflow\]"):
        writers.create([name], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", CLU)
@pytest.mark.filterwarnings("ignore")
def test_with_tensorflow_clu_writes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow", reason="clu's own writers need TensorFlow")
    writer = writers.create([name], tmp_path)
    writer.write_scalars(1, {"x": 0.5})
    writer.close()
    if name != "clu.LoggingWriter":
        assert list(tmp_path.glob("events.out.tfevents.*"))


def test_importing_the_writers_does_not_import_their_libraries() -> None:
    code = """
        import sys
        import trainer.writers
        heavy = {"jax", "rich", "tensorboardX", "clu", "tensorflow", "orbax"}
        print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
    """
    assert python("-c", textwrap.dedent(code)) == "[]\n"


def test_the_tensorboard_writer_does_not_import_torch(tmp_path):
    """Where torch is installed tensorboardX imports it, for 200 MB."""
    code = (
        "import sys; from trainer import writers; "
        f"w = writers.create(['tensorboard'], {str(tmp_path)!r}); "
        "w.write_scalars(1, {'a': 1.0}); w.write_texts(1, {'b': 'c'}); w.write_hparams({'d': 1}); "
        "w.close(); assert 'torch' not in sys.modules"
    )
    python("-c", code)
