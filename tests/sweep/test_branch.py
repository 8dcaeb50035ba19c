"""Branches: sweeps whose trials continue one state of a run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import runs
from tests.runs import replaced
from tests.sweep.test_derivation import derived, replan
from tests.sweep.test_sweep import assert_equal, folders, rows, solo
from tests.sweep.test_sweep_kills import kill_in, results
from tests.train.test_warm_start import params
from trainer import checkpoint
from trainer.__main__ import main
from trainer.config import ConfigError, load
from trainer.config.vocabulary import SWEEP as LANGUAGE
from trainer.engine.program import Program
from trainer.report.comparison import read_workloads
from trainer.report.conditions import conditions
from trainer.studies.claim import Wanted, verify_claim, write_claim
from trainer.sweep.plan_file import read_plan
from trainer.sweep.reading import read_sweep
from trainer.sweep.status import SweepReader
from trainer.workdir import read_record
from trainer.writers.summary import read_outcome

pytestmark = pytest.mark.usefixtures("lab")

BASE = replaced("keep_latest", "9", replaced("steps_per_call", "2"))  # 12 steps, saved every 4
ARMS = """arms:
  same: {}
  faster: {set: {optimizer.learning_rate: 0.03}}
  anew: {set: {warm_start.optimizer: reset, warm_start.follow: 0}}
  sgd: {set: {optimizer: !optax.sgd {learning_rate: 0.1, momentum: 0.9}}}
