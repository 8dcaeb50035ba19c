"""SOAP's parts against the programs of their authors, from a state of those programs on."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim import parts
from optim.parts.soap import KlState, SoapState

FIGURES = np.load(Path(__file__).with_name("soap_figures.npz"))
KERNELS = range(3)  # [3, 5], [4, 4] and [6, 2]: [inputs, outputs]
FROM = int(FIGURES["from"])

POLAR = partial(parts.polar, [2.0, -1.5, 0.5], 12, norm="gram")
EPS = 1e-20  # the programs bound the root of the mean squares by eps, where it is added here
# The share of SOAP in early steps, as train_gpt_cwd_SOTA.py bounds it.
GATED = partial(parts.trust_gate, floor=0.45, cap=0.85)


def record_46(around: Any) -> Callable[[float], tuple[list[Any], list[Any]]]:
    pin = parts.pin_radius(radial=True)
    return lambda mu: (
        [
            *(parts.momentum(mu), around, POLAR()),
            *(parts.radial_brake(0.5), parts.floor(0.3825, by="output")),
        ],
        [parts.cautious_decay(0.025, around=pin)],
    )


SOAP_H = partial(parts.soap, 0.9, squares="gradient", first="rotate", sort=False, length="free")
CASES: dict[str, Callable[[float], tuple[list[Any], list[Any]]]] = {
    "soap_muon": record_46(parts.soap(0.9, eps=EPS)),
    "trust_gate": record_46(GATED(parts.soap(0.9, eps=EPS), eps=1e-8)),
    "every_3": record_46(parts.soap(0.9, eps=EPS, every=3)),
    "soap_h": lambda _: (
        [parts.momentum(0.95, nesterov=False), SOAP_H(), parts.match_norm()],
        [parts.pin_radius()],
    ),
    "kl_soap": lambda _: (
        [parts.momentum(0.9, nesterov=False), parts.kl_soap(0.95, 0.8, 1e-6, every=2)],
        [],
    ),
    "kl_shampoo": lambda _: (
        [parts.momentum(0.9, nesterov=False), parts.kl_shampoo(0.8, 1e-6, every=2)],
        [],
    ),
}


def figures(name: str, field: str) -> Any:
    return [jnp.asarray(FIGURES[f"{name}_{field}_{i}"]) for i in KERNELS]


def transplanted(name: str, state: Any) -> Any:
    """Puts the state of a program, before the step FROM, into that of the chain."""
    count = jnp.asarray(int(FIGURES[f"{name}_count_0"]))
    sides = ("left", "right", "left_basis", "right_basis")
    fields = {field: figures(name, field) for field in sides}
    inner: Any
    if name.startswith("kl"):
        values = {field: figures(name, field) for field in ("left_values", "right_values")}
        variance = figures(name, "variance") if name == "kl_soap" else ()
        inner = KlState(count=count, variance=variance, **fields, **values)
    else:
        inner = SoapState(count=count, variance=figures(name, "variance"), **fields)
    momentum = state.before[0]._replace(momentum=figures(name, "momentum"))
    return state._replace(before=(momentum, inner, *state.before[2:]))


def gradients(t: int) -> Any:
    return [jnp.asarray(FIGURES[f"grads_{i}"][t]) for i in KERNELS]


@pytest.mark.parametrize("name", CASES)
def test_a_chain_with_soap_agrees_with_its_authors_program(name: str):
    """40 steps from the program's state after 10, when its Gram matrices have full rank.

    Before, its bases of the null spaces depend on rounding. The figures were computed in float64 by
    these programs: soap_muon, trust_gate and every_3 (SOAP_PRECONDITION_FREQUENCY = 3): class Muon
    of train_gpt_cwd_SOTA.py in modded-nanogpt's records/track_3_optimization (2026-06-19), with
    names of parameters to which it gives SOAP, with its gate and without; soap_h: class SOAPH of
    train_gpt_simple_soaph.py (2026-05-18); kl_soap, kl_shampoo: class KLOpt of
    yorkerlin/KL-Methods. A change of 1e-12 of one gradient changes their results by at most 3e-13.
    """

    @jax.jit
    def step(rate: Any, mu: Any, grads: Any, state: Any, params: Any) -> Any:
        updates, state = optim.chain(rate, *CASES[name](mu)).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64(True):
        params = figures(name, "at")
        state = transplanted(name, optim.chain(0.1, *CASES[name](0.9)).init(params))
        for t in range(FROM, len(FIGURES["rate"])):
            rate, mu = FIGURES["rate"][t], FIGURES["mu"][t]
            params, state = step(rate, mu, gradients(t), state, params)
        for found, wanted in zip(params, figures(name, "end"), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10)
