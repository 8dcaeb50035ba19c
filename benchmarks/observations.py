"""Measures what parts that read observations of the model cost a step, with the observations.

    python -m benchmarks.observations [--rounds=12] [--length=256] [--width=128]

A step of a GPT of two layers, whose matrices Muon updates, is timed with `parts.qk_clip`, which
reads the logits of attention, with experiments/parts/newton.py, which reads the inputs of kernels,
and without, alternately in one process, in CPU time, with the host waiting for each. Without a part
that reads them, nothing is observed: that the step is then the same one is a test, and not measured
here.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import optax

import optim
from benchmarks.interleave import interleave, report
from benchmarks.step import stepper
from experiments.parts.newton import newton
from optim import parts
from trainer import data, losses, models
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.train import runtime


def make_step(width: int, length: int, first: Any, after: Any) -> Callable[[], None]:
    """Compiles a run, and returns what computes one step of it.

    Args:
        width: of the model, in heads of 32.
        length: tokens of a sequence, of which a batch has 8.
        first: parts before the momentum.
        after: parts behind the learning rate.
    """
    before = [*first, partial(parts.momentum), partial(parts.polar)]
    muon = partial(optim.chain, 0.02, before, after)
    groups = {
        "matrices": optim.group("block.*/kernel", muon),
        "rest": optim.group(".*", partial(optax.adamw, 1e-3)),
    }
    intervals: dict[str, Any] = dict.fromkeys(("steps", "log_every", "eval_every"), 1000)
    made = Experiment(
        model=models.gpt(width=width, depth=2, num_heads=width // 32, qk_norm=False),
        data=data.text(length=length, batch_size=8),
        loss=losses.softmax_cross_entropy(),
        optimizer=optim.optimizer(groups),
        save_every=1000,
        **intervals,
    )
    step = stepper(Program(made), 1)
    step()
    return step


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    shape = arguments.width, arguments.length
    sides = [
        make_step(*shape, [], [partial(parts.qk_clip)]),
        make_step(*shape, [partial(newton)], []),
        make_step(*shape, [], []),
    ]

    def ten(step: Callable[[], None]) -> None:
        for _ in range(10):
            step()

    seconds = interleave([partial(ten, x) for x in sides], arguments.rounds, time.process_time)
    *with_parts, plain = ([100 * x for x in side] for side in seconds)
    # The products of inputs of a layer's kernels with themselves, 19 width**2 for each token, have
    # 0.53 of the FLOPs of the products with these kernels, forward and backward, 36 width**2.
    named = {"parts.qk_clip": 1.05, "Newton-Muon's part": 1.5}
    for (part, target), side in zip(named.items(), with_parts, strict=True):
        name = f"a step with {part}, {arguments.length} tokens of width {arguments.width}"
        report(name, side, plain, target, unit="ms of CPU", other="without")


if __name__ == "__main__":
    main()
