"""Every optimizer against a program that others wrote: how far they differ after 50 steps.

`python -m tests.references` prints the tables of docs/references.md, in about four minutes, or with
a word, such as muon, the rows of the optimizers in whose text it is. The rows against torch and the
packages for it need `make torch`. It ends with exit code 1 where a difference exceeds its bound.
"""

import contextlib
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import optim
from optim import parts, schedules
from optim.factories import learning_rate_of
from optim.parts.psgd import probes
from tests import originals, torch_cases
from tests.cosine import COSINE, STEPS, has_learning_rate, with_cosine
from tests.laws_harness import (
    NEIGHBOUR,
    TOLERANCE,
    Reference,
    compile_run,
    reference_of,
    to_host,
)
from tests.laws_table import ROWS as LAWS_ROWS
from tests.laws_table import Row as LawsRow
from tests.laws_table import public_name, tree_of
from tests.optim import (
    test_adam_parts,
    test_chain,
    test_lookahead,
    test_psgd,
    test_soap_parts,
)
from tests.programs import (
    adamc_by_the_paper,
    adan_by_the_paper,
    ademamix_by_the_authors,
    adopt_by_the_paper,
    cautious_lion,
    cautious_mask,
    cautious_mask_of_lion,
    grams_mask,
    keller_jordan,
    lamb_by_the_paper,
    laprop_by_the_authors,
    lars_by_the_paper,
    mars_by_the_paper,
    masked_adamw_by_the_paper,
    psgd_by_modded_nanogpt,
    relative_difference,
    scion_by_the_paper,
    shampoo_by_the_paper,
    soap_by_the_paper,
    spectral_conv,
    to_flax,
    train,
    uncorrected_adam_of_modded_nanogpt,
)
from tests.recorded import Recorded

