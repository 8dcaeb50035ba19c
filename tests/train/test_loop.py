"""What a run does when it is stopped, when it hangs, and when a value is not finite."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import runs, short
from trainer import checkpoint
from trainer.__main__ import main
from trainer.engine.evaluation import Evaluation
from trainer.engine.program import Program, load_located
from trainer.train.multihost import AutosavePolicy, was_killed
from trainer.train.rollback import (
    MOST_ROLLBACKS,
    Counters,
    RollbackLog,
    RollbackTarget,
    read_rollbacks,
    rollback_target,
)
from trainer.train.rows import Clock, Stopwatch
from trainer.train.watchdog import SlowLines, Watchdog
from trainer.workdir import folder
from trainer.writers.console import ConsoleWriter


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(runs.LAB)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return runs.write_config(tmp_path)


def bits(workdir: Path, step: int = 20) -> dict[str, bytes]:
    tree = checkpoint.load_params(workdir, step, "params")
    return {k: np.asarray(v).tobytes() for k, v in runs.leaves(tree).items()}


# Not finite.


def poisoned(folder: Path, action: str, at: str = "(10,)", more: str = "") -> Path:
    return runs.write_config(
        folder,
        f"experiment.data = @unruly.poisoned()\nunruly.poisoned.at = {at}\n"
        f"experiment.on_nonfinite = '{action}'\n{more}",
    )


def test_a_run_halts_at_the_step_that_is_not_finite(tmp_path, capfd):
    config, workdir = poisoned(tmp_path, "halt"), tmp_path / "run"
    assert runs.train(config, workdir) == 1
    assert "At step 11 train/loss is nan" in capfd.readouterr().err
    assert max(info.step for info in checkpoint.ls(workdir)) == 8
    assert runs.lines(workdir)[-1]["step"] == 11  # what was seen is written down
    (event,) = json.loads((workdir / "nonfinite.json").read_text())
    assert (event["step"], event["batch_number"], event["action"]) == (11, 10, "halt")
    key = jax.random.key_data(jax.random.fold_in(jax.random.key(0), 11))
    assert event["rng"] == key.tolist()
    assert re.fullmatch("[0-9a-f]{64}", event["batch_sha256"])
    assert runs.train(config, workdir) == 1  # it comes to the same end, and says it once
    assert json.loads((workdir / "nonfinite.json").read_text()) == [event]
    assert [row["step"] for row in runs.lines(workdir)] == [3, 5, 6, 9, 10, 11]


@pytest.mark.long
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    workdir = tmp_path / "run"
    assert runs.train(poisoned(tmp_path, "skip"), workdir) == 0
    assert [row.get("skipped") for row in runs.lines(workdir) if "grad_norm" in row] == [
        *[0] * 3,
        *[1] * 4,
    ]
    assert json.loads((workdir / "nonfinite.json").read_text())[0]["step"] == 11


def by_hand(config: Path, batches: list[int]) -> dict[str, bytes]:
    """Makes one step a batch of those numbers, without the loop."""
    from trainer import config as configs

    program = load_located(configs.load([config.parent / "base.gin", config]), ["unruly"])
    state, data = program.init(), program.experiment.data
    for number in batches:
        state, _ = program.step(state, program.feed.to_devices(next(data.train(number, 0))))
    return {k: np.asarray(v).tobytes() for k, v in runs.leaves(state.params).items()}


def test_a_run_rolls_back_and_skips_the_batch(tmp_path):
    config, workdir = poisoned(tmp_path, "rollback", "(10, 11, 15)"), tmp_path / "run"
    assert runs.train(config, workdir) == 0
    # 10 fails, then 11 at the same step: one step further back, so that 9 is left out as well.
    batches = [*range(9), 12, 13, 14, *range(16, 24)]
    assert len(batches) == 20
    assert bits(workdir) == by_hand(config, batches)
    assert runs.lines(workdir)[-1]["rollbacks"] == 3
    assert [row["step"] for row in runs.lines(workdir)] == [3, 5, 6, 9, 10, 12, 15, 18, 20]


@pytest.mark.long
@pytest.mark.parametrize("until", [[4], [9], [10, 11], [13, 14]])
def test_a_run_that_rolls_back_is_resumed_exactly(tmp_path, until):
    config = poisoned(tmp_path, "rollback", "(10, 11, 15)", "experiment.keep_latest = 1\n")
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    assert runs.train(config, whole) == 0
    for step in until:
        assert runs.train(config, workdir, f"--until={step}") == 75
    assert runs.train(config, workdir) == 0
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


@short.parametrize(("action", "name"), [("skip", "nonfinite.json"), ("rollback", "rollbacks.json")])
def test_a_record_that_a_full_disk_refused_is_reported_and_the_run_continues(
    tmp_path, monkeypatch, capfd, action, name
):
    config, workdir, full = poisoned(tmp_path, action), tmp_path / "run", [True]
    replace = folder.replace_file

    def replace_file(path, *content):
        if path.name == name and full:
            full.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(path, *content)

    monkeypatch.setattr(folder, "replace_file", replace_file)
    assert runs.train(config, workdir) == 0
    assert capfd.readouterr().err.count(f"{name} could not be written") == 1 and not full
    assert (
        json.loads((workdir / name).read_text())[0]["step"] == {"skip": 11, "rollback": 10}[action]
    )


CHAIN = "(4, 33, 34, 35, 36, 37, 38, 39, 40)"  # each but the first is met before the one before
EVERY_TEN = "experiment.steps = 60\nexperiment.save_every = 10\n"


@pytest.mark.long
@short.parametrize("keep", [1, 2, 50])
def test_a_run_may_roll_back_below_every_checkpoint(tmp_path, keep):
    more = f"{EVERY_TEN}experiment.keep_latest = {keep}\n"
    config, workdir = poisoned(tmp_path, "rollback", CHAIN, more), tmp_path / "run"
    assert runs.train(config, workdir) == 0
    # After 33 at step 33: 33, 32, 29, 22, 7, 1, 1 and 1 are bad; in the end it leaves out 0 to 40.
    assert bits(workdir, 60) == by_hand(config, list(range(41, 101)))
    assert runs.lines(workdir)[-1]["rollbacks"] == 9
    assert [row["step"] for row in runs.lines(workdir)] == sorted(
        {*range(3, 61, 3), *range(5, 61, 5)}
    )


@pytest.mark.long
def test_rollbacks_on_the_path_to_a_step_are_repeated(tmp_path):
    # 13 and 14 at step 12 lead back below the turn at step 4, of which no checkpoint is left.
    at, more = "(4, 13, 14, 15)", "experiment.keep_latest = 1\n"
    config, workdir, whole = (
        poisoned(tmp_path, "rollback", at, more),
        tmp_path / "a",
        tmp_path / "b",
    )
    assert runs.train(config, workdir) == 0
    assert runs.train(config, whole, "--set", "keep_latest=50", "--set", "save_every=1") == 0
    turns = read_rollbacks(workdir)
    assert len(turns) > 1 and min(turns) == 4
    assert bits(workdir) == bits(whole)


DYING = """
    import os, signal, sys
    from trainer.train import loop, rollback
    from trainer.checkpoint import Checkpoints, folder
    from trainer.__main__ import main
    owner, name, before = {{
        "the turn is noted": (rollback.RollbackLog, "add", True),
        "the turn was noted": (rollback.RollbackLog, "add", False),
        "a checkpoint is removed": (folder.Folder, "remove", True),
        "checkpoints were removed": (Checkpoints, "discard_after", False),
        "the turn was made": (loop.Loop, "_read_after", False),
    }}[{moment!r}]
    inner, noted = getattr(owner, name), []
    def dying(*args, **options):
        if name == "_read_after" and args[2] not in args[0]._records.rollbacks.counters:
            return inner(*args, **options)
        if name == "remove" and 15 not in args[1]:
            return inner(*args, **options)
        if not before:
            inner(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dying)
    sys.exit(main({options}))
