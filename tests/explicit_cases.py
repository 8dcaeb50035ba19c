"""Groups on meshes with explicit axes, with eight simulated devices, for test_explicit_axes.py.

`python -m tests.explicit_cases` prints one line of JSON a case: {"case": name, ...}.
"""

# First, because it sets XLA's flags before the first import of jax.
from tests.laws_explicit import run  # isort: skip

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import optim
from tests.laws_table import ROWS
from trainer.engine.sharding import ShardingRules, state_shardings

SHORT = ("optax.adamw", "optax.lbfgs (zoom)", "optim.muon")
STEPS = 3
P = PartitionSpec
SPECS = {
    "blocks": {"kernel": P("data", None, "model")},
    "head": {"kernel": P("data", "model"), "bias": P("model")},
    "scale": P(),
}
warm = optim.schedules.warmup_cosine(0.02, warmup_steps=2, decay_steps=10)


def start() -> Any:
    """Makes parameters of a model with four stacked layers."""
    draw = np.random.default_rng(0).normal
    return {
        "blocks": {"kernel": draw(size=(4, 8, 6)).astype("float32")},
        "head": {
            "kernel": draw(size=(8, 4)).astype("float32"),
            "bias": draw(size=4).astype("float32"),
        },
        "scale": np.float32(1.5),
    }


def loss(params: Any) -> Any:
    return sum(jnp.sum(jnp.sin(x)) + jnp.mean(x**2) for x in jax.tree.leaves(params)) ** 2


def on(mesh: Mesh, tree: Any, specs: Any = SPECS) -> Any:
    """Puts a tree on a mesh, sharded over its explicit axes."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))

    def put(x: Any, spec: PartitionSpec) -> Any:
        kept = (name if name and kinds[name] == AxisType.Explicit else None for name in spec)
        return jax.device_put(x, NamedSharding(mesh, P(*kept)))

    return jax.tree.map(put, tree, specs)


def two_groups(**options: Any) -> optim.Optimizer:
    decays = lambda t: 0.1 - 0.01 * t  # noqa: E731
    matrices = partial(optim.muon, learning_rate=warm, weight_decay=decays)
    rest = partial(optax.adamw, learning_rate=warm, b1=lambda t: 0.9 - 0.01 * t)
    return optim.optimizer(
        {"matrices": optim.group(".*/kernel", matrices), "rest": optim.group(".*", rest)}, **options
    )


def train(optimizer: optim.Optimizer, params: Any, **given: Any) -> Any:
    """Returns the parameters after a few steps in one scan."""

    def body(carry: Any, _: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(carry[0])
        extra = {"value": value, "value_fn": loss, **given}
        return optimizer.update(grads, carry[1], carry[0], **extra), None

    @jax.jit
    def steps(params: Any) -> Any:
        start = (params, optimizer.init(params))
        return jax.lax.scan(body, start, None, length=STEPS)[0][0]

    return jax.block_until_ready(steps(params))


def far(found: Any, wanted: Any) -> float:
    """Returns the largest difference of two trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max()) for a, b in pairs)


def with_options(mesh: Mesh) -> dict[str, Any]:
    layers = {"blocks/.*": "stacked", "head/.*": "head", "scale": "embedding"}
    clipped = two_groups(clip_norm=lambda t: 0.5 + 0.1 * t, layer_decay=0.9, layers=layers)
    rounded = two_groups(low_precision="stochastic")
    found = {}
    for dtype, optimizer in {"float32": clipped, "bfloat16": rounded}.items():
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), start())
        wanted = train(optimizer, jax.tree.map(jnp.asarray, params), skip=np.asarray(False))
        with jax.set_mesh(mesh):
            here = train(optimizer, on(mesh, params), skip=np.asarray(False))
        found[dtype] = far(here, wanted)
    return found


def half_explicit(_: Mesh) -> dict[str, Any]:
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    wanted = train(two_groups(), jax.tree.map(jnp.asarray, start()))
    with jax.set_mesh(mesh):
        return {"far": far(train(two_groups(), on(mesh, start())), wanted)}


def loss_with_shardings(mesh: Mesh) -> dict[str, Any]:
    """A loss that holds a sharded batch and names the sharding of a product."""
    draw = np.random.default_rng(1).normal
    batch, params = draw(size=(16, 8)).astype("float32"), {"w": start()["head"]["kernel"]}
    recipes = {
        "lbfgs": partial(optax.lbfgs),
        "sophia": partial(optax.contrib.sophia, learning_rate=warm, update_interval=2),
        "sam": partial(
            optax.contrib.sam,
            optimizer=partial(optax.sgd, learning_rate=warm),
            adv_optimizer=partial(optax.sgd, 0.05),
            opaque_mode=True,
        ),
    }

    def fit(recipe: partial, params: Any, batch: Any, spec: PartitionSpec | None) -> Any:
        optimizer = optim.optimizer({"all": optim.group(".*", recipe)})

        def of_batch(params: Any, *_: Any) -> Any:
            product = jnp.dot(batch, params["w"], out_sharding=spec)
            return jnp.mean(jnp.tanh(product) ** 2)

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            value, grads = jax.value_and_grad(of_batch)(params)
            functions = dict(value_fn=of_batch, obj_fn=of_batch, grad_fn=jax.grad(of_batch))
            return optimizer.update(grads, state, params, value=value, **functions)

        state = optimizer.init(params)
        for _ in range(STEPS):
            params, state = jax.block_until_ready(step(params, state))
        return params

    found = {}
    for name, recipe in recipes.items():
        wanted = fit(recipe, jax.tree.map(jnp.asarray, params), batch, None)
        with jax.set_mesh(mesh):
            here = on(mesh, {**params, "batch": batch}, {"w": P(None, "model"), "batch": P("data")})
            there = here.pop("batch")
            found[name] = far(fit(recipe, here, there, P("data", "model")), wanted)
    return found


