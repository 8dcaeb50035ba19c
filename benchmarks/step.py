"""Measures the time of a compiled step over one written by hand in jax and optax.

    python -m benchmarks.step [--rounds=40]

Both have the same model, batch, groups and clipping, donate their state, and are timed alternately
in one process.
"""

import argparse
from collections.abc import Callable

import jax

from benchmarks import by_hand
from benchmarks.interleave import interleave, report
from trainer import config
from trainer.engine.program import Program, load_located
from trainer.train import runtime


def stepper(program: Program, steps: int) -> Callable[[], None]:
    """Returns a function that makes some steps of a program and waits for them.

    Args:
        program: the program.
        steps: the number of steps of a call.
    """
    batch = next(program.experiment.data.train(0, 0))
    held = {"state": program.init()}

    def run() -> None:
        for _ in range(steps):
            held["state"], metrics = program.step(held["state"], program.feed.to_devices(batch))
        jax.block_until_ready(metrics)

    return run


def main() -> None:
    """Times both steps and prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    parser.add_argument("--width", type=int, default=by_hand.WIDTH)
    parser.add_argument("--depth", type=int, default=by_hand.DEPTH)
    parser.add_argument("--batch_size", type=int, default=128)
    arguments = parser.parse_args()
    runtime.keep_freed_memory()  # for both sides: they share the process

    sets = [f"model.{name}={getattr(arguments, name)}" for name in ("width", "depth")]
    sets += [f"data.batch_size={arguments.batch_size}", "data.crop=0"]
    read = config.load(["configs/muon_vit.gin"], [], sets)
    program = load_located(read)
    experiment = program.experiment
    host = next(experiment.data.train(0, 0))
    step, params, opt_state = by_hand.make_vit_step(
        dict(experiment.data.element_spec), arguments.width, arguments.depth
    )
    hand = {"params": params, "opt_state": opt_state}
    ours = stepper(program, arguments.steps)

    def theirs() -> None:
        for _ in range(arguments.steps):
            # Both sides send the batch to the device at every step, as a loop must.
            p, s, value, _ = step(hand["params"], hand["opt_state"], jax.device_put(host))
            hand.update(params=p, opt_state=s)
        jax.block_until_ready(value)

    interleave([ours, theirs], 1)  # warms up
    seconds = interleave([ours, theirs], arguments.rounds)
    to_ms = [[1e3 * x / arguments.steps for x in side] for side in seconds]
    report(f"step, {jax.devices()[0].device_kind}", *to_ms, target=1.02, unit="ms")


if __name__ == "__main__":
    main()
