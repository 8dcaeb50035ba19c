"""Ablations: the arms without one part each, their plan, and what the report says of them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from tests.report_cases import workload
from tests.sweep.test_sweep_extend import begun
from tests.sweep.test_sweep_plan import BASE, dry_run
from trainer.config import Call, ConfigError
from trainer.report.pairs import compare_arms
from trainer.report.planned_power import power_of_plan
from trainer.report.statistics.decide import detectable_effect
from trainer.report.verdict import verdict
from trainer.sweep.plan_file import read_plan

RATE = "optimizer.groups.kernels.optimizer.learning_rate"
CHAIN = "optimizer.groups.kernels.optimizer"
GROUPS = """
optimizer: !optim.optimizer
  clip_norm: 1.0
  groups:
    kernels: !optim.group
      match: .*/kernel
      optimizer: !optim.chain
        learning_rate: 0.02
        before: [!parts.momentum {decay: 0.9}, !parts.polar {}, !parts.match_norm {}]
        after: [!parts.cautious_decay {rate: 0.1, around: !parts.pin_radius {}}]
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 1e-3}}
"""
SWEEP = f"""base: base.yaml
arms:
  stack:
    space:
      {RATE}: !space.log_uniform {{low: 1e-3, high: 1e-1}}
      {CHAIN}.before.0.decay: !space.uniform {{low: 0.8, high: 0.99}}
trials: 4
searches: 3
method: !method.sobol {{seed: 0}}
ablate:
  parts: {CHAIN}
  settings: {{no_clip: {{optimizer.clip_norm: null}}}}
goal: {{metric: loss}}
final: {{seeds: 1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    base = re.sub("optimizer:.*\n", "", BASE) + GROUPS
    (tmp_path / "base.yaml").write_text(base)
    return tmp_path


def _parts(plan, arm: str) -> list[str]:
    chain = plan.arms[arm].config.at(CHAIN)
    names = []
    for part in (*chain.kwargs["before"], *chain.kwargs["after"]):
        inner = part.kwargs.get("around")
        names.append(part.name + (f"({inner.name})" if isinstance(inner, Call) else ""))
    return names


def test_each_arm_is_without_one_part(folder):
    sweep, plan = begun(folder, SWEEP)
    whole = ["parts.momentum", "parts.polar", "parts.match_norm"]
    decay = "parts.cautious_decay(parts.pin_radius)"
    nothing = "optax.identity"
    assert {arm: _parts(plan, arm) for arm in plan.arms} == {
        "stack": [*whole, decay],
        "no_momentum": [nothing, *whole[1:], decay],
        "no_polar": [whole[0], nothing, whole[2], decay],
        "no_match_norm": [*whole[:2], nothing, decay],
        "no_cautious_decay": [*whole, "parts.pin_radius"],
        "no_pin_radius": [*whole, "parts.cautious_decay"],
        "no_clip": [*whole, decay],
    }
    clips = {arm: plan.arms[arm].config.at("optimizer.clip_norm") for arm in plan.arms}
    assert clips.pop("no_clip") is None and set(clips.values()) == {1.0}
    assert plan.ablated == "stack" and plan == read_plan(sweep)


@pytest.mark.long
def test_what_is_searched_within_a_part_goes_with_it(folder):
    _, plan = begun(folder, SWEEP)
    searched = {arm: sorted(plan.of_arm(arm)[0].values) for arm in plan.arms}
    both = sorted([RATE, f"{CHAIN}.before.0.decay"])
    assert searched.pop("no_momentum") == [RATE]
    assert all(paths == both for paths in searched.values())
    assert all(len(plan.of_arm(arm)) == 12 for arm in plan.arms)


@pytest.mark.long
def test_keep_leaves_arms_out(folder):
    text = SWEEP.replace("  settings", "  keep: [no_polar, no_momentum]\n  settings")
    _, plan = begun(folder, text)
    assert "no_polar" not in plan.arms and "no_momentum" not in plan.arms and len(plan.arms) == 5


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"parts: {CHAIN}", "parts: optimizer.groups.kernel", "has no path 'optimizer.groups.kern"),
        (
            f"parts: {CHAIN}",
            "parts: optimizer.groups.rest.optimizer",
            "has optax.adamw at .* which is not optim.chain and has no parts",
        ),
        ("  settings", "  keep: [no_polr]\n  settings", r"Did you mean 'no_polar'\?"),
        ("no_clip", "no_polar", "two arms named 'no_polar'"),
        ("no_clip", "stack", "as the whole one is"),
        ("no_clip", "no/clip", "cannot be that of a folder"),
        ("{optimizer.clip_norm: null}", "{}", "settings changes nothing for 'no_clip'"),
        ("arms:\n", "arms:\n  other: {}\n", "the sweep has 2 arms"),
        ("ablate:", "ladder: {path: steps, values: [1x, 2x]}\nablate:", "the sweep has a ladder"),
    ],
)
def test_mistakes_are_named_with_their_place(folder, old, new, message):
    assert old in SWEEP
    with pytest.raises(ConfigError, match=message) as error:
        begun(folder, SWEEP.replace(old, new))
    assert error.value.source is not None and error.value.source.file.endswith("sweep.yaml")


FLOOR, GATE = "!parts.floor {ratio: 0.4, by: output}", "!parts.trust_gate {around: !parts.soap {}}"


