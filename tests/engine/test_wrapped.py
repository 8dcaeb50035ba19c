"""An optimizer with a lookahead and a readout in a config: its plan, its inputs, its mistakes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from trainer.config import ConfigError, load
from trainer.engine.plan import Plan, make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import Program, load_located
from trainer.messages import UserError

CONFIG = """model: !models.mlp {width: 8, depth: 2}
data: !data.digits {batch_size: 64}
loss: !losses.softmax_cross_entropy
steps: 40
optimizer: !optim.optimizer
  lookahead: !optim.ema_nesterov
    step_size: !schedules.warmup_cosine {peak_value: 0.5, warmup_steps: 10%}
    decay: 0.9
    start: 10%
    stop: 75%
    scheduled_by: matrices
  readout: !optim.weight_ema {horizon: 5%, start: 50%, stop: 100%, blend: 0.6, exclude: head/.*}
  groups:
    matrices: !optim.group
      match: .*kernel
      optimizer: !optim.muon
        learning_rate: !schedules.warmup_cosine {peak_value: 0.02, warmup_steps: 5%}
    rest: !optim.group {match: .*, optimizer: !optax.adamw {learning_rate: 3e-3}}
"""


def program_of(folder: Path, text: str = CONFIG) -> tuple[Program, Plan]:
    file = folder / "config.yaml"
    file.write_text(text)
    config = load([file])
    program = load_located(config)
    return program, make_plan(program, config)


def test_the_plan_says_what_wraps_the_groups(tmp_path):
    program, plan = program_of(tmp_path)
    shapes = program.abstract_state().params
    floats = sum(x.size for x in jax.tree.leaves(shapes))
    head = sum(x.size for x in jax.tree.leaves(shapes["head"]))
    lookahead, readout = plan.wrappers
    # Weights and moves, and the averages of all but the head.
    assert lookahead == (
        f"lookahead: optim.ema_nesterov displaces from step 5 to step 30, scheduled by group "
        f"'matrices'; {4 * 2 * floats:,} bytes of state"
    )
    assert readout == (
        f"readout: optim.weight_ema averages from step 20 to step 39, except 'head/.*'; "
        f"{4 * (floats - head):,} bytes of state"
    )
    text = render_plan(plan)
    assert lookahead in text and readout in text
    own = plan.hyperparameters[""]
    assert own["lookahead.step_size"].peak == pytest.approx(0.5)
    assert own["lookahead.step_size"].peak_step == 5
    assert own["readout.horizon"].final == 2 and own["readout.blend"].final == pytest.approx(0.6)


@pytest.mark.long
def test_every_float_is_an_input_of_the_program(tmp_path):
    program, plan = program_of(tmp_path)
    found = {path: x for path, x in plan.inputs.items() if "groups" not in path}
    assert found == {
        "loss.label_smoothing": 0.0,
        "optimizer.lookahead.decay": 0.9,
        "optimizer.lookahead.step_size.end_value": 0.0,
        "optimizer.lookahead.step_size.exponent": 1.0,
        "optimizer.lookahead.step_size.init_value": 0.0,
        "optimizer.lookahead.step_size.peak_value": 0.5,
        "optimizer.readout.blend": 0.6,
    }
    assert not plan.constants
    # A horizon that is not a whole number is one as well.
    assert program_of(tmp_path, CONFIG.replace("5%, start: 50%", "2.5, start: 50%"))[1].inputs[
        "optimizer.readout.horizon"
    ] == pytest.approx(2.5)


@pytest.mark.long
def test_other_values_of_the_inputs_are_those_of_another_config(tmp_path):
    """One compiled program with other inputs has the bits of a program that was made for them."""
    program, _ = program_of(tmp_path)
    names = ("optimizer.lookahead.decay", "optimizer.readout.blend")
    text = CONFIG.replace("decay: 0.9", "decay: 0.3").replace("blend: 0.6", "blend: 0.3")
    other, _ = program_of(tmp_path, text)
    program.compile(program.abstract_state())
    same = program.with_values({**program.inputs.values, **dict.fromkeys(names, 0.3)}, 0)
    ends = [evaluated(each) for each in (same, other, program)]
    jax.tree.map(np.testing.assert_array_equal, ends[0], ends[1])
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (ends[0], ends[2])), strict=True)
    )


def evaluated(program: Program) -> Any:
    state, batches = program.init(), program.feed.batches(0)
    for _ in range(4):
        state, _ = program.advance(state, [next(batches) for _ in range(8)])
    return jax.device_get(program.evaluation.params(state))


@pytest.mark.long
def test_each_row_says_how_far_the_parameters_are_ahead(tmp_path):
    """By the formula: the step size of the next step, times the last rate over its peak so far."""
    program, _ = program_of(tmp_path)
    state, batches, found = program.init(), program.feed.batches(0), []
    for _ in range(40):
        state, [metrics] = program.advance(state, [next(batches)])
        found.append(metrics["lookahead.step_size"].item())
    rates = [warmup_cosine(0.02, 2, t) for t in range(40)]
    expected = [
        warmup_cosine(0.5, 4, t + 1) * rates[t] / max(rates[: t + 1]) if 4 <= t + 1 < 30 else 0
        for t in range(40)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def warmup_cosine(peak: float, warmup: int, step: int) -> float:
    """The formula of a linear warm-up, and of half a cosine that ends at 0 at step 40."""
    if step < warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + np.cos(np.pi * (step - warmup) / (40 - warmup)))


# (what is replaced, by what, the line of the mistake or its option, words of the message)
MISTAKES = [
    ("stop: 75%", "stop: 2", 10, "stop is 2 and start is 4, so that the lookahead would never act"),
    ("start: 10%", "start: 40", 10, "stop is 30 and start is 40"),
    (
        "    start: 10%\n    stop: 75%",
        "    start: 50",
        9,
        "its start is 50, and the run has 40 steps",
    ),
    ("decay: 0.9", "decay: 1.0", 8, "decay of optim.ema_nesterov must be in [0, 1)"),
    (
        "peak_value: 0.5, warmup_steps: 10%",
        "peak_value: -0.5, warmup_steps: 10%",
        7,
        "The schedule of lookahead.step_size goes wrong: it must not be negative, got -0.5",
    ),
    (
        "scheduled_by: matrices",
        "scheduled_by: matrixes",
        11,
        "is 'matrixes', and there is no such group. Did you mean 'matrices'?",
    ),
    ("horizon: 5%", "horizon: 0.5", 12, "horizon of optim.weight_ema must be at least 1"),
    ("horizon: 5%", "horizon: 5 epoks", 12, "A number of steps may also be '5%'"),
    ("blend: 0.6", "blend: 1.6", 12, "blend of optim.weight_ema must be in [0, 1], got 1.6"),
    ("start: 50%, stop: 100%", "start: 100%", 12, "its start is 40, and the run has 40 steps"),
    ("start: 50%, stop: 100%", "start: 9, stop: 9", 12, "stop is 9 and start is 9"),
    ("exclude: head/.*", "exclude: haed/.*", 12, "matches no parameter that is trained"),
    ("exclude: head/.*", "exclude: .*", 12, "matches every parameter"),
    ("exclude: head/.*", "exclude: (", 12, "is not a regular expression"),
    (
        "steps: 40\n",
        "ema_decay: 0.9\nsteps: 40\n",
        4,
        "ema_decay is 0.9, and the optimizer has a readout",
    ),
    (
        "!optax.adamw {learning_rate: 3e-3}",
        "!optax.contrib.schedule_free_adamw {learning_rate: 3e-3}",
        18,
        "copies of the parameters or the length of a searched step, which would not agree with",
    ),
    ("scheduled_by: matrices", "scheduled_by: rest", None, ""),
]


@pytest.mark.parametrize(("old", "new", "line", "words"), MISTAKES)
def test_a_mistake_is_a_sentence_with_its_line(tmp_path, old, new, line, words):
    assert old in CONFIG
    text = CONFIG.replace(old, new)
    if line is None:
        program_of(tmp_path, text)
        return
    with pytest.raises((ConfigError, UserError)) as caught:
        program_of(tmp_path, text)
    said = str(caught.value)
    assert words in said and f"config.yaml:{line}:" in said, said


def test_a_readout_beside_a_group_that_keeps_averages_is_refused(tmp_path):
    text = CONFIG.replace(
        "!optax.adamw {learning_rate: 3e-3}",
        "!optax.contrib.schedule_free_adamw {learning_rate: 3e-3}",
    )
    begin, end = text.index("  lookahead:"), text.index("  readout:")
    with pytest.raises(ConfigError, match="in group 'rest' keeps averages .* so does the readout"):
        program_of(tmp_path, text[:begin] + text[end:])


def test_a_lookahead_of_outer_steps_says_when_it_would_never_act(tmp_path):
    begin, end = CONFIG.index("  lookahead:"), CONFIG.index("  readout:")
    outer = "  lookahead: !optim.outer_nesterov {learning_rate: 0.7, momentum: 0.6, every: 25%}\n"
    _, plan = program_of(tmp_path, CONFIG[:begin] + outer + CONFIG[end:])
    assert plan.wrappers[0].startswith(
        "lookahead: optim.outer_nesterov takes an outer step after every 10 steps; "
    )
    outer = outer.replace("25%", "41")
    with pytest.raises(ConfigError, match="after every 41 steps, and the run has 40"):
        program_of(tmp_path, CONFIG[:begin] + outer + CONFIG[end:])
