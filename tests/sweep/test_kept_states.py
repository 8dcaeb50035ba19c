"""The states that runs keep for claims: at which steps, with which bytes, also after kills."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests import runs
from tests.runs import SWEPT, replaced
from tests.sweep.test_halving import SWEEP as HALVED
from tests.sweep.test_halving import compute, write
from tests.sweep.test_sweep import POISONED, folders, rows, sweep, swept, write_sweep
from tests.sweep.test_sweep_kills import kill_in
from trainer import checkpoint
from trainer.__main__ import main
from trainer.sweep.evidence import examine
from trainer.sweep.ledger import read_ledger
from trainer.sweep.plan import kept_bytes, kept_steps
from trainer.sweep.plan_file import read_plan

pytestmark = pytest.mark.usefixtures("lab")

CLAIMS = "claims: {segments: 5}"  # of 12 steps: 2, 4, 7, 9


@pytest.fixture(scope="module")
def computed(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swept(tmp_path_factory.mktemp("kept"), more=CLAIMS)


def kept(workdir: Path) -> dict[str, bytes]:
    """Returns the files of all kept states, by their paths in the folder of the sweep."""
    files = [x for x in workdir.glob("[tf]*/**/segments/**/*") if x.is_file()]
    return {x.relative_to(workdir).as_posix(): x.read_bytes() for x in files}


def steps_of(trial: Path) -> list[int]:
    return sorted(int(each.name) for each in (trial / "segments").iterdir())


@pytest.mark.long
def test_each_run_keeps_its_states_where_segments_begin(computed):
    found = folders(computed)
    assert len(found) == 5 and all(steps_of(trial) == [2, 4, 7, 9] for trial in found)
    assert kept_steps(12, 5) == (2, 4, 7, 9)
    assert kept_steps(3, 8) == (1, 2) and kept_steps(1, 8) == () and kept_steps(9, 0) == ()


@pytest.mark.long
def test_a_kept_state_is_that_of_the_run_alone(computed, tmp_path):
    """The bits of a run that is stopped at this step, by the command that trains."""
    for trial in folders(computed)[::3]:
        for step in (4, 9):
            words = ["--vocabulary=unruly", f"--workdir={tmp_path / trial.name}"]
            config = f"--config={trial / 'config.yaml'}"
            assert main([config, *words, f"--until={step}"]) == 75
            assert (
                checkpoint.diff_checkpoints(trial / "segments", step, step, tmp_path / trial.name)
                == []
            )
        assert rows(tmp_path / trial.name) == [x for x in rows(trial) if x["step"] <= 9]
        shutil.rmtree(tmp_path / trial.name)


@pytest.mark.long
def test_keeping_states_changes_no_bits_and_no_other_file(computed, tmp_path):
    swept(tmp_path)
    for one, other in zip(folders(computed), folders(tmp_path / "sweep"), strict=True):
        assert rows(one) == rows(other)
        names = [{x.name for x in trial.iterdir()} for trial in (one, other)]
        assert names[0] == names[1] | {"segments"}
    assert read_plan(computed).segments == 5 and read_plan(tmp_path / "sweep").segments == 0
    assert "segments" not in (tmp_path / "sweep/plan.json").read_text()


@pytest.mark.long
def test_the_ledger_has_the_hashes_of_the_states(computed, tmp_path):
    ledger = read_ledger(computed)
    assert ledger is not None
    for entry in ledger.of("trial"):
        files = [file for file in entry.content["files"] if file.startswith("segments/")]
        assert len(files) == 4 * 2 and f"segments/7/{checkpoint_file(computed)}" in files
    assert not examine(computed).faults
    copy = Path(shutil.copytree(computed, tmp_path / "sweep"))
    (file,) = copy.glob("final/base/*0/segments/4/manifest.json")
    file.write_text(file.read_text() + " ")
    (fault,) = examine(copy).faults
    assert fault.file == file.relative_to(copy).as_posix() and "was changed after" in fault.why


def checkpoint_file(workdir: Path) -> str:
    names = {x.rpartition("/")[2] for x in kept(workdir)} - {"manifest.json"}
    (name,) = names
    return name


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(9, 30, 60), (25, 50), (70,)])
def test_a_killed_worker_leaves_the_same_states_in_the_end(computed, tmp_path, numbers):
    """A worker after a kill saves after its first block: some resume in the middle of a segment."""
    workdir = tmp_path / "sweep"
    file = write_sweep(tmp_path, replaced("steps_per_call", "1", SWEPT), more=CLAIMS)
    assert sweep(file, workdir, "--plan_only") == 0
    for number in numbers:
        kill_in("step", number, workdir)
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    assert kept(workdir) == kept(computed)
    assert not examine(workdir).faults


@pytest.mark.long
def test_trials_that_are_stopped_early_keep_what_they_came_to(tmp_path):
    text = HALVED.replace("goal:", "claims: {segments: 3}\ngoal:")  # of 12 steps: 4 and 8
    assert compute(write(tmp_path, text), tmp_path / "sweep") == 0
    ends = set()
    for trial in folders(tmp_path / "sweep"):
        step = json.loads((trial / "summary.json").read_text())["step"]
        assert steps_of(trial) == [x for x in (4, 8) if x <= step]
        ends.add(step)
    assert ends == {4, 8, 12} and not examine(tmp_path / "sweep").faults
    plan = read_plan(tmp_path / "sweep")
    # Of 9 points, 9 come to step 4 and 3 to step 8, on 2 seeds; 2 final runs have both.
    of_arm = [(2 * (9 + 3) + 2 * 2) * program.state_bytes for program in plan.programs]
    assert kept_bytes(plan) == sum(of_arm)


@pytest.mark.long
def test_a_trial_that_goes_back_is_computed_alone_and_keeps_none(tmp_path):
    base = replaced("on_nonfinite", "rollback", replaced("data", POISONED))
    swept(tmp_path, base, more=CLAIMS)
    assert not kept(tmp_path / "sweep") and not examine(tmp_path / "sweep").faults


# What is planned and refused.


def test_the_plan_says_what_is_kept_and_how_many_bytes(computed, tmp_path, capsys):
    file = write_sweep(tmp_path, more=CLAIMS)
    said = runs.printed(capsys, "sweep", f"--config={file}", "--vocabulary=unruly", "--check")
    size = read_plan(computed).programs[0].state_bytes
    assert (
        "claims: each run keeps its states after steps 2, 4, 7, 9; together at most"
        f" {4 * 5 * size:,} bytes" in said
    )
    stored = sum(len(x) for name, x in kept(computed).items() if "manifest" not in name)
    assert 4 * 5 * size <= stored + 4 * 5 * 64  # the floats of the config are not stored


MISTAKES = {
    "bytes": (
        "claims: {segments: 5, most_bytes: 10_000}",
        r"the runs would keep states of [\d,]+ bytes together, and at most 10,000 are allowed:"
        r" write claims: \{segments: 5, most_bytes: [\d_]+\} or fewer segments",
    ),
    "one": ("claims: {segments: 1}", "segments is 1, but at least 2 are needed"),
    "none": ("claims: {most_bytes: 0}", "most_bytes is 0, but it is how many bytes"),
    "vmap": ("claims: {segments: 4}\nvmap: 2", "The sweep has claims and vmap: 2"),
    "name": ("claims: {segment: 4}", "segment.*segments"),
    "number": ("claims: 8", "claims"),
    "file": ("claims: claim.json", "claims"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_exit_with_2_before_anything_is_computed(tmp_path, capsys, name):
    more, said = MISTAKES[name]
    file = write_sweep(tmp_path, more=more)
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 2
    error = capsys.readouterr().err
    assert re.search(said, " ".join(error.split())) and "Traceback" not in error
    assert "sweep.yaml:" in error and not (tmp_path / "sweep/plan.json").exists()


@pytest.mark.long
def test_the_advice_for_too_many_bytes_is_accepted(tmp_path, capsys):
    file = write_sweep(tmp_path, more="claims: {segments: 5, most_bytes: 10_000}")
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 2
    found = re.search(r"write (claims: \{.*?\})", " ".join(capsys.readouterr().err.split()))
    assert found
    file = write_sweep(tmp_path, more=found[1])
    assert sweep(file, tmp_path / "sweep", "--plan_only") == 0


@pytest.mark.long
def test_an_extension_keeps_the_same_segments(computed, tmp_path, capsys):
    copy = Path(shutil.copytree(computed, tmp_path / "copy"))
    words = ["sweep", "extend", str(copy), "--vocabulary=unruly"]
    file = write_sweep(tmp_path, more="claims: {segments: 4}", trials=4)
    assert "segments: 5 -> 4" in runs.refused(capsys, *words, f"--config={file}")
    file = write_sweep(tmp_path, more=CLAIMS, trials=4)
    assert main([*words, f"--config={file}"]) == 0
    assert read_plan(copy).segments == 5
    assert main(["sweep", "work", str(copy), "--vocabulary=unruly"]) == 0
    assert all(steps_of(trial) == [2, 4, 7, 9] for trial in folders(copy))
