"""Times ViT-S/16 and GPT-124M on an accelerator: ours, jax by hand, PyTorch eager and compiled.

    python -m benchmarks.gpu [--parts=memory,sides,attention,trials,training] [--workloads=gpt,vit]
        [--optimizers=adamw,muon] [--sides=ours,hand,eager,compiled] [--waves=1,2,4]
        [--attention=auto] [--rounds=10] [--steps=10] [--updates=300] [--small] [--json]

GPT-124M has modded-nanogpt's shape (12 layers, width 768, 6 heads, 50,304 tokens, length 1024),
ViT-S images of 224 pixels in patches of 16. Products are in bfloat16, parameters, norms, softmaxes
and losses in float32; Muon's products are in bfloat16 on all sides. `--small` shrinks all models,
so that a CPU can run them.

"memory" compares what the compiler says of a step's memory with the most that the device had in
use, and the step's time with the bound by its operations. "sides" times all sides alternately in
one process, from the same first parameters and on one batch, and `--waves` trials side by side.
PyTorch is compared where it is installed, and on an accelerator only if it has CUDA. "attention"
times the GPT's step with cuDNN's attention over that with XLA's, "trials" 64 small GPTs side by
side over one after the other. "training" trains the GPT by each optimizer for `--updates` steps on
the source of Python's library, a token a byte, and prints the loss.

The model FLOPs utilization (MFU) counts 6 operations for each parameter of a kernel and token (the
head of a ViT sees one vector of each image), and for each token 12 * depth * width * length for
attention, half of that where it is causal.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpt_sides import Ours, available, make_program, make_sides
from benchmarks.interleave import interleave, quartiles
from benchmarks.jax_gpt import Shape
from benchmarks.workload import Workload, kernel_sizes, make_gpt_workload
from trainer import models
from trainer.engine.memory import compiled_memory, stats_of
from trainer.engine.targets import peak_flops
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


def compare_memory(workload: Workload, optimizer: str, steps: int) -> dict[str, Any]:
    """Compares the compiler's figures of a step with the device's; returns a row."""
    device = jax.devices()[0]
    before = stats_of(device).get("peak_bytes_in_use")
    side = Ours(make_program(workload.model, workload.batch, optimizer, workload.bfloat16))
    side.steps(3)
    began = time.perf_counter()
    side.steps(steps)
    row = _row(workload, (time.perf_counter() - began) / steps)
    planned = compiled_memory(side.program.compiled)
    # The most since the process began: it may be that of an earlier program.
    most = stats_of(device).get("peak_bytes_in_use")
    row["peak_bytes"] = None if most == before else most
    peak = peak_flops(device.device_kind, "mixed")
    row["bound_ms"] = 1e3 * side.program.flops / peak if peak else None
    return {"side": "memory", **row, "planned_bytes": None if planned is None else planned.total}


def compare_attention(small: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Times our GPT's step with cuDNN's attention over that with XLA's; returns a row."""
    # A CPU has no cuDNN: there the blocks of `causal_attention` take its place.
    workloads = [
        make_gpt_workload(SMALL_GPT if small else GPT, bfloat16=True, attention=name)
        for name in ("plain" if small else "cudnn", "xla")
    ]
    sides = [Ours(make_program(each.model, each.batch, "adamw", True)) for each in workloads]
    for side in sides:
        side.steps(3)
    taken = interleave([partial(side.steps, steps) for side in sides], rounds)
    row = _row(workloads[0], statistics.median(taken[0]) / steps)
    return {"side": "cuDNN over XLA", **row, "ours_over_it": quartiles(*taken)}


def compare_trials(width: int, rounds: int, steps: int) -> dict[str, Any]:
    """Times small trials side by side over one after the other; returns a row."""
    workload = make_gpt_workload(SMALL_GPT, bfloat16=True)
    alone, beside = (time_wave(workload, "adamw", n, rounds, steps) for n in (1, width))
    ratio = beside["ms"] / (width * alone["ms"])
    return {**beside, "side": f"{width} trials over one by one", "ours_over_it": [ratio] * 3}


