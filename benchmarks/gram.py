"""Measures what the Gram form of Newton-Schulz saves in bfloat16, and how exact its results are.

    python -m benchmarks.gram [--rows=256] [--rounds=12]

First the error of `optim.newton_schulz.orthogonalize` in bfloat16, for spectra of several kinds:
its distance from the result by singular value decomposition in float64, over the length of that,
beside the error of the plain form, X <- a X + (b X X^T + c (X X^T)^2) X. Then the operations of
both forms, counted by XLA, and their time in CPU seconds, measured alternately. This machine's
products of bfloat16 matrices are slow; the operations are those of any device.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.interleave import interleave, report
from optim import newton_schulz
from optim.newton_schulz import orthogonalize, polynomials

SPECTRA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "uniform": lambda place: 1 - place,
    "1 / rank": lambda place: 1 / (1 + place * len(place)),
    "over four decades": lambda place: 10 ** (-4 * place),
    "an eighth, and 0": lambda place: np.where(place < 1 / 8, 1.0, 0.0),
    "one, and a hundredth": lambda place: np.where(place == 0, 1.0, 0.01),
}


def compile_form(plain: bool, shape: tuple[int, int], triples: list) -> jax.stages.Compiled:
    """Compiles `orthogonalize` in bfloat16 in the plain form, or in the one that it chooses."""
    chosen = newton_schulz._prefers_gram
    with mock.patch.object(
        newton_schulz, "_prefers_gram", lambda *size: not plain and chosen(*size)
    ):
        made = jax.jit(lambda x: orthogonalize(x, triples, dtype="bfloat16"))
        return made.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile()


def main() -> None:
    """Prints the errors, the operations and the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    for columns in (2 * given.rows, 4 * given.rows):
        shape = (given.rows, columns)
        basis, _, other = np.linalg.svd(random.normal(size=shape), full_matrices=False)
        for name, steps in (("jordan", 5), ("polar_express", 5)):
            triples = polynomials(name, steps)
            forms = [compile_form(plain, shape, triples) for plain in (False, True)]
            for kind, values_at in SPECTRA.items():
                values = values_at(np.arange(given.rows) / given.rows)
                x = jnp.asarray((basis * values) @ other, jnp.float32)
                exact: Any = values / np.linalg.norm(values)
                for a, b, c in triples:
                    exact = a * exact + b * exact**3 + c * exact**5
                exact = (basis * exact) @ other
                gram, plain = (
                    np.linalg.norm(np.asarray(form(x), float) - exact) / np.linalg.norm(exact)
                    for form in forms
                )
                print(
                    f"{shape} {name}, singular values {kind}: error {gram:.4f}, plain {plain:.4f}"
                )
            gram, plain = ((form.cost_analysis() or {})["flops"] for form in forms)
            print(f"{shape} {name}: {gram:.4g} operations, plain {plain:.4g}: {gram / plain:.3f}")
            one = jnp.asarray(random.normal(size=shape), jnp.float32)
            runs = [lambda run=form, x=one: jax.block_until_ready(run(x)) for form in forms]
            interleave(runs, 1)
            ours, theirs = interleave(runs, given.rounds, time.process_time)
            report(f"{shape} {name}", ours, theirs, 1.0, "s of CPU", "the plain form")


if __name__ == "__main__":
    main()
