"""Compares optimizers of matrices, and chains of parts, with AdamW: time, state, compilation.

    python -m benchmarks.optimizers [--rounds=24] [--seconds=4] [--only=muon,normuon] [--layers=2]

Each updates two sets of kernels by itself, in float32 with the state donated: those of layers of
ViT-Ti (192x576, 192x192, 192x768 and 768x192, a parameter each) and of a GPT of width 128, stacked
(3x128x128, 128x128, 128x512 and 512x128). Both have 12 layers, of which `--layers` are taken:
most time goes into the decompositions of kernels, one after the other. A row has the bytes of state
for each element, and the ratios of the times of an update and of the compilation over optax.adamw,
whose updates alternate with its own, with the quartiles of the rounds and their number. A round has
one change of the bases of an optimizer that computes them every so often. Rounds stop at
`--rounds`, or after so many `--seconds` for a row, but there are at least 4. On two busy cores a
row takes up to two minutes.

Then Muon as a chain of parts in a config over `optim.muon` (target 1.02), and the compilation of
Muon, and of its chain, for 200 separate kernels over that of optax.adamw (target 1.2); with
`--only`, if it names muon-chain.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optim
from benchmarks.interleave import interleave, quartiles, report
from optim import parts

Params = dict[str, jax.Array]
RATE = 1e-3
EVERY = 10  # updates between two changes of the bases of those that compute them every so often
PERIODIC = ("shampoo", "soap", "kl-soap")


def contenders() -> dict[str, optax.GradientTransformation]:
    """Returns the optimizers by name."""
    muon = [parts.momentum(), parts.polar()]
    soap = parts.soap(squares="gradient", first="rotate", sort=False, length="free")
    plain = parts.momentum(nesterov=False)
    pin = [parts.pin_radius()]
    return {
        "muon": optim.muon(RATE),
        "muon-chain": optim.chain(RATE, muon),
        "scion": optim.scion(RATE),
        "normuon": optim.chain(RATE, [*muon, parts.normalize()]),
        "muonh": optim.chain(RATE, [*muon, parts.match_norm()], pin),
        "psgd-hyperball": optim.chain(
            RATE, [optax.ema(0.95), parts.psgd(), parts.match_norm()], pin
        ),
        "shampoo": optim.shampoo(RATE, every=EVERY),
        "soap": optim.soap(RATE, precondition_frequency=EVERY),
        "soap-h-every-step": optim.chain(RATE, [plain, soap, parts.match_norm()], pin),
        "kl-soap": optim.chain(RATE, [plain, parts.kl_soap(every=EVERY)]),
        "soap-muon-every-step": optim.chain(
            RATE, [parts.momentum(), parts.soap(), parts.polar()], pin
        ),
    }


def kernels(width: int, layers: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the shapes of both sets of kernels."""
    tiny = {"qkv": (192, 576), "out": (192, 192), "up": (192, 768), "down": (768, 192)}
    n, w = layers, width
    gpt = {"qkv": (n, 3, w, w), "out": (n, w, w), "up": (n, w, 4 * w), "down": (n, 4 * w, w)}
    separate = {f"{name}_{i}": shape for i in range(n) for name, shape in tiny.items()}
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

    def run(self, updates: int) -> None:
        """Computes updates, and waits for the last one."""
        for _ in range(updates):
            self._held = self._program(*self._held, self._grads)
        jax.block_until_ready(self._held)


def compare(
    shapes: dict[str, tuple[int, ...]], names: Sequence[str], rounds: int, seconds: float
) -> None:
    """Prints a row for each optimizer, over AdamW on the same kernels."""
    base = Side(optax.adamw(RATE), shapes)
    print(f"{'':22} {'state':>7} {'update over AdamW':>26} {'compilation':>12}", flush=True)
    for name in names:
        side, updates = Side(contenders()[name], shapes), EVERY if name in PERIODIC else 1
        # AdamW is so quick that a round of it needs more updates to be measured.
        runs = [partial(side.run, updates), partial(base.run, 10)]
        interleave(runs, 1)  # the first round computes the first bases
        ours, theirs = _timed(runs, rounds, seconds)
        per_update = [x / updates for x in ours], [x / 10 for x in theirs]
        low, middle, high = quartiles(*per_update)
        ratio = f"{middle:.1f} ({low:.1f} to {high:.1f}; {len(ours)})"
        compiled = side.compiled / base.compiled
        print(f"{name:22} {side.bytes:7.1f} {ratio:>26} {compiled:12.1f}", flush=True)


def _timed(runs: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[list[float]]:
    """Times functions alternately, for at least 4 rounds and at most about so many seconds."""
    taken: list[list[float]] = [[] for _ in runs]
    while len(taken[0]) < min(4, rounds) or (
        len(taken[0]) < rounds and sum(map(sum, taken)) < seconds
    ):
        for side, found in zip(taken, interleave(runs, 2), strict=True):
            side += found
    return taken


def compile_time(make: Callable[[], optax.GradientTransformation], leaves: int) -> float:
    """Returns the seconds of tracing, lowering and compiling an update of so many kernels."""
    shapes = {f"kernel_{i}": (16, 16 + i % 4) for i in range(leaves)}
    jax.clear_caches()
    return Side(make(), shapes).compiled


def compare_chain(shapes: dict[str, tuple[int, ...]], rounds: int) -> None:
    """Prints the ratios that have targets."""
    both = [Side(contenders()[name], shapes) for name in ("muon-chain", "muon")]
    for side in both:
        side.run(1)  # warms up
    found = interleave([partial(side.run, 3) for side in both], rounds)
    times = [[1e3 * x / 3 for x in side] for side in found]
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


def main() -> None:
    """Prints the tables, and the ratios that have targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the rounds of a row")
    parser.add_argument("--width", type=int, default=128, help="of the GPT")
    parser.add_argument("--layers", type=int, default=2, help="of both sets of kernels")
    arguments = parser.parse_args()
    names = [x for x in arguments.only.split(",") if x] or list(contenders())
    sets = kernels(arguments.width, arguments.layers)
    for title, shapes in sets.items():
        print(title, flush=True)
        compare(shapes, names, arguments.rounds, arguments.seconds)
    if "muon-chain" in names:
        compare_chain(sets["ViT-Ti"], arguments.rounds)


if __name__ == "__main__":
    main()
