"""Times a step whose floats are inputs of the program over one whose floats are constants.

    python -m benchmarks.inputs [--rounds=40]

The first is the program of a run. The second is compiled from the same config with every number
built into it, so that another learning rate would have to compile it again.
"""

import argparse

from benchmarks.interleave import interleave, report
from benchmarks.step import stepper
from trainer import config
from trainer.engine.program import Program, load_located
from trainer.train import runtime

CASES = {
    "ViT, Muon and AdamW": ("configs/muon_vit.gin", []),
    "MLP 135k, AdamW": (
        "configs/adamw_vit.gin",
        ["model=!models.mlp {width: 240, depth: 3}", "data.batch_size=32", "data.crop=0"],
    ),
}


def main() -> None:
    """Times both programs of every case alternately, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    arguments = parser.parse_args()
    runtime.keep_freed_memory()
    for name, (file, sets) in CASES.items():
        program = load_located(config.load([file], [], sets))
        # A step of the MLP is short, so that a round has more of them.
        steps = arguments.steps * (1 if "ViT" in name else 20)
        ours, constants = (stepper(each, steps) for each in (program, Program(program.experiment)))
        interleave([ours, constants], 1)  # warms up
        seconds = interleave([ours, constants], arguments.rounds)
        ours_ms, constants_ms = ([1e3 * x / steps for x in side] for side in seconds)
        count = len(program.inputs.values)
        report(f"step with {count} inputs, {name}", ours_ms, constants_ms, 1.02, "ms", "constants")


if __name__ == "__main__":
    main()
