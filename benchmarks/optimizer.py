"""Compares groups of `optim` with optax.multi_transform of the same optimizers.

    python -m benchmarks.optimizer [--rounds=40] [--width=256] [--depth=8]

Both sides update the same parameters with the same gradients: matrices by AdamW with one schedule,
the rest by AdamW with another, in float32, with the state donated. The output has medians over
interleaved rounds, the ratio ours/optax per round, and the quartiles of that ratio. Targets: step
1.03, compilation 1.10, memory 1.02. The last line is a backtracking line search in a group, over
the same search without groups (target 1.20).
"""

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optim
from optim.paths import path_name

MATRICES = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1_000)
REST = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, 1_000)
Step = Callable[..., Any]


def make_params(width: int, depth: int) -> dict[str, dict[str, jax.Array]]:
    """Draws the parameters of a perceptron.

    Args:
        width: the size of its kernels, [width, width], and biases.
        depth: the number of layers.
    """
    keys = jax.random.split(jax.random.key(0), depth)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(key, (width, width)) / width**0.5,
            "bias": jnp.zeros(width),
        }
        for i, key in enumerate(keys)
    }


def loss(params: Mapping[str, Mapping[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Computes the mean squared difference of a perceptron's outputs from its inputs.

    Args:
        params: what `make_params` returns.
        x: the inputs, [batch, width].
    """
    y = x
    for i in range(len(params)):
        y = jnp.tanh(y @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"])
    return jnp.mean((y - x) ** 2)


def ours() -> optim.Optimizer:
    """Returns AdamW in two groups of `optim`, each with its own schedule."""
    return optim.optimizer(
        {
            "matrices": optim.group(".*/kernel", partial(optax.adamw, learning_rate=MATRICES)),
            "rest": optim.group(".*", partial(optax.adamw, learning_rate=REST)),
        }
    )


def plain() -> optax.GradientTransformation:
    """Returns the same two AdamW in `optax.multi_transform`."""

    def label(path: Any, _: Any) -> str:
        return "matrices" if path_name(path).endswith("kernel") else "rest"

    return optax.multi_transform(
        {"matrices": optax.adamw(MATRICES), "rest": optax.adamw(REST)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


def step_of(optimizer: optim.Optimizer | optax.GradientTransformation) -> Step:
    """Compiles the step of an optimizer, with parameters and state donated.

    Args:
        optimizer: an `optim.Optimizer` or an optax transformation.

    Returns:
        A function of parameters, state and inputs that returns new parameters, state and the loss.
    """

    def step(params: optax.Params, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        if isinstance(optimizer, optim.Optimizer):
            params, state = optimizer.update(
                grads, state, params, value=value, value_fn=lambda params: loss(params, x)
            )
            return params, state, value
        extra = dict(value=value, grad=grads, value_fn=lambda params: loss(params, x))
        updates, state = optimizer.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


class Side:
    """One of the two optimizers that are compared, with parameters and state of its own.

    Args:
        optimizer: an `optim.Optimizer` or an optax transformation.
        params: the first parameters, which are copied.
        x: the inputs, [batch, width].
    """

    def __init__(
        self,
        optimizer: optim.Optimizer | optax.GradientTransformation,
        params: optax.Params,
        x: jax.Array,
    ):
        self.optimizer, self.x = optimizer, x
        self.params = jax.tree.map(jnp.copy, params)  # its own, because the step donates them
        self.state = jax.jit(optimizer.init)(params)
        self.step = step_of(optimizer)

    def compile_seconds(self) -> float:
        """Traces, lowers and compiles the step again, and returns the seconds."""
        jax.clear_caches()  # which keep the traces of what a step calls
        begin = time.perf_counter()
        step_of(self.optimizer).lower(self.params, self.state, self.x).compile()
        return time.perf_counter() - begin

    def step_seconds(self, steps: int) -> float:
        """Runs some steps.

        Args:
            steps: the number of steps.

        Returns:
            The seconds per step.
        """
        begin = time.perf_counter()
        for _ in range(steps):
            self.params, self.state, value = self.step(self.params, self.state, self.x)
        jax.block_until_ready(value)
        return (time.perf_counter() - begin) / steps

    def bytes(self) -> int:
        """Returns the peak memory of a step: arguments, other results, and temporaries."""
        memory = self.step.lower(self.params, self.state, self.x).compile().memory_analysis()
        return (
            memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes  # donated arguments are outputs, too
            + memory.temp_size_in_bytes
        )


def compare(name: str, measure: Callable[[Side], float], sides: list[Side], rounds: int) -> float:
    """Measures both sides alternately, swapping the order, and prints the medians and the ratio.

    Args:
        name: what is measured.
        measure: takes a side and returns a number.
        sides: ours, and the other.
        rounds: the number of measurements of each side.

    Returns:
        The median ratio.
    """
    found: list[list[float]] = [[], []]
    for i in range(rounds):
        for side in (0, 1) if i % 2 else (1, 0):
            found[side].append(measure(sides[side]))
    ratios = np.asarray(found[0]) / np.asarray(found[1])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    mine, other = (np.median(x) for x in found)
    print(
        f"{name:34s} ours {mine:12.6g}  optax {other:12.6g}  ratio {middle:.3f} "
        f"[{low:.3f}, {high:.3f}]"
    )
    return float(middle)


def line_searches() -> tuple[optim.Optimizer, optax.GradientTransformation]:
    """Returns a backtracking line search in a group of ours, and the same without groups."""
    search = partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=15)
    parts: list[Any] = [partial(optax.sgd, 1.0), search]
    recipe = partial(optax.chain, *parts)
    alone = optax.chain(optax.sgd(1.0), search())
    return optim.optimizer({"all": optim.group(".*", recipe)}), alone


def main() -> None:
    """Times our groups and optax's and prints the ratios."""
    parser = argparse.ArgumentParser(description="Compares our groups with optax's.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="steps a round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    args = parser.parse_args()
    params = make_params(args.width, args.depth)
    x = jax.random.normal(jax.random.key(1), (32, args.width))
    sides = [Side(optimizer, params, x) for optimizer in (ours(), plain())]
    for side in sides:
        side.step_seconds(5)
    compare("seconds a step", lambda s: s.step_seconds(args.steps), sides, args.rounds)
    compare("peak bytes of a step", lambda s: float(s.bytes()), sides, 1)
    searches = [Side(optimizer, params, x) for optimizer in line_searches()]
    for side in searches:
        side.step_seconds(5)
    compare("line search, seconds a step", lambda s: s.step_seconds(5), searches, args.rounds)
    compare("seconds to trace and compile", Side.compile_seconds, sides, max(args.rounds // 4, 5))


if __name__ == "__main__":
    main()