def partly_manual(mesh: Mesh) -> dict[str, Any]:
    """Inside a shard_map over one of two axes, the other stays explicit."""
    rest = partial(optax.adamw, learning_rate=warm)
    optimizer = optim.optimizer({"all": optim.group(".*", rest)})
    params: Any = {"w": start()["head"]["kernel"]}
    state, wanted = optimizer.init(params), params
    for _ in range(STEPS):
        wanted, state = optimizer.update(wanted, state, wanted)
    with jax.set_mesh(mesh):
        params = on(mesh, params, {"w": P(None, "model")})
        state = optimizer.init(params)
        mapped = jax.shard_map(
            lambda p, s: optimizer.update(p, s, p), in_specs=P(), out_specs=P(), axis_names={"data"}
        )
        for _ in range(STEPS):
            step = jax.jit(mapped)
            params, state = jax.block_until_ready(step(params, state))
        return {"far": far(params, wanted), "spec": str(jax.typeof(params["w"]).sharding.spec)}


def held_array(mesh: Mesh) -> dict[str, Any]:
    """What a finished transformation holds cannot be taken out of it."""

    def step(params: Any, state: Any, peak: Any) -> Any:
        tx = optax.adam(lambda t: peak * (1 - 0.1 * t))
        optimizer = optim.optimizer({"all": optim.group(".*", tx)})
        return optimizer.update(params, state, params)

    with jax.set_mesh(mesh):
        params = on(mesh, start())
        state = optim.optimizer({"all": optim.group(".*", optax.adam(warm))}).init(params)
        found = {}
        for how, update in {"jit": jax.jit(step), "eager": step}.items():
            try:
                update(params, state, jnp.float32(0.1))
            except optim.GroupError as error:
                found[how] = str(error)
        return found


def whitened(learning_rate: float) -> optax.GradientTransformation:
    """A user's optimizer, whose init multiplies matrices, and whose update holds their product."""

    def init(params: Any) -> Any:
        return {"gram": jax.tree.map(lambda p: p.T @ p, params), "last": params}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        steps = jax.tree.map(lambda g, m: -learning_rate * g @ m, grads, state["gram"])
        return steps, {"gram": state["gram"], "last": params}

    return optax.GradientTransformation(init, update)


def product_at_init(mesh: Mesh) -> dict[str, Any]:
    rows = {"head": {"kernel": start()["head"]["kernel"]}}
    optimizer = optim.optimizer({"all": optim.group(".*", partial(whitened, learning_rate=warm))})

    def steps(params: Any) -> tuple[Any, Any]:
        state, step = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(STEPS):
            params, state = jax.block_until_ready(step(params, state, params))
        return params, state

    wanted, _ = steps(jax.tree.map(jnp.asarray, rows))
    with jax.set_mesh(mesh):
        found, state = steps(on(mesh, rows, {"head": {"kernel": P("data", "model")}}))
    last = state.groups["all"]["last"]["head/kernel"]
    return {"far": far(found, wanted), "spec": str(last.sharding.spec)}


def split_factors(_: Mesh) -> dict[str, Any]:
    """SOAP and Shampoo outside of groups, with factors that are split as the rules say."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    draw = np.random.default_rng(2).normal
    params = {"kernel": draw(size=(2, 8, 16)).astype("float32")}
    grads = {"kernel": draw(size=(STEPS, 2, 8, 16)).astype("float32")}
    rules = ShardingRules(mesh, {".*": "fsdp tensor"})
    found = {}
    for name, tx in {"soap": optim.soap(0.1), "shampoo": optim.shampoo(0.1)}.items():

        def steps(params: Any, state: Any, place: Any = None, tx: Any = tx) -> tuple[Any, Any]:
            step = jax.jit(tx.update)
            for t in range(STEPS):
                one = jax.device_put(jax.tree.map(lambda g, t=t: g[t], grads), place)
                moves, state = jax.block_until_ready(step(one, state, params))
                params = optax.apply_updates(params, moves)
            return params, state

        wanted = steps(jax.tree.map(jnp.asarray, params), tx.init(params))
        places = state_shardings(rules, (params, tx.init(params)), params)
        with jax.set_mesh(mesh):
            here = steps(*jax.device_put((params, tx.init(params)), places), places[0])
        kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), here[1], places[1])
        moved = far(wanted[0], params)
        found[name] = {
            "far": far(here[0], wanted[0]),
            "moved": moved,
            "kept": all(jax.tree.leaves(kept)),
        }
    return found


CASES: dict[str, Callable[[Mesh], dict[str, Any]]] = {
    "options": with_options,
    "half explicit": half_explicit,
    "loss with shardings": loss_with_shardings,
    "partly manual": partly_manual,
    "held array": held_array,
    "product at init": product_at_init,
    "split factors": split_factors,
}


def main() -> None:
    for row in ROWS:
        if row.name in SHORT:
            run(row, "4x2", "jit")
            print(json.dumps({"case": row.name}), flush=True)
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    for name, case in CASES.items():
        print(json.dumps({"case": name, **case(mesh)}), flush=True)


if __name__ == "__main__":
    main()
