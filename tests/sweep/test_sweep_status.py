"""Looking at a sweep: `sweep status`, `sweep show`, `plot`, and the table while it is computed."""

import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests import runs
from tests.runs import printed, refused
from tests.sweep.test_sweep_plan import BASE, defined
from tests.sweep.test_sweep_plan_file import TWO_ARMS, written
from trainer.__main__ import main
from trainer.cli.sweeps import LiveView
from trainer.cli.terminal import Redrawn
from trainer.config import load
from trainer.messages import UserError
from trainer.sweep import running, status
from trainer.sweep.final import choose_winners
from trainer.sweep.folder import WaveContent, wave_name
from trainer.sweep.status import SweepReader
from trainer.writers import locks
from trainer.writers.summary import Summary

SWEEP = """base: base.yaml
arms:
  adamw: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-4, high: 1e-1}}}
  sgd:
    set: {optimizer: !optax.sgd {learning_rate: 0.1}}
    space: {optimizer.learning_rate: !space.values {values: [0.1, 0.3, 1.0e+30]}}
    method: !method.grid {}
trials: 3
seeds: 2
method: !method.sobol {seed: 0}
goal: {metric: accuracy, mode: max}
final: {seeds: 2}
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a sweep that is complete; two of its runs diverged."""
    base = BASE + "log_every: 5\neval_every: 10\n"
    return runs.swept(tmp_path_factory.mktemp("computed"), base, SWEEP)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Returns the folder of a sweep with a plan only: 2 arms, 3 trials, 2 seeds, 20 steps."""
    (tmp_path / "base.yaml").write_text(BASE)
    written(tmp_path / "sweep", defined(tmp_path, TWO_ARMS))
    return tmp_path / "sweep"


def last(run: Path, name: str) -> float:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row][-1]


def finish(
    sweep: Path, trial: str, accuracy: float = 0.5, end: Any = "done", why: str = ""
) -> None:
    """Writes the result of a trial as a worker does."""
    folder = sweep / trial
    folder.mkdir(parents=True)
    metrics = {"validation/accuracy": accuracy, "eval/accuracy": accuracy}
    (folder / "summary.json").write_text(Summary(end, 20, metrics, why).text())


def wave(sweep: Path, *trials: str, **progress: float) -> Path:
    """Writes a wave, and what its worker reported; returns the file with its lock."""
    content = WaveContent(alone=False, program=0, trials=list(trials))
    folder = sweep / "waves" / wave_name(content)
    folder.mkdir(parents=True)
    (sweep / "lock").touch()
    holder = {"host": "vm", "pid": 123}
    (folder / "epoch").write_text("2 word\n")
    (folder / "lock").write_text(json.dumps(holder))
    if progress:
        (folder / "progress.json").write_text(json.dumps({"epoch": 2, **progress}))
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(content))
    return file


def held(file: Path) -> io.IOBase:
    stream = open(file)
    fcntl.flock(stream, fcntl.LOCK_EX)
    return stream


FIRST = [f"trials/first/{number:04d}/{seed}" for number in range(3) for seed in range(2)]


# A sweep that was computed.


def test_status_of_a_complete_sweep_has_the_values_of_its_metrics(computed, capsys):
    text = printed(capsys, "sweep", "status", computed)
    table = {line.split("  ")[0]: line.split()[-8:] for line in text.splitlines()[1:5]}
    points = [computed / "trials" / "adamw" / f"{number:04d}" for number in range(3)]
    means = [fmean(last(p / str(seed), "validation/accuracy") for seed in (0, 1)) for p in points]
    best = means.index(max(means))
    assert table["adamw"] == ["6", "6", "0", "0", "0", "100%", f"{max(means):.4g}", f"{best:04d}"]
    assert table["sgd"][:6] == ["6", "4", "0", "2", "0", "100%"]
    for split, row in (("validation", "validation/accuracy"), ("test", "eval/accuracy")):
        values = [last(computed / "final" / "adamw" / f"1000{s}", row) for s in (0, 1)]
        shown = [f"{value:.4g}" for value in (fmean(values), *values)]
        after = text[text.index("winner ") :]
        assert re.search(rf"{split} +{' +'.join(map(re.escape, shown))}\n", after), (split, text)
    assert "trials/sgd/0002/1 diverged: At step 2 train/loss is nan" in text
    assert "16 of 16 runs: the sweep is complete" in text
    assert f"python -m trainer sweep show {computed} adamw/{best:04d}" in text


def test_status_and_show_import_no_jax(computed):
    for action in (["status", str(computed)], ["show", str(computed), "sgd/1"]):
        code = (
            "import sys\nfrom trainer.__main__ import main\n"
            f"assert main(['sweep', *{action!r}]) == 0\nassert 'jax' not in sys.modules"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_show_prints_the_config_of_a_run_and_what_came_of_it(computed, capsys, tmp_path):
    trial = computed / "trials" / "sgd" / "0001" / "1"
    text = printed(capsys, "sweep", "show", computed, "sgd/0001/1")
    (tmp_path / "trial.yaml").write_text(text)
    assert load([tmp_path / "trial.yaml"]).root == load([trial / "config.yaml"]).root
    accuracy = last(trial, "validation/accuracy")
    assert f"done at step 20, validation/accuracy {accuracy:.4g}\n" in text
    assert "# optimizer.learning_rate: 0.1 -> 0.3\n# seed: (absent) -> 1\n" in text
    assert f"# eval/loss {last(trial, 'eval/loss'):.6g}\n" in text
    assert f"# python -m trainer --config={trial / 'config.yaml'}\n" in text
    for name in ("sgd/1/1", "trials/sgd/0001/1", "sgd/0001/1/"):
        assert printed(capsys, "sweep", "show", computed, name) == text


def test_what_show_prints_computes_the_bits_of_the_trial(computed, capsys, tmp_path):
    text = printed(capsys, "sweep", "show", computed, "final/adamw/10001")
    (tmp_path / "trial.yaml").write_text(text)
    assert main([f"--config={tmp_path / 'trial.yaml'}", f"--workdir={tmp_path / 'run'}"]) == 0
    assert runs.lines(tmp_path / "run") == runs.lines(computed / "final" / "adamw" / "10001")


def test_show_of_all_seeds_has_their_mean_and_a_reason(computed, capsys):
    text = printed(capsys, "sweep", "show", computed, "adamw/0")
    seeds = [computed / "trials" / "adamw" / "0000" / str(seed) for seed in (0, 1)]
    mean = fmean(last(run, "validation/accuracy") for run in seeds)
    assert f"# mean of validation/accuracy: {mean:.4g}\n" in text
    assert "# trials/sgd/0002/0: diverged at step 2\n# At step 2 train/loss is nan" in printed(
        capsys, "sweep", "show", computed, "sgd/0002/0"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sdg/0001", "no arm has this name. Did you mean 'sgd'?"),
        ("lion/1", "no arm has this name. There is: adamw, sgd."),
        ("sgd/3", "there are sgd/0000 to sgd/0002, each with the seeds 0, 1."),
        ("sgd/0001/7", "there are sgd/0000 to sgd/0002, each with the seeds 0, 1."),
        ("sgd", "there are sgd/0000 to sgd/0002"),
        ("final/sgd/3", "There is no final run 'final/sgd/3': sgd has the seeds 10000, 10001."),
        ("final/sdg", "Did you mean 'sgd'?"),
        ("", "There is: adamw, sgd."),
        ("../x/\x1b[2J", r"There is no trial '../x/\x1b[2J'"),
    ],
)
def test_show_names_what_exists_instead_of_an_unknown_trial(computed, capsys, name, said):
    assert said in refused(capsys, "sweep", "show", computed, name)


def test_plot_draws_the_mean_of_the_final_runs_of_each_winner(computed, capsys, tmp_path):
    text = printed(capsys, "plot", computed, "--metric=eval/loss")
    winners = json.loads((computed / "final.json").read_text())[0]["winners"]
    numbers = {arm: winner["number"] for arm, [winner] in winners.items()}
    assert f"* adamw {numbers['adamw']:04d}   o sgd {numbers['sgd']:04d}" in text
    assert "eval/loss by step, mean of 2 runs" in text
    from trainer.sweep.status import best_runs

    for arm, folders in zip(winners, best_runs(computed).values(), strict=True):
        assert folders == [computed / "final" / arm / "10000", computed / "final" / arm / "10001"]
    assert main(["plot", str(computed), f"--png={tmp_path / 'a.png'}"]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_plot_draws_the_trials_of_an_arm_and_several_trials(computed, capsys, tmp_path):
    text = printed(capsys, "plot", computed / "trials" / "sgd", "--metric=validation/accuracy")
    # The third point diverged before its first evaluation.
    assert "by step, mean of 2 runs\n" in text and "* 0000   o 0001\n" in text
    text = printed(
        capsys, "plot", computed / "trials/sgd", "--metric=validation/accuracy", "--each_run"
    )
    assert "* 0000/0   o 0000/1   + 0001/0   x 0001/1\n" in text
    text = printed(capsys, "plot", *(computed / "trials" / "sgd" / f"000{n}/0" for n in (0, 1)))
    assert "* 0000/0   o 0001/0\n" in text
    assert main(["plot", str(computed / "trials"), f"--png={tmp_path / 'a.png'}"]) == 0


# A sweep that is computed by others.


def test_status_of_a_plan_names_the_command_that_computes_it(sweep, capsys):
    text = printed(capsys, "sweep", "status", sweep)
    assert re.search(r"first +6 +0 +0 +0 +0 +0% +- +-\nsecond +6 ", text)
    assert "\n0 of 12 runs\n" in text
    assert f"python -m trainer sweep work {sweep} goes on." in text


def test_the_best_point_is_that_of_the_mean_over_seeds_and_needs_all_of_them(sweep):
    for name, accuracy in zip(FIRST[:5], (0.9, 0.1, 0.6, 0.6, 0.99), strict=True):
        finish(sweep, name, accuracy)
    first, second = SweepReader(sweep).read().arms
    assert (first.points, first.value, first.done) == (["first/0001"], 0.6, 5)
    assert (second.points, second.value) == ([], None)


def test_a_search_without_its_final_runs_is_not_complete(sweep, capsys):
    for name in (*FIRST, *(name.replace("first", "second") for name in FIRST)):
        finish(sweep, name)
    assert "12 of 12 runs, and the final ones follow\n" in printed(capsys, "sweep", "status", sweep)


def test_an_extension_is_seen_without_a_new_reader(sweep, tmp_path):
    reader = SweepReader(sweep)
    finish(sweep, FIRST[0])
    assert [arm.runs for arm in reader.read().arms] == [6, 6]
    written(tmp_path / "more", defined(tmp_path, TWO_ARMS.replace("trials: 3", "trials: 4")))
    os.replace(tmp_path / "more" / "plan.json", sweep / "plan.json")
    assert [(arm.runs, arm.done) for arm in reader.read().arms] == [(8, 1), (8, 0)]


def test_a_point_that_diverged_on_a_seed_is_not_the_best_one(sweep):
    finish(sweep, FIRST[0], 0.9)
    finish(sweep, FIRST[1], 0.9, end="diverged", why="It diverged.")
    reader = SweepReader(sweep)
    (first, _), outcomes = reader.read().arms, reader.read().outcomes
    assert (first.done, first.diverged, first.points) == (1, 1, [])
    assert set(outcomes) == {FIRST[0], FIRST[1]}


def test_the_time_that_is_left_follows_from_the_progress_of_the_waves(sweep, capsys):
    finish(sweep, FIRST[0])
    file = wave(sweep, *FIRST[1:5], step=5, steps=20, trials=4, rate=2.5)
    with held(file):
        state = SweepReader(sweep).read()
        text = printed(capsys, "sweep", "status", sweep)
    # Steps: 4 runs have 15 left, 7 have 20, and the final ones 2 x 8 x 20.
    assert state.seconds == pytest.approx((4 * 15 + 7 * 20 + 2 * 8 * 20) / (4 * 2.5))
    assert (state.arms[0].done, state.arms[0].running) == (1, 4)
    assert (state.arms[0].steps, state.arms[0].steps_done) == (120, 20 + 4 * 5)
    assert re.search(rf"{file.stem} +4 +{FIRST[1]} +5 +2.5 +vm, process 123\n", text)
    assert "1 of 12 runs, 4 running, ETA 52 s\n" in text
    assert "sweep work" not in text


def test_a_wave_that_a_killed_worker_left_with_all_its_results_is_not_listed(sweep, capsys):
    wave(sweep, *FIRST[:4], step=20, steps=20, trials=4)
    for name in FIRST[:4]:
        finish(sweep, name)
    assert SweepReader(sweep).read().waves == ()
    assert "abc" not in printed(capsys, "sweep", "status", sweep)


def test_a_wave_whose_lock_nobody_holds_is_not_running(sweep, capsys):
    wave(sweep, *FIRST[:4], step=5, steps=20, trials=4, rate=2.5)
    state = SweepReader(sweep).read()
    assert (state.arms[0].running, state.arms[0].steps_done, state.seconds) == (0, 20, None)
    text = printed(capsys, "sweep", "status", sweep)
    assert "none; the last was vm, process 123" in text
    assert f"python -m trainer sweep work {sweep} goes on." in text


def test_the_progress_of_an_earlier_worker_says_nothing_about_the_speed(sweep):
    with held(wave(sweep, *FIRST[:4], epoch=1, step=5, steps=20, trials=1, rate=2.5)):
        state = SweepReader(sweep).read()
    assert (state.arms[0].running, state.seconds, state.waves[0].rate) == (4, None, None)


def test_a_wave_that_was_just_claimed_is_running(sweep):
    file = wave(sweep, *FIRST[:4])
    for name in ("lock", "epoch"):
        (file.with_suffix("") / name).unlink()
    with held(file):
        assert SweepReader(sweep).read().arms[0].running == 4


def test_a_worker_that_is_stopped_gives_no_time_that_is_left(sweep, capsys):
    process = subprocess.Popen(["sleep", "60"])
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # a signal that was sent may not have arrived yet
    file = wave(sweep, *FIRST[:4], step=5, steps=20, trials=4, rate=2.5)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "getpid", lambda: process.pid)
            record = locks.this_process() | {"count": 3, "wave": file.stem, "locks": "flock"}
        (sweep / "workers").mkdir()
        (sweep / "workers" / "vm-1").write_text(json.dumps(record))
        with held(file):
            state = SweepReader(sweep).read()
            text = printed(capsys, "sweep", "status", sweep)
    finally:
        process.kill()
        process.wait()
    assert (state.seconds, state.arms[0].running, state.waves[0].moving) == (None, 4, False)
    assert "ETA" not in text and re.search(
        rf"{file.stem} +4 +\S+ +5 +- +vm, process 123, paused or gone\n", text
    )


@pytest.mark.parametrize("counts", [True, False])
def test_a_worker_of_another_machine_is_looked_at_twice_if_its_progress_is_old(
    sweep, monkeypatch, counts
):
    """Or if it is from the future: the clocks of two machines may be an hour apart."""
    monkeypatch.setattr(locks, "BEAT", 0.2)
    (sweep / "workers").mkdir()
    file = wave(sweep, *FIRST[:4], step=5, steps=20, trials=4, rate=2.5)
    name = {"host": "far", "pid": 1, "machine": "far", "locks": "heartbeat", "wave": file.stem}
    with open(sweep / "workers" / "far-1", "w+") as stream:
        beating = locks.Heartbeat(stream.fileno(), name)
        os.utime(file.with_suffix("") / "progress.json", (time.time() + 3600,) * 2)
        (sweep / "lock").unlink()  # with heartbeats there is none
        if not counts:
            beating.close()
        (seen,) = SweepReader(sweep).read().waves
        beating.close()
    assert (seen.held, seen.moving, seen.rate) == (True, counts, 2.5 if counts else None)


def test_a_trial_that_ended_before_its_wave_counts_at_once(sweep):
    file = wave(sweep, *FIRST[:4], step=5, steps=20, trials=3, rate=1.0)
    finish(file.with_suffix(""), FIRST[0], end="diverged", why="It diverged.")
    with held(file):
        first = SweepReader(sweep).read().arms[0]
    assert (first.running, first.diverged, first.steps_done) == (3, 1, 20 + 3 * 5)


def test_show_of_a_trial_without_result_says_how_far_it_is(sweep, capsys, tmp_path):
    def state(name: str) -> str:
        return printed(capsys, "sweep", "show", sweep, name)

    file = wave(sweep, *FIRST[:4], step=5, steps=20, trials=4, rate=2.5)
    with held(file):
        text = state("first/0/1")
    assert f"# {FIRST[1]}: running at step 5 of 20\n" in text
    assert f"sweep show {sweep} first/0/1 > trial.yaml && python -m trainer --config" in text
    (tmp_path / "trial.yaml").write_text(text)
    assert load([tmp_path / "trial.yaml"]).root.kwargs["seed"] == 1
    assert f"# {FIRST[1]}: stopped at step 5 of 20\n" in state("first/0/1")
    assert f"# {FIRST[5]}: not computed yet\n" in state("first/2/1")
    assert "first has none yet" in refused(capsys, "sweep", "show", sweep, "final/first/10000")


def test_looking_at_a_wave_never_keeps_it_from_a_worker(sweep, monkeypatch):
    """A look takes the lock of a wave for a moment, and a worker must not claim meanwhile."""
    file, looked = wave(sweep, *FIRST[:4]), []

    def is_locked(file: Path) -> bool:
        with open(sweep / "lock") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        looked.append(file)
        return False

    monkeypatch.setattr(running, "is_locked", is_locked)
    SweepReader(sweep).read()
    assert looked == [file]


def test_a_worker_that_claims_for_long_does_not_hold_up_a_look(sweep, monkeypatch):
    monkeypatch.setattr(running, "_PATIENCE", 0.0)
    wave(sweep, *FIRST[:4])
    with held(sweep / "lock"):
        (seen,) = SweepReader(sweep).read().waves
    assert seen.held


def test_results_are_read_once(sweep, monkeypatch):
    calls: list[Path] = []
    read = status.read_outcome
    monkeypatch.setattr(status, "read_outcome", lambda path: calls.append(path) or read(path))
    reader = SweepReader(sweep)
    for number, name in enumerate(FIRST[:3]):
        finish(sweep, name, 0.1 * number)
        assert reader.read().arms[0].done == number + 1
    assert calls == [sweep / name for name in FIRST[:3]]


def test_damaged_files_are_named_or_count_as_missing(sweep, capsys):
    for name in FIRST[:2]:
        finish(sweep, name)
    (sweep / FIRST[1] / "summary.json").write_text('{"end": "do')
    file = wave(sweep, *FIRST[2:4], step=1)
    (file.with_suffix("") / "progress.json").write_text("[1")
    (file.with_suffix("") / "lock").write_text("\x00")
    (file.parent / "def.json").write_text("{")
    with held(file):
        text = printed(capsys, "sweep", "status", sweep)
    assert f"{FIRST[1]} has no summary.json that can be read.\n" in text
    assert re.search(rf"{file.stem} +2 +\S+ +0 +- +not known yet\n", text)
    (sweep / "final.json").write_text("?")
    assert "final.json is damaged (it is not JSON: " in refused(capsys, "sweep", "status", sweep)


def test_a_folder_that_is_not_a_sweep_is_refused(sweep, capsys, tmp_path):
    nothing = tmp_path / "nothing"
    assert f"There is no folder {nothing}" in refused(capsys, "sweep", "status", nothing)
    said = refused(capsys, "sweep", "status", tmp_path)
    assert "is not the folder of a sweep, because it has no plan.json" in said
    finish(sweep, FIRST[0])
    said = refused(capsys, "sweep", "status", (sweep / FIRST[0]).parent)
    assert f"is in the folder of a sweep, which is {sweep}: name that one." in said
    assert "not the folder of a sweep" in refused(capsys, "sweep", "show", tmp_path, "a/1")
    assert "No trial of" in refused(capsys, "plot", sweep)


def test_an_arm_without_a_winner_is_named(sweep, capsys):
    for name in FIRST:
        finish(sweep, name, end="diverged", why="It diverged.")
        finish(sweep, name.replace("first", "second"))
    reader = SweepReader(sweep)
    choose_winners(sweep, reader.plan, reader.read().outcomes, lambda content: None)
    text = printed(capsys, "sweep", "status", sweep)
    assert "\nfirst has no winner: every trial diverged or failed.\n" in text
    assert re.search(r"second 0000  validation +- +-", text)
    assert "and 1 more diverged.\n" in text


def test_control_characters_in_a_reason_are_escaped(sweep, capsys):
    finish(sweep, FIRST[0], end="failed", why="Error: \x1b[2Jx\ny. And more.")
    assert r"failed: Error: \x1b[2Jx\ny." in printed(capsys, "sweep", "status", sweep)
    assert r"# Error: \x1b[2Jx\ny. And" in printed(capsys, "sweep", "show", sweep, "first/0/0")


# While it is computed.


class Screen(io.StringIO):
    """A terminal of 80 columns without an end; knows the control sequences of `Redrawn`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [""]
        self.most: dict[str, int] = {}  # how often a line was on the screen at once

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", text):
            if up := re.fullmatch(r"\x1b\[(\d+)A", part):
                del self.lines[-int(up[1]) - 1 :]  # always followed by \x1b[J
                self.lines.append("")
            elif part == "\n":
                self.lines.append("")
            elif part not in ("\r", "\x1b[J"):
                self.lines[-1] += part
        for line in self.lines:
            self.most[line] = max(self.most.get(line, 0), self.lines.count(line))
        return len(text)


