"""Compares optimizers of matrices, and chains of parts, with AdamW: time, state, compilation.

    python -m benchmarks.optimizers [--rounds=12] [--only=muon,normuon] [--width=256]

Each updates two sets of kernels by itself, in float32 with the state donated: the 48 kernels of
ViT-Ti (12 layers of 192x576, 192x192, 192x768 and 768x192, a parameter each) and those of 12
layers of a GPT, stacked (12x3xWxW, 12xWxW, 12xWx4W and 12x4WxW). A row has the bytes of state for
each element, and the ratios of the times of an update and of the compilation over optax.adamw,
whose updates alternate with its own, with the quartiles of the rounds. A round is `every` updates
of an optimizer that computes its bases every so often.

Then Muon as a chain of parts over `optim.muon` (target 1.02), and the compilation of Muon, and of
its chain, for 200 separate kernels over that of optax.adamw (target 1.2).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optim
from benchmarks.interleave import interleave, quartiles, report
from optim import parts

Params = dict[str, jax.Array]
RATE = 1e-3
EVERY = 10  # updates between two changes of the bases of optim.soap and optim.shampoo


def contenders() -> dict[str, optax.GradientTransformation]:
    """Returns the optimizers by name."""
    muon = [parts.momentum(), parts.polar()]
    soap = parts.soap(squares="gradient", first="rotate", sort=False, length="free")
    plain = parts.momentum(nesterov=False)
    pin = [parts.pin_radius()]
    return {
        "muon": optim.muon(RATE),
        "muon, a chain": optim.chain(RATE, muon),
        "scion": optim.scion(RATE),
        "normuon": optim.chain(RATE, [*muon, parts.normalize()]),
        "muonh": optim.chain(RATE, [*muon, parts.match_norm()], pin),
        "psgd, hyperball": optim.chain(
            RATE, [optax.ema(0.95), parts.psgd(), parts.match_norm()], pin
        ),
        "shampoo": optim.shampoo(RATE, precondition_frequency=EVERY),
        "soap": optim.soap(RATE, precondition_frequency=EVERY),
        "soap-h, every step": optim.chain(RATE, [plain, soap, parts.match_norm()], pin),
        "kl-soap": optim.chain(RATE, [plain, parts.kl_soap(every=EVERY)]),
        "soap-muon, every step": optim.chain(
            RATE, [parts.momentum(), parts.soap(), parts.polar()], pin
        ),
    }


def kernels(width: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of both sets of kernels."""
    tiny = {"qkv": (192, 576), "out": (192, 192), "up": (192, 768), "down": (768, 192)}
    w = width
    gpt = {"qkv": (12, 3, w, w), "out": (12, w, w), "up": (12, w, 4 * w), "down": (12, 4 * w, w)}
    separate = {f"{name}_{i}": shape for i in range(12) for name, shape in tiny.items()}
    return {"ViT-Ti": separate, f"GPT, width {width}": gpt}


class Side:
    """A compiled update with its state.

    Attributes:
        bytes: of state for each element of the parameters.
        compiled: the seconds that lowering and compiling took.
    """

    def __init__(self, tx: optax.GradientTransformation, shapes: dict[str, tuple[int, ...]]):
        keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
        named = list(shapes.items())
        params, self._grads = (
            {
                name: jax.random.normal(key, shape)
                for key, (name, shape) in zip(half, named, strict=True)
            }
            for half in (keys[: len(named)], keys[len(named) :])
        )
        state = tx.init(params)
        held = sum(x.nbytes for x in jax.tree.leaves(state))
        self.bytes = held / sum(x.size for x in params.values())

        def update(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state  # type: ignore[return-value]

        began = time.perf_counter()
        lowered = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, self._grads)
        self._program = lowered.compile()
        self.compiled = time.perf_counter() - began
        self._held = jax.tree.map(jnp.copy, (params, state))

    def run(self, updates: int = EVERY) -> None:
        """Computes updates, and waits for the last one."""
        for _ in range(updates):
            self._held = self._program(*self._held, self._grads)
        jax.block_until_ready(self._held)


def compare(shapes: dict[str, tuple[int, ...]], names: Sequence[str], rounds: int) -> None:
    """Prints a row for each optimizer, over AdamW on the same kernels."""
    base = Side(optax.adamw(RATE), shapes)
    print(f"{'':22} {'state':>7} {'update over AdamW':>24} {'compilation':>12}")
    for name in names:
        side = Side(contenders()[name], shapes)
        side.run()  # the first round computes the first bases
        base.run()
        # AdamW is so quick that a round of it needs more updates to be measured.
        ours, theirs = interleave([side.run, lambda: base.run(5 * EVERY)], rounds)
        low, middle, high = quartiles(ours, [x / 5 for x in theirs])
        print(
            f"{name:22} {side.bytes:7.1f} {middle:10.1f} ({low:.1f} to {high:.1f})"
            f" {side.compiled / base.compiled:12.1f}"
        )


def compile_time(make: Callable[[], optax.GradientTransformation], leaves: int) -> float:
    """Returns the seconds of tracing, lowering and compiling an update of so many kernels."""
    shapes = {f"kernel_{i}": (16, 16 + i % 4) for i in range(leaves)}
    jax.clear_caches()
    return Side(make(), shapes).compiled


def main() -> None:
    """Prints the tables and the ratios that have targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    names = [x for x in arguments.only.split(",") if x] or list(contenders())
    for title, shapes in kernels(arguments.width).items():
        print(title)
        compare(shapes, names, arguments.rounds)
    shapes = kernels(arguments.width)["ViT-Ti"]
    both = [Side(contenders()[name], shapes) for name in ("muon, a chain", "muon")]
    for side in both:
        side.run()
    ours, theirs = interleave([side.run for side in both], arguments.rounds)
    times = [[1e3 * x / EVERY for x in side] for side in (ours, theirs)]
    report("Muon as a chain, an update", *times, target=1.02, unit="ms", other="optim.muon")
    makers = [
        lambda: optim.muon(RATE),
        lambda: optim.chain(RATE, [parts.momentum(), parts.polar()]),
        lambda: optax.adamw(RATE),
    ]
    seconds = [[compile_time(make, 200) for make in makers] for _ in range(3)]
    muon, chain, adamw = (list(column) for column in zip(*seconds, strict=True))
    for name, side in (("optim.muon", muon), ("its chain", chain)):
        ratio = statistics.median(a / b for a, b in zip(side, adamw, strict=True))
        print(f"compilation for 200 kernels, {name} over optax.adamw: {ratio:.2f} (target 1.2)")


if __name__ == "__main__":
    main()
