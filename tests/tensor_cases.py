"""GPTs and ViTs on one simulated device and on eight, for test_tensor_axis.py.

`python -m tests.tensor_cases` prints one line of JSON a case: {"case": name, ...}.
"""

# First, because it sets XLA's flags before the first import of jax.
from benchmarks import mesh as benchmark  # isort: skip

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.engine import test_loss_contract
from trainer import data, losses, models
from trainer.constraints import constrain
from trainer.engine.collectives import find_traffic
from trainer.engine.experiment import Experiment
from trainer.engine.mesh import ambient, batch_sharding, make_mesh
from trainer.engine.program import Program
from trainer.engine.sharding import ShardingRules, state_shardings

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
BATCH, POSITIONS, VOCABULARY = 8, 16, 64
# The axes of the last dimensions of the parameters whose path matches; of the others, fsdp divides
# the last one.
SPECS = {
    "embed/embedding": ("tensor", "fsdp"),
    ".*/(qkv|q|kv|up|gate)/kernel|head/kernel": ("fsdp", "tensor"),
    ".*/(out|down)/kernel": ("tensor", "fsdp"),
    ".*/(qkv|q|kv|up|gate)/bias|head/bias": ("tensor",),
}
draw = np.random.default_rng(0)
text = draw.integers(0, VOCABULARY, (BATCH, POSITIONS + 1), dtype=np.int32)
TEXTS = {"tokens": text[:, :-1], "label": text[:, 1:]}
DOCUMENTS = {"documents": np.sort(draw.integers(0, 3, (BATCH, POSITIONS), dtype=np.int32))}
IMAGES = {
    "image": draw.normal(size=(BATCH, 8, 8, 1)).astype(np.float32),
    "label": draw.integers(0, 10, BATCH, dtype=np.int32),
}


def gpt(**options: Any) -> Any:
    given = {"vocab_size": VOCABULARY, "width": 32, "depth": 2, "num_heads": 4, **options}
    return models.gpt(**given)


def drawn(model: Any, batch: Any) -> Any:
    """Draws all parameters: zeros, such as those of biases, would hide what they are added to."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), batch)[0])
    normal = np.random.default_rng(1).normal
    return jax.tree.map(lambda x: normal(scale=0.2, size=x.shape).astype(np.float32), shapes)


def place(mesh: Any, params: Any) -> Any:
    """Puts parameters on a mesh by SPECS, whole along dimensions that do not divide."""

    def put(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        found = (axes for pattern, axes in SPECS.items() if re.fullmatch(pattern, name))
        axes = next(found, ("fsdp",))
        sizes = x.shape[x.ndim - len(axes) :]
        kept = [None if n % mesh.shape[a] else a for n, a in zip(sizes, axes, strict=True)]
        spec = P(*[None] * (x.ndim - len(axes)), *kept)
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(put, params)


def compared(model: Any, batch: Any) -> dict[str, Any]:
    """Computes a loss and its gradient on one device and on eight, with dropout if there is any."""
    params = drawn(model, batch)

    def loss(params: Any, batch: Any) -> Any:
        outputs, _ = model.apply(params, {}, batch, key=jax.random.key(3), train=True)
        found: Any = losses.softmax_cross_entropy()(outputs, batch)
        return jnp.mean(found[0] if isinstance(found, tuple) else found)

    def both(*arguments: Any) -> Any:
        step = jax.jit(jax.value_and_grad(loss))
        return jax.block_until_ready(step(*arguments))

    mesh = make_mesh(AXES)
    one = both(params, batch)
    spread = place(mesh, params), jax.device_put(batch, batch_sharding(mesh))
    with ambient(mesh):
        many = both(*spread)
    apart = jax.tree.map(
        lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        *(jax.tree.map(np.asarray, gradient) for _, gradient in (many, one)),
    )
    names = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(apart)}
    return {"one": float(one[0]), "many": float(many[0]), "apart": names}


def traffic() -> dict[str, Any]:
    """Counts the bytes that a device receives for a loss in chunks and its gradient."""
    model, mesh = gpt(loss_chunk=32), make_mesh(AXES)
    params = place(mesh, drawn(model, TEXTS))
    batch = jax.device_put(TEXTS, batch_sharding(mesh))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, batch)
    )

    def loss(params: Any, batch: Any) -> Any:
        return benchmark.ours(params, batch, model)

    compiled = benchmark.compile_step(loss, *shapes, mesh, whole=False)
    return {"bytes": sum(benchmark.measure(compiled.as_text()).received.values())}


def traffic_of(implementation: str) -> dict[str, Any]:
    """Notes the collectives of a gradient with an implementation of attention."""
    model, mesh = gpt(attention=implementation, num_kv_heads=2), make_mesh(AXES)
    params = place(mesh, drawn(model, TEXTS))
    places = jax.tree.map(lambda x: x.sharding, params)

    def loss(params: Any, batch: Any) -> Any:
        return benchmark.ours(params, batch, model)

    with ambient(mesh):
        step = jax.jit(jax.grad(loss), out_shardings=places)
        compiled = step.lower(params, jax.device_put(TEXTS, batch_sharding(mesh))).compile()
    return {f"{x.kind} over {x.axes}": x.size for x in find_traffic(compiled.as_text(), mesh.shape)}


def step_by_default() -> dict[str, Any]:
    """Notes the kinds of collectives in a step whose parameters the models' defaults split."""
    found = {}
    for name, model, batch in (
        ("no biases", gpt(activation="swiglu"), TEXTS),
        ("biases", gpt(activation="swiglu", bias=True), TEXTS),
        ("vit", models.vit(32, 2, 4), IMAGES),
    ):
        examples = data.ArrayDataset({**batch}, {**batch}, batch_size=None)
        times = dict(steps=2, log_every=1, eval_every=2, save_every=2)
        loss, tx = losses.softmax_cross_entropy(), optax.adamw(0.1)
        program = Program(
            Experiment(model=model, data=examples, loss=loss, optimizer=tx, mesh=AXES, **times)
        )
        compiled = program.trace(program.abstract_state()).lower().compile()
        lines = find_traffic(compiled.as_text(), program.mesh.shape)
        found[name] = sorted({f"{x.kind} over {x.axes}" for x in lines})
    return found


