"""Independent searches of each arm: their plan, their winners, and what is added to them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests import runs, short
from tests.runs import printed, refused
from tests.sweep.test_sweep_extend import added, begun, check_kept, extend
from tests.sweep.test_sweep_plan import planned
from tests.sweep.test_sweep_status import finish
from trainer.__main__ import main
from trainer.config import dump
from trainer.messages import UserError
from trainer.report.pairs import compare_arms, looks_of
from trainer.report.panels.methods import cost_block, hyperparameters_table, methods_block
from trainer.report.sweep_results import read_sweep_results
from trainer.report.verdict import verdict
from trainer.sweep.final import choose_winners, final_trials, read_choices
from trainer.sweep.folder import SweepFolder
from trainer.sweep.methods import Cuts
from trainer.sweep.plan import Trial, seed_of_search
from trainer.sweep.plan_file import read_plan
from trainer.sweep.status import SweepReader
from trainer.writers.json_files import DamagedFile
from trainer.writers.summary import Summary

SWEEP = """base: base.yaml
arms:
  first: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-4, high: 1e-2}}}
  second: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}}
trials: 4
searches: 3
method: !method.sobol {seed: 0}
goal: {metric: accuracy, mode: max}
final: {seeds: 2}
"""


def accuracy(arm: str, search: int, number: int) -> float:
    """Returns a value of which point (search + 1) % 4 is the best of a search."""
    best = number == (search + 1) % 4
    return 0.5 + 0.1 * best + 0.01 * search + (0.2 if arm == "first" else 0.0)


def end(sweep: Path, trial: Trial, value: float | None = None) -> None:
    """Writes the result of a trial, and its rows, if it has none."""
    if (sweep / trial.folder).exists():
        return
    if value is None:
        value = accuracy(trial.arm, trial.search, trial.number)
    finish(sweep, trial.folder, value)
    row = {"step": 20, "validation/accuracy": value, "eval/accuracy": value}
    (sweep / trial.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    # Results that no worker wrote are compared with their rows.
    (sweep / "ledger.jsonl").unlink(missing_ok=True)


def finish_search(sweep: Path) -> None:
    for trial in read_plan(sweep).trials:
        end(sweep, trial)
    reader = SweepReader(sweep)
    choose_winners(sweep, reader.plan, reader.read().outcomes, lambda content: None)


def finish_finals(sweep: Path, fewer: int = 0) -> None:
    trials = final_trials(sweep, read_plan(sweep))
    assert trials is not None
    for trial in trials[: len(trials) - fewer]:
        end(sweep, trial)


def test_each_search_has_points_and_seeds_of_its_own_which_all_arms_share(folder):
    _, plan = begun(folder, SWEEP)
    by_arm = {
        arm: [(t.search, t.number, t.seed) for t in plan.trials if t.arm == arm]
        for arm in ("first", "second")
    }
    assert by_arm["first"] == by_arm["second"]
    assert [key[:2] for key in by_arm["first"]] == [(s, n) for s in range(3) for n in range(4)]
    assert len({seed for _, _, seed in by_arm["first"]}) == 3
    rates = [next(iter(t.values.values())) for t in plan.trials]
    assert len(set(rates)) == 24
    # The same coordinates in the unit cube: the second space is ten times the first.
    for ours, theirs in zip(rates[:12], rates[12:], strict=True):
        assert theirs == pytest.approx(10 * ours)


@pytest.mark.long
def test_trials_that_failed_are_computed_again_and_the_winners_of_their_searches(folder):
    sweep, plan = begun(folder, SWEEP)
    finish_search(sweep)
    lost = next(t.folder for t in plan.trials if (t.arm, t.search, t.number) == ("second", 1, 0))
    fail(sweep / lost)
    finals = final_trials(sweep, plan)
    assert finals is not None
    with pytest.raises(UserError, match="have not ended. Let `python -m trainer sweep work"):
        SweepFolder(sweep).forget_failed()
    finish_finals(sweep)
    fail(sweep / finals[0].folder)  # of another search: the run alone
    again = [t.folder for t in finals if (t.arm, t.search) == ("second", 1)]
    assert len(again) == 2
    chosen, before = (sweep / "final.json").read_text(), {t.folder for t in finals}
    # After an extension, results of these winners have been judged.
    (sweep / "final.json").write_text(json.dumps(2 * json.loads(chosen)))
    with pytest.raises(UserError, match="Compute the sweep anew in another folder"):
        SweepFolder(sweep).forget_failed()
    (sweep / "final.json").write_text(chosen)
    (sweep / "cuts.json").touch()
    opened = SweepFolder(sweep)
    arm = replace(opened.plan.arms["second"], cuts=Cuts((10,), 2))
    opened.plan = replace(opened.plan, arms={**opened.plan.arms, "second": arm})
    with pytest.raises(UserError, match="at the cuts others went on in their place"):
        opened.forget_failed()
    (sweep / "cuts.json").unlink()
    found = SweepFolder(sweep).forget_failed()
    assert found == [lost, finals[0].folder, *again]
    assert not (sweep / "final.json").exists() and not (sweep / lost).exists()
    kept = {name for name in before if (sweep / name).exists()}
    assert kept == before - {finals[0].folder, *again}


def fail(folder: Path) -> None:
    (folder / "summary.json").write_text(Summary("failed", 3, {}, "out of memory").text())


@pytest.mark.long
def test_each_search_has_a_winner_that_runs_on_fresh_seeds_of_its_own(folder):
    sweep, plan = begun(folder, SWEEP)
    assert final_trials(sweep, plan) is None
    finish_search(sweep)
    trials = final_trials(sweep, plan)
    assert trials is not None
    won = [(t.arm, t.search, t.number) for t in trials[::2]]
    assert won == [(arm, s, s + 1) for arm in ("first", "second") for s in range(3)]
    assert len({t.folder for t in trials}) == 12
    assert {t.seed for t in trials}.isdisjoint(t.seed for t in plan.trials)
    for trial in trials:
        seeds = [seed_of_search(seed, plan.offsets[trial.search]) for seed in plan.final_seeds]
        assert trial.seed in seeds
        assert SweepReader(sweep).program_of(trial).steps == 20
    (choice,) = read_choices(sweep, plan)
    assert choice.winners["second", 2] == 3


@pytest.mark.long
def test_status_show_and_plot_know_searches(folder, capsys):
    sweep, _ = begun(folder, SWEEP)
    finish_search(sweep)
    finish_finals(sweep)
    text = printed(capsys, "sweep", "status", sweep)
    assert "36 of 36 runs: the sweep is complete" in text and "of 3 searches" in text
    assert "winner  split       mean  search 0  search 1  search 2" in text
    assert "first   validation  0.81       0.8      0.81      0.82" in text
    shown = printed(capsys, "sweep", "show", sweep, "first/2.3")
    assert "trials/first/2.0003/" in shown
    said = refused(capsys, "sweep", "show", sweep, "first/2.7")
    assert "there are first/2.0000 to first/2.0003" in said


def test_arms_are_compared_over_searches(folder):
    sweep, _ = begun(folder, SWEEP.replace("searches: 3", "searches: 4"))
    finish_search(sweep)
    work = read_sweep_results(sweep)
    assert (work.searches, work.completed, list(work.units)) == (4, 0, [0, 1, 2, 3])
    finish_finals(sweep, fewer=1)
    work = read_sweep_results(sweep)
    assert work.completed == 0 and len(work.units_of("second")) == 3
    assert not any(pair.decided or pair.looks for pair in compare_arms(work))
    finish_finals(sweep)
    work = read_sweep_results(sweep)
    assert work.completed == 1
    assert work.units_of("first") == pytest.approx({0: 0.8, 1: 0.81, 2: 0.82, 3: 0.83})
    (pair,) = compare_arms(work)
    assert (pair.better, pair.n, pair.looks) == ("first", 4, (4,))


def test_searches_can_be_added(folder):
    sweep, old = begun(folder, SWEEP)
    finish_search(sweep)
    finish_finals(sweep)
    _, new, _ = extend(folder, SWEEP.replace("searches: 3", "searches: 5"))
    check_kept(old, new)
    names = added(old, new)
    assert len(names) == 16
    assert {name.split("/")[1].split(".")[0] for name in names} == {"3", "4"}
    assert new.offsets[:3] == old.offsets
    before = read_sweep_results(sweep)
    assert before.completed == 1 and len(before.finals) == 12
    assert before.winners == {(arm, s): s + 1 for arm in ("first", "second") for s in range(3)}
    assert any("The sweep was extended." in line for line in before.missing)
    finish_search(sweep)
    finish_finals(sweep)
    after = read_sweep_results(sweep)
    assert after.completed == 2 and after.revisions[1].units == 5
    looks = looks_of(after, ("first", "second"), 5)
    assert looks is not None and (looks.planned, looks.later) == (3, (5,))


@pytest.mark.long
def test_searches_that_are_added_after_trials_of_two_arms_are_a_later_look(folder):
    """How good the winners are is known from their trials, before they run again."""
    sweep, plan = begun(folder, SWEEP)
    for trial in plan.trials:
        end(sweep, trial)
    extend(folder, SWEEP.replace("searches: 3", "searches: 5"))
    finish_search(sweep)
    finish_finals(sweep)
    work = read_sweep_results(sweep)
    looks = looks_of(work, ("first", "second"), 5)
    assert looks is not None and (looks.planned, looks.later) == (3, (5,))
    said = "When searches were added, trials of earlier ones had ended, which is a look."
    assert said in verdict(work, compare_arms(work))


@pytest.mark.long
def test_methods_and_the_table_of_spaces_say_which_points_are_from_which_space(folder):
    text = SWEEP.replace("searches: 3\n", "")
    sweep, _ = begun(folder, text)
    finish_search(sweep)
    finish_finals(sweep)
    wider = text.replace("high: 1e-2", "high: 1e-1").replace("trials: 4", "trials: 6")
    extend(folder, wider)
    finish_search(sweep)
    extend(folder, wider.replace("seeds: 2", "seeds: 4"))
    finish_search(sweep)  # chooses the winners again
    finish_finals(sweep)
    work = read_sweep_results(sweep)
    (methods,) = methods_block(work, []).text
    rate = "optimizer.learning_rate log_uniform"
    assert (
        " The first plan had 4 points for first and 4 points for second, from the spaces: first:"
        f" {rate} 0.0001 to 0.01; second: {rate} 0.001 to 0.1. Revision 2, made when 8 runs of the"
        " search had a result and the winners had been chosen, added 2 points for first and 2"
        f" points for second, from the spaces: first: {rate} 0.0001 to 0.1; second: {rate} 0.001 to"
        " 0.1. Revision 3, made when"
        " 12 runs of the search had a result and the winners had been chosen, added no points"
        " (final seeds: "
    ) in methods
    table = next(each for each in cost_block(work).tables if each.name == "spaces")
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows]
    assert [(row["arm"], row["revision"], row["points"], row["space"]) for row in rows] == [
        ("first", 1, 4, "log_uniform 0.0001 to 0.01"),
        ("first", 2, 2, "log_uniform 0.0001 to 0.1"),
        ("second", 1, 4, "log_uniform 0.001 to 0.1"),
        ("second", 2, 2, "log_uniform 0.001 to 0.1"),
    ]


def test_methods_count_the_points_and_seeds_of_each_search(folder):
    sweep, _ = begun(folder, SWEEP)
    finish_search(sweep)
    finish_finals(sweep)
    (methods,) = methods_block(read_sweep_results(sweep), []).text
    assert (
        "For each search the point with the largest accuracy on the validation split was run again"
        " with 2 fresh seeds, on which we report the accuracy on the test split."
    ) in methods
    assert (
        "Hyperparameters were tuned with 4 points for each arm, in each of 3 independent searches,"
        " chosen by sobol, seed 0, with 1 seed for each. How many were tuned: every arm 1"
        " with 4 trials of each search (4 for each). The search spaces were: first:"
    ) in methods


@pytest.mark.long
def test_a_new_winner_of_an_extension_is_not_judged_before_all_of_its_runs_ended(folder):
    text = SWEEP.replace("searches: 3\n", "")
    sweep, _ = begun(folder, text)
    finish_search(sweep)
    finish_finals(sweep)
    assert looks_of(read_sweep_results(sweep), ("first", "second"), 2) is not None
    extend(folder, text.replace("trials: 4", "trials: 8"))
    for trial in read_plan(sweep).trials[8:]:
        best = trial.name.startswith("first/0006")
        end(sweep, trial, 0.9 if best else 0.1)
    finish_search(sweep)
    work = read_sweep_results(sweep)
    assert work.revisions[1].new_winners == ("first",) and work.completed == 1
    assert looks_of(work, ("first", "second"), 2) is None
    finish_finals(sweep)
    looks = looks_of(read_sweep_results(sweep), ("first", "second"), 2)
    assert looks is not None and (looks.planned, looks.later) == (None, (2,))


@short.parametrize(
    ("change", "said"),
    [
        (("searches: 3", "searches: 4\nlooks: any"), "looks: planned -> any"),
        (("goal: {", "skewed: true\ngoal: {"), "skewed: False -> True"),
        (("searches: 3", ""), "searches: 3 -> 1"),
    ],
)
def test_what_would_change_the_rule_of_decision_is_refused(folder, capsys, change, said):
    sweep, _ = begun(folder, SWEEP)
    before = (sweep / "plan.json").read_bytes()
    (folder / "more.yaml").write_text(SWEEP.replace(*change))
    assert main(["sweep", "extend", str(sweep), f"--config={folder / 'more.yaml'}"]) == 2
    assert said in capsys.readouterr().err
    assert (sweep / "plan.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["seeds", "winners", "searches", "revision", "point"])
def test_winners_that_disagree_with_the_plan_are_refused(folder, damage):
    sweep, plan = begun(folder, SWEEP)
    finish_search(sweep)
    file = sweep / "final.json"
    (content,) = json.loads(file.read_text())
    if damage == "seeds":
        content["seeds"].pop()
    elif damage == "winners":
        del content["winners"]["first"]
    elif damage == "searches":
        content["winners"]["first"].pop()
    elif damage == "revision":
        content["revision"] = 2
    else:
        content["winners"]["first"][1]["number"] = 4
    file.write_text(json.dumps([content]))
    with pytest.raises(DamagedFile):
        final_trials(sweep, plan)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SWEEP.replace("searches: 3", "searches: 2"), "searches is 2"),
        (
            SWEEP.replace("sobol {seed: 0}", "grid {points: 2}").replace("trials: 4\n", ""),
            "search",
        ),
        (SWEEP.replace("final: {seeds: 2}", "final: null"), "search"),
    ],
)
def test_searches_that_cannot_be_independent_are_refused(folder, capsys, text, said):
    (folder / "sweep.yaml").write_text(text)
    assert said in runs.refused(capsys, "sweep", "--check", f"--config={folder / 'sweep.yaml'}")


def test_search_0_is_the_sweep_without_searches(folder):
    alone = planned(folder, SWEEP.replace("searches: 3\n", ""))
    several = planned(folder, SWEEP)
    first = [trial for trial in several.trials if trial.search == 0]
    assert [(t.name, t.values) for t in first] == [(t.name, t.values) for t in alone.trials]


def test_the_hyperparameters_of_a_report_are_those_of_all_winners(folder):
    sweep, _ = begun(folder, SWEEP)
    finish_search(sweep)
    finish_finals(sweep)
    trials = final_trials(sweep, read_plan(sweep))
    assert trials is not None
    rates: dict[str, list[float]] = {"first": [], "second": []}
    for trial in trials:
        (sweep / trial.folder / "config.yaml").write_text(dump(trial.config.root))
        rates[trial.arm] += trial.values.values()
    table = hyperparameters_table(read_sweep_results(sweep))
    assert table is not None and "the smallest and the largest" in table.note
    (row,) = (row for row in table.rows if row[0] == "optimizer.learning_rate")
    for cell, values in zip(row[1:], rates.values(), strict=True):
        assert len(set(values)) == 3
        assert list(map(float, cell.split(" to "))) == [min(values), max(values)]
    assert all(" to " not in str(cell) for each in table.rows for cell in each if each != row)