"""
TEXT = f"""branch: {{run: run, at: 8, follow: 4}}
{ARMS}
goal: {{metric: loss, select_on: test}}
final: {{seeds: 2}}
checkpoints: final
"""


def write(folder: Path, run: Path, text: str = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.yaml").write_text(text.replace("run: run", f"run: {run}"))
    return folder / "sweep.yaml"


def options(file: Path, workdir: Path) -> list[str]:
    return [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}"]


@pytest.fixture(scope="module")
def run(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps with the checkpoints of steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "base.yaml").write_text(BASE)
    assert main([*options(folder / "base.yaml", folder / "run")]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def computed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("branch")
    assert runs.sweep(*options(write(folder, run), folder / "sweep")) == 0
    return folder / "sweep"


# The bits.


@pytest.mark.long
def test_the_arm_that_changes_nothing_has_the_bits_of_the_run(computed, run):
    trial = computed / "trials/same/0000/0"
    assert rows(trial) == [row for row in rows(run) if row["step"] > 8]
    assert checkpoint.diff_checkpoints(trial, 12, 12, other=run) == []


@pytest.mark.long
def test_a_trial_has_the_bits_of_its_config_alone(computed, tmp_path):
    trials = folders(computed)
    assert len(trials) == 4 + 8
    for index, trial in enumerate(trials):
        if trial.name in ("0", "10001"):
            assert_equal(trial, solo(trial, tmp_path / str(index)), 12)


@pytest.mark.long
def test_arms_begin_with_the_state_that_the_plan_says(computed, run, tmp_path):
    plan = read_plan(computed)
    assert plan.branch is not None and plan.branch.sha256 == checkpoint.leaves_digest(run, 8)
    starts = {name: arm.config.root.kwargs["warm_start"] for name, arm in plan.arms.items()}
    assert {name: (x["optimizer"], x.get("follow")) for name, x in starts.items()} == {
        "same": ("keep", None),
        "faster": ("keep", None),
        "anew": ("reset", 0),
        "sgd": ("reset", 4),
    }
    # The momentum has followed gradients, and the schedules are at step 8.
    trial = computed / "trials/sgd/0000/0"
    alone = tmp_path / "alone"
    command = [f"--config={trial / 'config.yaml'}", "--vocabulary=unruly", f"--workdir={alone}"]
    assert main([*command, "--until=8"]) == 75
    found = params(alone, 8, "opt_state")
    assert any("trace" in path and np.abs(x).sum() > 0 for path, x in found.items())
    assert found["scalars/int32"].tolist() == [0, 8]


def test_seeds_share_the_state_and_differ_after_it(computed):
    found = [rows(x) for x in sorted(computed.glob("final/same/*"))]
    assert len(found) == 2 and found[0] != found[1]
    assert all(each[0]["step"] > 8 for each in found)


# Programs and waves.


@pytest.mark.long
def test_arms_with_one_program_are_one_wave_and_compile_once(run, tmp_path, monkeypatch, capsys):
    arms = "".join(f"  a{n}: {{set: {{optimizer.learning_rate: {n}e-3}}}}\n" for n in range(1, 8))
    text = TEXT.replace(ARMS, f"arms:\n{arms}  anew: {{set: {{warm_start.optimizer: reset}}}}\n")
    compiled = []
    inner = Program.compile
    monkeypatch.setattr(Program, "compile", lambda *a: (compiled.append(1), inner(*a))[1])
    file = write(tmp_path, run, text.replace("follow: 4", "follow: 0"))
    assert runs.sweep(*options(file, tmp_path / "sweep")) == 0
    assert len(read_plan(tmp_path / "sweep").programs) == 1 and len(compiled) == 1
    said = capsys.readouterr().err
    assert "8 trials from trials/a1/0000/0" in said and "16 trials from final/a1" in said


def test_steps_count_from_the_branch(computed, capsys):
    (first, *others) = read_plan(computed).programs
    assert first.steps == 12 and first.updates == 4 and len(others) == 1
    status = SweepReader(computed).read()
    assert {arm.steps for arm in status.arms if not arm.final} == {4}
    assert {arm.steps_done for arm in status.arms if arm.final} == {8}
    assert main(["report", str(computed), "--formats=csv", f"--out={computed}/report"]) == 0
    assert main(["sweep", "check", str(computed)]) == 0
    capsys.readouterr()


@pytest.mark.long
def test_vmap_computes_a_branch(run, tmp_path):
    file = write(tmp_path, run, TEXT.replace("checkpoints: final", "vmap: 2"))
    assert runs.sweep(*options(file, tmp_path / "sweep")) == 0
    found, wanted = rows(tmp_path / "sweep/trials/same/0000/0"), rows(run)[-1]
    assert found[-1]["eval/loss"] == pytest.approx(wanted["eval/loss"], rel=1e-5)
    assert found[0]["step"] > 8


@pytest.mark.long
def test_cuts_come_after_the_branch(run, tmp_path, capsys):
    space = "space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 0.1}}"
    text = f"""branch: {{run: run, at: 4}}
{space}
trials: 4
method: !method.halving {{points: !method.random {{seed: 1}}, cuts: [10], factor: 4}}
goal: {{metric: loss, select_on: test}}
final: {{seeds: 1}}
"""
    file = write(tmp_path, run, text)
    assert runs.sweep(*options(file, tmp_path / "sweep")) == 0
    ends = [read_outcome(x) for x in sorted((tmp_path / "sweep").glob("trials/*/*/*"))]
    assert sorted((x.end, x.step) for x in ends if x) == [("done", 12)] + [("pruned", 10)] * 3
    (arm, _) = SweepReader(tmp_path / "sweep").read().arms
    assert arm.steps == 4 * 6 + 2 == arm.steps_done
    capsys.readouterr()
    wrong = write(tmp_path / "wrong", run, text.replace("at: 4", "at: 8").replace("[10]", "[5]"))
    assert main(["sweep", *options(wrong, tmp_path / "no"), "--check"]) == 2
    assert "has a cut at step 5, and its runs begin at step 8" in capsys.readouterr().err


# Kills, changes, and what reads a sweep.


@pytest.fixture(scope="module")
def long(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A branch of some hundred steps, which is computed beside the file, undisturbed."""
    folder = tmp_path_factory.mktemp("long")
    base = replaced("steps", "400", replaced("log_every", "100", BASE))
    base = replaced("eval_every", "100", replaced("save_every", "100", base))
    (folder / "base.yaml").write_text(base)
    assert main([*options(folder / "base.yaml", folder / "run"), "--until=100"]) == 75
    text = TEXT.replace("at: 8, follow: 4", "at: 100, follow: 100").replace(
        "run: run", "run: ./run"
    )
    (folder / "sweep.yaml").write_text(text)
    assert runs.sweep(*options(folder / "sweep.yaml", folder / "undisturbed")) == 0
    return folder / "sweep.yaml"