def test_a_table_is_drawn_in_place_below_the_lines_of_the_log(sweep, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with LiveView(sweep, every=0.01) as view:
        runs.wait_for(lambda: any("0 of 12 runs" in line for line in screen.lines))
        view.log("one")
        finish(sweep, FIRST[0])
        runs.wait_for(lambda: any("1 of 12 runs" in line for line in screen.lines))
        view.log("two\x1b[2J")
    assert screen.lines == ["one", r"two\x1b[2J", ""]
    head = next(line for line in screen.most if line.startswith("arm "))
    assert screen.most[head] == 1


def test_lines_are_cut_to_the_terminal(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(screen, "fileno", lambda: 0)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((20, 4)))
    Redrawn(screen).draw(["x" * 50, *"abcdef"])
    assert screen.lines == ["x" * 19, "a", "b", ""]


def test_without_a_terminal_a_line_says_how_far_it_is(sweep, capfd):
    for options in ({}, {"table": False}):
        with LiveView(sweep, every=0.01, **options) as view:
            view.log("one")
            runs.wait_for(lambda: "0 of 12 runs" in capfd.readouterr().err)
    capfd.readouterr()  # the end of a line of which a part was read
    with LiveView(sweep, every=0.01, quiet=True) as view:
        time.sleep(0.1)
        view.log("one")
    assert capfd.readouterr().err == "one\n"


def test_a_table_that_cannot_be_drawn_does_not_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with LiveView(tmp_path, every=0.01) as view:
        runs.wait_for(lambda: "The table of the sweep is not shown any more" in screen.lines[0])
        view.log("one")
    assert screen.lines[1:] == ["one", ""]


@pytest.mark.long
def test_the_results_are_printed_at_the_end_and_a_fault_of_theirs_ends_nothing(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sweep.yaml").write_text("base: base.yaml\nfinal: null\n")
    command = ["sweep", f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={tmp_path / 'sweep'}"]
    out = printed(capsys, *command)
    assert "1 of 1 runs: the sweep is complete" in out
    assert f"python -m trainer report {tmp_path / 'sweep'}\n" in out

    def fail(self: object) -> None:
        raise UserError("It is damaged.")

    monkeypatch.setattr(SweepReader, "read", fail)
    assert main(command) == 0
    assert "The results cannot be shown: It is damaged." in capsys.readouterr().err