def operands_of_cudnn() -> dict[str, Any]:
    """Notes how the operands of cuDNN's attention are divided, which needs a GPU itself."""
    seen: dict[str, list[str]] = {}
    attention, mesh = jax.nn.dot_product_attention, make_mesh(AXES)

    def noting(*operands: Any, implementation: str, **more: Any) -> Any:
        for x in operands if implementation == "cudnn" else ():  # not at `init`, in float32
            jax.debug.inspect_array_sharding(
                x, callback=lambda s: seen.setdefault(name, []).append(str(tuple(s.spec)))
            )
        return attention(*operands, implementation="xla", **more)

    jax.nn.dot_product_attention = noting
    try:
        for heads in (4, 2, 1):
            name = f"{heads} of 4 heads"
            model = gpt(attention="cudnn", num_kv_heads=heads)
            batch = {**TEXTS, **DOCUMENTS}
            params = place(mesh, drawn(model, batch))

            def loss(params: Any, batch: Any, model: Any = model) -> Any:
                half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
                return benchmark.ours(half, batch, model)

            with ambient(mesh):
                spread = jax.device_put(batch, batch_sharding(mesh))
                jax.jit(loss).lower(params, spread).compile()
    finally:
        jax.nn.dot_product_attention = attention
    return seen


def first_parameters() -> dict[str, Any]:
    """Draws the parameters of GPTs without a mesh, and compiles their drawing in parts."""
    found = {}
    mesh, key = make_mesh(AXES), jax.random.key(5)
    for name, options in {"stacked": {"width": 128}, "one by one": {"scan_layers": False}}.items():
        model = gpt(**options)

        def first(key: Any, model: Any = model) -> Any:
            return model.init(key, TEXTS)[0]

        shapes = jax.eval_shape(first, key)
        places = state_shardings(ShardingRules(mesh, model=model), shapes, shapes)
        with ambient(mesh):
            compiled = jax.jit(first, out_shardings=places).lower(key).compile()
        one, many = jax.jit(first)(key), compiled(key)
        found[name] = {
            "equal": jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, many)),
            "collectives": [str(x) for x in find_traffic(compiled.as_text(), mesh.shape)],
            "temporary": compiled.memory_analysis().temp_size_in_bytes,
            "size": sum(x.nbytes for x in jax.tree.leaves(one)),
        }
    return found