@pytest.mark.long
@pytest.mark.parametrize(("phase", "number"), [("begin", 3), ("step", 5), ("move", 8)])
def test_a_worker_that_is_killed_costs_nothing(tmp_path, long, phase, number):
    workdir = tmp_path / "sweep"
    planned = ["sweep", *options(long, workdir)]
    assert main([*planned, "--plan_only"]) == 0
    kill_in(phase, number, workdir)
    if phase == "step":  # after a kill, the first block is saved
        kill_in("step", 16, workdir)
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert results(workdir) == results(long.parent / "undisturbed")
    assert main(["sweep", "check", str(workdir)]) == 0
    if phase == "step":
        entries = read_record(workdir / "trials/same/0000/0/run.json")["lineage"]
        assert entries[-1]["restored"] > 100 and len(entries) == 3


@pytest.mark.long
def test_a_checkpoint_that_is_gone_or_changed_costs_no_trial(run, tmp_path, capsys):
    copy, workdir = Path(shutil.copytree(run, tmp_path / "copy")), tmp_path / "sweep"
    assert main(["sweep", *options(write(tmp_path, copy), workdir), "--plan_only"]) == 0
    work = ["sweep", "work", str(workdir), "--vocabulary=unruly"]
    step, kept = copy / "checkpoints" / "8", tmp_path / "kept"
    step.rename(kept)
    said = runs.refused(capsys, *work)
    assert "There is no checkpoint of step 8" in said and "Traceback" not in said
    shutil.copytree(copy / "checkpoints" / "12", step)
    said = runs.refused(capsys, *work)
    assert "not the one that sha256 names" in said and "Traceback" not in said
    assert not folders(workdir)
    shutil.rmtree(step)
    kept.rename(step)
    assert main(work) == 0 and len(folders(workdir)) == 12
    assert all((found := read_outcome(x)) and found.end == "done" for x in folders(workdir))


@pytest.mark.long
def test_a_branch_is_extended_by_an_arm(run, tmp_path, capsys):
    file, workdir = write(tmp_path, run), tmp_path / "sweep"
    assert runs.sweep(*options(file, workdir)) == 0
    before = results(workdir)
    more = write(
        tmp_path / "more",
        run,
        TEXT.replace(
            ARMS, ARMS + "  lion: {set: {optimizer: !optax.lion {learning_rate: 1e-3}}}\n"
        ),
    )
    extend = ["sweep", "extend", str(workdir), "--vocabulary=unruly"]
    assert "1 new runs: 4 steps" in runs.printed(capsys, *extend, f"--config={more}")
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    after = results(workdir)
    assert {name: after[name] for name in before if name.startswith("trials")} == {
        name: x for name, x in before.items() if name.startswith("trials")
    }
    assert "trials/lion/0000/0" in after
    other = write(tmp_path / "other", run, more.read_text().replace("at: 8", "at: 4"))
    assert "warm_start.step: 8 -> 4" in runs.refused(capsys, *extend, f"--config={other}")


@pytest.mark.long
def test_a_claim_about_a_branch_is_verified(computed, tmp_path):
    file = tmp_path / "claim.json"
    write_claim(computed, file)
    assert "Every run continues one state" in json.dumps(json.loads(file.read_text()))
    assert verify_claim(file, computed, "1", Wanted(None, 2), ["unruly"]).verified


def test_the_plan_is_derived_again_without_the_run(computed, tmp_path):
    wrong, (said,) = derived(computed)
    assert wrong == [] and said.startswith("The run that sweep.yaml continues was not read")
    sweep = shutil.copytree(computed, tmp_path / "sweep")
    replan(sweep, lambda revision: revision["branch"].update(at=4))
    (line,), _ = derived(sweep)
    assert "branch: run " in line and ", at 4, sha256 " in line and ", at 8, sha256 " in line


def test_the_verdict_says_what_the_arms_continue(computed, run):
    (workload,) = read_workloads([str(computed)])
    said = " ".join(conditions(workload))
    assert f"Every run continues one state, that after step 8 of {run}:" in said
    assert "and not about training from the first step" in said
    assert (
        "that of the run (same, faster); new (anew); new, then advanced by the last 4 gradients of"
        " the run (sgd)."
    ) in said
    assert "warm_start" not in said


# What is chosen by itself, and what is refused.