BOUND = 1e-6  # what the tests against torch and the authors' programs assert
OPTAX_BOUND = TOLERANCE["float64"]  # and those of the laws, but for rows with a tolerance


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        optimizer: the call of our optimizer.
        reference: the program that it is compared with.
        measure: runs both, with constant learning rates or (True) with a cosine with warm-up; gives
            the largest difference over all steps, relative to the largest parameter of the array.
        bound: what both differences stay below; None where the definitions differ.
        remarks: what differs by definition, or why the arguments are these.
        dtype: the dtype of both.
        is_installed: whether the reference is there.
        constant: whether there is no learning rate that can follow a schedule.
    """

    optimizer: str
    reference: str
    measure: Callable[[bool], float]
    bound: float | None = BOUND
    remarks: str = ""
    dtype: str = "float64"
    is_installed: bool = True
    constant: bool = False

    def differences(self) -> list[float]:
        """Returns the difference at constant learning rates, and if there is one under a cosine."""
        return [self.measure(cosine) for cosine in ((False,) if self.constant else (False, True))]

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """All that is printed but the difference."""
        return self.optimizer, self.reference, self.dtype, self.remarks


def call(recipe: Any) -> str:
    """Writes a recipe as the call that it is: optax.sgd(0.1, momentum=0.9).

    A function without arguments stands for a value by its name.
    """
    if isinstance(recipe, list):
        return f"[{', '.join(map(call, recipe))}]"
    if not isinstance(recipe, partial):
        name = getattr(recipe, "__name__", "")
        return name.lstrip("_") if name else repr(recipe)
    arguments = [call(x) for x in recipe.args]
    arguments += [f"{name}={call(x)}" for name, x in recipe.keywords.items()]
    return f"{public_name(recipe.func)}({', '.join(arguments)})"


# ---- The authors' programs, restated in programs.py

SOAP = "SOAP's authors (arXiv:2409.11321)"
SHAMPOO = "Meta's Distributed Shampoo (arXiv:2309.06497)"
MARS = "MARS-AdamW's authors (arXiv:2411.10438)"
SCION = "Scion's authors (arXiv:2502.07529)"
C_ADAMW = "C-AdamW's authors (arXiv:2411.16085)"
C_LION = "C-Lion's authors (arXiv:2411.16085)"
LION = "Lion with C-AdamW's mask (arXiv:2411.16085)"
GRAMS = "Grams' authors (arXiv:2412.17107)"
LAMB = "LAMB's paper (arXiv:1904.00962)"
LARS = "LARS' paper (arXiv:1708.03888)"
ADAN = "Adan's authors (arXiv:2208.06677)"
RECORD_46 = "Adam of modded-nanogpt's record 46"
PSGD = "PSGD-Kron with Hyperball, of modded-nanogpt"
LAPROP = "LaProp's authors (arXiv:2002.04839)"
ADAMC = "AdamC's paper (arXiv:2506.02285)"
ADEMAMIX = "AdEMAMix's authors (arXiv:2409.03137)"
ADOPT = "ADOPT's paper (arXiv:2411.02853)"
JORDAN = "Keller Jordan's Muon (github.com/KellerJordan/Muon)"
OPTAX_MUON = "optax.contrib.muon"


def _authors(
    recipe: partial,
    reference: str,
    program: Callable[[Any, Any, Any], Any],
    shape: tuple[int, ...] = (4, 7),
    remarks: str = "",
    layout: Callable[[Any], Any] = np.asarray,
    scale: float = 1.0,
    bound: float | None = BOUND,
) -> Row:
    """Makes a row of a program that takes the first parameters, the gradients and the rates.

    Args:
        recipe: our optimizer.
        reference: whose program it is.
        program: gives the parameters after every step, in its own layout.
        shape: the shape of the parameter, in the layout of the program.
        remarks: as in `Row`.
        layout: turns a parameter from the program's layout into ours.
        scale: the size of the gradients.
        bound: as in `Row`.
    """

    def measure(cosine: bool) -> float:
        rng = np.random.default_rng(0)
        start = rng.standard_normal(shape)
        grads = scale * (rng.standard_normal((STEPS, *shape)) + 0.5)
        rates = learning_rate_of(recipe) * (COSINE if cosine else np.ones(STEPS))
        theirs = np.stack([layout(x) for x in program(start, grads, rates)])
        scheduled = with_cosine(recipe) if cosine else recipe
        tx = optim.optimizer({"all": optim.group(".*", scheduled)}).tx
        ours = train(tx, {"w": layout(start)}, [{"w": layout(g)} for g in grads])
        assert ours["w"].dtype == np.float64
        assert np.abs(theirs[-1] - theirs[0]).max() > 1e-2  # they went somewhere
        return relative_difference(ours, {"w": theirs})

    return Row(call(recipe), reference, measure, bound, remarks)


def _sum(program: Callable[..., Any], decay: float = 0.0) -> Callable[[Any, Any, Any], Any]:
    """Applies the updates of a program, and decoupled weight decay."""

    def apply(start: Any, grads: Any, rates: Any) -> Iterator[Any]:
        w = start
        for rate, update in zip(rates, program(grads, rate=rates), strict=True):
            w = (1 - rate * decay) * w + update
            yield w

    return apply


def _scion(norm: str, constrained: bool) -> Row:
    recipe = partial(optim.scion, 0.02, 3.0, 0.1, norm, constrained, eps=1e-14)
    program = partial(scion_by_the_paper, radius=3.0, alpha=0.1, norm=norm, constrained=constrained)
    return _authors(recipe, SCION, program, (5,) if norm == "bias_rms" else (4, 7))


def _optax_muon(remarks: str, theirs: dict[str, Any], **ours: Any) -> Row:
    def program(start: Any, grads: Any, rates: Any) -> Any:
        tx = optax.contrib.muon(
            lambda step: jnp.asarray(rates)[step], beta=0.9, weight_decay=0.1, **theirs
        )
        return train(tx, start, grads)

    recipe = partial(optim.muon, 0.02, 0.9, weight_decay=0.1, **ours)
    return _authors(recipe, OPTAX_MUON, program, remarks=remarks)


BF16 = "the authors orthogonalize in bfloat16 and add 1e-7 to the norm; here in float64"
ADAMW = partial(optax.adamw, learning_rate=0.03, b1=0.9, b2=0.95, weight_decay=0.1)
MASKED = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "decay": 0.1}

SOAP_WIDE = partial(optim.soap, 0.03, 0.9, 0.95, precondition_frequency=2)
_soap_wide = partial(soap_by_the_paper, b1=0.9, b2=0.95, beta=0.95, eps=1e-8, decay=0.0, every=2)
_soap_decayed = partial(
    soap_by_the_paper, b1=0.9, b2=0.95, beta=0.7, eps=1e-8, decay=0.1, every=3, after=True
)


def _soap_from_our_bases(start: Any, grads: Any, rates: Any) -> Any:
    """Gives the program the bases that we compute from the first gradient."""
    with jax.enable_x64(True):
        tx, params = SOAP_WIDE(), {"w": jnp.asarray(start)}
        bases = tx.update({"w": jnp.asarray(grads[0])}, tx.init(params), params)[1].direction
        first = [np.asarray(side["w"]) for side in (bases.left_basis, bases.right_basis)]
    return _soap_wide(start, grads, rates, bases=first)


def _half_life(step: Any) -> Any:
    return schedules.half_life(0.999, 30, 0.9)(step)


def _alpha(step: Any) -> Any:
    return optax.linear_schedule(0.0, 5.0, 30)(step)


def _psgd_with_our_draws(start: Any, grads: Any, rates: Any) -> Iterator[Any]:
    """Gives the program, which has [outputs, inputs], the random matrices that we draw."""
    with jax.enable_x64(True):
        like = jnp.zeros((1, *start.T.shape))
        drawn = [np.asarray(probes(0, t, 0, like))[0].T for t in range(len(grads))]
    states = psgd_by_modded_nanogpt(start, grads, rates, [(z, np.zeros_like(z)) for z in drawn])
    return (weights for weights, *_ in states)


SOAP_DECAYED = partial(optim.soap, 0.03, 0.9, 0.95, 0.7, weight_decay=0.1, precondition_frequency=3)
CAUTIOUS_LION = partial(optax.lion, 0.01, 0.9, 0.95, weight_decay=0.1)
AFTER = (
    "the authors decay the weight after its step, and here both are one sum; with"
    " decay_after_step=True they agree"
)
ONE_MORE = (
    "of n elements of which k are kept, the paper and its authors' Lion multiply them by"
    " n / (k + 1), and it is n / k here, as in their AdamW"
)
MASK_FIRST = (
    "the authors mask the momentum before it is orthogonalized, and here the step is masked"
)
EPS_FIRST = "the authors add eps before the second moment's bias is corrected"


# ---- The authors' own files, where they are


def _file(
    recipe: partial,
    original: originals.Original,
    make: Callable[[Any, Any, float], Any],
    remarks: str = "",
    shape: tuple[int, ...] = (6, 4),
    scale: float = 1.0,
    bound: float | None = BOUND,
) -> Row:
    """Makes a row of a file of authors, whose optimizer `make` makes; see `originals`."""
    program = original.trained(make)
    row = _authors(
        recipe, original.name, program, shape, remarks, np.transpose, scale=scale, bound=bound
    )
    return replace(row, is_installed=originals.are_there(original))


def _file_of_scion(norm: str, constrained: bool) -> Row:
    def make(m: Any, params: Any, rate: float) -> Any:
        name = "".join(word.title() for word in norm.split("_"))
        free = not constrained
        return m.Scion(params, rate, momentum=0.1, norm=name, scale=3.0, unconstrained=free)

    recipe = partial(optim.scion, 0.02, 3.0, 0.1, norm, constrained, eps=1e-14)
    return _file(recipe, originals.SCION, make, "" if norm == "sign" else "they add 1e-8 to norms")


NORMUON = partial(
    optim.chain,
    0.02,
    [partial(parts.momentum, 0.95), partial(parts.polar), partial(parts.normalize, 0.95)],
    [partial(parts.decay, 0.1)],
)
BETAS = (0.9, 0.95)
TRACK_POLAR = partial(parts.polar, [2.0, -1.5, 0.5], 12)
CONTRA_POLAR = partial(parts.polar, [2.0, -1.5, 0.5], 12, contra=0.2)
MOMENTUM = partial(parts.momentum, 0.95)
HYPERBALL = [partial(parts.match_norm)], [partial(parts.pin_radius)]
SOAP_OF_H = partial(parts.soap, 0.9, squares="gradient", first="rotate", sort=False, length="free")
KL_SOAP_OF_H = partial(parts.kl_soap, 0.9, every=1, b1=0.95, first_gram="copy", bounded_by="root")
TRACK_EPS = "they add 1e-7 to norms"


def _result(
    number: int,
    before: list[partial],
    after: list[partial],
    make: Callable[[Any, Any, float], Any],
    remarks: str = "",
    shape: tuple[int, ...] = (6, 4),
) -> Row:
    """Makes a row of a result of modded-nanogpt's optimizer track."""
    recipe = partial(optim.chain, 0.02, before, after)
    return _file(recipe, originals.TRACK[number], make, remarks, shape)