def known_mesh() -> dict[str, Any]:
    """Notes which mesh a model sees while first state, step and the others are traced."""
    seen: list[dict[str, int]] = []

    class Watching:
        def init(self, key: Any, batch: Any) -> Any:
            seen.append(dict(jax.sharding.get_abstract_mesh().shape))
            return {"dense": {"kernel": jnp.asarray(test_loss_contract.KERNEL)}}, {}

        def apply(self, params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
            seen.append(dict(jax.sharding.get_abstract_mesh().shape))
            return batch["x"] @ params["dense"]["kernel"], state

    def traced(call: Any) -> list[dict[str, int]]:
        seen.clear()
        call()
        return [dict(items) for items in {tuple(each.items()) for each in seen}]

    found = {}
    for name, axes in {"one": {"data": 1}, "many": {"data": 2, "tensor": 2}}.items():

        def make(axes: Any = axes) -> Program:
            options: Any = {"mesh": axes, "diagnostics": ["update_rms"]}
            return test_loss_contract.program(model=Watching(), **options)

        program = make()
        state, batch = program.init(), next(program.feed.batches(0))
        found[name] = {
            "first state": traced(lambda: make().init()),
            "step": traced(lambda p=program: p.trace(p.abstract_state())),
            "diagnosis": traced(lambda p=program, s=state, b=batch: p.diagnose(s, b)),
            "evaluation": traced(lambda p=program: p.evaluation.check(p.abstract_state())),
        }
    return found


def left_alone() -> dict[str, Any]:
    """Looks for constraints where the caller decides how arrays are divided."""
    x = jnp.ones((8, 4))

    def call(x: Any) -> Any:
        return constrain(x, "batch", "hidden") * 2.0

    def constrained(function: Any, x: Any) -> bool:
        return "sharding_constraint" in str(jax.make_jaxpr(function)(x))

    sizes, names = (4, 2), ("data", "tensor")
    auto = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * 2)
    explicit = jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * 2)
    manual = jax.shard_map(call, mesh=auto, in_specs=P("data"), out_specs=P("data"))
    found = {}
    with jax.set_mesh(auto):
        found["automatic"] = constrained(call, x)
        found["in shard_map"] = constrained(manual, x)
    with jax.set_mesh(explicit):
        found["explicit"] = constrained(call, jax.device_put(x, P("data", "tensor")))
    return found


def steps() -> dict[str, Any]:
    """Trains a GPT for three steps by the trainer and evaluates it, on one device and on eight."""
    found = {}
    for name, axes in {"one": {"data": 1}, "many": AXES}.items():
        experiment = Experiment(
            model=gpt(width=16, depth=1, dropout=0.1, loss_chunk=32),
            data=data.ArrayDataset({**TEXTS}, {**TEXTS}, batch_size=None, eval_batch_size=6),
            loss=losses.softmax_cross_entropy(),
            optimizer=optax.sgd(0.1),
            mesh=axes,
            microbatches=2,
            steps=10,
            log_every=1,
            eval_every=10,
            save_every=10,
        )
        program = Program(experiment)
        state, batches, values = program.init(), program.feed.batches(0), []
        for _ in range(3):
            step = program.step(state, program.feed.to_devices(next(batches)))
            state, metrics = jax.block_until_ready(step)  # bounds the steps in flight
            values.append(float(metrics["train/loss"]))
        found[name] = [*values, *program.evaluation.run_splits(state).values()]
    return found


GROUPED: dict[str, Any] = {"num_kv_heads": 2, "activation": "swiglu", "bias": True}
CASES = {
    "gpt": lambda: compared(gpt(dropout=0.2, loss_chunk=32), {**TEXTS, **DOCUMENTS}),
    "gpt, grouped and tied": lambda: compared(
        gpt(**GROUPED, tied=True, soft_cap=5.0, z_loss=1e-2, loss_chunk=24), TEXTS
    ),
    "gpt, sizes that do not divide": lambda: compared(
        gpt(**GROUPED | {"num_kv_heads": 1}, vocab_size=67, mlp_dim=45, scan_layers=False), TEXTS
    ),
    "vit": lambda: compared(models.vit(16, 2, 4, dropout=0.2, qk_norm=True, pool="cls"), IMAGES),
    "gpt, xla's attention": lambda: compared(
        gpt(num_kv_heads=2, attention="xla"), {**TEXTS, **DOCUMENTS}
    ),
    "traffic": traffic,
    "traffic by attention": lambda: {name: traffic_of(name) for name in ("plain", "xla")},
    "step by default": step_by_default,
    "operands of cudnn": operands_of_cudnn,
    "first parameters": first_parameters,
    "known mesh": known_mesh,
    "left alone": left_alone,
    "steps": steps,
}

if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"case": name, **case()}), flush=True)
