"""Blocks of steps: their bits in both forms, where they are cut, and which form is chosen."""

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import schedules
from tests import runs, short
from tests.engine.test_program import experiment
from tests.runs import ROOT
from trainer import checkpoint, config, models
from trainer.engine.block import choose_block, loop_on_device
from trainer.engine.program import Program, load_located

CONFIGS = ROOT / "configs"
FORMS = {
    "muon_vit.gin": "dispatch",  # a step has so many operations that a block is one
    "muon_vit.yaml": "dispatch",
    "adamw_vit.gin": "dispatch",
    "fashion_vit.gin": "dispatch",
    "vit_s16_i1k.gin": "dispatch",
    "muon_gpt.gin": "dispatch",
    "adamw_gpt.gin": "dispatch",
    "record46_gpt.yaml": "dispatch",
    "gpt2_124m.gin": "dispatch",
    "race_124m.gin": "dispatch",
    "gpt_1b.gin": "dispatch",
    "epfl_124m.yaml": "dispatch",
    "fantastic_130m.gin": "dispatch",
    "fantastic_300m.gin": "dispatch",
    "fantastic_520m.gin": "dispatch",
    "fantastic_1200m.gin": "dispatch",
    "lbfgs_backtracking.yaml": "dispatch",  # it logs every step
    "sgd_convnet.gin": "dispatch",
}


# Which form.


@pytest.mark.filterwarnings("ignore:.seed. is deprecated:DeprecationWarning")
@short.parametrize("path", runs.CONFIGS, runs.kind, ids=lambda path: path.name)
def test_the_form_of_every_shipped_config(path):
    # Some data are not on every machine.
    program = load_located(
        config.load([path], sets=runs.ELSEWHERE.get(path.name, [])), declared=True
    )
    rule = program.block_rule
    assert rule.form == FORMS.get(path.name, "device_loop")
    assert rule.steps & (rule.steps - 1) == 0  # a power of two
    assert (rule.steps == 1) == any(
        part in path.name for part in ("vit", "gpt", "124m", "fantastic", "backtracking")
    )


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(4)(nn.Conv(4, (3, 3))(x[:, None, :, None]).reshape(x.shape[0], -1))


def test_a_convolution_is_not_computed_in_a_loop_on_a_cpu():
    program = Program(experiment(model=Convolution(), log_every=8))
    assert program.block_rule.form == "dispatch"
    assert "convolution" in program.block_rule.why
    assert Program(experiment(log_every=8)).block_rule.form == "device_loop"


def test_the_steps_of_a_block_follow_from_the_operations_of_a_step():
    def steps(side: int, platform: str = "cpu", devices: int = 1, log_every: int = 1000) -> int:
        def step(x):
            return x @ x

        mesh = SimpleNamespace(
            size=devices, devices=np.array([SimpleNamespace(platform=platform)] * devices)
        )
        x = jax.ShapeDtypeStruct((side, side), jnp.float32)
        every = {"log_every": log_every, "eval_every": 1000, "save_every": 1000}
        chosen = choose_block(
            SimpleNamespace(steps_per_call=None, **every),  # type: ignore[arg-type]
            mesh,  # type: ignore[arg-type]
            jax.make_jaxpr(step)(x),
            {"x": x},
        )
        return chosen.steps

    assert steps(2) == 64  # the most
    # 2 * side**3 operations: a block has at most 2**32 on a CPU, 2**40 on an accelerator.
    assert (steps(512), steps(1024), steps(2048)) == (16, 2, 1)
    assert steps(2048, "gpu") == 4  # of 16 MiB each: together 64 MiB
    assert steps(2, log_every=10) == 16  # a longer block would be cut
    assert steps(2, devices=4) == 1  # simulated devices
    assert steps(2, "gpu", devices=4) == 64


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "True"])
def test_steps_per_call_must_be_a_positive_integer(tmp_path, capsys, lab, value):
    code = runs.train(
        runs.write_config(tmp_path), tmp_path / "run", f"--set=steps_per_call={value}"
    )
    said = capsys.readouterr().err
    assert code == 2 and "steps_per_call" in said and len(said.splitlines()) <= 3
    assert not (tmp_path / "run").exists()


