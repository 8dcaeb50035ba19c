"""Times a step of models.gpt over jax and optax by hand, and over PyTorch, eager and compiled.

    python -m benchmarks.gpt [--shapes=small,medium] [--optimizers=adamw,muon]
        [--against=hand,eager,compiled] [--rounds=15] [--seconds=0.5] [--one_core]

"small" has about the size of configs/muon_gpt.gin, "medium" is three times as wide. All sides
compute the same model from the same first parameters, in float32, on as many threads as there are
cores, in one process, alternately. `--one_core` measures CPU time on one core instead: on a machine
with other work, the threads of PyTorch wait for each other most of the time.

Before the rounds, three steps of each side must give the same parameters (with Muon on PyTorch's
side, which orthogonalizes in bfloat16, only about the same loss). By hand, attention is a softmax
of all scores, as most would write it. PyTorch is compared where it is installed: `make torch`.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.gpt_sides import available, make_sides
from benchmarks.interleave import interleave, report
from benchmarks.jax_gpt import Shape
from benchmarks.workload import make_gpt_workload
from trainer.train import runtime

SHAPES = {
    "tiny": Shape(vocab_size=37, width=16, depth=2, num_heads=2, length=8, batch_size=4),
    "small": Shape(vocab_size=257, width=128, depth=4, num_heads=4, length=256, batch_size=16),
    "medium": Shape(vocab_size=2048, width=384, depth=6, num_heads=6, length=512, batch_size=8),
}
TARGETS = {"hand": 1.02, "eager": 0.8, "compiled": 1.0}


def check_same(sides: dict[str, Any], optimizer: str, steps: int = 3) -> None:
    """Computes a few steps of each side, and asserts that their results agree.

    Args:
        sides: from `make_sides`.
        optimizer: "adamw" or "muon".
        steps: how many steps.
    """
    first = sides["ours"].params()
    losses = {name: side.steps(steps) for name, side in sides.items()}
    ours = sides["ours"].params()
    for name, side in sides.items():
        if name in ("eager", "compiled") and optimizer == "muon":
            assert abs(losses[name] - losses["ours"]) < 0.02 * losses["ours"], (name, losses)
            continue
        mine, before = ours, first
        if name in ("eager", "compiled"):
            from benchmarks.torch_gpt import to_torch

            mine, before = to_torch(ours), to_torch(first)
        assert difference(mine, side.params(), before) < 0.01, name
        assert abs(losses[name] - losses["ours"]) < 1e-4 * losses["ours"], (name, losses)


def difference(one: Any, other: Any, first: Any) -> float:
    """Returns the distance of two sets of parameters, over the way from the first ones."""
    flat = [
        np.concatenate([x.ravel().astype(np.float64) for x in jax.tree.leaves(tree)])
        for tree in (one, other, first)
    ]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[0] - flat[2]))


def compare(
    name: str,
    optimizer: str,
    against: list[str],
    rounds: int,
    seconds: float,
    clock: Callable[[], float],
) -> None:
    """Prints the ratios of one shape and one optimizer.

    Args:
        name: a name in SHAPES.
        optimizer: "adamw" or "muon".
        against: the other sides.
        rounds: the number of rounds.
        seconds: about how long a round of each side takes.
        clock: returns seconds.
    """
    sides = make_sides(make_gpt_workload(SHAPES[name]), optimizer, ["ours", *against])
    check_same(sides, optimizer)
    start = time.perf_counter()
    sides["ours"].steps(2)
    steps = max(1, round(seconds / (time.perf_counter() - start) * 2))
    for other in against:
        runs = [partial(sides[side].steps, steps) for side in ("ours", other)]
        taken = interleave(runs, rounds, clock)
        ms = [[1e3 * x / steps for x in side] for side in taken]
        report(f"GPT {name}, {optimizer}", *ms, target=TARGETS[other], unit="ms", other=other)


def main() -> None:
    """Prints the ratios of the steps of all shapes, optimizers and sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="small,medium")
    parser.add_argument("--optimizers", default="adamw,muon")
    parser.add_argument("--against", default="hand,eager,compiled")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a round of each side")
    parser.add_argument("--one_core", action="store_true", help="CPU time on one core")
    arguments = parser.parse_args()
    if arguments.one_core:  # before jax and torch start their threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    clock = time.process_time if arguments.one_core else time.perf_counter
    runtime.keep_freed_memory()  # for all sides: they share the process
    against = available(arguments.against.split(","))
    if set(against) - {"hand"}:
        from benchmarks.torch_gpt import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as XLA does
    for shape in arguments.shapes.split(","):
        for optimizer in arguments.optimizers.split(","):
            compare(shape, optimizer, against, arguments.rounds, arguments.seconds, clock)


if __name__ == "__main__":
    main()
