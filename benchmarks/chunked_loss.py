"""Measures the loss of chunked logits and its gradient, over those of whole logits.

    python -m benchmarks.chunked_loss [--rounds=8] [--positions=2048] [--width=384]

The other side multiplies features and kernel, and takes optax's cross-entropy of integer labels.
Memory is what the compiled programs need beside their arguments and results.
"""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from benchmarks.interleave import interleave, report
from trainer import losses
from trainer.logits import ChunkedLogits
from trainer.train import runtime

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def ours(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of chunked logits, as a step of models.gpt computes it."""
    outputs = ChunkedLogits(features=features, kernel=kernel)
    values = losses.softmax_cross_entropy()(outputs, {"label": labels})
    assert not isinstance(values, tuple)  # without a z-loss there is no aux value
    return values.mean()


def theirs(features: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss of whole logits."""
    logits = (features @ kernel).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compiled(loss: Loss, arguments: tuple[jax.Array, ...]) -> tuple[Callable[[], None], int]:
    """Compiles a loss with its gradients.

    Args:
        loss: of features, kernel and labels.
        arguments: these.

    Returns:
        A function that computes them to the end, and the bytes that the program needs.
    """
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()

    def run() -> None:
        jax.block_until_ready(step(*arguments))

    analysis = step.memory_analysis()
    assert analysis is not None, f"{jax.default_backend()} does not say what a program needs."
    return run, analysis.temp_size_in_bytes


def main() -> None:
    """Times both sides alternately and prints the ratios of time and memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--positions", type=int, default=2048, help="of the whole batch")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    runtime.keep_freed_memory()  # for both sides: they share the process
    shape = (arguments.batch_size, arguments.positions // arguments.batch_size)
    keys = jax.random.split(jax.random.key(0), 3)
    features = jax.random.normal(keys[0], (*shape, arguments.width), arguments.dtype)
    kernel = jax.random.normal(keys[1], (arguments.width, arguments.vocabulary), arguments.dtype)
    kernel /= arguments.width**0.5
    labels = jax.random.randint(keys[2], shape, 0, arguments.vocabulary)
    inputs = (features, kernel, labels)
    (mine, my_bytes), (other, other_bytes) = compiled(ours, inputs), compiled(theirs, inputs)
    interleave([mine, other], 1)  # warms up
    name = f"chunked loss, {arguments.positions} positions of width {arguments.width}"
    sizes = ([x / 2**20] for x in (my_bytes, other_bytes))
    report(f"{name}, memory", *sizes, target=0.5, unit="MiB", other="whole logits")
    seconds = interleave([mine, other], arguments.rounds)
    report(f"{name}, time", *seconds, target=1.05, unit="s", other="whole logits")


if __name__ == "__main__":
    main()