def _contra_muon(m: Any, params: Any, rate: float) -> Any:
    """Makes the Muon of a script with the constants that stand at its head."""
    m.CONTRA_MUON, m.TARGET_UW = 0.4, 0.35
    return m.Muon(params, rate)


def _adamuon(m: Any, params: Any, rate: float) -> Any:
    """Makes AdaMuon for one process, which gathers its own updates."""

    def gather(buffer: Any, own: Any, async_op: bool) -> Any:
        buffer.copy_(own.view_as(buffer))
        return SimpleNamespace(wait=lambda: None)

    m.dist = SimpleNamespace(all_gather_into_tensor=gather)
    return m.AdaMuon(params, rate, weight_decay=0.1, rank=0, world_size=1)


FILES = [
    *[
        _file(
            partial(optim.muon, 0.02, weight_decay=0.1),
            originals.MUON,
            lambda m, params, rate: m.SingleDeviceMuon(params, rate, weight_decay=0.1),
            BF16 + form,
            shape,
        )
        for shape, form in [((9, 4), ""), ((4, 9), "; the longer side is that of the inputs")]
    ],
    _file(
        NORMUON,
        originals.NORMUON,
        lambda m, params, rate: m.SingleDeviceNorMuon(params, rate, weight_decay=0.1),
        BF16,
    ),
    _file(
        partial(
            optim.chain,
            0.02,
            [
                MOMENTUM,
                partial(optax.scale_by_sign),
                partial(parts.polar),
                partial(optax.scale_by_rms, 0.95, eps_in_sqrt=False),
                partial(parts.match_rms, 0.2),
            ],
            [partial(parts.decay, 0.1)],
        ),
        originals.ADAMUON,
        _adamuon,
        TRACK_EPS,
    ),
    _file(
        partial(optim.soap, 0.03, 0.9, 0.95, 0.7, precondition_frequency=3),
        originals.SOAP,
        lambda m, params, rate: m.SOAP(
            params, rate, BETAS, 0.7, weight_decay=0.0, precondition_frequency=3
        ),
        "square matrices",
        (6, 6),
    ),
    _file(
        partial(SOAP_DECAYED, decay_after_step=True),
        originals.SOAP,
        lambda m, params, rate: m.SOAP(
            params, rate, BETAS, 0.7, weight_decay=0.1, precondition_frequency=3
        ),
        "square matrices",
        (6, 6),
    ),
    *[
        _file(
            partial(optim.mars, 0.03, 0.9, 0.95, 0.05, 1e-6, 0.1),
            originals.MARS,
            lambda m, params, rate: m.MARS(params, rate, BETAS, 1e-6, 0.1, gamma=0.05),
            f"gradients {remarks}",
            scale=scale,
        )
        for scale, remarks in [(1.0, "longer than 1, scaled down"), (0.02, "mostly shorter than 1")]
    ],
    _file(
        partial(optim.chain, 0.02, [partial(parts.kl_soap, 0.95, 0.8, 1e-6, every=2, b1=0.9)]),
        originals.KL_METHODS,
        lambda m, params, rate: m.KLOpt(
            params,
            rate,
            (0.9, 0.95),
            0.8,
            1e-6,
            weight_decay=0.0,
            precondition_frequency=2,
            using_klsoap=True,
            cast_dtype=m.torch.float64,
        ),
        "square matrices",
        (6, 6),
    ),
    _result(
        1,
        [MOMENTUM, TRACK_POLAR],
        [partial(parts.decay, 0.01)],
        lambda m, params, rate: m.Muon(params, rate, weight_decay=0.01),
        TRACK_EPS,
    ),
    _result(
        4,
        [partial(optax.scale_by_adam, 0.9, 0.95), *HYPERBALL[0]],
        HYPERBALL[1],
        lambda m, params, rate: m.AdamH(params, rate),
    ),
    _result(
        5,
        [MOMENTUM, TRACK_POLAR, *HYPERBALL[0]],
        HYPERBALL[1],
        lambda m, params, rate: m.MuonH(params, rate),
        TRACK_EPS,
    ),
    _result(
        7,
        [
            partial(parts.adam, 0.95, 0.95, 1e-10, bias_correction=False, nesterov=True),
            TRACK_POLAR,
        ],
        [partial(parts.decay, 0.0125)],
        lambda m, params, rate: m.MuonSq(params, rate, weight_decay=0.0125),
        TRACK_EPS,
    ),
    _result(
        8,
        [MOMENTUM, TRACK_POLAR, partial(parts.normalize, 0.95), *HYPERBALL[0]],
        HYPERBALL[1],
        lambda m, params, rate: m.NorMuonH(params, rate),
        TRACK_EPS,
    ),
    _result(
        9,
        [MOMENTUM, TRACK_POLAR, partial(parts.normalize, 0.95), partial(parts.floor, 0.35)],
        [],
        lambda m, params, rate: m.Muon(params, rate),
        TRACK_EPS,
    ),
    _result(
        10,
        [MOMENTUM, TRACK_POLAR, partial(parts.normalize, 0.95)],
        [partial(parts.decay, 0.025)],
        lambda m, params, rate: m.NorMuon(params, rate, weight_decay=0.025),
        TRACK_EPS,
    ),
    *[
        _result(
            number,
            [MOMENTUM, CONTRA_POLAR, partial(parts.normalize, 0.95), partial(parts.floor, 0.35)],
            [],
            _contra_muon,
            TRACK_EPS,
        )
        for number in (11, 24)
    ],
    _result(
        17,
        [MOMENTUM, partial(CONTRA_POLAR, balance=2), partial(parts.floor, 0.35)],
        [],
        lambda m, params, rate: m.Muon(params, rate),
        TRACK_EPS,
    ),
    _result(
        22,
        [TRACK_POLAR],
        [partial(parts.decay, 0.015)],
        lambda m, params, rate: m.Muon(params, rate, weight_decay=0.015, mu=0.0),
        TRACK_EPS,
    ),
    _result(
        25,
        [KL_SOAP_OF_H, *HYPERBALL[0]],
        HYPERBALL[1],
        lambda m, params, rate: m.KLSOAPH(params, rate),
        "square matrices",
        (6, 6),
    ),
    _result(
        27,
        [partial(parts.momentum, 0.95, nesterov=False), SOAP_OF_H, *HYPERBALL[0]],
        HYPERBALL[1],
        lambda m, params, rate: m.SOAPH(params, rate),
        "square matrices",
        (6, 6),
    ),
    *[
        _file_of_scion(norm, constrained)
        for norm in ("spectral", "sign", "col_norm", "row_norm")
        for constrained in (True, False)
    ],
    _file(
        partial(optim.cautious, ADAMW),
        originals.C_ADAMW,
        lambda m, params, rate: m.AdamW(params, rate, BETAS, 1e-8, 0.1),
    ),
    _file(
        partial(optim.grams, ADAMW),
        originals.GRAMS,
        lambda m, params, rate: m.Grams(params, rate, BETAS, 1e-8, 0.1),
        EPS_FIRST,
    ),
    _file(
        partial(optax.contrib.adopt, 0.02, 0.9, 0.95),
        originals.ADOPT,
        lambda m, params, rate: m.ADOPT(params, rate, BETAS),
    ),
    _file(
        partial(optax.contrib.ademamix, 0.02, 0.9, 0.99, 0.999, 5.0, weight_decay=0.1),
        originals.ADEMAMIX,
        lambda m, params, rate: m.AdEMAMix(params, rate, (0.9, 0.99, 0.999), 5.0, weight_decay=0.1),
        "without schedules",
    ),
    _file(
        partial(optim.chain, 0.02, [partial(parts.laprop, 0.9, 0.95, 1e-6)]),
        originals.LAPROP,
        lambda m, params, rate: m.LaProp(params, rate, BETAS, 1e-6),
    ),
]
OTHER_FILES = [
    _file(
        SOAP_DECAYED,
        originals.SOAP,
        lambda m, params, rate: m.SOAP(
            params, rate, BETAS, 0.7, weight_decay=0.1, precondition_frequency=3
        ),
        AFTER,
        (6, 6),
        bound=None,
    ),
    _file(
        partial(optim.cautious, CAUTIOUS_LION),
        originals.C_LION,
        lambda m, params, rate: m.Lion(params, rate, BETAS, 0.1),
        ONE_MORE,
        bound=None,
    ),
    _file(
        partial(optim.cautious, partial(optim.muon, 0.02, weight_decay=0.1)),
        originals.C_MUON,
        lambda m, params, rate: m.SingleDeviceMuon(params, rate, weight_decay=0.1),
        MASK_FIRST,
        bound=None,
    ),
]

