"""What a report says of a ladder: speed-ups, their trend, regret and best rates."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from tests.report_cases import RATE, run, workload
from trainer.report.comparison import make_report
from trainer.report.pairs import compare_arms
from trainer.report.panels.ladder import Climb, match, speedup_sentences
from trainer.report.results import Result, Workload
from trainer.report.sweep_results import on_rungs
from trainer.sweep.ladder import PlannedLadder
from trainer.writers.summary import Summary

LABELS = ("1x", "2x", "4x", "8x", "16x")
STEPS = (100, 200, 400, 800, 1600)

Loss = Callable[[str, int, int], float]  # arm, steps and chain -> the final loss


def ladder(
    loss: Loss,
    chains: int = 5,
    arms: Sequence[str] = ("adamw", "muon"),
    rates: Mapping[str, Sequence[float]] | None = None,
    retuned: Loss | None = None,
    failing: Sequence[Result] = (),
    **more: object,
) -> list[Workload]:
    """Returns the rungs of a ladder whose arms are searched on each of them.

    `rates` is arm -> the best rate on each rung; every search has it among four. With `retuned`,
    arms are searched on the lowest rung and on 4x, where the searched ones have these losses.
    `failing` replaces the trials of the same names.
    """
    planned = PlannedLadder(
        "steps",
        LABELS,
        tuple(steps / 100 for steps in STEPS),
        5 if retuned is None else 1,
        () if retuned is None else ("4x",),
        "adamw",
    )
    finals: list[Result] = []
    trials: list[Result] = []
    names: list[str] = []
    for arm in arms:
        for index, (label, steps) in enumerate(zip(LABELS, STEPS, strict=True)):
            if arm != "adamw" and label == "16x":
                continue
            for suffix, of in (("", loss), ("-retuned", retuned if label == "4x" else None)):
                if of is None:
                    continue
                name = f"{arm}@{label}{suffix}"
                names.append(name)
                searched = planned.searched == 5 or index == 0 or suffix
                for chain in range(chains):
                    value = of(arm, steps, chain)
                    end = None if math.isinf(value) else value
                    place = f"final/{name}/{chain}"
                    finals.append(run(place, name, chain, end, 0, steps=steps, search=chain))
                    best = (rates or {}).get(arm, [0.01] * 5)[index]
                    for n, rate in enumerate((best, 1e-3, 0.05, 0.3) if searched else ()):
                        place = f"trials/{name}/{chain}.{n:04d}/{chain}"
                        fields = {"steps": steps, "search": chain, "values": {RATE: rate}}
                        trials.append(run(place, name, chain, 1.0 + n, n, **fields))
    trials = [next((x for x in failing if x.name == each.name), each) for each in trials]
    whole = workload({name: [0.0] for name in names})
    revision = replace(whole.revisions[0], arms=tuple(names), units=chains)
    spaces = {name: whole_space() for name in names}
    fields = {
        "revisions": (revision,),
        "searches": chains,
        "units": tuple(range(chains)),
        "trials": tuple(trials),
        "finals": tuple(finals),
        "spaces": spaces,
        "winners": {(t.arm, t.search): 0 for t in trials},
        "ladder": planned,
    } | more
    return on_rungs(replace(whole, **fields))


def whole_space():  # noqa: ANN201
    from trainer.report.results import ArmSpace

    return ArmSpace("sobol, seed 0", {RATE: "log_uniform 0.0001 to 1"})


def power_law(speedup: Callable[[int], float], noise: float = 0.0, seed: int = 0) -> Loss:
    """Returns losses E + A steps^-0.3, where muon takes the steps of adamw over `speedup`."""
    random = np.random.default_rng(seed)

    def loss(arm: str, steps: int, chain: int) -> float:
        times = speedup(steps) if arm == "muon" else 1.0
        return 2.0 + 4.0 * (steps * times) ** -0.3 + noise * random.standard_normal()

    return loss


def test_a_rung_is_not_judged_if_trials_failed_where_its_values_were_searched():
    law = power_law(lambda steps: 2.0, noise=1e-3)
    rungs = ladder(law, retuned=law)
    assert {work.rung: compare_arms(work)[0].decided for work in rungs if len(work.arms) > 1} == {
        rung: True for rung in ("1x", "2x", "4x", "8x", "4x-retuned")
    }
    trials = tuple(
        replace(each, arm="muon@1x", summary=Summary("failed", 3, {}, "out of memory"))
        for each in rungs[0].trials
        if each.name == "trials/muon@1x/2.0001/2"
    )
    assert trials
    rungs = ladder(law, retuned=law, failing=trials)
    assert {work.rung: compare_arms(work)[0].decided for work in rungs if len(work.arms) > 1} == {
        rung: rung == "4x-retuned" for rung in ("1x", "2x", "4x", "8x", "4x-retuned")
    }


def test_a_match_is_where_the_curve_of_the_baseline_has_the_value():
    # The known answer is the curve itself: exact for a line, and to 0.3% of the cost for a power.
    costs = [100.0, 200.0, 400.0, 800.0]
    line = [5.0 - 0.5 * math.log(cost) for cost in costs]
    power = [2.0 + 4.0 * cost**-0.3 for cost in costs]
    for cost in (100.0, 130.0, 200.0, 290.0, 400.0, 560.0, 800.0):
        found = match(costs, line, 5.0 - 0.5 * math.log(cost), sign=1)
        assert found is not None and found.bound == ""
        assert math.exp(found.log_cost) == pytest.approx(cost, rel=1e-9)
        found = match(costs, power, 2.0 + 4.0 * cost**-0.3, sign=1)
        assert found is not None and math.exp(found.log_cost) == pytest.approx(cost, rel=3e-3)
    values = [3.0, 2.5, 2.2, 2.1]
    above, below = match(costs, values, 3.5, sign=1), match(costs, values, 2.0, sign=1)
    assert above is not None and (above.log_cost, above.bound) == (math.log(100), "most")
    assert below is not None and (below.log_cost, below.bound) == (math.log(800), "least")
    assert match(costs, [3.0, math.inf, 2.2, 2.1], 2.3, sign=1) is None
    accuracy = match([1.0, 4.0], [0.5, 0.9], 0.7, sign=-1)
    assert accuracy is not None and accuracy.log_cost == pytest.approx(math.log(2))


def test_a_baseline_that_gets_worse_is_met_where_it_first_was_as_good():
    found = match([100, 200, 400], [3.0, 2.0, 2.5], 2.4, sign=1)
    assert found is not None and 100 < math.exp(found.log_cost) < 200


def test_a_constant_speedup_is_found_on_every_rung():
    climb = Climb(ladder(power_law(lambda steps: 1.5)))
    assert [each.rung for each in climb.speedups] == ["1x", "2x", "4x", "8x"]
    for each in climb.speedups:
        assert each.exact and each.estimate is not None
        # A line between the rungs would find 1.525.
        assert math.exp(each.estimate.value) == pytest.approx(1.5, rel=4e-3)
    assert climb.trend("muon").estimate.value == pytest.approx(0, abs=0.004)  # type: ignore[union-attr]


def clocked(slowest: float = 1.0, **fields: object) -> list[Workload]:
    """Returns rungs on which a step of muon costs 1.1 times the FLOPs, and 1.25 times the time.

    A run of each arm takes `slowest` times as long as the others; `fields` are of the runs of muon.
    """
    rungs = ladder(power_law(lambda steps: 1.5, 0.006))

    def timed(each: Result) -> Result:
        flops, seconds = (1.1e9, 0.0125) if each.arm == "muon" else (1e9, 0.01)
        seconds *= slowest if each.search == 2 else 1.0
        summary = replace(each.summary, step=each.steps, seconds=seconds * each.steps)
        more = fields if each.arm == "muon" else {}
        return replace(each, flops=flops, summary=summary, **more)  # type: ignore[arg-type]

    return [replace(each, finals=tuple(map(timed, each.finals))) for each in rungs]


def test_speedups_in_flops_and_in_time_are_those_in_steps_over_what_a_step_costs():
    rungs = clocked(slowest=1.9)  # of which the median takes no notice
    climb = Climb(rungs)
    for cost, times in {"FLOPs": 1.1, "training time": 1.25}.items():
        for each, in_steps in zip(climb.speedups_in[cost], climb.speedups, strict=True):
            assert (each.rung, each.bounds) == (in_steps.rung, in_steps.bounds)
            assert math.exp(each.estimate.value) == pytest.approx(  # type: ignore[union-attr]
                math.exp(in_steps.estimate.value) / times,  # type: ignore[union-attr]
                rel=1e-9,
            )
    (said, *_) = found = speedup_sentences(rungs)
    assert said.startswith("Speed-ups over adamw in steps to an equal result (over 5 searches")
    assert [text.split(" 1.")[0] for text in found[1:3]] == [
        "In FLOPs: muon",
        "In training time: muon",
    ]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"at_once": 4}, "several runs were computed at once, by vmap."),
        ({"fingerprint": {"devices": "1 x H100"}}, "runs were computed on different devices."),
        ({"fingerprint": {"cpu": "another"}}, "runs were computed on different devices."),
        ({"load": 1.5}, "the machine was busy with other work."),
        ({"slowest": 3.0}, "A step of final/adamw@1x/2 took 3.0 times as long"),
    ],
)
def test_no_speedup_is_in_times_that_cannot_be_compared(fields, why):
    rungs = clocked(**fields)
    assert [*Climb(rungs).costs] == ["steps", "FLOPs"]
    assert f"None is given in training time: {why}" in " ".join(speedup_sentences(rungs))


def test_costs_that_do_not_rise_match_nothing():
    assert match([100, 100, 400], [3.0, 2.0, 1.0], 1.5, sign=1) is None


def test_beyond_the_longest_run_of_the_baseline_there_is_a_bound():
    rungs = ladder(power_law(lambda steps: 2.5))
    top = Climb(rungs).speedups[-1]
    assert top.bounds == {"least": 5, "most": 0} and top.estimate is not None
    assert math.exp(top.estimate.value) == pytest.approx(2) and top.estimate.low is None
    text = speedup_sentences(rungs)[0]
    assert "at least 2 (no interval: 5 of 5 are bounds) on 8x" in text


def test_chains_of_which_one_is_a_bound_have_no_interval():
    law = power_law(lambda steps: 1.5)

    def loss(arm: str, steps: int, chain: int) -> float:
        return law(arm, steps, chain) - (0.3 if (arm, steps, chain) == ("muon", 800, 1) else 0)

    top = Climb(ladder(loss)).speedups[-1]
    assert top.bounds == {"least": 1, "most": 0} and top.estimate is not None
    assert top.estimate.low is None and top.estimate.deviation


def _simulated(speedup: Callable[[int], float], draws: int) -> list[Climb]:
    return [Climb(ladder(power_law(speedup, noise=0.006, seed=seed))) for seed in range(draws)]


@pytest.mark.long
def test_intervals_and_trends_are_false_as_seldom_as_they_say():
    """The noise is a third of the loss that a speed-up of 1.5 is worth on the lowest rung."""
    climbs = _simulated(lambda steps: 1.5, 300)
    wrong = claimed = 0
    for climb in climbs:
        ends = [(e.estimate.low, e.estimate.high) for e in climb.speedups if e.exact and e.estimate]
        wrong += any(
            low is not None and high is not None and not math.exp(low) <= 1.5 <= math.exp(high)
            for low, high in ends
        )
        trend = climb.trend("muon").estimate
        claimed += trend is not None and trend.low is not None and trend.low * trend.high > 0  # type: ignore[operator]
    # Of 300 draws at .05, more than 26 are expected in 0.3% of tests.
    assert wrong <= 26 and claimed <= 26


@pytest.mark.long
def test_a_speedup_that_shrinks_is_seen():
    climbs = _simulated(lambda steps: 1.9 * (steps / 100) ** -0.25, 60)
    said = [" ".join(speedup_sentences(climb.rungs)) for climb in climbs]
    assert sum("The speed-up of muon shrinks by a factor of" in text for text in said) > 40
    assert not any("grows" in text for text in said)


def test_an_unfinished_ladder_says_nothing_of_its_rungs(tmp_path):
    rungs = ladder(power_law(lambda steps: 1.5, 0.006), completed=0)
    assert speedup_sentences(rungs) == [
        "Nothing is said of the rungs together before all runs of the ladder have ended."
    ]
    verdict = make_report(rungs, tmp_path).verdict
    assert verdict[1].startswith("steps 1x: Not judged yet: other rungs of the ladder have not")
    climb = Climb(rungs)
    assert climb.speedups == [] and climb.regrets == [] and climb.powers() == []


@pytest.mark.parametrize("fault", [{"faults": ("plan.json (changed)",)}, {"skewed": True}])
def test_edited_or_skewed_results_have_no_intervals(fault):
    rungs = ladder(power_law(lambda steps: 1.5, 0.006), **fault)
    assert Climb(rungs).speedups == [] and "muon" not in speedup_sentences(rungs)[0]


def test_a_chain_that_diverged_has_no_speedup():
    law = power_law(lambda steps: 1.5)

    def loss(arm: str, steps: int, chain: int) -> float:
        return math.inf if (arm, steps, chain) == ("muon", 400, 2) else law(arm, steps, chain)

    rungs = ladder(loss)
    each = Climb(rungs).speedups[2]
    assert each.rung == "4x" and sorted(each.matches) == [0, 1, 3, 4] and not each.exact
    assert "unknown (1 of 5 without a value) on 4x" in speedup_sentences(rungs)[0]


def test_regret_is_that_of_the_rule_over_a_search_on_fresh_seeds():
    differences = {"adamw": [0.01, 0.03, 0.02, 0.05, 0.04], "muon": [-0.01, 0.0, 0.01, 0.0, -0.02]}
    law = power_law(lambda steps: 1.5)
    rungs = ladder(
        lambda arm, steps, chain: law(arm, steps, chain) + differences[arm][chain] * (steps == 400),
        retuned=law,
    )
    found = {each.arm: each for each in Climb(rungs).regrets}
    for arm, values in differences.items():
        assert found[arm].rung == "4x"
        expected = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 2)
        estimate = found[arm].estimate
        assert (estimate.low, estimate.high) == pytest.approx(tuple(expected), rel=1e-9)
    assert found["adamw"].estimate.low > 0 > found["muon"].estimate.low  # type: ignore[operator]


def test_the_best_rate_has_a_slope_unless_it_lies_at_an_edge():
    halving = [0.04, 0.02, 0.01, 0.005, 0.0025]
    climb = Climb(ladder(power_law(lambda steps: 1.5), rates={"adamw": halving, "muon": [0.9] * 5}))
    trends = {each.arm: each for each in climb.rate_trends()}
    assert trends["adamw"].estimate is not None
    assert trends["adamw"].estimate.value == pytest.approx(-1, rel=1e-12)
    assert trends["muon"].estimate is None
    assert re.search("lies at an edge of its space on 1x, 2x, 4x and 8x", trends["muon"].why)


def test_the_power_of_the_loss_is_that_of_numpy():
    law = power_law(lambda steps: 1.5, 0.006)
    values = {(a, s, c): law(a, s, c) for c in range(5) for a in ("adamw", "muon") for s in STEPS}
    climb = Climb(ladder(lambda *key: values[key]))
    (adamw, _) = climb.powers()
    slopes = [
        np.polyfit(np.log(STEPS), np.log([values["adamw", s, c] for s in STEPS]), 1)[0]
        for c in range(5)
    ]
    assert adamw.rungs == 5 and adamw.estimate is not None
    assert adamw.estimate.value == pytest.approx(np.mean(slopes), rel=1e-9)


def test_rungs_of_equal_cost_have_no_powers_of_it(monkeypatch):
    climb = Climb(ladder(power_law(lambda steps: 1.5, 0.006)))
    assert climb.powers()
    monkeypatch.setattr(Climb, "costs_of", lambda *_: 1e9)
    assert Climb(climb.rungs).powers() == []


def test_pairs_are_compared_on_each_rung_and_the_error_is_divided_among_them(tmp_path):
    rungs = ladder(power_law(lambda steps: 1.5, 0.006))
    assert [(each.rung, each.families) for each in rungs] == [(label, 4) for label in LABELS]
    report = make_report(rungs, tmp_path)
    assert [panel.name for panel in report.panels].count("ladder") == 1
    assert "workloads" not in [panel.name for panel in report.panels]
    (panel,) = [panel for panel in report.panels if panel.name == "ladder"]
    tables = {table.name: table for table in panel.blocks[0].tables}
    assert set(tables) == {"ladder_speedups", "ladder_trends", "ladder_rates", "ladder_powers"}
    from trainer.report.pairs import compare_arms

    (pair,) = compare_arms(rungs[0])
    x = [[run.value("eval/loss") for run in rungs[0].finals if run.arm == a] for a in rungs[0].arms]
    p = float(stats.ttest_rel(*x).pvalue)
    assert pair.p == pytest.approx(min(1, 4 * p * 0.05 / 0.04), rel=1e-6)
