"""Ladders: the arms of a sweep on several rungs, and how hyperparameters get from rung to rung."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests import runs, short
from tests.runs import printed, refused
from tests.sweep.test_sweep_extend import begun
from tests.sweep.test_sweep_plan import BASE, planned
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.sweep.final import final_trials
from trainer.sweep.ladder import PlannedLadder, split_name
from trainer.sweep.plan_file import read_plan
from trainer.sweep.status import SweepReader
from trainer.writers import iterate_metrics
from trainer.writers.summary import read_outcome

RATE = "optimizer.learning_rate"
SWEEP = """base: base.yaml
arms:
  adamw: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}}
  lion:
    set: {optimizer: !optax.lion {learning_rate: 1e-3}}
    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-4, high: 1e-2}}
trials: 4
searches: 3
method: !method.sobol {seed: 0}
ladder:
  path: steps
  values: [1x, 2x, 4x]
  rule: {optimizer.learning_rate: -0.5}
  retuned: [2x]
  baseline: adamw
goal: {metric: loss}
final: {seeds: 1}
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.swept(tmp_path_factory.mktemp("ladder"), BASE, SWEEP)


def _ladder(searched: int, power: float | str | None = None) -> PlannedLadder:
    powers = {} if power is None else {"muon": {"rate": power}}
    return PlannedLadder(
        "width", ("64", "128", "256", "1024"), (1, 2, 4, 16), searched, powers=powers
    )


def test_a_fixed_rule_takes_the_values_of_the_highest_rung_that_is_searched():
    ladder = _ladder(2)
    winners = [{"rate": 0.1, "decay": 1.0}, {"rate": 0.3, "decay": 2.0}]
    assert ladder.moved("muon@1024", winners) == {"rate": 0.3, "decay": 2.0}
    assert ladder.sources("muon@1024") == ["muon@64", "muon@128"]


def test_a_power_is_that_of_the_ratio_to_the_rung_of_the_winner():
    # muP divides Adam's learning rate by the width: from 128 to 1024 by 8.
    moved = _ladder(2, -1.0).moved("muon@1024", [{"rate": 9.0}, {"rate": 0.4}])
    assert moved == {"rate": pytest.approx(0.4 / 8, rel=1e-15)}


def test_a_fitted_power_continues_the_line_of_numpy():
    values = [0.1, 0.07, 0.02]
    line = np.polyfit(np.log([1, 2, 4]), np.log(values), 1)
    expected = math.exp(np.polyval(line, math.log(16)))
    moved = _ladder(3, "fitted").moved("muon@1024", [{"rate": x} for x in values])
    assert moved["rate"] == pytest.approx(expected, rel=1e-12)


def test_the_arms_of_a_plan_are_those_of_the_file_on_each_rung(folder):
    _, plan = begun(folder, SWEEP)
    assert list(plan.arms) == [
        *("adamw@1x", "adamw@2x", "adamw@2x-retuned", "adamw@4x"),
        *("lion@1x", "lion@2x", "lion@2x-retuned"),  # only the baseline climbs to the top
    ]
    assert plan.searched == ["adamw@1x", "adamw@2x-retuned", "lion@1x", "lion@2x-retuned"]
    steps = {arm: each.steps for each in plan.programs for arm in each.arms}
    assert steps == {
        **{"adamw@1x": 20, "adamw@2x": 40, "adamw@2x-retuned": 40, "adamw@4x": 80},
        **{"lion@1x": 20, "lion@2x": 40, "lion@2x-retuned": 40},
    }
    # All rungs of a search have its points and its seeds.
    points = [[(t.search, t.number, t.seed, t.values) for t in plan.of_arm(a)] for a in plan.arms]
    assert points[0] == points[2] and len(points[0]) == 12
    assert plan == read_plan(folder / "runs")


