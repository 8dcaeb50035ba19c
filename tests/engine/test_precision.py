"""The roles of `precision`, against the names, steps by hand and the programs of the compiler."""

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import optim
from tests import short
from tests.engine.test_program import Net, cross_entropy, experiment
from tests.runs import ROOT, python
from trainer.config import load, override
from trainer.engine.precision import Roles, describe_precision, in_precision, roles_of
from trainer.engine.program import Program, load_located


def adam(**options: Any) -> optim.Optimizer:
    recipe = partial(optax.adam, learning_rate=0.05)
    return optim.optimizer({"all": optim.group(".*", recipe)}, **options)


def lowered(**changes: Any) -> str:
    program = Program(experiment(metrics={}, **changes))
    return program.trace(program.abstract_state()).lower().as_text()


def steps(program: Program, state: Any, first: int, last: int) -> Any:
    batches = program.experiment.data.train(first, 0)
    for _ in range(first, last):
        state, _ = program.step(state, program.feed.to_devices(next(batches)))
    return state


@pytest.mark.long
def test_the_names_are_short_for_roles():
    for microbatches in (1, 2):
        given = {"microbatches": microbatches, "optimizer": adam()}
        assert lowered(precision={"compute": "bfloat16"}, **given) == lowered(
            precision="mixed", **given
        )
        assert lowered(precision={"parameters": "bfloat16"}, **given) == lowered(
            precision="bfloat16", **given
        )
        # One device adds nothing.
        reductions = {"compute": "bfloat16", "reductions": "float32"}
        assert lowered(precision=reductions, **given) == lowered(precision="mixed", **given)
    assert roles_of({}) == roles_of("float32") == Roles()


def test_master_and_states_are_the_arguments_of_the_optimizer():
    roles = {"parameters": "bfloat16", "master": "float32", "states": {"mu": "bfloat16"}}
    wanted = lowered(
        precision="bfloat16", optimizer=adam(low_precision="master", states={"mu": "bfloat16"})
    )
    assert lowered(precision=roles, optimizer=adam()) == wanted
    assert lowered(precision=roles, optimizer=adam(low_precision="master")) == wanted
    assert lowered(precision="bfloat16", optimizer=adam()) != wanted


@pytest.mark.long
def test_parameters_in_bfloat16_may_be_computed_with_in_float32():
    precision = {"parameters": "bfloat16", "compute": "float32", "master": "none"}
    program = Program(experiment(precision=precision, optimizer=partial(optax.sgd, 0.5)))
    state = program.init()
    before = jax.device_get(state.params)
    batch = next(program.experiment.data.train(0, 0))

    def loss(wide: Any) -> Any:
        return cross_entropy(Net().apply({"params": wide}, batch["image"]), batch).mean()

    def wide(x: Any) -> Any:
        return jnp.asarray(x, jnp.float32)

    # The gradient of the cast is rounded to bfloat16, the dtype of the parameters.
    grads = jax.tree.map(
        lambda g: wide(g.astype(jnp.bfloat16)), jax.grad(loss)(jax.tree.map(wide, before))
    )
    wanted = jax.tree.map(lambda w, g: (wide(w) - 0.5 * g).astype(jnp.bfloat16), before, grads)
    after = steps(program, state, 0, 1).params
    close = partial(np.testing.assert_allclose, rtol=2**-7, atol=1e-5)
    jax.tree.map(lambda x, y: close(wide(x), wide(y)), after, wanted)
    assert {x.dtype.name for x in jax.tree.leaves(after)} == {"bfloat16"}
    assert in_precision({"x": jnp.bfloat16(1)}, precision)["x"].dtype == jnp.float32


@pytest.mark.long
@short.parametrize("master", ["float32", "none"])
def test_a_resumed_run_keeps_its_bits(master: str):
    precision = {
        "parameters": "bfloat16",
        "master": master,
        "states": {"nu": "bfloat16 stochastic", "all/mu": "bfloat16"},
    }
    low = "nearest" if master == "float32" else "stochastic"
    given = experiment(precision=precision, optimizer=adam(low_precision=low), ema_decay=0.9)
    program = Program(given)
    whole = jax.device_get(steps(program, program.init(), 0, 6))
    saved = jax.device_get(steps(program, program.init(), 0, 3))
    other = Program(given)
    shardings = jax.tree.map(lambda x: x.sharding, other.abstract_state())
    resumed = steps(other, jax.device_put(saved, shardings), 3, 6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), whole)


def test_the_plan_lists_dtypes_and_bytes():
    precision = {"parameters": "bfloat16", "master": "float32", "states": {"mu": "bfloat16"}}
    program = Program(experiment(precision=precision, optimizer=adam()))
    state = program.abstract_state()
    of = program.experiment
    mesh = AbstractMesh((2,), ("data",))
    # 5 * 8 + 8 + 8 * 3 + 3 = 75 parameters.
    assert describe_precision(of.roles, of.optimizer, state, mesh) == [
        "precision: parameters bfloat16 150 bytes; compute bfloat16; sums of gradients over "
        "microbatches float32, over 2 devices bfloat16; master float32 300 bytes",
        "states of group 'all': mu bfloat16 150 bytes, nu float32 300 bytes",
    ]
    plain = Program(experiment(optimizer=adam()))
    of, state = plain.experiment, plain.abstract_state()
    assert describe_precision(of.roles, of.optimizer, state, mesh) == []