AUTHORS = [
    _authors(
        partial(optim.muon, 0.02, weight_decay=0.1),
        JORDAN,
        _sum(keller_jordan, 0.1),
        (9, 4),
        BF16,
        to_flax,
    ),
    _authors(
        partial(optim.muon, 0.02, weight_decay=0.1, matrices="conv"),
        JORDAN,
        _sum(keller_jordan, 0.1),
        (4, 8, 3, 3),
        BF16 + "; no more outputs than inputs, where both factors are 1",
        to_flax,
    ),
    _optax_muon(
        "without Nesterov: with it optax corrects the bias of momentum and gradient",
        {"nesterov": False, "eps": 1e-15},
        nesterov=False,
    ),
    _optax_muon(
        "the same",
        {"nesterov": False, "eps": 1e-15, "consistent_rms": 0.2},
        nesterov=False,
        scale="match_rms_adamw",
    ),
    *[
        _authors(
            partial(optim.soap, 0.03, 0.9, 0.95, beta, precondition_frequency=k),
            SOAP,
            partial(
                soap_by_the_paper,
                b1=0.9,
                b2=0.95,
                beta=beta or 0.95,
                eps=1e-8,
                decay=0.0,
                every=k,
            ),
            (6, 6),
            "square matrices",
        )
        for k, beta in [(1, None), (3, 0.7)]
    ],
    _authors(SOAP_WIDE, SOAP, _soap_from_our_bases, (4, 7), "from our first bases"),
    *[
        _authors(
            partial(
                optim.shampoo,
                0.03,
                0.9,
                b2,
                1e-6,
                0.1,
                every=k,
                start=begin,
            ),
            SHAMPOO,
            partial(
                shampoo_by_the_paper,
                b1=0.9,
                b2=b2,
                eps=1e-6,
                decay=0.1,
                every=k,
                begin=begin,
            ),
            remarks=remarks,
        )
        for k, begin, b2, remarks in [
            (1, 1, 0.97, "with Adam's grafting, matrices whole"),
            (4, 2, 0.97, "the same"),
            (2, 2, 1.0, "the same; b2=1 sums, as Meta's default does"),
        ]
    ],
    *[
        _authors(
            partial(optim.mars, 0.03, 0.9, 0.95, 0.05, 1e-6, 0.1),
            MARS,
            partial(mars_by_the_paper, b1=0.9, b2=0.95, gamma=0.05, eps=1e-6, decay=0.1),
            remarks=f"the approximate variant; gradients {remarks}",
            scale=scale,
        )
        for scale, remarks in [(1.0, "longer than 1, scaled down"), (0.02, "mostly shorter than 1")]
    ],
    *[
        _scion(norm, constrained)
        for norm in ("spectral", "sign", "col_norm", "row_norm", "bias_rms")
        for constrained in (True, False)
    ],
    _authors(
        partial(optim.scion, 0.02, 3.0, norm="spectral_conv", constrained=False),
        SCION,
        _sum(spectral_conv),
        (8, 4, 3, 3),
        BF16,
        to_flax,
    ),
    _authors(
        partial(optim.cautious, ADAMW),
        C_ADAMW,
        partial(masked_adamw_by_the_paper, **MASKED, mask=cautious_mask),
    ),
    _authors(
        partial(optim.cautious, CAUTIOUS_LION),
        LION,
        partial(cautious_lion, b1=0.9, b2=0.95, decay=0.1),
    ),
    _authors(
        partial(optim.grams, ADAMW),
        GRAMS,
        partial(masked_adamw_by_the_paper, **MASKED, mask=grams_mask),
    ),
    _authors(
        partial(optax.lamb, 0.02, 0.9, 0.95, weight_decay=0.1),
        LAMB,
        partial(lamb_by_the_paper, b1=0.9, b2=0.95, eps=1e-6, decay=0.1),
    ),
    _authors(
        partial(optax.lars, 0.5, weight_decay=0.0, trust_coefficient=0.1),
        LARS,
        partial(lars_by_the_paper, trust=0.1, momentum=0.9, decay=0.0),
        remarks="without weight decay",
    ),
    _authors(
        partial(optax.contrib.adopt, 0.02, 0.9, 0.95),
        ADOPT,
        partial(adopt_by_the_paper, b1=0.9, b2=0.95, eps=1e-6),
    ),
    _authors(
        partial(optax.contrib.ademamix, 0.02, 0.9, 0.99, _half_life, _alpha, weight_decay=0.1),
        ADEMAMIX,
        partial(
            ademamix_by_the_authors,
            **{"b1": 0.9, "b2": 0.99, "b3": 0.999, "alpha": 5.0},
            **{"eps": 1e-8, "decay": 0.1, "warm_up": 30},
        ),
        remarks="half_life is schedules.half_life(0.999, 30, 0.9), alpha is"
        " optax.linear_schedule(0, 5, 30), as in their program for optax; theirs for PyTorch counts"
        " the steps of both from 1; linear_schedule computes in float32",
    ),
    _authors(
        partial(
            optim.chain,
            0.02,
            [partial(parts.adam, 0.8, 0.95, 1e-10, bias_correction=False)],
        ),
        RECORD_46,
        partial(uncorrected_adam_of_modded_nanogpt, b1=0.8, b2=0.95, eps=1e-10),
        remarks="as in its program of the optimizer track; optax.scale_by_adam always corrects the"
        " bias",
    ),
    _authors(
        partial(optim.chain, 0.02, [partial(parts.laprop, 0.9, 0.95, 1e-6)]),
        LAPROP,
        partial(laprop_by_the_authors, b1=0.9, b2=0.95, eps=1e-6),
        remarks="optax 0.2.8 has no LaProp",
    ),
    _authors(
        partial(
            optim.chain,
            0.02,
            [partial(parts.adam, 0.9, 0.95)],
            [partial(parts.decay, 0.1, peak=0.02)],
        ),
        ADAMC,
        partial(adamc_by_the_paper, b1=0.9, b2=0.95, eps=1e-8, decay=0.1),
        remarks="the decay is multiplied by learning_rate / peak",
    ),
    _authors(
        partial(
            optim.chain,
            0.03,
            [
                partial(optax.ema, 0.9),
                partial(parts.shampoo, 0.97, 1e-6, every=4, start=2),
                partial(parts.graft, partial(parts.adam, 0.9, 0.97), start=2),
            ],
            [partial(parts.decay, 0.1)],
        ),
        SHAMPOO,
        partial(shampoo_by_the_paper, b1=0.9, b2=0.97, eps=1e-6, decay=0.1, every=4, begin=2),
        remarks="as parts; tests/optim/test_shampoo_part.py has results 21 and 35 of"
        " modded-nanogpt's optimizer track",
    ),
    _authors(
        partial(
            optim.chain,
            0.02,
            [partial(optax.ema, 0.95), partial(parts.psgd), partial(parts.match_norm)],
            [partial(parts.pin_radius)],
        ),
        PSGD,
        _psgd_with_our_draws,
        remarks="with our random matrices; the program adds 1e-10 to norms",
        layout=np.transpose,
    ),
]