"""


@pytest.mark.long
@short.parametrize(
    "moment",
    [
        "the turn is noted",
        "the turn was noted",
        "a checkpoint is removed",
        "checkpoints were removed",
        "the turn was made",
    ],
)
def test_a_run_that_is_killed_during_a_rollback_is_resumed_exactly(tmp_path, moment):
    more = "experiment.keep_latest = 2\nexperiment.save_every = 1\n"
    config = poisoned(tmp_path, "rollback", "(4, 16, 17)", more)
    workdir, whole = tmp_path / "run", tmp_path / "whole"
    assert runs.train(config, whole) == 0
    # The second batch in a row is bad: back to step 14, when the newest checkpoint is of step 15.
    assert runs.train(config, workdir, "--until=12") == 75
    code = DYING.format(moment=moment, options=runs.options(config, workdir))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=runs.environment(), capture_output=True
    )
    assert done.returncode == -9, done.stderr.decode()
    assert checkpoint.ls(workdir), "Something to go on from is there at any moment."
    assert runs.train(config, workdir) == 0
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


@pytest.mark.long
def test_rollbacks_that_cannot_be_read_are_an_error(tmp_path, capfd):
    config, workdir = poisoned(tmp_path, "rollback"), tmp_path / "run"
    assert runs.train(config, workdir, "--until=14") == 75
    text = (workdir / "rollbacks.json").read_text()
    for torn in (text[:20], "[[1]]", '[{"step": 1, "turns": 2}]', "7"):
        (workdir / "rollbacks.json").write_text(torn)
        assert runs.train(config, workdir) == 2
        assert "rollbacks.json is damaged" in capfd.readouterr().err
    (workdir / "rollbacks.json").write_text(text)
    assert runs.train(config, workdir) == 0


def test_rollbacks_json_keeps_the_keys_that_earlier_versions_wrote(tmp_path):
    rows = [
        {"step": 4, "rollbacks": 1, "left_out": 1, "last": 5, "again": 0},
        {"step": 9, "rollbacks": 3, "left_out": 4, "last": 11, "again": 2},
    ]
    (tmp_path / "rollbacks.json").write_text(json.dumps(rows, indent=1) + "\n")
    read = read_rollbacks(tmp_path)
    assert read == {4: Counters(1, 1, 5, 0), 9: Counters(3, 4, 11, 2)}
    assert (read[9].skipped_batches, read[9].last, read[9].retries) == (4, 11, 2)
    written = {}
    log = RollbackLog(tmp_path, written.__setitem__, print)
    log.add(RollbackTarget(7, Counters(4, 8, 12, 3)))
    new = {"step": 7, "rollbacks": 4, "left_out": 8, "last": 12, "again": 3}
    assert json.loads(written["rollbacks.json"]) == [rows[0], new]


def test_a_run_ends_when_rollbacks_run_out(tmp_path, capfd):
    at = str(tuple(range(10, 200)))
    assert runs.train(poisoned(tmp_path, "rollback", at), tmp_path / "run") == 1
    assert f"went back {MOST_ROLLBACKS} times" in capfd.readouterr().err


def test_repeated_rollbacks_go_back_further():
    def back(counters, bad):
        found = rollback_target(counters, bad)
        assert found is not None
        return found

    step, counters = back(Counters(), 11)
    assert (step, counters.skipped_batches) == (10, 1)
    step, again = back(counters, 11)  # no step further: one state further back
    assert (step, again.skipped_batches, again.retries) == (9, 3, 1)
    step, third = back(again, 10)
    assert (step, third.skipped_batches, third.retries) == (6, 7, 2)
    step, later = back(third, 12)  # past the trouble: that batch alone
    assert (step, later.skipped_batches, later.retries) == (11, 8, 0)
    assert back(Counters(1, 1, 3, 5), 3).step == 0
    assert rollback_target(Counters(MOST_ROLLBACKS), 11) is None


# Replay.


@pytest.mark.long
def test_replay_names_the_operation_that_was_not_finite(tmp_path, capsys):
    config = runs.write_config(tmp_path, "experiment.loss = @unruly.loss()\n")
    workdir = tmp_path / "run"
    assert runs.train(config, workdir) == 1
    capsys.readouterr()
    before = sorted(path.stat().st_mtime_ns for path in workdir.rglob("*"))
    assert main(["replay", str(workdir), "--vocabulary=unruly"]) == 1
    said = capsys.readouterr().out
    assert "log at" in said and "unruly/__init__.py:" in said, said
    assert "returned 8 infinite of 8 values" in said or "returned 8 NaN of 8 values" in said, said
    assert sorted(path.stat().st_mtime_ns for path in workdir.rglob("*")) == before


@pytest.mark.long
def test_replay_looks_into_scans_and_names_parameters(tmp_path, capsys):
    config = poisoned(tmp_path, "halt", "(6,)", "unruly.poisoned.factor = 1e30\n")
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--set", "model.depth=3") == 1
    capsys.readouterr()
    assert main(["replay", str(workdir), "--vocabulary=unruly"]) == 1
    said = capsys.readouterr().out
    assert "Started from the checkpoint of step 4" in said and "Step 7 with batch 6" in said, said
    assert "params/blocks/linear/kernel" in said or "params/embed/kernel" in said, said
    assert main(["replay", str(workdir), "--vocabulary=unruly", "--step=6"]) == 0
    assert "is finite" in capsys.readouterr().out


def test_replay_repeats_the_rollbacks_of_the_run(tmp_path, capsys):
    config = poisoned(tmp_path, "rollback", "(10, 11, 15, 16)", "experiment.keep_latest = 1\n")
    workdir = tmp_path / "run"
    assert runs.train(config, workdir, "--until=12") == 75
    capsys.readouterr()
    replay = ["replay", str(workdir), "--vocabulary=unruly"]
    for step, batch, start, code in (
        (11, 11, "initial state", 1),
        (12, 14, "initial state", 0),
        (13, 15, "checkpoint of step 12", 1),
        (14, 19, "initial state", 0),  # 15 and 16 lead back below the checkpoint
    ):
        assert main([*replay, f"--step={step}"]) == code
        said = capsys.readouterr().out
        assert f"Started from the {start}." in said, said
        assert f"Step {step} with batch {batch}:" in said, said
        assert said.count("Started from") == 1


@short.parametrize(
    ("more", "words"),
    [(["--step=21"], "20 steps"), ([], "--step=N"), (["--step=0"], None)],
)
def test_replay_refuses_a_step_that_the_run_does_not_have(tmp_path, config, capsys, more, words):
    assert runs.train(config, tmp_path / "run", "--until=1") == 75
    arguments = ["replay", str(tmp_path / "run"), "--vocabulary=unruly", *more]
    if words is None:
        with pytest.raises(SystemExit):
            main(arguments)
    else:
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


# Stopping.


@pytest.mark.long
def test_a_signal_in_the_evaluation_leaves_it_for_the_next_process(tmp_path, config, monkeypatch):
    import unruly  # type: ignore[import-not-found]

    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert runs.train(config, whole) == 0
    evaluate, stops = unruly.Points.evaluate, [0, 1] * 4

    def interrupted(self):
        for number, batch in enumerate(evaluate(self)):
            if number == 1 and stops and stops.pop():
                runs.stop()
            yield batch

    monkeypatch.setattr(unruly.Points, "evaluate", interrupted)
    codes = [runs.train(config, workdir) for _ in range(5)]
    assert codes == [75, 75, 75, 75, 0]  # after steps 5, 10, 15 and 20
    assert checkpoint.diff_checkpoints(whole, 20, 20, other=workdir) == []
    assert runs.lines(workdir) == runs.lines(whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_in_the_compilation_stops_before_the_first_step(
    tmp_path, config, monkeypatch, name
):
    compile_ = Program.compile

    def interrupted(self, state):
        runs.stop(getattr(signal, name))
        compile_(self, state)

    monkeypatch.setattr(Program, "compile", interrupted)
    assert runs.train(config, tmp_path / "run") == 75
    assert [info.step for info in checkpoint.ls(tmp_path / "run")] == [0]
    monkeypatch.undo()
    monkeypatch.syspath_prepend(runs.LAB)
    assert runs.train(config, tmp_path / "run") == 0


def test_a_second_signal_ends_the_process_in_the_middle_of_a_call_into_c():
    code = """
        import hashlib, sys
        from trainer.train.signals import StopSignals
        with StopSignals():
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=runs.environment(),
    )
    with process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "once more" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(runs.LONG) == 128 + signal.SIGTERM