# Bits.


class Normalized(nn.Module):
    """A perceptron with batch statistics and dropout."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x)))
        return nn.Dense(4)(nn.Dropout(self.rate, deterministic=not train)(x))


def groups(optimizer: Any, **more: Any) -> Any:
    return optim.optimizer({"all": optim.group(".*", optimizer)}, **more)


def by_shape(matrices: Any) -> Any:
    rest = optim.group(".*", partial(optax.adamw, 1e-3))
    return optim.optimizer({"matrices": optim.group(".*kernel", matrices), "rest": rest})


RATE = schedules.warmup_cosine(0.02, 3, 20)
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": groups(partial(optax.adamw, RATE), clip_norm=0.5)},
    "muon": {"optimizer": by_shape(partial(optim.muon, RATE))},
    "soap": {"optimizer": by_shape(partial(optim.soap, RATE, precondition_frequency=3))},
    "schedule-free": {"optimizer": groups(partial(optax.contrib.schedule_free_adamw, 0.02))},
    "ema_nesterov": {
        "optimizer": groups(
            partial(optax.adamw, RATE),
            lookahead=optim.ema_nesterov(0.5, 0.7, start=2, stop=15, scheduled_by="all"),
            readout=optim.weight_ema(3, start=4, blend=0.6),
        )
    },
    "outer_nesterov": {
        "on_nonfinite": "skip",
        "optimizer": groups(
            partial(optax.adamw, RATE), lookahead=optim.outer_nesterov(0.7, 0.6, every=3)
        ),
    },
    "lbfgs": {"optimizer": groups(partial(optax.lbfgs, memory_size=3))},
    "batch statistics": {"model": Normalized()},
    "dropout": {"model": Normalized(0.5)},
    "ema": {"ema_decay": 0.9},
    "bfloat16": {"precision": "bfloat16"},
    "mixed": {"precision": "mixed", "microbatches": 2},
    "stochastic rounding": {
        "precision": "bfloat16",
        "optimizer": groups(partial(optax.adam, RATE), low_precision="stochastic"),
    },
    "skip": {"on_nonfinite": "skip"},
    "rollback": {"on_nonfinite": "rollback"},
}


def numbers(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def advance(program: Program, lengths: list[int], state: Any, bad: tuple[int, ...] = ()) -> Any:
    """Computes blocks of these lengths; returns the state and the metrics of every step."""
    batches = program.feed.batches(int(state.step))
    rows = []
    for length in lengths:
        block = []
        for _ in range(length):
            batch = dict(next(batches))
            if int(state.step) + len(block) in bad:
                batch["image"] = batch["image"] * np.float32(np.nan)
            block.append(batch)
        state, metrics = program.advance(state, block)
        if program.block_rule.form == "device_loop":
            (packed,) = metrics
            rows += [
                tuple(np.asarray(a)[i].tobytes() for a in packed.arrays) for i in range(length)
            ]
        else:
            rows += [tuple(np.asarray(a).tobytes() for a in each.arrays) for each in metrics]
    return state, rows


@short.parametrize("name", CASES, lambda name: name == "bfloat16")
def test_a_block_has_the_bits_of_single_steps(name):
    bad = (4,) if name == "skip" else ()

    def program(steps_per_call: int) -> Program:
        return Program(experiment(**CASES[name], steps_per_call=steps_per_call))

    single = program(1)
    assert single.block_rule.form == "dispatch"
    state = single.init()
    places = jax.tree.map(lambda x: x.sharding, state)
    start = jax.device_get(state)  # the buffers are donated
    middle, first = advance(single, [1] * 5, state, bad)
    kept = jax.device_get(middle)
    state, second = advance(single, [1] * 4, middle, bad)
    wanted, rows = numbers(state), first + second
    assert name != "skip" or int(single.experiment.optimizer.skipped(state.opt_state)) == 1
    for steps, lengths in {16: [9], 3: [2, 3, 1, 3], 4: [4, 4, 1]}.items():
        block = program(steps)
        assert block.block_rule.form == "device_loop"
        end, found = advance(block, lengths, jax.device_put(start, places), bad)
        assert numbers(end) == wanted, steps
        assert found == rows
    # A run that is continued from a saved state, by blocks of another length.
    end, found = advance(block, [4], jax.device_put(kept, places), bad)
    assert numbers(end) == wanted and found == second


class Images:
    """Random images of 8x8 pixels in three classes, in batches of 32."""

    batch_size, num_examples, fingerprint = 32, 64, "images"
    element_spec = {
        "image": jax.ShapeDtypeStruct((32, 8, 8, 1), jnp.float32),
        "label": jax.ShapeDtypeStruct((32,), jnp.int32),
    }

    def train(self, batch_index: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
        for index in itertools.count(batch_index):
            draw = np.random.default_rng((seed, index))
            image = draw.normal(size=(32, 8, 8, 1)).astype(np.float32)
            yield {"image": image, "label": draw.integers(0, 3, 32).astype(np.int32)}

    def evaluate(self) -> Iterator[dict[str, np.ndarray]]:
        yield {**next(self.train(0, 9)), "mask": np.ones(32, np.float32)}


def flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1)


def square(layer: nn.Module) -> jax.Array:
    return layer.param("square", nn.initializers.normal(1.0), (16, 16))


def positive(x: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(x @ x.T + jnp.eye(16))


def attend(layer: nn.Module, x: jax.Array) -> jax.Array:
    x = nn.Dense(16)(x[..., 0])
    return nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x, x)).mean(1)


# What a model may compute besides products of matrices. Convolutions have other bits in a loop.
LAYERS: dict[str, Callable[[nn.Module, jax.Array], jax.Array]] = {
    "attention": attend,
    "lstm": lambda _, x: nn.RNN(nn.LSTMCell(16))(x[..., 0])[:, -1],
    "max pooling": lambda _, x: flat(nn.max_pool(nn.Dense(8)(x), (2, 2), (2, 2))),
    "average pooling": lambda _, x: flat(nn.avg_pool(nn.Dense(8)(x), (3, 3), (2, 2))),
    "group norm": lambda _, x: flat(nn.GroupNorm(2)(nn.Dense(8)(x))),
    "fft": lambda _, x: flat(jnp.abs(jnp.fft.rfft2(nn.Dense(8)(x), axes=(1, 2)))),
    "embedding": lambda _, x: nn.Embed(16, 16)(flat(x > 0).astype(jnp.int32)).mean(1),
    "sort": lambda _, x: jnp.sort(nn.Dense(16)(flat(x)), -1),
    "cumulative sum": lambda _, x: jnp.cumsum(nn.Dense(16)(flat(x)), -1),
    "singular values": lambda layer, x: (
        nn.Dense(16)(flat(x)) * jnp.linalg.svd(square(layer), compute_uv=False)
    ),
    "qr": lambda layer, x: nn.Dense(16)(flat(x)) @ jnp.linalg.qr(square(layer))[0],
    "cholesky": lambda layer, x: nn.Dense(16)(flat(x)) @ positive(square(layer)),
    "wide": lambda _, x: nn.Dense(512)(nn.relu(nn.Dense(1024)(flat(x)))),
}


class WithLayer(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(3)(nn.gelu(LAYERS[self.kind](self, x)))


@pytest.mark.long
@pytest.mark.parametrize("kind", [*LAYERS, "vit"])
def test_a_block_has_the_bits_of_single_steps_for_every_kind_of_layer(kind):
    model = models.vit(width=16, depth=2, num_classes=3) if kind == "vit" else WithLayer(kind)

    def program(steps_per_call: int) -> Program:
        return Program(experiment(model=model, data=Images(), steps_per_call=steps_per_call))

    single, block = program(1), program(8)
    assert block.block_rule.form == "device_loop"
    end, rows = advance(single, [1] * 9, single.init())
    found, found_rows = advance(block, [8, 1], block.init())
    assert numbers(found) == numbers(end) and found_rows == rows


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "muon", "soap", "schedule-free", "lbfgs", "dropout"])
def test_trials_in_a_map_have_the_bits_of_single_runs(name):
    program = Program(experiment(**CASES[name], steps_per_call=8))
    batches = program.feed.stack([next(program.feed.batches(i)) for i in range(6)], 8)

    def trial(state: Any) -> Any:
        return loop_on_device(program.packed_step, state, batches, jnp.int32(6))[0]

    states = [program.init(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    ends = jax.jit(partial(jax.lax.map, trial))(stacked)
    for index, state in enumerate(states):
        alone, _ = advance(program, [6], state)
        assert numbers(alone) == numbers(jax.tree.map(lambda x, i=index: x[i], ends)), index


def test_one_program_serves_blocks_of_every_length(compilations):
    program = Program(experiment(steps_per_call=8))
    state = program.init()
    with compilations() as names:
        advance(program, [8, 3, 1, 8, 5], state)
    assert [name for name in names if "loop" in name or "step" in name] == ["jit(loop_on_device)"]


def test_a_block_ends_at_a_step_that_is_not_finite():
    program = Program(experiment(steps_per_call=8))
    batches = [dict(next(program.feed.batches(i))) for i in range(6)]
    batches[3]["image"] = batches[3]["image"] * np.float32(np.inf)
    state, (metrics,) = program.advance(program.init(), batches)
    assert metrics["finite"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert int(state.step) == 4  # the steps after it were not computed


# Runs.


POISONED = "experiment.data = @unruly.poisoned()\nunruly.poisoned.at = (10, 11, 15)\n"
EVERY = "experiment.log_every = 10\nexperiment.eval_every = 20\nexperiment.save_every = 20\n"


def files(workdir: Path) -> dict[str, Any]:
    """Returns what runs that compute the same have in common."""
    found: dict[str, Any] = {"rows": runs.lines(workdir)}
    for name in ("nonfinite.json", "rollbacks.json"):
        path = workdir / name
        found[name] = json.loads(path.read_text()) if path.exists() else None
    newest = max(info.step for info in checkpoint.ls(workdir))
    tree = checkpoint.load_params(workdir, newest, "params")
    return found | {"step": newest, "params": numbers(tree)}


@pytest.mark.long
@pytest.mark.usefixtures("lab")
@pytest.mark.parametrize("policy", ["halt", "skip", "rollback"])
def test_a_run_in_blocks_writes_what_a_run_of_single_steps_writes(tmp_path, policy):
    more = f"{POISONED}experiment.on_nonfinite = '{policy}'\n{EVERY}"
    path, found = runs.write_config(tmp_path, more), {}
    for steps in (1, 2, 8, 64):
        workdir = tmp_path / str(steps)
        code = runs.train(path, workdir, f"--set=steps_per_call={steps}")
        assert code == (1 if policy == "halt" else 0)
        found[steps] = files(workdir) if policy != "halt" else runs.lines(workdir)
    assert found[2] == found[1] and found[8] == found[1] and found[64] == found[1]


@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_a_run_may_continue_with_blocks_of_another_length(tmp_path):
    path, whole, workdir = runs.write_config(tmp_path, EVERY), tmp_path / "whole", tmp_path / "run"
    assert runs.train(path, whole, "--set=steps_per_call=1") == 0
    assert runs.train(path, workdir, "--set=steps_per_call=8", "--until=7") == 75
    assert runs.train(path, workdir, "--set=steps_per_call=3", "--until=11") == 75
    assert runs.train(path, workdir) == 0
    assert files(workdir) == files(whole)


@pytest.mark.long
@pytest.mark.usefixtures("lab")
def test_a_trace_computes_single_steps_and_says_so(tmp_path, capfd):
    path = runs.write_config(tmp_path, EVERY)
    assert runs.train(path, tmp_path / "run", "--trace") == 0
    assert "--trace computes one step at a time" in capfd.readouterr().err
    lines = (tmp_path / "run" / "trace.jsonl").read_text().splitlines()
    assert ["leaves" in json.loads(line) for line in lines] == [True] * 20
    assert runs.train(path, tmp_path / "blocks", "--trace_blocks") == 0
    lines = (tmp_path / "blocks" / "trace.jsonl").read_text().splitlines()
    assert ["leaves" in json.loads(line) for line in lines] == ([False] * 9 + [True]) * 2
