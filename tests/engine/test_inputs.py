"""The floats of a config that are inputs of the compiled program."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests import runs, short
from trainer import config as configs
from trainer.__main__ import main
from trainer.engine.plan import make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import Program, load_located

CONFIGS = runs.ROOT / "configs"

SMALL = """
model: !models.mlp {width: 8, depth: 1}
data: !data.digits {batch_size: 32, crop: 0}
loss: !losses.softmax_cross_entropy
steps: 40
writers: []
optimizer: %s
"""


def read(tmp_path: Path, optimizer: str, *sets: str) -> configs.Config:
    file = tmp_path / "run.yaml"
    file.write_text(SMALL % optimizer)
    return configs.load([str(file)], [], sets)


def advance(program: Program, steps: int) -> tuple:
    state = program.init()
    batches = program.experiment.data.train(0, 0)
    losses = []
    for _ in range(steps):
        state, metrics = program.step(state, program.feed.to_devices(next(batches)))
        losses.append(float(metrics["train/loss"]))
    return state, losses


# Which floats.

GROUPED = """!optim.optimizer
  clip_norm: 1.0
  layer_decay: null
  groups:
    matrices: !optim.group
      match: .*kernel
      optimizer: !optax.adamw
        learning_rate: !schedules.warmup_cosine {peak_value: 0.01, warmup_steps: 5}
        b1: 0.8
    rest: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.1}}