@pytest.fixture
def needy(folder: Path) -> Path:
    """A stack with a floor that needs the pin, and a gate that needs what it is around."""
    base = folder / "base.yaml"
    text = base.read_text().replace("!parts.match_norm {}", FLOOR)
    base.write_text(text.replace("!parts.polar {}", f"{GATE}, !parts.polar {{}}"))
    return folder


@pytest.mark.long
def test_parts_that_others_need_are_named_when_the_sweep_is_planned(needy, capsys):
    (needy / "sweep.yaml").write_text(SWEEP)
    code, out, err = dry_run(needy / "sweep.yaml", capsys)
    assert code == 2 and not out
    assert err.startswith(f"error: {needy / 'sweep.yaml'}:10: ablate takes out parts that others")
    assert (
        "no_pin_radius: parts.floor needs a part that keeps the norms of the weights, such as"
        " parts.pin_radius.\nAdd keep: [no_soap, no_pin_radius] to ablate, or take out such a part"
    ) in err
    assert "no_soap: parts.trust_gate takes an optimizer for 'around', and was given null." in err


@pytest.mark.long
def test_a_part_that_another_needs_can_be_kept_or_taken_out_with_it(needy):
    both = f"{{{CHAIN}.before.3: !optax.identity {{}}, {CHAIN}.after: []}}"
    text = SWEEP.replace("settings: {", f"settings: {{no_norms: {both}, ")
    text = text.replace("  settings", "  keep: [no_soap, no_pin_radius]\n  settings")
    _, plan = begun(needy, text)
    momentum, gate, polar = "parts.momentum", "parts.trust_gate(parts.soap)", "parts.polar"
    assert _parts(plan, "no_norms") == [momentum, gate, polar, "optax.identity"]
    decay = "parts.cautious_decay(parts.pin_radius)"
    assert _parts(plan, "no_floor") == [momentum, gate, polar, "optax.identity", decay]


@pytest.mark.long
def test_a_setting_that_does_not_build_is_not_taken_for_a_part(needy):
    text = SWEEP.replace("no_clip: {optimizer.clip_norm: null}", f"raw: {{{CHAIN}.after: []}}")
    text = text.replace("  settings", "  keep: [no_soap, no_pin_radius]\n  settings")
    with pytest.raises(ConfigError, match="trial raw/0000/0 does not build: .* parts.floor needs,"):
        begun(needy, text)


@pytest.mark.long
def test_settings_take_out_what_is_searched_within_them(folder):
    text = SWEEP.replace("no_clip: {optimizer.clip_norm: null}", f"raw: {{{CHAIN}.before: []}}")
    _, plan = begun(folder, text)
    assert _parts(plan, "raw") == ["parts.cautious_decay(parts.pin_radius)"]
    assert list(plan.of_arm("raw")[0].values) == [RATE]


VALUES = {
    "stack": [1.00, 1.02, 0.99, 1.01, 1.00],
    "no_polar": [1.51, 1.49, 1.55, 1.48, 1.52],
    "no_decay": [0.90, 0.91, 0.88, 0.92, 0.895],
    "no_clip": [1.01, 1.00, 1.00, 1.02, 0.99],
}


def _compared(values=VALUES, **more):
    trials = {arm: [(10.0**-n, 1.0) for n in range(1, 5)] for arm in values}
    fields = {"ablated": "stack", "searches": 5} | more
    made = workload(values, trials, **fields)
    finals = tuple(replace(run, search=run.seed) for run in made.finals)
    return replace(made, finals=finals)


def test_each_arm_is_compared_with_the_whole_one_only():
    pairs = compare_arms(_compared())
    assert {frozenset((pair.better, pair.worse)) for pair in pairs} == {
        frozenset(("stack", arm)) for arm in ("no_polar", "no_decay", "no_clip")
    }
    (polar,) = [pair for pair in pairs if pair.worse == "no_polar"]
    found = stats.ttest_rel(VALUES["stack"], VALUES["no_polar"])
    # Three comparisons share the error of the planned look, and not the six of all pairs.
    low, high = found.confidence_interval(1 - 0.04 / 3)
    assert (polar.low, polar.high) == pytest.approx((low, high), rel=1e-9)


def test_the_verdict_says_what_each_part_is_worth():
    workload = _compared()
    text = verdict(workload, compare_arms(workload))
    assert "stack, best of 4 trials in its space, has a better mean loss" in text
    assert re.search(r"It is better than no_polar 0\.506 \(0\.4\d+ to 0\.5\d+\)\.", text)
    assert re.search(r"It is worse than no_decay −0\.103 \(−0\.1\d+ to −0\.0\d+\)\.", text)
    assert re.search(r"Not decided: no_clip \S+ \(−0\.0\d+ to 0\.0\d+\)\.", text)


def test_an_unfinished_ablation_has_means_only():
    workload = _compared(completed=0)
    text = verdict(workload, compare_arms(workload))
    assert "better than" not in text and "The mean loss" in text


def test_a_part_without_which_a_run_diverged_has_no_interval():
    values = VALUES | {"no_polar": [1.5, None, 1.5, None, 1.5]}
    workload = _compared(values)
    text = verdict(workload, compare_arms(workload))
    assert "No interval: no_polar (diverged or collapsed in 2 of 5 searches)." in text


@pytest.mark.long
def test_the_power_is_that_of_the_pairs_with_the_whole_arm(folder):
    _, plan = begun(folder, SWEEP.replace("searches: 3", "searches: 6"))
    (text,) = power_of_plan(plan)
    expected = detectable_effect(6, 0.8, 0.04 / 6)
    assert f"A difference of {expected:.2g} standard deviations" in text