OTHER_AUTHORS = [
    _authors(
        SOAP_WIDE,
        SOAP,
        _soap_wide,
        (4, 7),
        "the first gradient does not span the longer side: the authors' first basis is completed by"
        " the rounding of eigh, ours is not; equal from the same first bases, as above",
        bound=None,
    ),
    _authors(
        SOAP_DECAYED,
        SOAP,
        _soap_decayed,
        (6, 6),
        AFTER,
        bound=None,
    ),
    _authors(
        partial(optim.cautious, CAUTIOUS_LION),
        C_LION,
        partial(cautious_lion, b1=0.9, b2=0.95, decay=0.1, mask=cautious_mask_of_lion),
        remarks=ONE_MORE,
        bound=None,
    ),
    _authors(
        partial(optax.adan, 0.02, weight_decay=0.1),
        ADAN,
        partial(adan_by_the_paper, b1=0.98, b2=0.92, b3=0.99, eps=1e-8, decay=0.1),
        remarks="optax 0.2.8 weighs the change of the gradient by 1 - b2 = 0.08, its authors by"
        " b2 = 0.92: no arguments make them equal; and they divide by 1 + learning_rate *"
        " weight_decay",
        bound=None,
    ),
    _authors(
        partial(optax.lars, 0.5, weight_decay=0.1, trust_coefficient=0.1),
        LARS,
        partial(lars_by_the_paper, trust=0.1, momentum=0.9, decay=0.1),
        remarks="optax divides by the norm of the gradient with its weight decay, the paper by the"
        " sum of both norms",
        bound=None,
    ),
]