@pytest.mark.long
def test_winners_run_on_the_rungs_above_by_the_rule(computed):
    plan = read_plan(computed)
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for trial in plan.trials:
        outcome = read_outcome(computed / trial.folder)
        assert outcome is not None
        key, found = (trial.arm, trial.search), (outcome.metrics["validation/loss"], trial)
        rate = trial.values[RATE]
        if key not in best or found[0] < best[key][0]:
            best[key] = (found[0], rate)
    finals = final_trials(computed, plan)
    assert finals is not None and len(finals) == 7 * 3
    for each in finals:
        arm, rung, again = split_name(each.arm)
        if again or rung == "1x":
            expected = best[each.arm, each.search][1]
        else:
            ratio = {"2x": 2, "4x": 4}[rung]
            expected = best[f"{arm}@1x", each.search][1] / math.sqrt(ratio)
        assert each.values[RATE] == pytest.approx(expected, rel=1e-12)
        assert (computed / each.folder / "summary.json").exists()
    seeds = {each.search: each.seed for each in finals}
    assert all(each.seed == seeds[each.search] for each in finals)


@pytest.mark.long
def test_a_moved_run_has_the_bits_that_it_has_alone(computed, tmp_path):
    (folder,) = (computed / "final/adamw@4x").glob("10000")
    assert main([f"--config={folder / 'config.yaml'}", f"--workdir={tmp_path / 'alone'}"]) == 0

    def losses(run: Path) -> list[float]:
        return [row[k] for row in iterate_metrics(run) for k in sorted(row) if "loss" in k]

    alone = losses(tmp_path / "alone")
    assert alone == losses(folder) and len(alone) > 3


@pytest.mark.long
def test_every_command_reads_a_ladder(computed, capsys):
    text = printed(capsys, "sweep", "status", computed)
    assert "lion@2x, final" in text and "the sweep is complete" in text
    assert "agree with each other" in printed(capsys, "sweep", "check", computed)
    assert "adamw@4x" in printed(capsys, "sweep", "show", computed, "final/adamw@4x/10000")


@short.parametrize("rule", ["fixed", "{optimizer.learning_rate: -0.5}"])
def test_the_waves_of_a_rung_that_is_not_searched_are_of_winners(folder, capsys, rule):
    text = SWEEP.replace("{optimizer.learning_rate: -0.5}", rule).replace("  retuned: [2x]\n", "")
    (folder / "sweep.yaml").write_text(text)
    assert main(["sweep", f"--config={folder / 'sweep.yaml'}", "--dry_run"]) == 0
    rows = re.split(r"\nprogram +waves .*\n", capsys.readouterr().out)[1].splitlines()[:5]
    widths = [int(row.split()[2]) for row in rows]
    assert sorted(widths) == [3, 3, 3, 12, 12]  # 3 searches, of 4 trials on the lowest rung


@pytest.mark.long
def test_a_value_of_the_rule_that_was_edited_is_found(copied, capsys):
    (copied / "ledger.jsonl").unlink()  # which has the hash of final.json as well
    choices = json.loads((copied / "final.json").read_text())
    choices[0]["winners"]["lion@2x"][1]["values"][RATE] *= 1.01
    (copied / "final.json").write_text(json.dumps(choices))
    capsys.readouterr()
    assert main(["sweep", "check", str(copied)]) == 2
    text = capsys.readouterr().out
    assert "its winner of lion@2x in search 1 of revision 1 is moved to optimizer" in text


@pytest.mark.long
def test_a_search_without_a_winner_has_no_runs_above(folder):
    from tests.sweep.test_searches import end
    from trainer.sweep.final import choose_winners

    sweep, plan = begun(folder, SWEEP.replace("loss", "accuracy, mode: max"))
    for trial in plan.trials:
        lost = trial.arm == "lion@1x" and trial.search == 1
        if lost:
            run = sweep / trial.folder
            run.mkdir(parents=True)
            text = '{"end": "diverged", "step": 3, "metrics": {}, "why": "nan"}'
            (run / "summary.json").write_text(text)
        else:
            end(sweep, trial, 0.5)
    outcomes = SweepReader(sweep).read().outcomes
    choose_winners(sweep, plan, outcomes, lambda content: None)
    finals = final_trials(sweep, plan) or []
    assert [t.search for t in finals if t.arm == "lion@2x"] == [0, 2]
    assert [t.search for t in finals if t.arm == "lion@2x-retuned"] == [0, 1, 2]


