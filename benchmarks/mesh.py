"""Compares a GPT's step on a mesh with one by hand: what each device computes and receives.

    python -m benchmarks.mesh [--width=256] [--depth=4]

Compiles the step of AdamW, and the loss with its gradient alone, for eight simulated devices in a
mesh of data 2 x fsdp 2 x tensor 2. XLA partitions a program for them as for eight real ones. Two
numbers are read from the compiled programs: the operations of a device's matrix products, and the
bytes of the results of its collectives. Both sides have the same shapes, the same shardings of
parameters and batches, and save the same for the backward pass; by hand, activations and gathered
kernels are constrained as in Megatron-LM (Shoeybi et al., arXiv:1909.08053) and MaxText.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

# Before jax is imported and looks for devices: neither is read again.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.jax_gpt import ADAMW, Shape, rms_norm
from trainer import losses, models
from trainer.engine import mesh as meshes
from trainer.engine.collectives import executed_lines, find_collectives

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
TARGET = 1.02
SPECS: dict[str, P] = {
    "embed/embedding": P("tensor", "fsdp"),
    "blocks/attn/qkv/kernel": P(None, None, "fsdp", "tensor"),
    "blocks/attn/out/kernel": P(None, "tensor", "fsdp"),
    "blocks/mlp/up/kernel": P(None, "fsdp", "tensor"),
    "blocks/mlp/down/kernel": P(None, "tensor", "fsdp"),
    "head/kernel": P("fsdp", "tensor"),
}
"""The shardings of the kernels; norms lie over fsdp."""

_BATCH = ("data", "fsdp")


class Measured(NamedTuple):
    """What one device computes and receives in a compiled program.

    Attributes:
        operations: those of its matrix products, a multiplication and an addition for each term.
        received: bytes of the results of its collectives, by the name of the collective.
    """

    operations: float
    received: Mapping[str, int]


def measure(text: str) -> Measured:
    """Reads operations and traffic from a compiled program; those of a loop times its iterations.

    XLA's own cost analysis counts a loop once.

    Args:
        text: the program, as HLO.
    """
    operations = 0.0
    shapes: dict[str, list[int]] = {}
    for line, times in executed_lines(text):
        result, _, call = line.partition(" = ")
        name = result.split("%")[-1]
        if found := re.match(r"\w+\[([\d,]*)\]", call):
            shapes[name] = [int(n) for n in found[1].split(",") if n]
        if found := re.search(r" dot\((?:\S+ )?%([\w.-]+),.*lhs_contracting_dims={([\d,]*)}", call):
            contracted = [shapes[found[1]][int(axis)] for axis in found[2].split(",")]
            operations += 2.0 * times * float(np.prod([*shapes[name], *contracted]))
    received: Counter[str] = Counter()
    for each in find_collectives(text):
        received[each.kind] += each.times * each.size
    return Measured(operations, received)


# By hand.


def loss_by_hand(params: Any, batch: Any, shape: Shape) -> jax.Array:
    """Returns the mean cross-entropy of a batch, with the constraints of Megatron-LM and MaxText.

    Args:
        params: the parameters, as models.gpt names them, float32.
        batch: `tokens` and `label`, int32 [batch, length].
        shape: the sizes.
    """
    on, size = jax.lax.with_sharding_constraint, shape.width // shape.num_heads
    angles = jnp.arange(shape.length)[:, None] * 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    seen = jnp.tril(jnp.ones((shape.length, shape.length), bool))

    def rotate(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    @partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        prevent_cse=False,
    )
    def block(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        attn, mlp = p["attn"], p["mlp"]
        h = rms_norm(x, p["attn_norm"]["scale"])
        kernel = on(attn["qkv"]["kernel"], P(None, None, "tensor"))
        heads = jnp.einsum("btw,cws->btcs", h, kernel).reshape(*h.shape[:2], 3, -1, size)
        heads = on(heads, P(_BATCH, None, None, "tensor", None))
        query = rotate(rms_norm(heads[:, :, 0], attn["q_norm"]["scale"]))
        key = rotate(rms_norm(heads[:, :, 1], attn["k_norm"]["scale"]))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * size**-0.5
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, heads[:, :, 2]).reshape(x.shape)
        mixed = on(mixed, P(_BATCH, None, "tensor"))
        x = on(x + mixed @ on(attn["out"]["kernel"], P("tensor", None)), P(_BATCH, None, None))
        h = rms_norm(x, p["mlp_norm"]["scale"]) @ on(mlp["up"]["kernel"], P(None, "tensor"))
        h = jnp.square(jax.nn.relu(on(h, P(_BATCH, None, "tensor"))))
        x = x + h @ on(mlp["down"]["kernel"], P("tensor", None))
        return on(x, P(_BATCH, None, None)), None

    x = on(params["embed"]["embedding"], P("tensor", None))[batch["tokens"]]
    x, _ = jax.lax.scan(block, on(x, P(_BATCH, None, None)), params["blocks"])
    x = rms_norm(x, params["norm"]["scale"])
    logits = on(x @ on(params["head"]["kernel"], P(None, "tensor")), P(_BATCH, None, "tensor"))
    at_label = jnp.arange(shape.vocab_size) == batch["label"][..., None]
    likelihood = jnp.sum(jnp.where(at_label, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - likelihood)


def ours(params: Any, batch: Any, model: models.Model) -> jax.Array:
    """Returns the same loss by models.gpt and losses.softmax_cross_entropy."""
    outputs, _ = model.apply(params, {}, batch, key=None, train=True)
    found: Any = losses.softmax_cross_entropy()(outputs, batch)
    return jnp.mean(found)


# Programs.


def abstract(shape: Shape, model: models.Model, mesh: Any) -> tuple[Any, Any]:
    """Returns parameters and a batch as shapes with their shardings on a mesh."""
    batch = {name: jnp.asarray(x) for name, x in shape.batch().items()}
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch)[0])

    def place(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        spec = SPECS.get("/".join(key.key for key in path), P(*[None] * (x.ndim - 1), "fsdp"))
        kept = P(*(name if name in mesh.shape else None for name in spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, kept))

    split = meshes.batch_sharding(mesh)
    spread = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for n, x in batch.items()}
    return jax.tree_util.tree_map_with_path(place, params), spread


def check_same(programs: Sequence[Any], shape: Shape, model: models.Model, places: Any) -> None:
    """Asserts that the programs of both sides compute the same loss and gradient.

    Args:
        programs: the compiled losses with their gradients.
        shape: the sizes.
        model: ours.
        places: the shardings of parameters and batch.
    """
    batch = shape.batch()
    arguments = jax.device_put((model.init(jax.random.key(0), batch)[0], batch), places)
    found = [jax.block_until_ready(program(*arguments)) for program in programs]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert np.linalg.norm(one - other) < 1e-4 * np.linalg.norm(other)


def compile_step(
    loss: Callable[[Any, Any], jax.Array], params: Any, batch: Any, mesh: Any, whole: bool
) -> Any:
    """Compiles a step of AdamW, or, unless `whole`, the loss with its gradient."""
    tx = optax.adamw(**ADAMW)
    spread = jax.tree.map(lambda x: x.sharding, params)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if not whole:
            found = jax.jit(jax.value_and_grad(loss), out_shardings=(None, spread))
            return found.lower(params, batch).compile()
        state = optax.tree.map_params(
            tx,
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            jax.eval_shape(tx.init, params),
            spread,
            transform_non_params=lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=meshes.replicated(mesh)
            ),
        )

        def step(params: Any, state: Any, batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, batch)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        places = (spread, jax.tree.map(lambda x: x.sharding, state), None)
        return (
            jax.jit(step, out_shardings=places, donate_argnums=(0, 1))
            .lower(params, state, batch)
            .compile()
        )


def main() -> None:
    """Prints operations and traffic of a device on both sides, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    arguments = parser.parse_args()
    # Sequences of one block of queries: longer ones cost our attention fewer products.
    shape = Shape(2048, arguments.width, arguments.depth, num_heads=8, length=128, batch_size=16)
    model = models.gpt(shape.vocab_size, shape.width, shape.depth, shape.num_heads)
    mesh = meshes.make_mesh(AXES)
    params, batch = abstract(shape, model, mesh)
    sides = {"ours": partial(ours, model=model), "by hand": partial(loss_by_hand, shape=shape)}
    for whole in (False, True):
        programs = [compile_step(loss, params, batch, mesh, whole) for loss in sides.values()]
        if not whole:
            places = jax.tree.map(lambda x: x.sharding, (params, batch))
            check_same(programs, shape, model, places)
        found = {
            name: measure(program.as_text()) for name, program in zip(sides, programs, strict=True)
        }
        mine, other = found.values()
        received = [sum(x.received.values()) for x in (mine, other)]
        print(
            f"GPT, {'step of AdamW' if whole else 'loss and gradient'}: operations"
            f" {mine.operations / other.operations:.3f}, bytes received"
            f" {received[0] / received[1]:.3f} of those by hand (target {TARGET})",
            flush=True,
        )
        for name, x in found.items():
            told = ", ".join(f"{k} {v / 1e6:.2f} MB" for k, v in sorted(x.received.items()))
            print(f"  {name:8} {x.operations / 1e9:.3f} G operations; {told}", flush=True)


if __name__ == "__main__":
    main()
