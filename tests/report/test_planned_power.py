"""What `sweep --check`, `--dry_run` and `sweep extend` say about the differences that are found."""

import json
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from tests import runs, short
from tests.sweep.test_sweep_plan import BASE, begin
from trainer.__main__ import main

RATE = "{optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}"


def text(arms: int = 2, trials: int = 4, final: int = 1, more: str = "") -> str:
    """Returns the file of a sweep."""
    lines = [f"  arm_{n}: {{set: {{optimizer.b1: 0.8{n}}}, space: {RATE}}}" for n in range(arms)]
    named = "\n".join(lines)
    return (
        f"base: base.yaml\narms:\n{named}\ntrials: {trials}\nmethod: !method.sobol {{seed: 0}}\n"
        f"final: {{seeds: {final}}}\n{more}"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def said(folder: Path, capsys, sweep: str, *options: str, code: int = 0) -> str:
    """Runs `sweep --check`; returns what it printed, on standard error if it failed."""
    (folder / "sweep.yaml").write_text(sweep)
    capsys.readouterr()
    assert main(["sweep", f"--config={folder / 'sweep.yaml'}", "--check", *options]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err and len(err.splitlines()) <= 3
    return err if code else out


@short.parametrize(
    ("arms", "searches", "effect", "signs"),
    [(2, 5, "1.8", 6), (2, 8, "1.2", 6), (4, 6, "2.3", 9), (4, 9, "1.5", 9)],
)
def test_a_check_says_which_effect_a_sweep_finds(folder, capsys, arms, searches, effect, signs):
    out = said(folder, capsys, text(arms, more=f"searches: {searches}\n"))
    assert (
        f"power: {arms} arms are compared over {searches} searches, in pairs. A difference of"
        f" {effect} standard deviations of the paired differences is found with a power of 0.8."
    ) in out
    about_signs = (
        f" If a run diverges or collapses, signs are counted, which can decide from {signs} on:"
    )
    assert (about_signs in out) == (searches < signs)
    assert 2 / 2**signs < 0.04 / (arms * (arms - 1) / 2) < 2 / 2 ** (signs - 1)
    # The level of a pair is that of the planned look, 4%, over the number of pairs.
    level = 0.04 / (arms * (arms - 1) / 2)
    known = TTestPower().solve_power(power=0.8, nobs=searches, alpha=level)
    assert f"{known:.2g}" == effect


@pytest.mark.long
def test_with_one_search_the_configurations_are_compared_over_final_seeds(folder, capsys):
    out = said(folder, capsys, text(final=8))
    assert (
        "power: the configurations that are found for 2 arms are compared over 8 final seeds, in"
        " pairs. A difference of 1.2 standard deviations"
    ) in out
    assert "says nothing about other searches: `searches: 6` compares the arms." in out
    assert (
        "warning: 1 final seed of each arm cannot decide anything: with 1 pair of arms it takes at"
        " least 4, and 6 are recommended.\n"
    ) in said(folder, capsys, text())
    few = said(folder, capsys, text(4, more="searches: 5\n"))
    assert "5 searches of each arm cannot decide anything: with 6 pairs of arms it takes at" in few
    assert "power:" not in said(folder, capsys, text(arms=1, final=8))


@pytest.mark.long
def test_the_rule_of_the_file_changes_the_effect(folder, capsys):
    skewed = said(folder, capsys, text(more="searches: 5\nskewed: true\n"))
    known = TTestPower().solve_power(power=0.8, nobs=5, alpha=0.034)
    assert f"A difference of {known:.2g} standard deviations" in skewed
    # With any look, an e-value of 20 at the last look finds it at the latest.
    looked = said(folder, capsys, text(more="searches: 8\nlooks: any\n"))
    assert "A difference of at most 1.9 standard deviations" in looked
    c = 0.25 / 8.25

    def evidence(t):
        return np.sqrt(c) * ((1 + t**2 / 7) / (1 + c * t**2 / 7)) ** 4

    for effect, more in ((1.8, False), (1.95, True)):
        draws = np.random.default_rng(0).normal(effect, 1, (100_000, 8))
        t = draws.mean(1) / (draws.std(1, ddof=1) / np.sqrt(8))
        assert ((evidence(t) >= 20).mean() > 0.8) == more
    few = said(folder, capsys, text(trials=3, more="searches: 5\n"))
    assert "nothing will be said about the arms, because a search has 3 trials" in few


# A pilot.


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a finished sweep with three searches."""
    base = BASE.replace("steps: 20", "steps: 4")
    sweep = text(arms=3, trials=1, more="searches: 3\n")
    return runs.swept(tmp_path_factory.mktemp("pilot"), base, sweep)


@pytest.mark.long
def test_with_a_pilot_the_difference_is_in_units_of_the_metric(folder, capsys, pilot):
    values = {}
    for arm in ("arm_0", "arm_1"):
        files = sorted(pilot.glob(f"final/{arm}/*/summary.json"))
        assert len(files) == 3
        metrics = [json.loads(file.read_text())["metrics"] for file in files]
        values[arm] = np.array([each["eval/loss"] for each in metrics])
    deviation = np.std(values["arm_0"] - values["arm_1"], ddof=1)
    out = said(folder, capsys, text(more="searches: 5\n"), f"--pilot={pilot}")
    found = TTestPower().solve_power(power=0.8, nobs=5, alpha=0.04) * deviation
    low, high = np.sqrt(2 / 5.991), np.sqrt(2 / 0.10259)  # of the table of chi-squared, 2 df
    line = next(line for line in out.splitlines() if line.startswith("pilot: "))
    assert "(3 searches with 1 trial and 1 final seed each), the differences of arm_" in line
    assert f"a standard deviation of {deviation:.4g} in the loss on the test split" in line
    assert f"so that a difference of about {found:.4g} is found." in line
    words = line.partition("90% interval ")[2].partition(")")[0].split(" to ")
    assert [float(x) for x in words] == pytest.approx([deviation * low, deviation * high], 1e-3)
    assert "Searches with 4 trials and 1 final seed, as in this sweep, may vary otherwise." in line
    relevant = f"searches: 5\ngoal: {{relevant: {deviation:.6g}}}\n"
    line = said(folder, capsys, text(more=relevant), f"--pilot={pilot}").splitlines()[-1]
    assert line.endswith(f"The difference that matters, {deviation:.4g}, takes about 11 searches.")
    assert TTestPower().power(1.0, 11, 0.04) > 0.8 > TTestPower().power(1.0, 10, 0.04)


@pytest.mark.long
def test_of_other_arms_the_pilots_most_variable_pair_is_taken(folder, capsys, pilot):
    other = text(more="searches: 5\n").replace("arm_", "mine_")
    out = said(folder, capsys, other, f"--pilot={pilot}")
    largest = 0.0
    by_arm = [
        [
            json.loads(file.read_text())["metrics"]["eval/loss"]
            for file in sorted(pilot.glob(f"final/arm_{n}/*/summary.json"))
        ]
        for n in range(3)
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        largest = max(largest, np.std(np.subtract(by_arm[a], by_arm[b]), ddof=1))
    assert f"a standard deviation of {largest:.4g} in" in out


@pytest.mark.long
def test_a_pilot_that_tells_nothing_about_the_sweep_is_refused(folder, capsys, pilot, tmp_path):
    five = text(more="searches: 5\n")
    goal = text(more="searches: 5\ngoal: {metric: accuracy, mode: max}\n")
    err = said(folder, capsys, goal, f"--pilot={pilot}", code=2)
    assert (
        "has another goal, the smallest loss of the validation split, than this sweep, the largest"
        " accuracy of the validation split: name a sweep with the same goal"
    ) in err
    err = said(folder, capsys, text(final=8), f"--pilot={pilot}", code=2)
    assert "this sweep has one search of each arm" in err and "write searches: 5" in err
    for name, sweep in (("one", text(final=3)), ("begun", five)):
        begin(tmp_path / name, folder, sweep)
    err = said(folder, capsys, five, f"--pilot={tmp_path / 'one'}", code=2)
    assert "has 1 search of each arm" in err and "name a sweep with searches: 3 or more" in err
    err = said(folder, capsys, five, f"--pilot={tmp_path / 'begun'}", code=2)
    assert "is not finished. The search is not complete: no result yet of 40 trials" in err


def test_a_pilot_that_does_not_exist_is_refused(folder, capsys):
    five = text(more="searches: 5\n")
    err = said(folder, capsys, five, f"--pilot={folder / 'nothing'}", code=2)
    assert "There is no folder" in err and "--workdir of python -m trainer sweep" in err


# Extensions.


def extension(folder: Path, capsys, sweep: str, *sets: str) -> str:
    """Returns what `sweep extend --dry_run` prints about the sweep in `runs`."""
    (folder / "sweep.yaml").write_text(sweep)
    command = ["sweep", "extend", str(folder / "runs"), f"--config={folder / 'sweep.yaml'}"]
    return runs.printed(capsys, *command, "--dry_run", *(f"--set={each}" for each in sets))


@pytest.mark.long
def test_an_extension_says_that_fewer_than_twice_the_planned_units_hardly_help(folder, capsys):
    five = text(more="searches: 5\n")
    begin(folder / "runs", folder, five)
    # Before the winners are known, what is added belongs to the plan, which is judged once.
    assert "power:" not in extension(folder, capsys, five, "searches=8")
    (folder / "runs" / "final.json").write_text("{}")
    out = extension(folder, capsys, five, "searches=8")
    assert (
        "power: the results are judged again at 8 searches, which finds a difference of 2.5"
        " standard deviations of the paired differences with a power of 0.8; the planned look at 5"
        " finds 1.8. Fewer than twice the planned number hardly help: extend to at least 10, or"
        " start a fresh sweep.\n"
    ) in out
    out = extension(folder, capsys, five, "searches=12")
    assert "at 12 searches, which finds a difference of 1.7" in out and "hardly" not in out
    # A new winner is judged at half of the level of a later look, 0.5% of which 5 signs have 6%.
    out = extension(folder, capsys, five, "trials=5")
    assert "power: 5 searches cannot decide anything about an arm with another winner" in out
    assert "with 1 pair of arms it takes at least 6" in out


@pytest.mark.long
def test_an_extension_of_a_sweep_with_skewed_runs_changes_no_verdict(folder, capsys):
    skewed = text(more="searches: 5\nskewed: true\n")
    begin(folder / "runs", folder, skewed)
    (folder / "runs" / "final.json").write_text("{}")
    out = extension(folder, capsys, skewed, "searches=12")
    assert "only the 5 searches of the plan are judged" in out
