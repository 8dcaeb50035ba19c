"""A training script written by hand in jax and optax, with which Lockstep is compared.

    python -m benchmarks.by_hand [--steps=1]

The model, the data and Muon are those of configs/muon_vit.gin; the step, the groups, the clipping
and the loop are written in jax and optax.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optim
from trainer import data, losses, models

STEPS = 1_000
WIDTH, DEPTH = 64, 4


def label(params: Any) -> Any:
    """Returns "matrices" for the kernels of the blocks, and "rest" for all other parameters."""

    def name(path: Any, _: Any) -> str:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        return "matrices" if where.startswith("blocks") and where.endswith("kernel") else "rest"

    return jax.tree_util.tree_map_with_path(name, params)


def make_step(
    loss: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    microbatches: int = 1,
    skip: bool = False,
    out_shardings: Any = None,
) -> Callable[..., Any]:
    """Returns the jitted step of a loss.

    Args:
        loss: `loss(params, batch)`, a scalar.
        tx: the optimizer.
        microbatches: into how many equal parts a batch is split, whose gradients are averaged.
        skip: whether a step changes nothing if its loss or its gradients are not finite.
        out_shardings: where the results lie; None leaves it to the compiler.

    Returns:
        `step(params, opt_state, batch)`, which donates the first two and returns them with the
        loss and the norm of the gradients.
    """

    def mean(params: optax.Params, batch: Any) -> tuple[jax.Array, Any]:
        if microbatches == 1:
            return jax.value_and_grad(loss)(params, batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / microbatches, total)

    def step(params: optax.Params, opt_state: optax.OptState, batch: Any) -> tuple[Any, ...]:
        value, grads = mean(params, batch)
        updates, new_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        norm = optax.tree.norm(grads)  # a run logs it, so that this step computes it, too
        if skip:
            proceeds = jnp.isfinite(value) & jnp.isfinite(norm)
            new_params, new_state = jax.tree.map(
                lambda new, old: jnp.where(proceeds, new, old),
                (new_params, new_state),
                (params, opt_state),
            )
        return new_params, new_state, value, norm

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)


def make_vit_step(
    batch: dict[str, Any], width: int = WIDTH, depth: int = DEPTH, seed: int = 0
) -> tuple[Callable[..., Any], Any, Any]:
    """Builds the step of the ViT of the config, and its first parameters.

    Args:
        batch: name -> array, or anything with a shape and a dtype, of a batch.
        width: the width of the ViT.
        depth: the number of its layers.
        seed: the seed of the parameters.

    Returns:
        (step, params, opt_state); the step is that of `make_step`.
    """
    model = models.vit(width=width, depth=depth)
    cross_entropy: Any = losses.softmax_cross_entropy()
    # As in the config, whose warmup is 5% of the steps.
    schedule = partial(
        optax.warmup_cosine_decay_schedule, 0.0, warmup_steps=STEPS // 20, decay_steps=STEPS
    )

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "matrices": optim.muon(schedule(0.02), weight_decay=0.05),
                "rest": optax.adamw(schedule(3e-3), weight_decay=0.05),
            },
            label,
        ),
    )

    @jax.jit
    def init(key: jax.Array) -> tuple[Any, Any]:
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}
        params, _ = model.init(key, zeros)
        return params, tx.init(params)

    def mean_loss(params: optax.Params, batch: Any) -> jax.Array:
        outputs, _ = model.apply(params, {}, batch, key=None, train=True)
        return cross_entropy(outputs, batch).mean()

    return make_step(mean_loss, tx), *init(jax.random.key(seed))


def main() -> None:
    """Trains by hand for the steps of the command line, and prints when the first one is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1)
    arguments = parser.parse_args()
    batches = data.digits(batch_size=128, crop=1).train(0, 0)
    batch = next(batches)
    step, params, opt_state = make_vit_step(batch)
    for number in range(arguments.steps):
        params, opt_state, value, _ = step(params, opt_state, jax.device_put(batch))
        if number == 0:
            print(f"First step: loss {float(value):.4f}", flush=True)
        batch = next(batches)
    jax.block_until_ready(params)


if __name__ == "__main__":
    main()
