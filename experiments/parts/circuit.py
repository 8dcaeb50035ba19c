"""A part of a chain that Lockstep does not have: Circuit-Muon's, which couples two kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optim.parts.base import Part
from optim.paths import flatten, unflatten


def circuit(num_heads: int, damping: float = 1e-3) -> optax.GradientTransformationExtraArgs:
    """Couples the updates of values and outputs of attention, head by head (Circuit-Muon).

    With the kernels V and O of a head, [width, head_dim] and [head_dim, width], and their updates
    v and o, one step is

        v <- a * v / sqrt(norm(O)^2 / head_dim + damping),   o likewise with b and V
        x  = (<V, v> - <O, o>) / (norm(V)^2 + norm(O)^2 + 2 * head_dim * damping)
        v <- v - x * V,   o <- o + x * O

    where a and b, the same for all heads of a layer, restore the norms of the updates of all heads
    together. So V O, which is what a head does, changes about as much whatever the norms of V and O
    are, and their squares do not move apart. It stands after `parts.polar`, and leaves other
    kernels as they are. Values are the last of [..., 3, width, width] at a path `qkv/kernel`, as in
    `models.gpt` and `models.vit`, and outputs are at `out/kernel` beside it.

    See result 41 of modded-nanogpt's optimizer track, which couples what its result 40 makes.
    """
    tiny = 1e-12

    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(x * x, axis=(-2, -1), keepdims=True)

    def whitened(x: jax.Array, other: jax.Array, size: int) -> jax.Array:
        new = x / jnp.sqrt(jnp.maximum(squares(other) / size + damping, tiny))
        norms = [jnp.sqrt(jnp.sum(squares(y), axis=-3, keepdims=True)) for y in (x, new)]
        return new * (norms[0] / jnp.maximum(norms[1], tiny))

    def couple(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = arrays[0].shape[-1] // num_heads
        # [..., heads, width, head_dim] for values, and [..., heads, head_dim, width] for outputs
        v, kv = (
            jnp.moveaxis(x.reshape(*x.shape[:-1], num_heads, size), -2, -3) for x in arrays[:2]
        )
        o, ko = (x.reshape(*x.shape[:-2], num_heads, size, x.shape[-1]) for x in arrays[2:])
        v, o = whitened(v, ko, size), whitened(o, kv, size)
        gap = jnp.sum(kv * v, axis=(-2, -1)) - jnp.sum(ko * o, axis=(-2, -1))
        total = squares(kv) + squares(ko) + 2 * size * damping
        share = gap[..., None, None] / jnp.maximum(total, tiny)
        v, o = jnp.moveaxis(v - share * kv, -3, -2), o + share * ko
        return v.reshape(arrays[0].shape), o.reshape(arrays[2].shape)

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
        moves, weights = flatten(updates), flatten(params)
        pairs = {
            path: out
            for path in moves
            if path.endswith("qkv/kernel")
            and (out := path.removesuffix("qkv/kernel") + "out/kernel") in moves
        }
        if not pairs:
            raise ValueError(
                "circuit couples kernels at qkv/kernel and at out/kernel beside them, and its group"
                f" has {', '.join(sorted(moves))}. Match both, of a model such as models.gpt"
                " without num_kv_heads."
            )
        for path, out in pairs.items():
            values = [x[path][..., 2, :, :] for x in (moves, weights)]
            v, o = couple(*values, moves[out], weights[out])
            moves[path] = moves[path].at[..., 2, :, :].set(v)
            moves[out] = o
        return unflatten(updates, moves), state

    return Part(init, update, name="circuit")
