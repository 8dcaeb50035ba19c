"""The rule of the goal in a sweep: what the report says of an arm, and when it says nothing."""

import json
import math
from pathlib import Path

import pytest

from tests import runs
from tests.sweep.test_sweep_plan import DEEP, defined
from trainer.config import ConfigError
from trainer.report.comparison import make_report
from trainer.report.panels.targets import NotJudgedError, judge, sentence
from trainer.report.sweep_results import read_sweep_results
from trainer.sweep.definition import Goal
from trainer.writers import iterate_metrics

SWEEP = """base: base.yaml
arms:
  fast: {set: {optimizer: !optax.adamw {learning_rate: 0.01}}}
  slow: {set: {optimizer: !optax.adamw {learning_rate: 1e-5}}}
seeds: 4
goal: {metric: loss, target: 2.2, rule: earliest_step, sigma: 0.02}
final: null
"""
BASE = DEEP + "log_every: 5\neval_every: 5\n"


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.swept(tmp_path_factory.mktemp("reaching"), BASE, SWEEP)


def _means(folder: Path, arm: str) -> dict[int, float]:
    """Step -> mean loss over the runs, read from the rows."""
    found: dict[int, list[float]] = {}
    for run in sorted((folder / "trials" / arm / "0000").iterdir()):
        for row in iterate_metrics(run, about="validation/loss"):
            if "validation/loss" in row:
                found.setdefault(int(row["step"]), []).append(row["validation/loss"])
    return {step: math.fsum(values) / len(values) for step, values in found.items()}


@pytest.mark.long
def test_the_step_is_that_of_the_rows(computed):
    means = _means(computed, "fast")
    passing = [step for step, mean in means.items() if (2.2 - mean) * 2 >= 0.02 * 3.0902]
    found = judge(read_sweep_results(computed), "fast")
    assert found.step == min(passing) > min(means)
    assert found.mean == pytest.approx(means[found.step], rel=1e-12) and found.runs == 4
    assert judge(read_sweep_results(computed), "slow").step is None


@pytest.mark.long
def test_the_report_says_who_has_reached_it(computed):
    workload = read_sweep_results(computed)
    report = make_report([workload], computed / "report")
    (panel,) = [each for each in report.panels if each.name == "target"]
    text = " ".join(panel.blocks[0].text)
    step = judge(workload, "fast").step
    assert f"fast has reached loss 2.2 on validation after {step} steps: the mean of 4 runs" in text
    assert "slow has not been shown to reach loss 2.2 on validation" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("rule", "p"),
    [
        ("earliest_step", "(p at that step at most 0.001)"),  # it looks until one passes
        ("earliest_lasting_step", "(p at most 0.001)"),
    ],
)
def test_the_sentence_names_the_statistic_of_the_mode(tmp_path, rule, p):
    goal = f"goal: {{metric: accuracy, mode: max, target: 0.15, rule: {rule}, sigma: 0.001}}"
    lines = [goal if line.startswith("goal:") else line for line in SWEEP.splitlines()]
    folder = runs.swept(tmp_path, BASE, "\n".join(lines))
    workload = read_sweep_results(folder)
    found = judge(workload, "fast")
    assert found.step is not None and found.mean > 0.15
    assert found.statistic == pytest.approx((found.mean - 0.15) * 2)
    text = sentence(workload, "fast")
    assert f"and (mean - target) * sqrt(runs) is {found.statistic:.4g}" in text
    assert text.endswith(f"is needed {p}.")
    report = make_report([workload], folder / "report")
    (panel,) = [each for each in report.panels if each.name == "target"]
    assert "(target - mean)" not in " ".join(panel.blocks[0].text)


