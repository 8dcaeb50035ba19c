"""Searches whose worse trials are stopped early: who goes on, with which bits, after kills."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import runs, short
from tests.runs import SWEPT, replaced
from tests.sweep.test_sweep import assert_equal, folders, rows
from tests.sweep.test_sweep_kills import kill_in, results
from trainer import checkpoint
from trainer.__main__ import main
from trainer.report.comparison import read_workloads
from trainer.report.panels.methods import cost_block
from trainer.report.panels.tuning import cuts_block, tuning_block
from trainer.studies.claim import Wanted, drawn, verify_claim, write_claim
from trainer.sweep.evidence import examine
from trainer.sweep.halving import Halving
from trainer.sweep.methods import Cuts, halving, random, sobol
from trainer.sweep.plan_file import read_plan
from trainer.sweep.status import SweepReader
from trainer.writers.summary import Summary, read_outcome

pytestmark = pytest.mark.usefixtures("lab")

RATE = "optimizer.learning_rate"
BASE = replaced("log_every", "3", replaced("eval_every", "4", SWEPT))  # of 12 steps
METHOD = "!method.halving {points: !method.random {seed: 1}, cuts: [4, 8], factor: 3}"
SWEEP = f"""base: base.yaml
arms:
  adamw:
    space: {{{RATE}: !space.log_uniform {{low: 1e-4, high: 1.0}}}}
  sgd:
    set: {{optimizer: !optax.sgd {{learning_rate: 0.1}}}}
    space: {{{RATE}: !space.log_uniform {{low: 1e-3, high: 10.0}}}}
trials: 9
seeds: 2
method: {METHOD}
goal: {{metric: loss, select_on: test}}
final: {{seeds: 2}}
"""


def write(folder: Path, text: str = SWEEP, base: str = BASE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(base)
    (folder / "sweep.yaml").write_text(text)
    return folder / "sweep.yaml"


def compute(file: Path, workdir: Path) -> int:
    return runs.sweep(f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}")


@pytest.fixture(scope="module")
def computed(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two arms of nine points, cut at steps 4 and 8 of 12."""
    return runs.swept(tmp_path_factory.mktemp("halving"), BASE, SWEEP, "--vocabulary=unruly")


def goal_at(trial: Path, step: int) -> float:
    (found,) = [
        row["eval/loss"] for row in rows(trial) if row["step"] == step and "eval/loss" in row
    ]
    return found