# ---- torch.optim and packages for PyTorch, with the cases of torch_cases.py


def _torch(name: str, case: torch_cases.Case, bound: float | None) -> Row:
    return Row(
        call(case.ours),
        f"{case.package}.{name}",
        partial(torch_cases.difference, case),
        bound,
        case.why,
        "bfloat16 inside" if case.bfloat16 else "float64",
        case.is_installed,
        case.constant,
    )


TORCH = [_torch(name, case, BOUND) for name, case in torch_cases.SAME.items()]
OTHER_TORCH = [_torch(name, case, None) for name, case in torch_cases.DIFFERENT.items()]


# ---- optax alone: the rows of the laws' table that are optax's


def against_optax(row: LawsRow, cosine: bool) -> float:
    """Trains a row as one group of three for 50 steps, with its bare factory beside it.

    As in the tests of the laws, the bare optimizer keeps its own state for all steps and computes
    each step from our last parameters: the loss would otherwise amplify what rounding differs.

    Args:
        row: a row of the table of the laws.
        cosine: whether learning rates follow a cosine with warm-up, in both: optax evaluates the
            schedule by itself.

    Returns:
        The largest difference of the group's parameters, relative to the largest parameter.
    """
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
        start = tree_of(row, "float64")
        optimizer = optim.optimizer(
            {
                "own": optim.group("own/.*", with_cosine(row.recipe) if cosine else row.recipe),
                "frozen": optim.group("frozen/.*", partial(optim.frozen)),
                "other": optim.group(".*", NEIGHBOUR),
            }
        )
        run = compile_run(optimizer, row)
        params = to_host(start)
        reference = Reference(row, params, _with_own_schedules if cosine else reference_of)
        carry = jax.device_put((start, optimizer.init(start)), jax.devices()[0])
        ours, theirs = [], []
        for _ in range(STEPS):
            bare = reference.step(params, 0)  # at step 0 the schedules of the laws have not moved
            carry = run(carry, np.int32(1))
            params = to_host(carry[0])
            ours.append(params["own"])
            theirs.append(to_host(bare["own"]))
        over_steps = partial(jax.tree.map, lambda *steps: np.stack(steps))
        return relative_difference(over_steps(*ours), over_steps(*theirs))


