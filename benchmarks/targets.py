"""Compares compiled steps for GPUs and TPUs that are not here: ours, and by hand in jax and optax.

    python -m benchmarks.targets [--targets=h100,v5e] [--cases="gpt adamw,vit muon"]
        [--attention=cudnn] [--small]

GPT-124M (32 sequences of 1,024 tokens) and ViT-S/16 (256 images) with products in bfloat16, by
AdamW and Muon behind a clipped norm; with 4 microbatches, under on_nonfinite="skip", and on 8
devices that divide the batch (`benchmarks.mesh` divides parameters, too). Both sides have the same
attention, cuDNN's on GPUs and XLA's on TPUs unless `--attention` names another, and are
compared by what the compiler says of a device: temporary memory, fusions and calls of libraries
that a step executes, and bytes of collectives; by floating-point operations, counted as in a plan;
and for TPUs, whose compiler tells more, by the cycles that it estimates for all operations
together, and by the bytes that they read and write, where the body of a loop counts once. First
three steps with small shapes must agree on the CPU.

"kernels" is the time in which an update of 200 kernels by Muon is compiled, over one by AdamW, and
"explain" that of the whole command for configs/muon_vit.gin, over the compilation in it.

No other time is measured. The operations over the peak of a device's products are printed as a
bound of it, and nothing else.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.engine import targets


class Case(NamedTuple):
    """A step that both sides compute.

    Args:
        model: "gpt" or "vit".
        optimizer: "adamw" or "muon".
        settings: more fields of the experiment: microbatches, on_nonfinite, mesh.
    """

    model: str
    optimizer: str
    settings: Mapping[str, Any] = {}


CASES = {
    "gpt adamw": Case("gpt", "adamw"),
    "gpt muon": Case("gpt", "muon"),
    "gpt adamw microbatches": Case("gpt", "adamw", {"microbatches": 4}),
    "gpt adamw skip": Case("gpt", "adamw", {"on_nonfinite": "skip"}),
    "gpt adamw data": Case("gpt", "adamw", {"mesh": {"data": 8}}),
    "vit adamw": Case("vit", "adamw"),
    "vit muon": Case("vit", "muon"),
}


KERNELS, EXPLAIN = "kernels", "explain"  # cases of their own
# Figure -> what it is, and the aim of ours over that by hand.
FIGURES = {
    "temporary": ("temporary bytes", 1.0),
    "flops": ("operations", 1.02),
    "cycles": ("estimated cycles", 1.02),
    "accessed": ("bytes accessed", 1.02),
    "kernels": ("fusions", 1.02),
    "calls": ("calls", 1.02),
    "exchanged": ("bytes exchanged", 1.02),
}


def explain(kind: str, rounds: int = 3) -> None:
    """Prints the time of `explain --compile` of configs/muon_vit.gin over that of compiling."""
    ratios = []
    command = [sys.executable, "-m", "trainer", "explain", "--config=configs/muon_vit.gin"]
    for _ in range(rounds):
        began = time.perf_counter()
        done = subprocess.run(
            [*command, f"--target={kind}", "--compile"],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": ""},
        )
        seconds = time.perf_counter() - began
        compiled = re.search(r"was compiled for .* in ([\d.]+) s", done.stdout)
        assert compiled is not None, done.stdout
        ratios.append(seconds / float(compiled[1]))
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"explain --target={kind} --compile of muon_vit, over the compilation alone: {middle:.2f}"
        f" (quartiles {low:.2f} to {high:.2f}, {rounds} rounds; target 1.3)",
        flush=True,
    )


def compare(name: str, target: str, attention: str, small: bool) -> None:
    """Prints the figures of a case for a target; jax must not be imported before."""
    if name == EXPLAIN:
        explain(target)
        return
    devices = 8 if name in CASES and "mesh" in CASES[name].settings else 1
    kind = target.partition(":")[0]
    shape = {"v5e": "2x4", "v6e": "2x4"}.get(kind, "8")
    elsewhere = targets.elsewhere_of(targets.parse(f"{kind}:{shape}" if devices > 1 else kind))
    from benchmarks import target_sides
    from trainer.engine.targets import peak_flops

    assert elsewhere.devices is not None
    if name == KERNELS:
        muon, adamw = target_sides.compile_kernels(elsewhere.devices).values()
        print(
            f"compilation for 200 kernels, {kind}: optim.muon {muon:.1f} s, optax.adamw {adamw:.1f}"
            f" s; ratio {muon / adamw:.2f} (target 1.2)"
        )
        return
    case = CASES[name]
    attention = attention or ("xla" if kind.startswith(("v", "tpu")) else "cudnn")
    target_sides.check_same(case)
    found = target_sides.compile_sides(case, attention, small, elsewhere.devices)
    mine, theirs = found.values()
    print(f"{name}, {kind}, {attention} attention:", flush=True)
    for field, (words, aim) in FIGURES.items():
        ours, other = getattr(mine, field), getattr(theirs, field)
        if other:
            ratio = f"ratio {ours / other:.3f} (target {aim})"
            print(f"  {words:16} {ours:22,.0f}, by hand {other:22,.0f}; {ratio}")
        elif ours:
            print(f"  {words:16} {ours:22,.0f}, by hand none")
    if peak := peak_flops(elsewhere.devices[0].device_kind, "mixed"):
        print(f"  bound: {1e3 * mine.flops / devices / peak:.4g} ms for the operations", flush=True)


def main() -> None:
    """Compares each case for each target in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default="h100,v5e")
    parser.add_argument("--cases", default="", help="names, separated by commas; default all")
    parser.add_argument("--attention", default="", help="plain, xla or cudnn, on both sides")
    parser.add_argument("--small", action="store_true", help="models of seconds")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        compare(arguments.one, arguments.targets, arguments.attention, arguments.small)
        return
    names = arguments.cases.split(",") if arguments.cases else [*CASES, KERNELS, EXPLAIN]
    options = [f"--attention={arguments.attention}", *["--small"] * arguments.small]
    for target in arguments.targets.split(","):
        for name in names:
            words = ["-m", "benchmarks.targets", f"--one={name}", f"--targets={target}", *options]
            subprocess.run([sys.executable, *words], check=True)


if __name__ == "__main__":
    main()