def train(optimizer: str, small: bool, updates: int) -> dict[str, Any]:
    """Trains our GPT on the source of Python's library; returns a row with the last losses."""
    shape, folder = SMALL_GPT._replace(vocab_size=256) if small else GPT, Path(os.__file__).parent
    text = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    tokens, draw = np.frombuffer(text, np.uint8).astype(np.int32), np.random.default_rng(0)
    workload = make_gpt_workload(shape, bfloat16=True)
    side = Ours(make_program(workload.model, workload.batch, optimizer, True))
    losses, began = [], 0.0
    for number in range(updates + 1):
        if number == 1:  # the first compiles
            began = time.perf_counter()
        starts = draw.integers(0, len(tokens) - shape.length - 1, shape.batch_size)
        rows = tokens[starts[:, None] + np.arange(shape.length + 1)]
        side.batch = {"tokens": rows[:, :-1], "label": rows[:, 1:]}
        losses.append(side.steps(1))
    row = _row(workload, (time.perf_counter() - began) / updates)
    return {"side": f"after {updates} updates", **row, "loss": statistics.mean(losses[-20:])}


def _row(workload: Workload, seconds: float, trials: int = 1) -> dict:
    peak = peak_flops(jax.devices()[0].device_kind, "mixed")
    mfu = trials * workload.flops / seconds / peak if peak else None
    rate = trials * workload.units / seconds
    return {"ms": 1e3 * seconds, "unit": workload.unit, "per_second": rate, "mfu": mfu}


def main() -> None:
    """Prints a row for each workload, optimizer and side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (
        ("parts", "memory,sides,attention,trials,training"),
        ("workloads", "gpt,vit"),
        ("optimizers", "adamw,muon"),
        ("sides", "ours,hand,eager,compiled"),
        ("waves", "1,2,4"),
    ):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--attention", default="auto", help="of our GPT: auto, plain, xla, cudnn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="of each side in a round")
    parser.add_argument("--updates", type=int, default=300, help="of the part training")
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
    parts, counts = arguments.parts.split(","), (arguments.rounds, arguments.steps)
    sides = available(arguments.sides.split(",")) if "sides" in parts else []
    widths = [int(width) for width in arguments.waves.split(",") if width]
    optimizers = arguments.optimizers.split(",")

    def rows(name: str, workload: Workload, optimizer: str) -> Iterator[dict[str, Any]]:
        if "memory" in parts:
            yield compare_memory(workload, optimizer, arguments.steps)
        if "sides" in parts:
            yield from time_sides(workload, optimizer, sides, *counts)
            yield from (time_wave(workload, optimizer, width, *counts) for width in widths)
        if "training" in parts and name == "gpt":
            yield train(optimizer, small, arguments.updates)
        if optimizer == optimizers[0] and name == "gpt":
            if "attention" in parts:
                yield compare_attention(small, *counts)
            if "trials" in parts:
                yield compare_trials(4 if small else 64, *counts)

    for name in arguments.workloads.split(","):
        workload = make[name]()
        for optimizer in optimizers:
            for row in rows(name, workload, optimizer):
                described = {"device": jax.devices()[0].device_kind, "workload": name}
                row = {**described, "optimizer": optimizer, **row}
                print(json.dumps(row) if arguments.json else _text(row), flush=True)


def _text(row: dict[str, Any]) -> str:
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    low, middle, high = row.get("ours_over_it", [None] * 3)
    ratio = "" if middle is None else f"; ours over it {middle:.3f} ({low:.3f} to {high:.3f})"
    more = "".join(
        f"; {name.replace('_', ' ')} {row[name]:,.4g}"
        for name in ("bound_ms", "planned_bytes", "peak_bytes", "loss")
        if row.get(name) is not None
    )
    return (
        f"{row['workload']}, {row['optimizer']}, {row['side']}: {row['ms']:.4g} ms a step, "
        f"{row['per_second']:,.0f} {row['unit']} a second{mfu}{ratio}{more}"
    )


if __name__ == "__main__":
    main()