@pytest.mark.long
def test_the_rule_reads_evaluations_at_changing_intervals(tmp_path):
    changing = SWEEP.replace("seeds: 4", "seeds: 2\nset: {eval_every: {0: 8, 75%: 1}}")
    folder = runs.swept(tmp_path, BASE, changing)
    steps = sorted(_means(folder, "fast"))
    total = steps[-1]
    late = -(-3 * total // 4)
    assert steps == [*range(8, late, 8), *range(late, total + 1)]
    found = judge(read_sweep_results(folder), "slow")
    assert found.step is None and found.closest in steps
    assert runs.main(["sweep", "check", str(folder)]) == 0


def test_another_target_or_metric_has_no_rule(computed):
    assert read_sweep_results(computed, target=2.25).goal.rule is None
    assert read_sweep_results(computed, metric="accuracy", better="max").goal.rule is None


def test_rows_that_were_edited_are_not_judged(copied):
    file = next((copied / "trials/slow/0000").glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row |= {"validation/loss": 1.0} if "validation/loss" in row else {}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(NotJudgedError, match="files of the sweep disagree"):
        judge(read_sweep_results(copied), "slow")


def test_an_unfinished_arm_is_not_judged(computed, tmp_path):
    from trainer.__main__ import main

    (tmp_path / "base.yaml").write_text(DEEP)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    options = [f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={tmp_path / 'sweep'}"]
    assert main(["sweep", *options, "--plan_only"]) == 0
    said = sentence(read_sweep_results(tmp_path / "sweep"), "fast")
    assert said == (
        "fast is not judged by the rule of the target before all its runs have ended: 0 of 4 have."
    )


@pytest.mark.long
def test_runs_that_chose_their_point_are_not_judged(tmp_path):
    text = SWEEP.replace("seeds: 4\n", "").replace(
        "fast: {set: {optimizer: !optax.adamw {learning_rate: 0.01}}}",
        "fast: {space: {optimizer.learning_rate: !space.values {values: [0.01, 0.02]}}}",
    )
    text = text.replace("final: null", "final: null\nbudgets: unequal")
    folder = runs.swept(tmp_path, BASE, text)
    assert "its runs are those by which its point was chosen among 2" in sentence(
        read_sweep_results(folder), "fast"
    )


@pytest.mark.long
def test_runs_that_are_added_after_a_look_need_more(computed, tmp_path):
    import shutil

    home = tmp_path / "home"
    home.mkdir()
    folder = Path(shutil.copytree(computed, home / "sweep"))
    (home / "base.yaml").write_text(BASE)
    (home / "more.yaml").write_text(SWEEP.replace("seeds: 4", "seeds: 6"))
    from trainer.__main__ import main

    assert main(["sweep", "extend", str(folder), f"--config={home / 'more.yaml'}"]) == 0
    assert runs.sweep(f"--config={home / 'more.yaml'}", f"--workdir={folder}") == 0
    before, after = (judge(read_sweep_results(each), "fast") for each in (computed, folder))
    assert (before.runs, after.runs) == (4, 6)
    assert before.limit == pytest.approx(0.02 * 3.0902, rel=1e-4)
    assert 0.02 * 3.9 < after.limit < 0.02 * 4.5


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        ("{rule: earliest_step, sigma: 0.1}", "there is no target"),
        ("{rule: earliest_step, target: 1.0}", "which needs sigma, a number above 0"),
        ("{rule: earliest_step, target: 1.0, sigma: 0.0}", "which needs sigma, a number above 0"),
        ("{sigma: 0.1}", "there is no target"),
        ("{rule: first, sigma: 0.1, target: 1.0}", "earliest_step"),
    ],
)
def test_a_rule_that_cannot_be(tmp_path, goal, why):
    (tmp_path / "base.yaml").write_text(DEEP)
    text = f"base: base.yaml\ngoal: {goal}\nseeds: 2\nfinal: null\n"
    with pytest.raises(ConfigError, match=why):
        defined(tmp_path, text)


def test_a_goal_with_sigma_has_the_rule_that_holds_for_any_curve():
    assert Goal(target=1.0, sigma=0.1).rule == "earliest_lasting_step"
    assert Goal(target=1.0).rule is None and Goal(target=1.0).target_rule is None


def test_a_rule_is_about_one_configuration(tmp_path):
    (tmp_path / "base.yaml").write_text(DEEP)
    goal = "goal: {rule: earliest_step, sigma: 0.1, target: 1.0}"
    space = "space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}"
    text = f"base: base.yaml\n{goal}\n{space}\ntrials: 2\nsearches: 3\nmethod: !method.sobol"
    with pytest.raises(ConfigError, match="each search finds another one"):
        defined(tmp_path, text)