@pytest.mark.long
@pytest.mark.parametrize(("argv", "code"), [("None", 0), ("sys.argv[1:]", -signal.SIGTERM)])
def test_a_signal_while_python_shuts_down_does_not_change_the_exit_code(
    tmp_path, config, argv, code
):
    """It would make a scheduler take a finished run for a failed one; a caller of main goes on."""
    program = f"""
        import atexit, sys, time
        from trainer.__main__ import main
        code = main({argv})
        atexit.register(lambda: (print("shutting down", flush=True), time.sleep(2)))
        sys.exit(code)
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(program),
        *runs.options(config, tmp_path / "r"),
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=runs.environment(),
    ) as process:
        assert process.stdout
        while process.stdout.readline() != "shutting down\n":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(runs.LONG) == code
    assert [info.step for info in checkpoint.ls(tmp_path / "r")][-1] == 20


@pytest.mark.long
def test_a_run_stops_at_the_step_of_until(tmp_path, config):
    assert runs.train(config, tmp_path / "run", "--until=6") == 75
    assert [info.step for info in checkpoint.ls(tmp_path / "run")][-1] == 6
    assert runs.train(config, tmp_path / "run", "--until=6") == 75
    assert runs.train(config, tmp_path / "run") == 0
    assert runs.train(config, tmp_path / "run") == 0  # nothing to do


# Saving.


def test_metrics_are_on_disk_before_a_later_state_is_saved(tmp_path, config, monkeypatch):
    save, seen = checkpoint.Checkpoints.save, {}

    def looking(self, step, state, **more):
        seen[step] = [row["step"] for row in runs.lines(tmp_path / "run")]
        return save(self, step, state, **more)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", looking)
    assert runs.train(config, tmp_path / "run") == 0
    logged = [3, 5, 6, 9, 10, 12, 15, 18, 20]
    assert seen == {step: [n for n in logged if n <= step] for step in (4, 8, 12, 16, 20)}


def test_automatic_saves_become_less_frequent():
    now = [0.0]
    autosave, saves = AutosavePolicy(clock=lambda: now[0]), []
    for second in range(200):
        now[0] = float(second)
        if autosave.due():
            saves.append(second)
            autosave.record_save(0.01)
    assert saves == [10, 30, 70, 150]


def test_the_speed_counts_only_the_time_of_steps():
    now, data = [100.0], types.SimpleNamespace(batch_size=8, num_examples=80)
    stopwatch = Stopwatch(40, data, 7.0, Clock(now=lambda: now[0]))
    for lap, (took, paused) in enumerate([(2.0, 0.0), (4.0, 30.0), (2.0, 0.5)]):
        now[0] += took / 2
        with stopwatch.paused():
            now[0] += paused
        now[0] += took / 2
        stopwatch.lap(50 + 10 * lap)
        assert stopwatch.row(50)["perf/steps_per_second"] == pytest.approx(10 / took)
    assert stopwatch.row(70)["perf/examples_per_second"] == pytest.approx(40)
    # Two rows of one lap: the earlier step was finished earlier.
    assert stopwatch.row(70)["perf/seconds"] == pytest.approx(7 + 8)
    assert stopwatch.row(65)["perf/seconds"] == pytest.approx(7 + 7)
    now[0] += 0.5
    progress = {"examples": 560, "epochs": 7.0, "perf/seconds": pytest.approx(15.5)}
    assert stopwatch.progress(70) == progress


def test_a_clock_counts_its_share_of_the_time_in_which_it_runs():
    now = [0.0]
    clock = Clock(running=False, now=lambda: now[0])
    for share, seconds in ((1.0, 3.0), (0.25, 3.75)):
        clock.share = share
        now[0] += 5
        with clock.running():
            now[0] += 1
            with clock.paused():
                now[0] += 9
            now[0] += 2
            assert clock() == pytest.approx(seconds)
        now[0] += 5
        assert clock() == pytest.approx(seconds)


@pytest.mark.long
@short.parametrize(
    ("more", "ends"),
    [
        # log_every 3, save_every 4 and eval_every 5 end blocks, too.
        (["--set=steps_per_call=1"], [*range(1, 21)]),
        (["--set=steps_per_call=2"], [2, 3, 4, 5, 6, 8, 9, 10, 12, 14, 15, 16, 18, 20]),
        (["--set=steps_per_call=64"], [3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20]),
    ],
)
def test_every_block_is_passed_to_the_progress_bar(tmp_path, config, monkeypatch, more, ends):
    told = []
    monkeypatch.setattr(ConsoleWriter, "progress", lambda self, step: told.append(step))
    assert runs.train(config, tmp_path / "run", "--set", "writers=[console]", *more) == 0
    assert told == ends


@pytest.mark.long
def test_the_speed_that_is_logged_adds_up_to_the_time_of_the_run(tmp_path):
    # Every line of a run in which a step waits for its data 20 ms: none may claim much more.
    # Without evaluations in between, in whose time batches would be made.
    more = "experiment.data = @unruly.sleepy()\nunruly.sleepy.seconds = 0.02\n"
    more += "unruly.sleepy.every = True\nexperiment.log_every = 1\nexperiment.eval_every = 20\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run") == 0
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    speeds = [row["perf/steps_per_second"] for row in rows if "perf/steps_per_second" in row]
    assert len(speeds) == 20
    assert (
        sum(1 / speed for speed in speeds[1:]) >= 0.9 * 0.02 * 15
    )  # two may be in flight, and two made ahead


def test_after_a_kill_the_first_step_is_saved():
    now = [5.0]
    autosave = AutosavePolicy(after_kill=True, clock=lambda: now[0])
    assert autosave.due()
    autosave.record_save(0.5)
    now[0] += 9
    assert not autosave.due()  # a save that holds up for half a second comes after ten at most
    now[0] += 1
    assert autosave.due()


def test_a_kill_is_recognized_by_the_lineage(tmp_path):
    file = tmp_path / "run.json"
    assert not was_killed(file)
    for lineage, killed in (
        ([{"exit": None}], False),
        ([{"exit": "killed"}, {"exit": None}], True),
        ([{"exit": "killed"}, {"exit": "stopped"}, {"exit": None}], False),
    ):
        content = {"format": 1, "fingerprint": {}, "lineage": lineage}
        file.write_text(json.dumps(content))
        assert was_killed(file) is killed


@pytest.mark.long
def test_a_run_killed_more_often_than_save_every_still_ends(tmp_path):
    config = runs.write_config(
        tmp_path,
        "experiment.save_every = 1000\nexperiment.steps = 4\nexperiment.steps_per_call = 1\n",
    )
    code = f"""
        import os, signal, sys
        from trainer.train import loop
        from trainer.__main__ import main
        save, next_block = loop.Loop.save, loop.Boundaries.steps_to_next
        begun = []
        def saving(self, *args):
            save(self, *args)
            self._checkpoints.wait()
        def dying(self, *args):
            begun.append(args)
            if len(begun) == 3:  # what followed the second step is done
                os.kill(os.getpid(), signal.SIGKILL)
            return next_block(self, *args)
        loop.Loop.save, loop.Boundaries.steps_to_next = saving, dying
        sys.exit(main({runs.options(config, tmp_path / "run")}))
    """
    codes = []
    while len(codes) < 6 and (not codes or codes[-1] == -9):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=runs.environment(),
            capture_output=True,
        )
        codes.append(done.returncode)
    # One step further each time; more where a slow machine brings the next save nearer.
    assert codes[-1] == 0 and set(codes[:-1]) == {-9} and len(codes) <= 4, done.stderr.decode()


def test_a_data_set_that_ends_is_named(tmp_path, capfd):
    config = runs.write_config(tmp_path, "experiment.data = @unruly.short()\n")
    assert runs.train(config, tmp_path / "run") == 2
    told = capfd.readouterr().err
    assert f"error: {config}:1: The data set's train(batch_index, seed) ended" in told


@pytest.mark.long
def test_deleted_metrics_are_reported(tmp_path, config, capfd):
    assert runs.train(config, tmp_path / "run", "--until=9") == 75
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert runs.train(config, tmp_path / "run") == 1
    assert "metrics.jsonl was removed: a new file starts after step 9." in capfd.readouterr().err


# Hanging.


def steps(watchdog: Watchdog, count: int, seconds: float) -> int:
    """Computes steps from 1, as a loop does that is one ahead; returns the number of the next."""
    for step in range(1, count + 1):
        watchdog.begin_block(step, 1)
        if step > 1:
            time.sleep(seconds)
            watchdog.end_block(1)
    return count + 1


@pytest.mark.long
def test_a_slow_step_is_reported_once_with_the_stacks_of_all_threads_if_these_are_asked_for(
    tmp_path,
):
    for stacks in (False, True):
        said: list[str] = []
        with open(tmp_path / "stacks", "w+") as stream:
            with Watchdog(5.0, said.append, SlowLines(0, stacks=stacks), stream) as watchdog:
                watchdog.begin_block(steps(watchdog, 8, 0.002), 1)
                while not said:
                    time.sleep(0.05)
                time.sleep(0.6)
                watchdog.begin_block(10, 1)
            stream.seek(0)
            printed = stream.read()
        assert len(said) == 1 + stacks, said
        found = re.match(r"Slow: step 9 has taken ([0-9.]+) s", said[0])
        assert found and float(found[1]) >= 1.0, said
        assert ("test_a_slow_step_is_reported_once_with" in printed) == stacks
        assert (printed.count("hread 0x") >= 2) == stacks


@pytest.mark.long
def test_the_stacks_are_printed_when_nothing_has_moved_for_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.train.watchdog._STALLED", 1.2)
    said: list[str] = []
    with open(tmp_path / "stacks", "w+") as stream:
        with Watchdog(5.0, said.append, SlowLines(0), stream) as watchdog:
            watchdog.begin_block(1, 1)  # the first one: how long it takes as a rule is not known
            time.sleep(2.5)
            stream.seek(0)
            assert "test_the_stacks_are_printed_when_nothing_has" in stream.read()
    assert said[0].startswith("Nothing has moved for 1 s: step 1 has taken 1."), said
    assert len(said) == 2, said


@pytest.mark.long
def test_lines_about_slow_steps_are_limited():
    said: list[str] = []
    once = SlowLines(math.inf)
    for _ in range(2):  # the waves of a worker
        with Watchdog(5.0, said.append, once) as watchdog:
            first = steps(watchdog, 8, 0.002)
            for step in (first, first + 1):
                watchdog.begin_block(step, 1)
                time.sleep(1.5)
    assert len(said) == 1, said
    often = SlowLines(0.05)
    assert often.take() and not often.take()
    time.sleep(0.1)
    assert often.take()


@pytest.mark.long
def test_steps_as_slow_as_the_others_are_not_reported():
    for multiple, count in ((30.0, 0), (2.0, 1)):  # the second one shows what would be told
        said: list[str] = []
        with Watchdog(multiple, said.append, SlowLines(0)) as watchdog:
            watchdog.begin_block(steps(watchdog, 8, 0.15), 1)
            time.sleep(1.5)  # ten times the median: slower than the others, and not far too slow
            watchdog.begin_block(10, 1)
        assert len(said) == count, said


@pytest.mark.long
def test_steps_that_the_host_only_starts_do_not_count_as_fast_ones():
    """The trials of a sweep: the host starts a step of each, and waits when all are started."""
    said: list[str] = []
    with Watchdog(2.0, said.append, SlowLines(0)) as watchdog:
        for step in range(1, 8):
            for _ in range(10):
                watchdog.begin_block(step, 1)
            time.sleep(0.3)  # of the devices, for all ten
            for _ in range(10):
                watchdog.end_block(1)
            watchdog.begin_other("an evaluation")
            time.sleep(0.1)
        watchdog.begin_block(8, 1)
        time.sleep(1.5)
    assert len(said) == 1
    found = re.search("the median step takes ([0-9.]+) s", said[0])
    assert found and 0.03 <= float(found[1]) < 0.038, said  # without the evaluations


@pytest.mark.long
def test_a_process_that_was_stopped_is_not_slow(tmp_path):
    text = "import os, signal, sys, time\n"
    text += "from trainer.train.watchdog import SlowLines, Watchdog\n"
    text += "with Watchdog(5.0, print, SlowLines(0)) as watchdog:\n"
    text += "    for step in range(1, 10):\n"
    text += "        watchdog.begin_block(step, 1); time.sleep(.01); watchdog.end_block(1)\n"
    text += "    print('ready', flush=True)\n"
    text += "    time.sleep(.8)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=runs.ROOT
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=runs.LONG)[0] == ""


def test_without_a_multiple_steps_are_not_watched():
    with Watchdog(None, pytest.fail, SlowLines(0)) as watchdog:
        assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]
        watchdog.begin_block(1, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "what"),
    [([1], "step 16"), ([2], "the block of steps 15 to 16"), ([1, "--trace"], "step 16")],
)
def test_a_run_is_watched(tmp_path, capfd, options, what):
    more = "experiment.data = @unruly.sleepy()\nunruly.sleepy.at = 15\n"
    more += "experiment.watchdog = 4.0\nexperiment.log_every = 20\nexperiment.eval_every = 20\n"
    more += f"experiment.save_every = 20\nexperiment.steps_per_call = {options[0]}\n"
    assert runs.train(runs.write_config(tmp_path, more), tmp_path / "run", *options[1:]) == 0
    said = capfd.readouterr().err
    assert said.count(f"Slow: {what} has taken") == 1
    stacks = "unruly/__init__.py" in said and "in batch" in said
    assert stacks == ("--trace" in options)


@pytest.mark.long
def test_a_second_stop_before_the_last_evaluation_does_not_lose_it(tmp_path, config, monkeypatch):
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert runs.train(config, whole) == 0
    stop_in(monkeypatch, Evaluation, "run_split", lambda state: int(state.step) == 20)
    assert runs.train(config, workdir) == 75
    monkeypatch.undo()
    monkeypatch.syspath_prepend(runs.LAB)
    stop_in(monkeypatch, Program, "abstract_state", lambda: True)  # while it restores
    assert runs.train(config, workdir) == 75
    monkeypatch.undo()
    monkeypatch.syspath_prepend(runs.LAB)
    assert runs.train(config, workdir) == 0
    assert runs.lines(workdir) == runs.lines(whole)


def stop_in(monkeypatch: pytest.MonkeyPatch, of: type, method: str, when) -> None:
    """Sends SIGTERM as a method of a class begins, in a run that is under way."""
    inner = getattr(of, method)

    def interrupted(self, *args):
        if any(frame.name == "_run_in" for frame in traceback.extract_stack()):
            if when(*args[:1]):
                runs.stop()
        return inner(self, *args)

    monkeypatch.setattr(of, method, interrupted)


@pytest.mark.long
def test_an_evaluation_after_a_save_can_make_the_checkpoint_the_best(tmp_path, monkeypatch):
    import unruly  # type: ignore[import-not-found]

    # A learning rate that drives the loss up: the first evaluation is the best one.
    more = "experiment.best_metric = 'loss'\nexperiment.best_mode = 'min'\n"
    more += "experiment.keep_latest = 1\nschedules.warmup_cosine.peak_value = 3.0\n"
    config, workdir = runs.write_config(tmp_path, more), tmp_path / "run"
    evaluate, stops = unruly.Points.evaluate, [1]

    def interrupted(self):
        for number, batch in enumerate(evaluate(self)):  # the plan looks at the first
            if number == 1 and stops and stops.pop():
                runs.stop()
            yield batch

    monkeypatch.setattr(unruly.Points, "evaluate", interrupted)
    assert runs.train(config, workdir) == 75
    assert runs.train(config, workdir, "--until=9") == 75
    assert runs.train(config, workdir) == 0
    assert [info.step for info in checkpoint.ls(workdir)] == [5, 20]