@pytest.mark.long
def test_a_ladder_of_widths_moves_other_paths_with_it(folder):
    text = SWEEP.replace("path: steps", "path: model.width\n  also: {steps: [20, 30, 40]}")
    _, plan = begun(folder, text.replace("[1x, 2x, 4x]", "[8, 16, 32]").replace("[2x]", "[16]"))
    roots = {name: arm.config.root.kwargs for name, arm in plan.arms.items()}
    assert roots["adamw@32"]["model"].kwargs["width"] == 32 and roots["adamw@32"]["steps"] == 40
    assert plan.ladder is not None and plan.ladder.factors == (1, 2, 4)


@pytest.mark.long
def test_arms_have_equal_budgets_on_each_rung(folder):
    unequal = SWEEP.replace("lion {learning_rate: 1e-3}}", "lion {learning_rate: 1e-3}, steps: 30}")
    with pytest.raises(ConfigError, match=r"numbers of steps \(adamw@1x 240, lion@1x 360\)"):
        begun(folder, unequal)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("path: steps", "path: stepz", r"no value of 'stepz' to multiply. Did you mean 'steps'\?"),
        ("[1x, 2x, 4x]", "[1x, 4x, 2x]", "values must rise from rung to rung"),
        ("[1x, 2x, 4x]", "[1x]", "values has 1 rungs"),
        ("[1x, 2x, 4x]", "[1x, 2x, 90]", "mixes numbers and multiples"),
        ("[1x, 2x, 4x]", "[1x, 2x, 2.02x]", "40.4, which is not a whole number"),
        ("{optimizer.learning_rate: -0.5}", "{optimizer.rate: -0.5}", "which is in no space"),
        ("{optimizer.learning_rate: -0.5}", "fixd", r"Did you mean 'fixed'\?"),
        ("{optimizer.learning_rate: -0.5}", "retuned", "which searches every rung"),
        ("{optimizer.learning_rate: -0.5}", "{optimizer.learning_rate: fited}", "must be a number"),
        ("baseline: adamw", "baseline: adam", r"not an arm. Did you mean 'adamw'\?"),
        ("retuned: [2x]", "retuned: [1x]", "retuned has the rung 1x"),
        ("retuned: [2x]", "tuned: 3", "tuned is 3, but must be at least 1 and less than the 3"),
        ("path: steps", "path: optimizer.learning_rate", "which the ladder sets on each rung"),
        (
            "searches: 3",
            "searches: 1\nfinal: null",
            "on the rungs that the ladder does not search",
        ),
        (
            "high: 1e-1}}",
            "high: 1e-1}, data.batch_size: !space.values {values: [16, 32]}}",
            "its space makes 2 programs, because of data.batch_size",
        ),
    ],
)
def test_mistakes_are_named_with_their_place(folder, old, new, message):
    assert old in SWEEP
    text = SWEEP.replace(old, new)
    if "final: null" in new:
        text = text.replace("final: {seeds: 1}\n", "")
    with pytest.raises(ConfigError, match=message) as error:
        begun(folder, text)
    assert error.value.source is not None and error.value.source.file.endswith("sweep.yaml")


@pytest.mark.long
def test_a_ladder_is_not_extended(folder, capsys):
    sweep, _ = begun(folder, SWEEP)
    before = (sweep / "plan.json").read_bytes()
    planned(folder, SWEEP, "trials=5")
    text = refused(capsys, "sweep", "extend", sweep, f"--config={folder / 'sweep.yaml'}")
    assert "A sweep with a ladder cannot be extended" in text
    assert (sweep / "plan.json").read_bytes() == before


@pytest.mark.long
def test_another_rule_is_another_sweep(folder, capsys):
    sweep, _ = begun(folder, SWEEP)
    (folder / "sweep.yaml").write_text(SWEEP.replace("-0.5", "-1"))
    text = refused(capsys, "sweep", f"--config={folder / 'sweep.yaml'}", f"--workdir={sweep}")
    assert "has another sweep" in text and "ladder: " in text