def _with_own_schedules(
    recipe: partial, factors: Any, fixed: tuple[str, ...] = ()
) -> optax.GradientTransformationExtraArgs:
    """Calls the factories with schedules, as `reference_of` does with numbers."""
    return reference_of(with_cosine(recipe), factors, fixed)


# Rounding that float64 does not take away: a bound for 50 steps, and the reason.
FLOAT32 = "optax computes a function of the step number in float32"
ROUNDED = {
    "optax.adafactor (factored)": (1e-7, FLOAT32),
    "optax.adafactor": (1e-7, FLOAT32),
    "optax.contrib.madgrad": (1e-7, FLOAT32),
    "optax.adam (bfloat16 momentum)": (2e-3, "the momentum is rounded to bfloat16"),
}

# Rows that differ under a cosine only: optax evaluates the schedule at another step than the run's.
_NEXT = "alone, optax 0.2.8 weighs a step in the average by the rate of the next step"
_PERTURBED = "alone, a schedule counts the steps of the perturbation, or begins again with each"
_ACTED = "alone, a schedule counts only the steps that were taken"
OTHER_STEPS = {
    "optax.contrib.schedule_free": _NEXT,
    "optax.contrib.schedule_free_adamw": _NEXT,
    "optax.contrib.schedule_free_sgd": _NEXT,
    "optax.contrib.sam (transparent)": _PERTURBED,
    "optax.contrib.sam (opaque)": _PERTURBED,
    "optax.MultiSteps": _ACTED,
    "optax.conditionally_transform": _ACTED,
    "optax.conditionally_mask": _ACTED,
}
# They refuse a schedule by themselves.
NUMBERS_ONLY = ("optax.optimistic_adam", "optax.sm3")