def survivors(workdir: Path, arm: str) -> dict[int, set[int]]:
    """Returns step -> the points that go on, from the rows alone, by sorting and counting."""
    points: dict[int, list[Path]] = {}
    for trial in sorted(workdir.glob(f"trials/{arm}/*/*")):
        points.setdefault(int(trial.parent.name), []).append(trial)
    alive, found = set(points), {}
    for step in (4, 8):
        means = {n: sum(goal_at(x, step) for x in points[n]) / len(points[n]) for n in alive}
        alive = set(sorted(means, key=lambda n: (means[n], n))[: max(1, len(alive) // 3)])
        found[step] = alive
    return found


# Who goes on.


def test_counts_and_steps_are_those_of_successive_halving():
    """27 trials by thirds at 100 and 300 of 900 steps: 27 * 100 + 9 * 200 + 3 * 600."""
    cuts = Cuts((100, 300), 3)
    assert cuts.counts(27) == [27, 9, 3] and cuts.counts(2) == [2, 1, 1]
    assert cuts.total(27, 900) == 2700 + 1800 + 1800
    assert [cuts.after(step) for step in (0, 100, 299, 300)] == [100, 300, 300, None]


def test_the_best_third_goes_on_at_each_cut(computed):
    for arm in ("adamw", "sgd"):
        wanted = survivors(computed, arm)
        ends: dict[int, set[tuple[str, int]]] = {}
        for trial in computed.glob(f"trials/{arm}/*/*"):
            outcome = read_outcome(trial)
            assert outcome is not None
            ends.setdefault(int(trial.parent.name), set()).add((outcome.end, outcome.step))
        for number, found in ends.items():
            if number in wanted[8]:
                assert found == {("done", 12)}
            else:
                assert found == {("pruned", 8 if number in wanted[4] else 4)}
    (final,) = json.loads((computed / "final.json").read_text())
    assert [[won["number"]] for (won,) in final["winners"].values()] == [
        sorted(survivors(computed, arm)[8]) for arm in ("adamw", "sgd")
    ]


def test_a_folder_of_a_sweep_that_is_complete_has_nothing_that_waits(computed):
    assert not (computed / "waiting").exists() and not list((computed / "waves").iterdir())
    assert not list(computed.glob("trials/*/*/*/checkpoints"))
    reader = SweepReader(computed)
    arm = reader.read().arms[0]
    # 18 runs of 4 steps, 6 of 4 more and 2 of 4 more; both seeds of a point go on together.
    assert (arm.runs, arm.done, arm.pruned, arm.steps, arm.steps_done) == (18, 2, 16, 104, 104)


@pytest.mark.long
def test_of_equal_points_that_with_the_lower_number_goes_on(tmp_path):
    points = ", ".join(f"{{{RATE}: {rate}}}" for rate in (0.5, 0.01, 0.01, 0.01))
    method = (
        f"!method.halving {{points: !method.explicit {{trials: [{points}]}}, cuts: [8], factor: 4}}"
    )
    text = (
        f"base: base.yaml\nmethod: {method}\ngoal: {{metric: loss, select_on: test}}\nfinal: null\n"
    )
    file = write(tmp_path, text)
    assert compute(file, tmp_path / "sweep") == 0
    (cut,) = json.loads((tmp_path / "sweep" / "cuts.json").read_text())
    values = dict(zip(cut["order"], cut["values"], strict=True))
    assert values[1] == values[2] == values[3] != values[0]
    place = cut["order"].index(1)
    assert cut["order"][place : place + 3] == [1, 2, 3] and cut["kept"] == 1


@pytest.mark.long
def test_points_that_diverged_do_not_go_on(tmp_path):
    rates = f"space: {{{RATE}: !space.values {{values: [1e30, 1e-3, 1e31, 1e32]}}}}"
    text = (
        f"base: base.yaml\n{rates}\nmethod: !method.halving\n  points: !method.grid\n"
        "  cuts: [4]\n  factor: 2\ngoal: {metric: loss, select_on: test}\nfinal: {seeds: 1}\n"
    )
    assert compute(write(tmp_path, text), tmp_path / "sweep") == 0
    (cut,) = json.loads((tmp_path / "sweep" / "cuts.json").read_text())
    assert cut["kept"] == 1 and cut["order"][0] == 1
    assert cut["values"][1:] == [None, None, None]
    ends = {x.parent.name: read_outcome(x) for x in (tmp_path / "sweep").glob("trials/*/*/*")}
    assert {n: e.end for n, e in ends.items() if e} == {
        "0000": "diverged",
        "0001": "done",
        "0002": "diverged",
        "0003": "diverged",
    }


@pytest.mark.long
def test_each_search_is_cut_for_itself(tmp_path):
    text = SWEEP.replace("\nseeds: 2", "\nsearches: 3").replace("trials: 9", "trials: 4")
    file = write(tmp_path, text)
    assert compute(file, tmp_path / "sweep") == 0
    cuts = json.loads((tmp_path / "sweep" / "cuts.json").read_text())
    found = {(x["arm"], x["search"], x["step"]): (len(x["order"]), x["kept"]) for x in cuts}
    assert found == {
        (arm, search, step): (4, 1) if step == 4 else (1, 1)
        for arm in ("adamw", "sgd")
        for search in range(3)
        for step in (4, 8)
    }
    assert main(["sweep", "check", str(tmp_path / "sweep")]) == 0


# Bits.


@pytest.mark.long
def test_a_trial_has_the_bits_of_its_run_alone(tmp_path):
    """One that was stopped has those of the run with --until, also of its state."""
    text = SWEEP.replace("\nseeds: 2\n", "\ncheckpoints: final\n")
    assert compute(write(tmp_path, text), tmp_path / "sweep") == 0
    for end, step in (("done", 12), ("pruned", 8), ("pruned", 4)):
        trial = next(
            x
            for x in folders(tmp_path / "sweep")
            if (o := read_outcome(x)) and (o.end, o.step) == (end, step) and "trials" in x.parts
        )
        alone = tmp_path / f"alone{step}"
        config = f"--config={trial / 'config.yaml'}"
        code = main([config, "--vocabulary=unruly", f"--workdir={alone}", f"--until={step}"])
        assert code == (0 if end == "done" else 75)
        assert_equal(trial, alone, step)


@pytest.mark.long
def test_the_trials_do_not_depend_on_how_many_workers_compute_them(computed, tmp_path):
    """Two workers at once: other waves, in another order."""
    file = write(tmp_path)
    workdir = tmp_path / "sweep"
    assert (
        main(
            [
                "sweep",
                f"--config={file}",
                "--vocabulary=unruly",
                f"--workdir={workdir}",
                "--plan_only",
            ]
        )
        == 0
    )
    command = [sys.executable, "-m", "trainer", "sweep", "work", str(workdir)]
    command += ["--vocabulary=unruly", "--workers=2"]
    environment = runs.environment()
    workers = [
        subprocess.Popen(command, cwd=runs.ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    ours, theirs = (json.loads((x / "cuts.json").read_text()) for x in (workdir, computed))
    key = lambda cut: (cut["arm"], cut["step"])  # noqa: E731
    assert sorted(ours, key=key) == sorted(theirs, key=key)
    assert {x.relative_to(workdir): rows(x) for x in folders(workdir)} == {
        x.relative_to(computed): rows(x) for x in folders(computed)
    }
    assert main(["sweep", "check", str(workdir)]) == 0


# Kills and damage.


@pytest.fixture(scope="module")
def longer(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("longer")
    base = BASE
    for name, value in (("steps", 120), ("log_every", 20), ("eval_every", 20), ("save_every", 30)):
        base = replaced(name, str(value), base)
    file = write(folder, SWEEP.replace("[4, 8]", "[40, 80]") + "checkpoints: best\n", base)
    assert compute(file, folder / "undisturbed") == 0
    return file


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("cut", 0),
        ("cut", 1),
        ("cut", 3),
        ("cut", 5),
        ("cut", 12),
        ("restore", 4),
        ("restore", 40),
    ]
    + [("move", 9), ("finish", 30), ("discard", 9), ("ledger", 1)],
)
def test_a_worker_that_is_killed_changes_nothing(tmp_path, longer, phase, number):
    workdir = tmp_path / "sweep"
    planned = ["sweep", f"--config={longer}", "--vocabulary=unruly", f"--workdir={workdir}"]
    assert main([*planned, "--plan_only"]) == 0
    kill_in(phase, number, workdir)
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert results(workdir) == results(longer.parent / "undisturbed")
    for trial in folders(workdir):
        other = longer.parent / "undisturbed" / trial.relative_to(workdir)
        steps = [info.step for info in checkpoint.ls(other)]
        assert [info.step for info in checkpoint.ls(trial)] == steps and steps
        assert not any(
            checkpoint.diff_checkpoints(trial, step, step, other=other) for step in steps
        )
    assert main(["sweep", "check", str(workdir)]) == 0
    assert not (workdir / "waiting").exists()


def stopped_at(cut: int, file: Path, workdir: Path, monkeypatch) -> None:
    """Computes a sweep until a number of cuts was made, as if its worker was stopped there."""
    inner = Halving.cut

    def cut_and_stop(self: Halving) -> Any:
        found = inner(self)
        if sum(map(len, found.values())) >= cut:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Halving, "cut", cut_and_stop)
        compute(file, workdir)


@pytest.mark.long
def test_a_waiting_trial_is_shown_and_one_whose_state_is_damaged_begins_anew(
    tmp_path, computed, monkeypatch, capsys
):
    workdir = tmp_path / "sweep"
    stopped_at(1, write(tmp_path), workdir, monkeypatch)
    waiting = sorted((workdir / "waiting" / "4" / "adamw").glob("*/*"))
    assert len(waiting) == 6
    status = SweepReader(workdir).read()
    assert status.arms[0].pruned == 12 and status.arms[0].waiting == 6
    assert status.arms[0].steps_done == 18 * 4
    name = waiting[0].relative_to(workdir / "waiting" / "4").as_posix()
    told = runs.printed(capsys, "sweep", "show", str(workdir), name)
    assert "waiting at the cut of step 4" in told and "config.yaml --until=4" in told
    (workload,) = read_workloads([str(workdir)])
    (costs, *_) = cost_block(workload).tables
    places = {column.name: index for index, column in enumerate(costs.columns)}
    (row,) = (row for row in costs.rows if row[places["arm"]] == "adamw")
    assert row[places["steps"]] == 18 * 4  # also those of the six that wait
    files = [x for x in (waiting[0] / "checkpoints").rglob("*") if x.is_file()]
    state = max(files, key=lambda x: x.stat().st_size)
    content = bytearray(state.read_bytes())
    content[-200] ^= 1
    state.write_bytes(content)
    shutil.rmtree(waiting[1] / "checkpoints")
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert capsys.readouterr().err.count("is computed again from its first step.") == 2
    assert {x.relative_to(workdir): rows(x) for x in folders(workdir)} == {
        x.relative_to(computed): rows(x) for x in folders(computed)
    }


@short.parametrize("end", ["done", "pruned"])
def test_a_trial_that_was_removed_is_computed_again(copied, computed, end):
    trial = next(x for x in folders(copied) if (o := read_outcome(x)) and o.end == end)
    before = rows(trial)
    shutil.rmtree(trial)
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    assert rows(trial) == before and (read_outcome(trial) or Summary("", 0)).end == end
    assert main(["sweep", "check", str(copied)]) == 0


# Evidence.


def test_an_order_that_the_rows_do_not_give_is_found(copied):
    assert not examine(copied).faults
    file = copied / "cuts.json"
    text = file.read_text()
    cuts = json.loads(text)
    cuts[0]["order"][2:4], cuts[0]["values"][2:4] = (
        cuts[0]["order"][3:1:-1],
        cuts[0]["values"][3:1:-1],
    )
    file.write_text(json.dumps(cuts))
    found = {fault.why for fault in examine(copied).faults if fault.file == "cuts.json"}
    assert "it was changed after its line in ledger.jsonl" in found
    arm, step = cuts[0]["arm"], cuts[0]["step"]
    wrong = f"its order of {arm} in search 0 at step {step} is not that of the rows"
    assert wrong in found or any("is not of the points that went on" in each for each in found)
    (copied / "ledger.jsonl").unlink()  # as somebody would who wants to hide it
    assert {fault.file for fault in examine(copied).faults} == {"cuts.json"}
    file.write_text(text)
    assert not examine(copied).faults


def test_a_file_of_cuts_that_was_removed_is_written_again(copied):
    file = copied / "cuts.json"
    before = {(x["arm"], x["step"]): x for x in json.loads(file.read_text())}
    file.unlink()
    assert examine(copied).faults
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    assert {(x["arm"], x["step"]): x for x in json.loads(file.read_text())} == before
    assert not examine(copied).faults


@pytest.mark.long
def test_rows_of_a_waiting_trial_that_were_changed_do_not_decide_a_cut(
    tmp_path, monkeypatch, capsys
):
    workdir, inner = tmp_path / "sweep", Halving.cut

    def stop_before(self: Halving) -> Any:
        if self.waiting():
            raise KeyboardInterrupt
        return inner(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Halving, "cut", stop_before)
        compute(write(tmp_path), workdir)
    assert not examine(workdir).faults
    trial = next((workdir / "waiting" / "4").glob("*/*/*"))
    metrics = trial / "metrics.jsonl"
    honest = metrics.read_text()
    loss = goal_at(trial, 4)
    metrics.write_text(honest.replace(f'"eval/loss": {loss!r}', '"eval/loss": 0.001'))
    assert goal_at(trial, 4) == 0.001
    (fault,) = examine(workdir).faults
    assert fault.file == metrics.relative_to(workdir).as_posix()
    said = runs.refused(capsys, "sweep", "work", str(workdir), "--vocabulary=unruly")
    assert "its eval/loss at step 4 is not that of summary.json" in said and str(trial) in said
    metrics.write_text(honest)
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0


def test_a_damaged_file_of_cuts_is_named(copied, capsys):
    (copied / "cuts.json").write_text("[{}]")
    assert main(["sweep", "check", str(copied)]) == 2
    assert "cuts.json" in capsys.readouterr().out
    assert "cuts.json is damaged" in runs.refused(capsys, "report", str(copied))


@pytest.mark.long
def test_a_claim_computes_a_pruned_trial_again_to_its_cut(computed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", runs.environment()["PYTHONPATH"])
    file = tmp_path / "claim.json"
    write_claim(computed, file)
    names = sorted(x.relative_to(computed).as_posix() for x in folders(computed))
    ends = {name: read_outcome(computed / name) for name in names}
    pruned = {name for name, outcome in ends.items() if outcome and outcome.end == "pruned"}
    public = next(
        text for text in map(str, range(100)) if drawn(names, file.read_bytes(), text)[0] in pruned
    )
    checked = verify_claim(file, computed, public, Wanted(None, 1), ["unruly"])
    assert checked.verified and {each.name for each in checked.recomputed} <= pruned


# What is refused.


@pytest.mark.parametrize(
    ("change", "base", "said"),
    [
        (
            ("cuts: [4, 8]", "cuts: [4, 7]"),
            BASE,
            "has a cut at step 7, after which there is no eval",
        ),
        (
            ("cuts: [4, 8]", "cuts: [4, 12]"),
            BASE,
            "has a cut at step 12, and its runs have 12 steps",
        ),
        (("cuts: [4, 8]", "cuts: [8, 4]"), BASE, "cuts is [8, 4], but must be steps from 1 on"),
        (("cuts: [4, 8]", "cuts: []"), BASE, "cuts is empty"),
        (("factor: 3", "factor: 1"), BASE, "factor is 1, but must be at least 2"),
        (
            ("trials: 9", "ladder: {path: steps, values: [12, 24]}\ntrials: 9"),
            BASE,
            "a ladder and method.halving",
        ),
        (("seeds: 2", "seeds: 2"), replaced("on_nonfinite", "rollback", BASE), "rollback"),
        (
            (
                f"{RATE}: !space.log_uniform {{low: 1e-4",
                "steps: !space.values {values: [12, 24, 36]}, "
                f"{RATE}: !space.log_uniform {{low: 1e-4",
            ),
            BASE,
            "searches steps (",
        ),
        (
            ("  sgd:\n", "  sgd:\n    method: !method.random {seed: 1}\n"),
            BASE,
            "The arms have different numbers of steps (adamw 104, sgd 216)",
        ),
        (
            ("points: !method.random {seed: 1}", f"points: {METHOD}"),
            BASE,
            "points must be a method that chooses all points before",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_in_a_sentence(tmp_path, capsys, change, base, said):
    assert change[0] in SWEEP
    file = write(tmp_path, SWEEP.replace(*change), base)
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={tmp_path / 'sweep'}"]
    error = runs.refused(capsys, "sweep", *words, "--plan_only")
    assert said in error and "Traceback" not in error, error
    assert re.search(r"sweep\.yaml:\d+", error), error
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_with_cuts_is_not_extended(copied, capsys):
    file = write(copied.parent, SWEEP.replace("trials: 9", "trials: 12"))
    words = ["sweep", "extend", str(copied), f"--config={file}", "--vocabulary=unruly"]
    assert "method.halving cannot be extended" in runs.refused(capsys, *words)


def test_a_list_of_trials_is_named_within_the_method(tmp_path, capsys):
    points = f"[{{{RATE}: 0.1}}, {{{RATE}: zero}}]"
    method = f"!method.halving\n  points: !method.explicit\n    trials: {points}\n  cuts: [4]"
    text = f"base: base.yaml\nmethod: {method}\ngoal: {{metric: loss, select_on: test}}\n"
    file = write(tmp_path, text)
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={tmp_path / 'sweep'}"]
    assert "sweep.yaml:4" in runs.refused(capsys, "sweep", *words, "--plan_only")


# What is said.


def test_the_plan_says_how_many_go_on_and_what_it_costs(tmp_path, capsys):
    file = write(tmp_path)
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={tmp_path / 'sweep'}"]
    assert main(["sweep", *words, "--plan_only"]) == 0
    said = capsys.readouterr()
    text = said.out + said.err
    assert "adamw: of 9 points in a search, 3 from step 4 on, 1 from step 8 on" in text
    assert re.search(r"^trials +36 +at most 208 ", text, re.MULTILINE)
    assert "trials: seeds 0 to 1" in text
    plan = read_plan(tmp_path / "sweep")
    assert plan.cuts == {"adamw": Cuts((4, 8), 3), "sgd": Cuts((4, 8), 3)}


def test_the_report_says_that_trials_were_stopped_and_shows_the_order(computed):
    (workload,) = read_workloads([str(computed)])
    block = cuts_block(workload)
    (table,) = block.tables
    places = {column.name: index for index, column in enumerate(table.columns)}
    for row in table.rows:
        arm, step = row[places["arm"]], row[places["step"]]
        going_on = survivors(computed, str(arm))[int(str(step))]
        shown = str(row[places["order"]]).split(", ")
        assert set(map(int, shown)) == going_on
        winner = workload.winners[str(arm), 0]
        assert shown[int(str(row[places["winner"]])) - 1] == f"{winner:04d}"
    assert [row[places["points"]] for row in table.rows] == [9, 3, 9, 3]
    # The pairs are counted by hand, from the rows.
    of_first = {
        n: sum(goal_at(x, 4) for x in computed.glob(f"trials/adamw/{n:04d}/*"))
        for n in survivors(computed, "adamw")[4]
    }
    of_second = {
        n: sum(goal_at(x, 8) for x in computed.glob(f"trials/adamw/{n:04d}/*")) for n in of_first
    }
    a, b, c = of_first
    same = sum(
        (of_first[x] < of_first[y]) == (of_second[x] < of_second[y])
        for x, y in ((a, b), (a, c), (b, c))
    )
    assert (table.rows[0][places["same"]], table.rows[0][places["pairs"]]) == (same, 3)
    assert not tuning_block(workload).figures
    assert "are stopped early" in tuning_block(workload).text[0]


@pytest.mark.long
def test_the_verdict_says_that_slow_starters_are_at_a_disadvantage(computed, capsys, tmp_path):
    out = tmp_path / "report"
    assert main(["report", str(computed), f"--output={out}"]) == 0
    text = " ".join((out / "report.md").read_text().split())
    rule = "each search cut to 1/3, but at least one point, at steps 4, 8"
    assert f"Trials are stopped early ({rule})" in text
    # 18 trials of each arm, of which 2 are computed to the end, and 2 final runs.
    assert "Every run that came to its end made 12 steps" in text
    assert "Of 40 runs, 32 stopped early." in text
    assert "what begins slowly is at a disadvantage" in text
    assert "diverged" not in text.partition("## Cost")[0]


@pytest.mark.long
def test_nothing_is_said_of_cuts_without_them(tmp_path):
    text = SWEEP.replace(METHOD, "!method.random {seed: 1}").replace("trials: 9", "trials: 3")
    assert compute(write(tmp_path, text), tmp_path / "sweep") == 0
    (workload,) = read_workloads([str(tmp_path / "sweep")])
    assert workload.cuts == {} and workload.orders == {}
    assert not (tmp_path / "sweep" / "cuts.json").exists()
    assert '"cuts"' not in (tmp_path / "sweep" / "plan.json").read_text()


@pytest.mark.long
def test_nothing_is_said_of_cuts_that_stopped_nothing(tmp_path):
    text = SWEEP.replace("trials: 9", "trials: 1").replace("final: {seeds: 2}", "final: null")
    assert compute(write(tmp_path, text), tmp_path / "sweep") == 0
    assert main(["report", str(tmp_path / "sweep"), f"--output={tmp_path / 'out'}"]) == 0
    said = " ".join((tmp_path / "out" / "report.md").read_text().split())
    assert "stopped early (" not in said and "are stopped early" not in said
    assert "Every run made 12 steps" in said


def test_a_method_for_methods_is_refused():
    with pytest.raises(ValueError, match="a method that chooses all points before"):
        halving(halving(sobol(), cuts=[3]), cuts=[3])
    assert halving(random(seed=2), [5]).of_search(1).text == (
        f"{random(seed=2).of_search(1).text}; cut to 1/3, but at least one point, at step 5"
    )