WRONG: list[tuple[Any, Any, str]] = [
    ("fp8", adam(), "precision is 'fp8', which does not exist. There is: bfloat16, float32, mixed"),
    ("float16", adam(), "would need gradients that are scaled, which Lockstep does not do. There"),
    ({"parmeters": "bfloat16"}, adam(), "no role 'parmeters'. Did you mean 'parameters'?"),
    ({"parameters": "float16"}, adam(), "float16 has no numbers above 65,504"),
    ({"compute": "bf16"}, adam(), "'bf16' as compute, which is not supported. Did you mean 'bfloa"),
    ({"compute": None}, adam(), "None as compute, which is not supported. There is: bfloat16, fl"),
    ({"reductions": "bfloat16"}, adam(), "Set reductions to float32, or leave it out."),
    ({"master": "float32"}, adam(), "a copy would have no effect. Set parameters to bfloat16"),
    ({"parameters": "bfloat16", "master": "float64"}, adam(), "There is: float32, none."),
    ({"states": {"mu": "int8"}}, adam(), "precision: In states, 'mu' has the value 'int8'"),
    (
        {"parameters": "bfloat16", "master": "float32"},
        adam(low_precision="stochastic"),
        "low_precision='stochastic', which rounds without a copy. Remove one of them.",
    ),
    (
        {"parameters": "bfloat16", "master": None},
        adam(low_precision="master"),
        "low_precision='master', which keeps float32 copies. Remove one of them.",
    ),
    (
        {"states": {"mu": "bfloat16"}},
        adam(states={"nu": "bfloat16"}),
        "precision has states, and so has the optimizer.",
    ),
]


@pytest.mark.parametrize(("precision", "optimizer", "message"), WRONG)
def test_wrong_roles_are_refused(precision: Any, optimizer: Any, message: str):
    with pytest.raises(ValueError, match="precision") as error:
        experiment(precision=precision, optimizer=optimizer)
    assert message in str(error.value)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("precision") / "hlo"
    command = ["-m", "tests.precision_cases", str(folder)]
    # XLA writes no text of a program that was kept.
    lines = python(*command, JAX_COMPILATION_CACHE_DIR="").splitlines()
    return {row["case"]: row for row in map(json.loads, lines)}


@pytest.mark.long
def test_gradients_are_added_over_devices_in_the_dtype_of_the_role(rows: dict[str, Any]):
    assert rows["mixed"]["reduced"] == ["bf16"]
    assert rows["float32"]["reduced"] == rows["both"]["reduced"] == ["f32"]
    assert rows["float32"]["distance"] < 1e-6
    assert "a state that its whole batch determines" in rows["statistics"]["refused"]


MESHES = ("data 2, fsdp 2", "fsdp 4", "data 2, fsdp 2, tensor 2")


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_terms_that_a_sum_in_bfloat16_would_lose_are_added_over_all_axes(rows: Any, mesh: str):
    # The gradients of four devices are 256, 1, 1 and 1, whose mean is 259 / 4. In bfloat16 256 + 1
    # is 256; even the sum in float32 that a CPU takes instead is rounded, to 258 or 260.
    added = sum([jnp.bfloat16(1)] * 3, jnp.bfloat16(256))
    assert float(added) / 4 == 64.0
    assert rows[f"terms, {mesh}"]["float32"] == [64.75] * 8
    assert {abs(x - 64.75) for x in rows[f"terms, {mesh}"]["mixed"]} == {0.25}


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_whose_gradients_are_added_apart_is_that_of_one_device(rows: Any, mesh: str):
    """With dropout, microbatches, a mask, the loss in chunks, clipping and an average."""
    found = rows[f"step, {mesh}"]
    assert found["reduced"] == ["f32"]
    # Gradients that float32 computes in another order, and each rounded to bfloat16 before the sum:
    # few of them to another number.
    assert found["loss"] < 1e-6
    assert found["params"] < 2**-12 and found["ema"] < 2**-12
    assert found["norm"] < 2**-12


@pytest.mark.long
def test_the_plan_counts_gradients_that_are_whole_before_their_sum(rows: dict[str, Any]):
    # Half of 64 * 16 numbers of embedding and head, and of 12 * 16 * 16 of a layer, in float32; and
    # the whole scales, three of 16 and two of 4.
    size = 4 * (2 * 64 * 16 // 2 + 12 * 16 * 16 // 2 + 3 * 16 + 2 * 4)
    line = f"gradients before their sum over 4 devices: up to {size:,} bytes on each, whole along "
    assert line + "fsdp" in rows["step, data 2, fsdp 2, tensor 2"]["plan"]


def test_a_config_whose_floats_are_inputs_keeps_its_roles():
    sets = ["precision={parameters: bfloat16, master: float32, states: {'rest/mu': bfloat16}}"]
    config = override(load([str(ROOT / "configs/muon_vit.yaml")]), sets)
    program = load_located(config, declared=True)
    assert program.inputs.values
    state = program.abstract_state().opt_state
    [momentum] = {x.dtype.name for x in jax.tree.leaves(state.groups["matrices"])}
    assert momentum == "float32" and state.master
    assert {x.dtype.name for x in jax.tree.leaves(state.groups["rest"])} == {"bfloat16", "float32"}