def arm(run: Path, folder: Path, text: str) -> dict[str, object]:
    arms = f"arms:\n  x: {{set: {text}}}\n"
    file = write(folder, run, TEXT.replace(ARMS, arms))
    definition = read_sweep(load([str(file)], language=LANGUAGE), ["unruly"])
    (found,) = definition.arms
    start = found.config.root.kwargs["warm_start"]
    return {key: start.get(key) for key in ("optimizer", "follow")}


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("{optimizer: !optax.adamw {learning_rate: 0.1, b1: 0.5, weight_decay: 0.1}}", "keep"),
        ("{optimizer: !optax.adamw {learning_rate: !schedules.warmup_cosine {}}}", "keep"),
        ("{optimizer: !optax.nadamw {learning_rate: 0.1}}", "reset"),  # another function
        ("{optimizer: !optax.adamax {learning_rate: 0.1}}", "reset"),  # with arrays of equal names
        ("{optimizer: !optax.adamw {learning_rate: 0.1, mu_dtype: bfloat16}}", "reset"),
    ],
)
def test_an_optimizer_that_is_not_that_of_the_run_begins_anew(run, tmp_path, text, optimizer):
    text = text.replace("{}", "{peak_value: 0.1, warmup_steps: 0}")
    follow = 4 if optimizer == "reset" else None
    assert arm(run, tmp_path, text) == {"optimizer": optimizer, "follow": follow}


MISTAKES = [
    (("run: run", "run: nowhere"), "nowhere, which does not exist"),
    (("at: 8", "at: 7"), "There is no checkpoint of step 7"),
    (("at: 8", "at: 0"), "at is 0, but must be the step of a checkpoint"),
    (("at: 8", "at: 12"), "This run has 12 steps in all"),
    (("follow: 4", "follow: -1"), "follow is -1"),
    (
        ("follow: 4", "follow: 7"),
        "has those of 4, 8, 12. follow can be at most 4, or 8, all of them. A run keeps",
    ),
    (("follow: 4", "folow: 4"), "folow"),
    (("same: {}", "same: {set: {model.width: 9}}"), "params/embed/bias"),
    (("same: {}", "same: {set: {ema_decay: 0.9}}"), "Give both runs an ema_decay, or none"),
    (("same: {}", "same: {set: {warm_start: null}}"), "sets another warm_start than the branch"),
    (("same: {}", "same: {set: {warm_start.step: 4}}"), "sets another warm_start than the branch"),
    (("same: {}", "same: {space: {warm_start.step: !space.values {values: [4]}}}"), "remove it"),
    (
        ("checkpoints: final", "ladder: {path: steps, values: [12, 24]}"),
        "a ladder and a branch",
    ),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_a_branch_that_does_not_fit_is_a_user_error(run, tmp_path, capsys, change, words):
    assert change[0] in TEXT
    file = write(tmp_path, run, TEXT.replace(*change))
    for more in ("--check", "--plan_only"):
        said = runs.refused(capsys, "sweep", *options(file, tmp_path / "sweep"), more)
        assert words in said and "sweep.yaml:" in said and "Traceback" not in said, said
        assert len(said.splitlines()) <= 9
    assert not (tmp_path / "sweep").exists()


def test_a_sweep_without_a_branch_needs_a_base(tmp_path):
    (tmp_path / "a.yaml").write_text("trials: 1\n")
    with pytest.raises(ConfigError, match="base is empty"):
        read_sweep(load([str(tmp_path / "a.yaml")], language=LANGUAGE))


@pytest.mark.long
def test_segments_of_a_branch_begin_after_its_state(run, tmp_path):
    """A segment of such a run begins between two rows, which count the clipped steps since."""
    text = """branch: {run: run, at: 4}
set:
  diagnostics: [clipped]
  log_every: 3
  optimizer: !optim.optimizer
    clip_norm: 0.9
    groups: {all: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.5}}}
goal: {metric: loss, select_on: test}
final: null
claims: {segments: 2}
"""
    sweep = tmp_path / "sweep"
    assert runs.sweep(*options(write(tmp_path, run, text), sweep)) == 0
    (trial,) = (sweep / "trials").glob("*/*/*")
    assert [step.name for step in (trial / "segments").iterdir()] == ["8"]
    shares = [row["clipped"] for row in rows(trial) if "clipped" in row]
    assert any(shares) and len(shares) > 1
    write_claim(sweep, tmp_path / "claim.json")
    checked = verify_claim(tmp_path / "claim.json", sweep, "1", Wanted(2), ["unruly"])
    assert checked.verified and [each.same for each in checked.recomputed] == [True, True]
