"""The warnings of the plans of arms: in the plan of a sweep, its folder, its status, its report."""

import json

import pytest

from tests import runs
from tests.sweep.test_sweep_plan import GIN, planned, with_programs
from trainer.__main__ import main
from trainer.engine.plan import make_plan as make_run_plan
from trainer.engine.program import load_located
from trainer.sweep.plan_file import digest_of, read_plan

# An optimizer of which 0.9 is a likely mistake, because its momentum is the weight of what is new.
SCION = (
    "{optimizer: !optim.optimizer {groups: {kernels: !optim.group {match: '.*/kernel', optimizer:"
    " !optim.scion {learning_rate: 0.1, momentum: 0.1}}, rest: !optim.group {match: '.*',"
    " optimizer: !optax.adamw {learning_rate: 1e-3}}}}}"
)
MOMENTUM = "optimizer.groups.kernels.optimizer.momentum"
TEXT = f"""base: base.yaml
differs: [weight_decay, space]
arms:
  first: {{space: {{optimizer.b1: !space.values {{values: [0.8, 0.9]}}}}}}
  second: {{set: {SCION}, space: {{{MOMENTUM}: !space.values {{values: [0.1, 0.9]}}}}}}
  third: {{set: {SCION}, space: {{{MOMENTUM}: !space.values {{values: [0.9, 0.1]}}}}}}
  fourth: {{set: {SCION}, space: {{{MOMENTUM}: !space.values {{values: [0.1, 0.2]}}}}}}
final: {{seeds: 2}}
"""
PART = "In group 'kernels', optim.scion has momentum=0.9: it is the weight of the new gradient"
LARGEST = (
    "The goal has mode: max, and smaller values of loss are better: the worst trial would win."
    " Write mode: min in goal ('min' in Gin)."
)


@pytest.mark.long
def test_warnings_are_those_of_the_plans_of_the_trials(folder):
    plan = with_programs(folder, TEXT)
    found = plan.warnings
    known = {}
    for trial in plan.trials:
        warnings = make_run_plan(load_located(trial.config), trial.config).warnings
        known[trial.arm] = {*known.get(trial.arm, ()), *warnings}
    assert {arm: set(found.get(arm, ())) for arm in known} == known
    assert [bool(known[arm]) for arm in known] == [False, True, True, False]


def test_a_check_shows_warnings_by_arm(folder, capsys):
    planned(folder, TEXT)
    command = ["sweep", f"--config={folder / 'sweep.yaml'}", "--check"]
    assert main([*command, "--set=goal={mode: max}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert lines[0].startswith("warning: 2 final seeds of each arm cannot decide anything")
    assert lines[1] == f"warning (first, second, third, fourth): {LARGEST}"
    assert lines[2].startswith(f"warning (second, third): {PART}") and len(lines) == 3


@pytest.mark.parametrize(
    ("kind", "space", "warned"),
    [
        ("yaml", "optimizer.learning_rate: !space.integers {low: 1, high: 9}", True),
        (
            "yaml",
            "all: !space.zip {spaces: {optimizer.learning_rate: !space.integers {low: 1, high: 2},"
            " steps: !space.values {values: [10, 20]}}}",
            True,
        ),
        ("yaml", "optimizer.learning_rate: !space.values {values: [1, 2]}", False),
        ("yaml", "steps: !space.integers {low: 10, high: 20}", False),
        ("gin", "optax.adamw.learning_rate", True),
    ],
)
def test_whole_numbers_for_a_learning_rate_are_a_warning(folder, capsys, kind, space, warned):
    text = f"base: base.yaml\nspace: {{{space}}}\nmethod: !method.sobol\ntrials: 2\n"
    if kind == "gin":
        text = GIN.replace("log_uniform", "integers").replace("1e-4", "1").replace("1e-1", "9")
    planned(folder, text)
    said = runs.printed(capsys, "sweep", f"--config={folder / f'sweep.{kind}'}", "--check")
    words = "is a learning rate, and its space has whole numbers only, integers 1 to"
    assert (words in said and "use space.log_uniform" in said) is warned, said


@pytest.mark.long
def test_the_folder_of_a_sweep_keeps_warnings_for_status_and_report(folder, capsys):
    planned(folder, TEXT)
    where = [f"--config={folder / 'sweep.yaml'}", f"--workdir={folder / 'runs'}"]
    assert main(["sweep", *where, "--plan_only"]) == 0
    assert f"warning (second, third): {PART}" in capsys.readouterr().out
    assert main(["sweep", "status", str(folder / "runs")]) == 0
    assert f"\nwarning (second, third): {PART}" in capsys.readouterr().out
    assert main(["report", str(folder / "runs"), "--formats=markdown"]) == 0
    assert f"Note: The plan of second and third warns: {PART}" in capsys.readouterr().out
    page = (folder / "runs" / "report" / "report.md").read_text()
    assert "The plan of second and third warns: " in page
    # An arm that is added later has its own.
    fifth = SCION.replace("0.1}", "0.95}")
    space = "{optimizer.groups.rest.optimizer.b1: !space.values {values: [0.8, 0.9]}}"
    more = TEXT.replace("final:", f"  fifth: {{set: {fifth}, space: {space}}}\nfinal:")
    (folder / "sweep.yaml").write_text(more)
    command = ["sweep", "extend", str(folder / "runs"), f"--config={folder / 'sweep.yaml'}"]
    assert "warning (fifth): In group 'kernels', optim.scion has momentum=0.95" in (
        runs.printed(capsys, *command)
    )
    assert {*read_plan(folder / "runs").warnings} == {"second", "third", "fifth"}


@pytest.mark.long
def test_a_plan_of_an_earlier_version_has_no_warnings(folder, capsys):
    planned(folder, TEXT)
    where = [f"--config={folder / 'sweep.yaml'}", f"--workdir={folder / 'runs'}"]
    assert main(["sweep", *where, "--plan_only"]) == 0
    file = folder / "runs" / "plan.json"
    content = json.loads(file.read_text())
    (revision,) = content["revisions"]
    for program in revision["programs"]:
        del program["warnings"]
    revision["digest"] = digest_of(revision)
    file.write_text(json.dumps(content))
    assert read_plan(folder / "runs").warnings == {}
    assert "warning" not in runs.printed(capsys, "sweep", "status", str(folder / "runs"))


@pytest.mark.long
def test_the_smallest_loss_and_the_largest_accuracy_get_no_warning(folder):
    for goal in ("{metric: accuracy, mode: max}", "{metric: loss, mode: min}"):
        found = with_programs(folder, TEXT, f"goal={goal}").warnings
        assert {*found} == {"second", "third"}
