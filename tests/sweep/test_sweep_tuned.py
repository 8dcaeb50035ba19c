"""How many hyperparameters an arm tunes, by its trials and by the entries of its space."""

import pytest

from tests import runs
from tests.sweep.test_sweep_extend import begun, extend
from tests.sweep.test_sweep_plan import GIN, METHOD, RATE, dry_run, planned
from trainer.__main__ import main
from trainer.config import load
from trainer.config.vocabulary import SWEEP
from trainer.report.results import tunings
from trainer.report.run_results import read_runs
from trainer.report.sweep_results import read_sweep_results
from trainer.sweep.plan import plan_sweep
from trainer.sweep.reading import read_sweep as read_definition
from trainer.sweep.tuned import tuned_text, unequally_tuned

B1 = "optimizer.b1: !space.uniform {low: 0.8, high: 0.9}"
B2 = "optimizer.b2: !space.uniform {low: 0.9, high: 0.99}"
FIXED = "optimizer.weight_decay: !space.values {values: [0.1]}"
DECAY = "optimizer.weight_decay: !space.uniform {low: 0.0, high: 0.2}"
LINKED = f"both: !space.zip {{spaces: {{{RATE}, {DECAY}}}}}"
SAMPLED = f"base: base.yaml\nspace: {{%s}}\ntrials: 4\n{METHOD}\n"
LISTED = "base: base.yaml\nmethod: !method.explicit {trials: [%s]}\n"
EQUAL = "{optimizer.b1: %s, optimizer.b2: %s}"
ARMS = f"""base: base.yaml
arms:
  wide: {{space: {{{RATE}, {B1}, {B2}}}}}
  narrow: {{space: {{{RATE}}}}}
trials: 4
{METHOD}
final: {{seeds: 2}}
"""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (SAMPLED % RATE, 1),
        (SAMPLED % f"{RATE}, {B1}, {B2}", 3),
        (SAMPLED % f"{RATE}, {FIXED}", 1),  # one value is not tuned
        (SAMPLED % LINKED, 1),  # an entry that sets two paths, to different values
        (SAMPLED % f"{LINKED}, {B2}", 2),
        (SAMPLED.replace("trials: 4", "trials: 1") % RATE, 0),
        (SAMPLED.replace("trials: 4", "trials: 1\nsearches: 3") % RATE, 0),  # nothing to choose
        (SAMPLED.replace("trials: 4", "trials: 2\nsearches: 3") % RATE, 1),
        (SAMPLED.replace("trials: 4", "seeds: 3\ntrials: 4") % RATE, 1),
        (LISTED % "{optimizer.b1: 0.8, steps: 20}, {optimizer.b1: 0.9, steps: 21}", 2),
        (LISTED % f"{EQUAL % (0.8, 0.8)}, {EQUAL % (0.9, 0.9)}", 1),
        (LISTED % "{optimizer.weight_decay: 1}, {optimizer.weight_decay: 1.0}", 0),
        ("base: base.yaml\n", 0),
    ],
)
def test_hyperparameters_that_take_several_values_within_a_search_are_counted(folder, text, count):
    tuning = planned(folder, text).tunings["base"]
    assert tuning.count == count
    assert tuning.trials_each == (tuning.trials / count if count else None)
    assert (" trials of each search (" in tuning.text) == ("searches: 3" in text and count > 0)


def test_a_selector_that_sets_several_paths_counts_once(folder):
    (folder / "sweep.gin").write_text(GIN.replace("adamw.learning_rate'", "adamw.b2'"))
    config = load([folder / "sweep.gin"], language=SWEEP)
    plan = plan_sweep(read_definition(config))
    (paths,) = plan.tunings["base"].hyperparameters
    assert len(paths) == 2


def test_a_folder_and_its_report_count_as_the_plan_does(folder):
    text = SAMPLED.replace("space:", "arms: {one: {space:").replace("}\ntrials", "}}}\ntrials")
    runs, stored = begun(folder, text % f"{LINKED}, {B2}")
    want = (("optimizer.learning_rate", "optimizer.weight_decay"), ("optimizer.b2",))
    assert stored.tunings["one"].hyperparameters == want
    assert tunings(read_sweep_results(runs))["one"] == stored.tunings["one"]