def _optax(row: LawsRow) -> Row:
    bound, why = ROUNDED.get(row.name, (OPTAX_BOUND, ""))
    constant = not has_learning_rate(row.recipe) or "learning_rate" in row.fixed
    if row.name in NUMBERS_ONLY:
        constant, why = True, "alone, it takes no schedule"
    if row.name in OTHER_STEPS:
        bound, why = None, OTHER_STEPS[row.name]
    measure = partial(against_optax, row)
    return Row(row.name, "optax alone", measure, bound, why, constant=constant)


# A name with "optim." in it has one of ours inside or around it.
_ROWS = [
    _optax(row) for row in LAWS_ROWS if row.name.startswith("optax.") and "optim." not in row.name
]
OPTAX = [row for row in _ROWS if row.bound is not None]
DIFFERENT = [
    *OTHER_FILES,
    *OTHER_AUTHORS,
    *OTHER_TORCH,
    *(row for row in _ROWS if row.bound is None),
]


# ---- The page

HEADINGS = {
    "The authors' own files": FILES,
    "The authors' programs, and Muon of optax": AUTHORS,
    "torch.optim and packages for PyTorch": TORCH,
    "Other definitions": DIFFERENT,
    "optax alone": OPTAX,
}
ALL = [row for rows in HEADINGS.values() for row in rows]
RECORDED = {
    f"{module.__name__.rpartition('.')[2]}: {name}": case
    for module in (test_chain, test_soap_parts, test_adam_parts, test_psgd, test_lookahead)
    for name, case in module.RECORDED.items()
}
RECORDED_HEADING = "Chains and lookaheads, against recorded results"
PACKAGES = ("torch", "prodigyopt", "schedulefree", "pytorch_optimizer")
BEGIN, END = "<!-- references: begin -->", "<!-- references: end -->"


def markdown(faults: list[str], word: str = "") -> Iterator[str]:
    """Measures all rows; gives the lines of the page's tables.

    Args:
        faults: a sentence is added for each difference that exceeds its bound.
        word: only the optimizers in whose text it is.
    """
    versions = {"jax": jax.__version__, "optax": optax.__version__, "NumPy": np.__version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    yield BEGIN
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"Measured on a CPU ({platform.machine()}) with {listed}."
    for heading, rows in HEADINGS.items():
        rows = [row for row in rows if row.is_installed and word in row.cells[0]]
        if not rows:
            continue
        yield f"\n## {heading}\n"
        yield "| optimizer | reference | dtype | constant | cosine | remarks |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in rows:
            differences = row.differences()
            numbers = [f"{x:.0e}" if x else "0" for x in differences]
            optimizer, reference, dtype, remarks = row.cells
            constant, cosine = (*numbers, "-")[:2]
            yield f"| `{optimizer}` | {reference} | {dtype} | {constant} | {cosine} | {remarks} |"
            if row.bound is not None and not all(x < row.bound for x in differences):
                shown = ", ".join(numbers)
                faults.append(f"{optimizer} against {reference}: {shown}, not below {row.bound}")
    cases = {name: case for name, case in RECORDED.items() if word in recorded_call(case)}
    if cases:
        yield from _recorded(cases, faults)
    yield END


def recorded_call(case: Recorded) -> str:
    """Writes what a recorded case compares as calls, with "and" between them."""
    given = case.optimizer
    return " and ".join(map(call, given)) if isinstance(given, list) else call(given)


def _recorded(cases: Mapping[str, Recorded], faults: list[str]) -> Iterator[str]:
    """Measures recorded cases; gives the lines of their table."""
    yield f"\n## {RECORDED_HEADING}\n"
    yield "| ours | program | test | bound | difference | remarks |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, case in cases.items():
        difference = case.measure()
        cells = (*recorded_cells(name, case), f"{difference:.0e}" if difference else "0")
        ours, program, test, bound, remarks, number = cells
        yield f"| `{ours}` | {program} | {test} | {bound} | {number} | {remarks} |"
        if not difference < case.bound:
            faults.append(f"{ours} against {program}: {number}, not below {bound}")


def recorded_cells(name: str, case: Recorded) -> tuple[str, str, str, str, str]:
    """Returns all that is printed of a recorded case but the difference."""
    return recorded_call(case), case.program, name, f"{case.bound:.0e}", case.remarks


def main() -> int:
    """Prints the tables; returns 1 where a difference exceeds its bound."""
    faults: list[str] = []
    for line in markdown(faults, *sys.argv[1:2]):
        print(line, flush=True)
    if not all(row.is_installed for rows in HEADINGS.values() for row in rows):
        text = (
            "Rows of packages and files that are not here are left out: `make torch` and `make"
            " originals` add them."
        )
        print(text, file=sys.stderr)
    for fault in faults:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())