"""


def test_values_and_defaults_that_are_floats_are_inputs(tmp_path):
    config = read(tmp_path, GROUPED, "ema_decay=0.9")
    program = load_located(config)
    matrices = "optimizer.groups.matrices.optimizer"
    assert program.inputs.values == {
        "ema_decay": 0.9,
        "loss.label_smoothing": 0.0,
        "optimizer.clip_norm": 1.0,
        f"{matrices}.b1": 0.8,
        f"{matrices}.b2": 0.999,
        f"{matrices}.eps": 1e-8,
        f"{matrices}.eps_root": 0.0,
        f"{matrices}.learning_rate.end_value": 0.0,
        f"{matrices}.learning_rate.exponent": 1.0,
        f"{matrices}.learning_rate.init_value": 0.0,
        f"{matrices}.learning_rate.peak_value": 0.01,
        f"{matrices}.weight_decay": 1e-4,
        "optimizer.groups.rest.optimizer.learning_rate": 0.1,
    }
    assert list(program.inputs.values) == sorted(program.inputs.values)
    text = render_plan(make_plan(program, config))
    assert "  optimizer: clip_norm 1\n" in text
    assert f"  {matrices}.learning_rate: end_value 0, exponent 1, init_value 0, peak" in text


def test_an_integer_is_not_an_input_whatever_its_annotation(tmp_path):
    lookahead = """!optax.lookahead
      fast_optimizer: !optax.sgd {learning_rate: 0.1}
      sync_period: 3
      slow_step_size: 0.5
    """
    found = load_located(read(tmp_path, lookahead)).inputs.values
    assert set(found) == {
        "loss.label_smoothing",
        "optimizer.fast_optimizer.learning_rate",
        "optimizer.slow_step_size",
    }


def test_the_floats_of_model_and_loss_are_structure_unless_annotated(tmp_path):
    # Neither of the first two is in the compiled program, so that neither is listed.
    sets = ["watchdog=5.0", "data.validation=0.1", "loss=!losses.huber {delta: 0.5}"]
    config = read(tmp_path, "!optax.sgd {learning_rate: 0.1}", *sets)
    program = load_located(config)
    assert set(program.inputs.values) == {"optimizer.learning_rate"}
    assert program.inputs.constants == {"loss.delta": (0.5, "it belongs to loss")}


@pytest.mark.filterwarnings("ignore:.*seed:DeprecationWarning")
@short.parametrize("file", runs.CONFIGS, runs.kind, ids=lambda file: file.name)
def test_every_float_of_a_shipped_optimizer_is_an_input_but_for_the_plateau_s(file):
    sets = runs.ELSEWHERE.get(file.name, [])
    # Some data are not on every machine.
    program = load_located(configs.load([str(file)], sets=sets), declared=True)
    program.abstract_state()
    constants = {path for path in program.inputs.constants if path.startswith("optimizer.")}
    plateau = {f"optimizer.args.1.{name}" for name in ("factor", "rtol", "atol")}
    assert constants == (plateau if file.stem == "plateau" else set())


@pytest.mark.long
def test_a_float_that_an_update_branches_on_is_a_constant(tmp_path, lab):
    config = read(tmp_path, "!unruly.branching {learning_rate: 0.1, power: 3.0}")
    program = load_located(config, ["unruly"])
    state = program.abstract_state()
    assert "optimizer.learning_rate" in program.inputs.values
    assert program.inputs.constants == {
        "optimizer.power": (3.0, "its function decides by it in Python")
    }
    assert state.hyperparams.shape == (len(program.inputs.values),)
    assert "optimizer.power 3: its function decides" in render_plan(make_plan(program, config))
    _, losses = advance(program, 3)
    _, wanted = advance(load_located(read(tmp_path, "!optax.sgd {learning_rate: 0.2}")), 3)
    assert losses == pytest.approx(wanted, rel=1e-6)  # 0.1, twice for this power


# Their values.


@short.parametrize(
    ("text", "make"),
    [
        (
            "!optax.adamw {learning_rate: 0.01, b2: 0.95, weight_decay: 0.1}",
            partial(optax.adamw, 0.01, b2=0.95, weight_decay=0.1),
        ),
        (
            "!optax.sgd {learning_rate: !optax.warmup_cosine_decay_schedule {init_value: 0.0, "
            "peak_value: 0.2, warmup_steps: 3, decay_steps: 10}, momentum: 0.9}",
            lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.2, 3, 10), 0.9),
        ),
        (
            "!optax.adam {learning_rate: !optax.exponential_decay {init_value: 0.01, "
            "transition_steps: 4, decay_rate: 0.5}}",
            lambda: optax.adam(optax.exponential_decay(0.01, 4, 0.5)),
        ),
    ],
    ids=["adamw", "sgd-cosine", "adam-exponential"],
)
def test_a_run_with_inputs_is_that_of_optax_with_numbers(tmp_path, text, make):
    program = load_located(read(tmp_path, text))
    state, losses = advance(program, 12)
    tx, params = make(), program.init().params
    opt_state, batches = tx.init(params), program.experiment.data.train(0, 0)

    @jax.jit
    def step(params, opt_state, batch):
        def loss(params):
            logits, _ = program.experiment.model.apply(params, {}, batch, key=None, train=True)
            label = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for mine in losses:
        params, opt_state, value = step(params, opt_state, next(batches))
        assert mine == pytest.approx(float(value), rel=2e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), state.params, params)


def test_other_values_of_the_inputs_are_those_of_their_config_and_compile_nothing(
    tmp_path, compilations
):
    adamw = "!optax.adamw {learning_rate: 0.01, b2: 0.95}"
    program = load_located(read(tmp_path, adamw))
    other = load_located(read(tmp_path, adamw, "optimizer.b2=0.5", "loss.label_smoothing=0.2"))
    _, first = advance(program, 4)
    with compilations() as names:
        state, changed = advance(program.with_values(other.inputs.values, seed=0), 4)
    assert "jit(packed_step)" not in names
    wanted_state, wanted = advance(other, 4)
    assert changed == wanted and changed != first
    jax.tree.map(np.testing.assert_array_equal, state, wanted_state)
    metrics = [
        p.evaluation.run_split(s, "test") for p, s in ((program, state), (other, wanted_state))
    ]
    assert metrics[0] == metrics[1], "The evaluation has the run's label smoothing."


COUNT = """
import jax, json, sys
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from trainer.__main__ import main
code = main(sys.argv[1:])
last = [event.split("/")[-1] for event in events]
print(json.dumps([code, last.count("cache_misses"), last.count("cache_hits")]))
"""


@pytest.mark.long
def test_another_learning_rate_is_compiled_by_no_later_process(tmp_path):
    environment = runs.environment(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "programs"))
    del environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]  # as a user's shell has it

    def run(name: str, *sets: str) -> list[int]:
        config = tmp_path / "run.yaml"
        config.write_text(SMALL % GROUPED)
        options = [f"--config={config}", f"--workdir={tmp_path / name}", "--until=3"]
        done = subprocess.run(
            [sys.executable, "-c", COUNT, *options, *(f"--set={each}" for each in sets)],
            cwd=runs.ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    group = "optimizer.groups.matrices.optimizer"
    code, misses, _ = run("first")
    assert code == 75 and misses >= 3
    code, misses, hits = run(
        "second",
        f"{group}.learning_rate.peak_value=0.03",
        f"{group}.weight_decay=0.3",
        f"{group}.b2=0.9",
        "optimizer.clip_norm=0.5",
        "loss.label_smoothing=0.1",
    )
    assert (code, misses) == (75, 0) and hits >= 3
    _, misses, _ = run("third", "model.width=9")
    assert misses > 1


# Mistakes, and runs that go on.


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.b1=1.0", "b1 of optax.adamw must be in [0, 1)"),
        ("optimizer.learning_rate=-0.1", "must not be negative"),
        ("loss.label_smoothing=1.5", "0 <= label_smoothing < 1"),
        ("ema_decay=1.0", "at least 0 and less than 1"),
        (
            "optimizer.learning_rate=!optax.piecewise_constant_schedule "
            "{init_value: 0.1, boundaries_and_scales: {3: -1.0}}",
            "non-negative scale",
        ),
    ],
)
def test_an_input_out_of_its_range_is_refused_as_a_number(tmp_path, capsys, setting, words):
    file = tmp_path / "run.yaml"
    file.write_text(SMALL % "!optax.adamw {learning_rate: 0.1, b1: 0.9}")
    assert main(["explain", f"--config={file}", f"--set={setting}"]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_a_changed_learning_rate_holds_for_the_rest_of_a_run(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(SMALL % "!optax.sgd {learning_rate: 0.1}")
    options = [f"--config={file}", f"--workdir={tmp_path / 'run'}", "--set=log_every=1"]
    assert main([*options, "--until=3"]) == 75
    change = ["--set=optimizer.learning_rate=0.025", "--allow_changed=config", "--until=5"]
    assert main([*options, *change]) == 75
    rates = [row["learning_rate/all"] for row in runs.lines(tmp_path / "run")]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.025, 0.025])


def test_a_run_of_an_earlier_version_is_refused_and_not_called_damaged(tmp_path, capsys):
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(SMALL % "!optax.sgd {learning_rate: 0.1}")
    options = [f"--config={file}", f"--workdir={folder}"]
    assert main([*options, "--until=3"]) == 75
    program = load_located(configs.load([str(file)]))
    state = jax.device_get(program.init())
    # Lockstep 0.1 saved the seed as hyper/seed.
    old = {**state._asdict(), "hyper": state.run_state}
    del old["hyperparams"], old["run_state"]
    from trainer.checkpoint import Checkpoints

    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.discard_after(0)
        checkpoints.save(3, jax.tree.map(jnp.asarray, old))
    capsys.readouterr()
    assert main(options) == 1
    said = capsys.readouterr().err
    assert "checkpoints/3 does not fit this program" in said and "hyper/seed" in said
