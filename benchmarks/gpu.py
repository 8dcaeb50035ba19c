"""Times ViT-S/16 and GPT-124M on an accelerator: ours, jax by hand, PyTorch eager and compiled.

    python -m benchmarks.gpu [--workloads=gpt,vit] [--optimizers=adamw,muon] [--sides=ours,hand,
        eager,compiled] [--waves=1,2,4] [--attention=auto] [--rounds=10] [--steps=10] [--small]
        [--json]

GPT-124M has modded-nanogpt's shape (12 layers, width 768, 6 heads, 50,304 tokens, length 1024),
ViT-S images of 224 pixels in patches of 16. Products are in bfloat16, parameters, norms, softmaxes
and losses in float32; Muon's products are in bfloat16 on all sides. All sides have the same first
parameters and batch and are timed alternately in one process. `--waves` times that many trials side
by side. `--small` shrinks both models, so that a CPU can run them. PyTorch is compared where it is
installed, and on an accelerator only if it has CUDA.

The model FLOPs utilization (MFU) counts 6 operations for each parameter of a kernel and token (the
head of a ViT sees one vector of each image), and for each token 12 * depth * width * length for
attention, half of that where it is causal.
"""

import argparse
import json
import os
import statistics
import time
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpt_sides import available, make_program, make_sides
from benchmarks.interleave import interleave, quartiles
from benchmarks.jax_gpt import Shape
from benchmarks.workload import Workload, kernel_sizes, make_gpt_workload
from trainer import models
from trainer.engine.peaks import peak_flops
from trainer.engine.vmapped import Vmapped

GPT = Shape(vocab_size=50_304, width=768, depth=12, num_heads=6, length=1024, batch_size=32)
SMALL_GPT = Shape(vocab_size=64, width=32, depth=2, num_heads=2, length=16, batch_size=2)
SMALL_VIT: dict[str, Any] = {
    "width": 32,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 8,
    "num_classes": 10,
}
VIT: dict[str, Any] = {
    "width": 384,
    "depth": 12,
    "num_heads": 6,
    "patch_size": 16,
    "num_classes": 1000,
}


def make_vit_workload(small: bool) -> Workload:
    """Returns ViT-S/16 on images of 224 pixels, or a small ViT; by hand, the model is the same."""
    sizes, pixels, images = (SMALL_VIT, 16, 4) if small else (VIT, 224, 256)
    model, draw = models.vit(**sizes), np.random.default_rng(0)
    batch = {
        "image": draw.normal(size=(images, pixels, pixels, 3)).astype(np.float32),
        "label": draw.integers(0, sizes["num_classes"], images).astype(np.int32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        images = {"image": batch["image"].astype(jnp.bfloat16)}
        logits, _ = model.apply(half, {}, images, key=None, train=True)
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def module(params: Any) -> Any:
        from benchmarks import torch_gpt, torch_vit

        made = torch_vit.Vit(**sizes, image_size=pixels)
        return torch_gpt.load(made, torch_vit.to_torch(params))

    tokens = (pixels // sizes["patch_size"]) ** 2
    attended = 12 * sizes["depth"] * sizes["width"] * tokens
    kernels = kernel_sizes(model, batch)
    head = kernels.pop("head/kernel")  # of the mean of the tokens
    flops = images * (tokens * (6.0 * sum(kernels.values()) + attended) + 6.0 * head)
    return Workload(model, batch, loss, module, True, "images", images, flops)


def time_sides(
    workload: Workload, optimizer: str, names: list[str], rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Times sides alternately.

    Args:
        workload: the model and its batch.
        optimizer: "adamw" or "muon".
        names: the sides.
        rounds: the number of rounds.
        steps: steps of each side in a round.

    Returns:
        A row for each side: ms of a step, units a second, MFU (None where the device's peak is not
        known), loss after three steps, and the ratio of ours to it with its quartiles.
    """
    sides = make_sides(workload, optimizer, names)
    losses = {name: side.steps(3) for name, side in sides.items()}
    taken = interleave([partial(side.steps, steps) for side in sides.values()], rounds)
    seconds = dict(zip(sides, taken, strict=True))
    rows = []
    for name, mine in seconds.items():
        row = _row(workload, statistics.median(mine) / steps)
        spread = quartiles(seconds.get("ours", mine), mine)
        rows.append({"side": name, **row, "loss": losses[name], "ours_over_it": spread})
    return rows


def time_wave(
    workload: Workload, optimizer: str, width: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Times trials that are computed side by side; returns a row as `time_sides` does.

    Args:
        workload: the model and its batch.
        optimizer: "adamw" or "muon".
        width: how many trials.
        rounds: the number of rounds.
        steps: steps of each trial in a round.
    """
    program = make_program(workload.model, workload.batch, optimizer, workload.bfloat16)
    wave, states = Vmapped(program, width), [program.init() for _ in range(width)]
    block = [workload.batch] * program.block_rule.steps
    calls, taken = max(1, steps // len(block)), []
    for number in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            found = wave.advance([(state, block) for state in states])
            states = [state for state, _ in found]
        jax.block_until_ready(states)
        if number > 0:  # the first compiles
            taken.append((time.perf_counter() - start) / (calls * len(block)))
    return {"side": f"wave of {width}", **_row(workload, statistics.median(taken), width)}


def _row(workload: Workload, seconds: float, trials: int = 1) -> dict:
    peak = peak_flops(jax.devices()[0].device_kind, "mixed")
    mfu = trials * workload.flops / seconds / peak if peak else None
    rate = trials * workload.units / seconds
    return {"ms": 1e3 * seconds, "unit": workload.unit, "per_second": rate, "mfu": mfu}


def main() -> None:
    """Prints a row for each workload, optimizer and side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("workloads", "gpt,vit"),
        ("optimizers", "adamw,muon"),
        ("sides", "ours,hand,eager,compiled"),
        ("waves", "1,2,4"),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--attention", default="auto", help="of our GPT: auto, plain, xla, cudnn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of each side in a round")
    parser.add_argument("--small", action="store_true", help="models that a CPU can run")
    parser.add_argument("--json", action="store_true", help="prints a line of JSON for each row")
    arguments = parser.parse_args()
    small = arguments.small
    make = {
        "gpt": lambda: make_gpt_workload(
            SMALL_GPT if small else GPT, bfloat16=True, attention=arguments.attention
        ),
        "vit": lambda: make_vit_workload(small),
    }
    sides = available(arguments.sides.split(","))
    counts = (arguments.rounds, arguments.steps)
    for name in arguments.workloads.split(","):
        workload = make[name]()
        for optimizer in arguments.optimizers.split(","):
            rows = time_sides(workload, optimizer, sides, *counts)
            widths = [int(width) for width in arguments.waves.split(",") if width]
            rows += [time_wave(workload, optimizer, width, *counts) for width in widths]
            for row in rows:
                described = {"device": jax.devices()[0].device_kind, "workload": name}
                row = {**described, "optimizer": optimizer, **row}
                print(json.dumps(row) if arguments.json else _text(row), flush=True)


def _text(row: dict[str, Any]) -> str:
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    low, middle, high = row.get("ours_over_it", [None] * 3)
    ratio = "" if middle is None else f"; ours over it {middle:.3f} ({low:.3f} to {high:.3f})"
    return (
        f"{row['workload']}, {row['optimizer']}, {row['side']}: {row['ms']:.4g} ms a step, "
        f"{row['per_second']:,.0f} {row['unit']} a second{mfu}{ratio}"
    )


if __name__ == "__main__":
    main()