@pytest.mark.long
def test_a_dry_run_and_a_check_say_what_each_arm_tunes(folder, capsys):
    (folder / "sweep.yaml").write_text(ARMS)
    said = "tuned: wide 3 with 4 trials (1.33 for each) and narrow 1 with 4 trials (4 for each)\n"
    code, out, _ = dry_run(folder / "sweep.yaml", capsys)
    assert code == 0 and said in out
    assert "The arms tune different numbers of hyperparameters: wide 3" in out
    assert said in runs.printed(capsys, "sweep", f"--config={folder / 'sweep.yaml'}", "--check")


@pytest.mark.long
def test_an_extension_counts_the_trials_of_all_revisions(folder, capsys):
    """A wider space tunes more, though the first trials have a path at the value of the config."""
    runs, stored = begun(folder, ARMS)
    assert tuned_text(stored.tunings).endswith("and narrow 1 with 4 trials (4 for each)")
    capsys.readouterr()
    wider = ARMS.replace(f"narrow: {{space: {{{RATE}}}", f"narrow: {{space: {{{RATE}, {B1}, {B2}}}")
    wider = wider.replace("trials: 4", f"  new: {{space: {{{LINKED}}}}}\ntrials: 6")
    # In the new file, wide and narrow are equal.
    code, extended, _ = extend(folder, wider, "differs=[nothing]")
    out = capsys.readouterr().out
    text = "wide 3 with 6 trials (2 for each), narrow 3 with 6 trials (2 for each) and new 1 with"
    assert code == 0 and text in out
    assert tuned_text(extended.tunings).startswith(text)
    assert tuned_text(tunings(read_sweep_results(runs))).startswith(text)


def test_paths_that_a_later_revision_links_are_tuned_apart(folder):
    text = ARMS.replace(f"  narrow: {{space: {{{RATE}}}}}\n", "").replace(f"{B1}, ", "")
    runs, _ = begun(folder, text.replace(f"{RATE}, {B2}", f"{RATE}, {DECAY}"))
    code, extended, _ = extend(folder, text.replace(f"{RATE}, {B2}", LINKED), "trials=8")
    assert code == 0 and [r.get("linked") is None for r in extended.revisions] == [True, False]
    assert tunings(read_sweep_results(runs))["wide"].count == extended.tunings["wide"].count == 2


@pytest.mark.long
def test_single_runs_say_nothing_about_tuning(folder):
    assert main([f"--config={folder / 'base.yaml'}", f"--workdir={folder / 'run'}"]) == 0
    assert tunings(read_runs([str(folder / "run")], "loss", "min")) == {}


def test_sentences_name_unequal_numbers_and_untuned_baselines(folder):
    arms = planned(folder, ARMS).tunings
    (text,) = unequally_tuned(arms, past=True)
    assert text == (
        "The arms tuned different numbers of hyperparameters: wide 3 with 4 trials (1.33 for each)"
        " and narrow 1 with 4 trials (4 for each); the same number of trials is fewer for each"
        " where more are tuned."
    )
    fixed = planned(folder, "base: base.yaml\n").tunings["base"]
    assert unequally_tuned({"a": arms["wide"], "b": arms["wide"]}, past=True) == []
    assert unequally_tuned({"a": fixed, "b": fixed}, past=True) == []
    assert unequally_tuned({"a": arms["wide"], "sgd": fixed}, past=True) == [
        "sgd tuned no hyperparameter: in this sweep it is an untuned baseline."
    ]
    assert unequally_tuned({"a": arms["wide"], "b": fixed, "c": fixed}, past=False) == [
        "b and c tune no hyperparameter: in this sweep they are untuned baselines."
    ]
    more = planned(folder, ARMS, "trials=8").tunings["narrow"]
    (text,) = unequally_tuned({"wide": arms["wide"], "narrow": more}, past=False)
    assert text.endswith("narrow 1 with 8 trials (8 for each).")  # not the same number of trials


@pytest.mark.parametrize(("steps", "count"), [(20, 1), (21, 2)])
def test_a_path_that_was_not_searched_had_the_value_of_the_config(folder, steps, count):
    """A revision adds a path of one value, which the first trials had too, or had not."""
    runs, _ = begun(folder, SAMPLED % RATE)
    further = f"{RATE}, steps: !space.values {{values: [{steps}]}}"
    code, extended, _ = extend(folder, SAMPLED % further, "trials=6")
    assert code == 0
    assert (
        tunings(read_sweep_results(runs))["base"].count == extended.tunings["base"].count == count
    )
