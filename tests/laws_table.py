"""The table of optimizers that the laws are tested on: a row an optimizer, a column a law.

`python -m tests.reference_pages` writes it into docs/laws.md. A public factory of optax that has
no row here, no row that contains it, and no reason in `NOT_ROWS` fails
`test_every_factory_has_a_row`.
"""

import ast
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import optim
from optim import checks, parts
from optim.factories import recipes_within
from tests import short
from trainer.cli.optimizer_families import FAMILIES, PIECES

contrib = optax.contrib

LAWS = {
    1: "avals",
    2: "float32 inside",
    3: "one compilation",
    4: "schedules",
    5: "groups",
    6: "loops",
    7: "shardings",
    8: "restore",
    9: "evaluation",
}
SEARCH = ("value", "grad", "value_fn")
DTYPES = ("float32", "bfloat16", "float16", "mixed", "float64")
# Layout of devices -> the laws that its tests ask for, and the ways to call a step there.
LAYOUTS = {
    "one device": (1, 2, 3, 4, 5, 6, 8, 9),
    "four devices": (7,),
    "explicit axes": (4, 7),
}
HOWS = {
    "four devices": ("jit", "shard_map", "parts"),
    "explicit axes": ("8, jit", "4x2, jit", "4x2, eager"),
}


@dataclass(frozen=True, eq=False)
class Row:
    """An optimizer with its arguments.

    Attributes:
        name: as a user finds it, with what is special about the arguments in brackets.
        recipe: a partial of its factory.
        params: which parameters it is given: "all" (a matrix, a vector and a scalar), "no scalar",
            "matrices" (a matrix, and two of them stacked) or "complex".
        empty: whether it is also given a parameter without elements.
        needs: the extra arguments that plain optax needs.
        per_example: whether its gradients have a leading axis of examples.
        tolerance: how far it may be from its reference, where rounding inside it counts.
        fixed: float arguments that cannot follow a schedule.
        lookahead: a partial of the factory of a lookahead that wraps all groups, or None.
        readout: the same of a readout.
        exempt: law, or (law, dtype) -> why it cannot hold.
        notes: what the table says about it.
    """

    name: str
    recipe: partial
    params: str = "all"
    empty: bool = True
    needs: tuple[str, ...] = ()
    per_example: bool = False
    tolerance: float = 0.0
    fixed: tuple[str, ...] = ()
    lookahead: partial | None = None
    readout: partial | None = None
    exempt: Mapping[Any, str] = field(default_factory=dict)
    notes: str = ""

    def why_not(self, law: int, dtype: str) -> str | None:
        return self.exempt.get(law) or self.exempt.get((law, dtype))

    @property
    def family(self) -> str:
        """What `family_of` returns for the factory."""
        return family_of(public_name(self.recipe.func))


def family_of(name: str) -> str:
    """Returns the family in which `python -m trainer optimizers` lists a name.

    Chains, of which there are many, are families of their own, and parts of one are another.
    """
    tables = (*FAMILIES.items(), *PIECES.items())
    families = {each: family for family, names in tables for each in names}
    return name if name.endswith(".chain") else families.get(name, name.partition(".")[0])


OPTIONS = tuple(f.name for f in fields(Row))[2:]


def _row(factory: Callable[..., Any], *args: Any, note: str = "", **kwargs: Any) -> Row:
    options = {k: kwargs.pop(k) for k in OPTIONS if k in kwargs}
    name = public_name(factory) + (f" ({note})" if note else "")
    return Row(name, partial(factory, *args, **kwargs), **options)


def _chain(learning_rate: float = 0.02, **kwargs: Any) -> Row:
    return _row(optim.chain, learning_rate=learning_rate, **kwargs)


def public_name(factory: Callable[..., Any]) -> str:
    """Finds the name by which a user reaches a factory (optax.nadam is itself a partial)."""
    for package in (optim, parts, optax, contrib):
        for name, thing in vars(package).items():
            if thing is factory and not name.startswith("_"):
                return f"{package.__name__}.{name}"
    raise LookupError(f"{factory} is not a public name of optim, its parts, optax or contrib.")


def _sgd(learning_rate: float = 0.1, **kwargs: Any) -> partial:
    return partial(optax.sgd, learning_rate=learning_rate, **kwargs)


def _adam(learning_rate: float = 0.05) -> partial:
    return partial(optax.adam, learning_rate=learning_rate)


def _matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.ndim(x) == 2, params)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda x: "a" if jnp.ndim(x) == 2 else "b", params)


def _norm(updates: Any) -> Any:
    return optax.tree.norm(updates)


def _halve(updates: Any, params: Any = None) -> Any:
    return jax.tree.map(lambda u: 0.5 * u, updates)


def _is_late(step: Any, *_: Any, **__: Any) -> Any:
    return step > 1


ROWS = [
    _row(optax.adabelief, learning_rate=0.02),
    _row(optax.adadelta, learning_rate=1.0, weight_decay=0.01),
    _row(
        optax.adafactor,
        learning_rate=0.05,
        min_dim_size_to_factor=2,
        tolerance=1e-8,
        note="factored",
    ),
    _row(optax.adafactor, learning_rate=0.05, momentum=0.9, weight_decay_rate=1e-3, tolerance=1e-8),
    _row(optax.adagrad, learning_rate=0.1, fixed=("initial_accumulator_value",)),
    _row(optax.adam, learning_rate=0.05),
    _row(
        optax.adam,
        learning_rate=0.05,
        mu_dtype="bfloat16",
        tolerance=2e-3,
        note="bfloat16 momentum",
    ),
    _row(optax.adamax, learning_rate=0.05),
    _row(optax.adamaxw, learning_rate=0.05),
    _row(optax.adamw, learning_rate=0.05, weight_decay=0.1),
    _row(optax.adamw, learning_rate=0.05, weight_decay=0.1, mask=_matrices, note="masked decay"),
    _row(
        optax.adan,
        learning_rate=0.05,
        weight_decay=0.01,
        notes="0.2.8 is not its authors' Adan, see docs/references.md",
    ),
    _row(optax.amsgrad, learning_rate=0.05),
    _row(optax.fromage, learning_rate=0.05),
    _row(optax.lamb, learning_rate=0.05, weight_decay=0.01),
    _row(optax.lars, learning_rate=0.5, weight_decay=0.01),
    _row(optax.lbfgs, memory_size=3, needs=SEARCH, note="zoom"),
    _row(
        optax.lbfgs,
        memory_size=3,
        linesearch=partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=10),
        needs=SEARCH,
        note="backtracking",
    ),
    _row(optax.lbfgs, learning_rate=0.1, memory_size=3, linesearch=None, note="fixed step"),
    _row(optax.lion, learning_rate=0.02, weight_decay=0.01),
    _row(optax.nadam, learning_rate=0.05),
    _row(optax.nadamw, learning_rate=0.05),
    _row(optax.noisy_sgd, learning_rate=0.05, key=7),
    _row(optax.novograd, learning_rate=0.05, weight_decay=0.01),
    _row(optax.optimistic_adam, learning_rate=0.05, optimism=0.05),
    _row(optax.optimistic_adam_v2, learning_rate=0.05),
    _row(optax.optimistic_gradient_descent, learning_rate=0.05),
    _row(optax.polyak_sgd, max_learning_rate=0.5, needs=("value",)),
    _row(optax.radam, learning_rate=0.05),
    _row(
        optax.rmsprop,
        learning_rate=0.02,
        centered=True,
        momentum=0.9,
        fixed=("initial_scale",),
    ),
    _row(optax.rprop, learning_rate=0.02, fixed=("learning_rate",)),
    _row(optax.sgd, learning_rate=0.1, momentum=0.9, nesterov=True),
    _row(optax.sign_sgd, learning_rate=0.02),
    _row(optax.signum, learning_rate=0.02),
    _row(optax.sm3, learning_rate=0.1, params="no scalar", empty=False),
    _row(optax.yogi, learning_rate=0.05),
    # Line searches and the like by themselves.
    _row(
        optax.chain,
        _sgd(1.0),
        partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=10),
        needs=SEARCH,
        note="sgd, backtracking line search",
    ),
    _row(
        optax.chain,
        _sgd(1.0),
        partial(optax.scale_by_backtracking_linesearch, max_backtracking_steps=10, store_grad=True),
        needs=SEARCH,
        note="sgd, backtracking line search, store_grad",
    ),
    _row(
        optax.chain,
        _sgd(1.0),
        partial(optax.scale_by_zoom_linesearch, max_linesearch_steps=10),
        needs=SEARCH,
        note="sgd, zoom line search",
    ),
    _row(contrib.sophia, learning_rate=0.02, update_interval=2, needs=("obj_fn",)),
    _row(
        contrib.sam,
        optimizer=_sgd(momentum=0.9),
        adv_optimizer=partial(optax.chain, partial(contrib.normalize), _sgd(0.05)),
        note="transparent",
    ),
    _row(
        contrib.sam,
        optimizer=_sgd(momentum=0.9),
        adv_optimizer=partial(optax.chain, partial(contrib.normalize), _sgd(0.05)),
        opaque_mode=True,
        needs=("grad_fn",),
        note="opaque",
    ),
    # What evaluates at other parameters than it trains.
    _row(optax.lookahead, fast_optimizer=_adam(), sync_period=2, slow_step_size=0.5),
    _row(
        contrib.schedule_free,
        base_optimizer=partial(optax.scale_by_learning_rate, 0.1),
        learning_rate=0.1,
        fixed=("b1",),
    ),
    _row(contrib.schedule_free_adamw, learning_rate=0.05, weight_decay=0.01, fixed=("b1",)),
    _row(contrib.schedule_free_sgd, learning_rate=0.1, fixed=("b1",)),
    # The rest of contrib.
    _row(contrib.acprop, learning_rate=0.02),
    _row(contrib.ademamix, learning_rate=0.02, weight_decay=0.01),
    _row(contrib.simplified_ademamix, learning_rate=0.005),
    _row(contrib.adopt, learning_rate=0.02),
    _row(contrib.cocob, learning_rate=1.0, fixed=("eps",)),
    _row(contrib.dadapt_adamw, learning_rate=1.0, fixed=("estim_lr0",)),
    _row(contrib.dog, learning_rate=1.0),
    _row(contrib.dowg, learning_rate=1.0, fixed=("eps",)),
    _row(
        contrib.dpsgd,
        learning_rate=0.1,
        l2_norm_clip=1.0,
        noise_multiplier=0.1,
        seed=3,
        per_example=True,
    ),
    _row(contrib.galore, learning_rate=0.02, rank=2, update_proj_gap=2),
    _row(contrib.madgrad, learning_rate=0.02),
    _row(contrib.mechanize, base_optimizer=_sgd(1.0), fixed=("s_init",)),
    _row(contrib.momo, learning_rate=0.5, needs=("value",), fixed=("lower_bound",)),
    _row(contrib.momo_adam, learning_rate=0.02, needs=("value",), fixed=("lower_bound",)),
    _row(contrib.muon, learning_rate=0.02, empty=False),
    _row(contrib.prodigy, learning_rate=1.0, fixed=("estim_lr0",)),
    _row(contrib.split_real_and_imaginary, inner=_adam(), params="complex"),
    _row(
        optax.chain,
        _sgd(),
        partial(contrib.reduce_on_plateau, factor=0.5, patience=1),
        needs=("value",),
        fixed=("factor", "rtol", "atol"),
        notes="factor, rtol and atol are compared in Python and cannot follow schedules",
        note="sgd, reduce_on_plateau",
    ),
    # Blocks that no optimizer above contains, and wrappers.
    _row(
        optax.chain,
        partial(optax.zero_nans),
        partial(optax.clip, max_delta=1.0),
        partial(optax.clip_by_block_rms, threshold=0.5),
        partial(optax.clip_by_global_norm, max_norm=0.5),
        partial(optax.adaptive_grad_clip, clipping=0.1),
        partial(optax.centralize),
        _sgd(),
        note="clips, sgd",
    ),
    _row(
        optax.chain,
        partial(optax.normalize_by_update_norm),
        partial(optax.scale_by_param_block_norm),
        partial(optax.scale_by_param_block_rms),
        partial(optax.ema, decay=0.9),
        partial(optax.apply_every, k=2),
        partial(optax.identity),
        partial(optax.scale, step_size=-0.1),
        partial(optax.keep_params_nonnegative),
        note="scales, ema",
    ),
    _row(optax.apply_if_finite, inner=_adam(), max_consecutive_errors=3),
    _row(optax.MultiSteps, opt=_adam(), every_k_schedule=2),
    _row(optax.flatten, inner=_adam()),
    _row(optax.masked, inner=_adam(), mask=_matrices),
    _row(optax.conditionally_transform, inner=_adam(), should_transform_fn=_is_late),
    _row(optax.conditionally_mask, inner=_adam(), should_transform_fn=_is_late),
    _row(
        optax.partition,
        transforms={True: _adam(), False: _sgd()},
        param_labels=_matrices,
    ),
    _row(optax.named_chain, ("adam", _adam()), ("scale", partial(optax.scale, step_size=0.5))),
    _row(
        optax.multi_transform,
        transforms={"a": _adam(), "b": _sgd()},
        param_labels=_labels,
        note="multi_transform",
    ),
    _row(
        optax.chain,
        partial(optax.snapshot, measure_name="norm", measure=_norm),
        partial(optax.stateless, _halve),
        partial(optax.stateless_with_tree_map, lambda update, param: 0.5 * update),
        _sgd(),
        note="measures, sgd",
    ),
    _row(
        optax.chain,
        partial(optax.scale_by_distance_over_gradients),
        partial(optax.scale_by_learning_rate, 1.0),
        params="no scalar",
        fixed=("reps_rel",),
        note="distance over gradients",
    ),
    # Ours.
    _row(optim.muon, learning_rate=0.02, weight_decay=0.01, params="matrices"),
    _row(optim.scion, learning_rate=0.02, params="matrices"),
    _row(optim.soap, learning_rate=0.02, precondition_frequency=2, params="matrices"),
    _row(optim.shampoo, learning_rate=0.02, every=2, params="matrices"),
    _chain(
        before=[
            partial(parts.momentum),
            partial(parts.polar),
            partial(parts.normalize),
            partial(parts.match_norm),
        ],
        after=[partial(parts.pin_radius)],
        params="matrices",
        note="NorMuonH",
    ),
    _chain(
        before=[
            partial(parts.momentum),
            partial(parts.polar, contra=0.2, balance=2),
            partial(parts.normalize),
            partial(parts.floor, 0.35),
        ],
        params="matrices",
        note="Aurora",
    ),
    _chain(
        before=[
            partial(parts.momentum, nesterov=False),
            partial(parts.polar, [2.0, -1.5, 0.5], 3, norm="gram"),
            partial(parts.radial_brake, 0.5),
            partial(parts.floor, 0.4, by="output"),
        ],
        after=[partial(parts.cautious_decay, 0.1, around=partial(parts.pin_radius, radial=True))],
        params="matrices",
        note="brake, floor, cautious decay around a pin",
    ),
    _chain(
        before=[
            partial(parts.momentum_mixture, [0.9, 0.99], [0.6, 0.4]),
            partial(parts.polar),
            partial(parts.match_rms),
        ],
        after=[partial(parts.pin_radius, "initial")],
        params="matrices",
        note="mixture of means, RMS, initial norm",
    ),
    _chain(
        before=[
            partial(parts.momentum),
            partial(parts.trust_gate, around=partial(parts.soap, every=2), floor=0.4),
            partial(parts.polar),
        ],
        params="matrices",
        note="SOAP-Muon behind a gate",
    ),
    _chain(
        before=[
            partial(parts.momentum, nesterov=False),
            partial(
                parts.soap,
                squares="gradient",
                first="rotate",
                sort=False,
                length="free",
                sides="shorter",
            ),
            partial(parts.match_norm),
        ],
        after=[partial(parts.pin_radius)],
        params="matrices",
        note="one-sided SOAP-H",
    ),
    _chain(
        before=[partial(parts.soap, b1=0.9, every=2, first="skip", length="free")],
        after=[partial(parts.decay, 0.1)],
        params="matrices",
        note="SOAP as a part",
    ),
    _chain(
        before=[partial(parts.momentum, nesterov=False), partial(parts.kl_soap, every=2)],
        params="matrices",
        fixed=("first_value",),
        note="KL-SOAP",
        notes="first_value sets the first state and cannot follow a schedule",
    ),
    _chain(
        before=[
            partial(parts.kl_soap, every=2, b1=0.95, first_gram="copy", bounded_by="root"),
            partial(parts.match_norm),
        ],
        after=[partial(parts.pin_radius)],
        params="matrices",
        fixed=("first_value",),
        note="KL-SOAP-H",
        notes="first_value sets the first state and cannot follow a schedule",
    ),
    _chain(
        before=[partial(parts.momentum, nesterov=False), partial(parts.kl_shampoo, every=2)],
        params="matrices",
        fixed=("first_value",),
        note="KL-Shampoo",
        notes="first_value sets the first state and cannot follow a schedule",
    ),
    _chain(
        before=[
            partial(optax.ema, 0.9),
            partial(parts.shampoo, 0.9, every=2),
            partial(parts.graft, partial(parts.adam, 0.9, 0.9), start=2),
        ],
        after=[partial(parts.decay, 0.1)],
        params="matrices",
        note="parts.shampoo grafted onto Adam",
    ),
    _chain(
        before=[
            partial(
                parts.shampoo,
                0.9,
                every=2,
                b1=0.9,
                graft=partial(parts.adam, None, 0.9, squares="gradient"),
            )
        ],
        params="matrices",
        note="parts.shampoo that grafts its mean onto Adam",
    ),
    _chain(
        before=[
            partial(
                parts.shampoo, 1.0, eps=None, exponent=0.4, tolerance=1e-6, sides="shorter", start=1
            )
        ],
        params="matrices",
        note="parts.shampoo, one-sided pseudo-inverses of sums",
    ),
    _chain(
        before=[partial(optax.scale_by_adam), partial(optax.add_decayed_weights, 0.1)],
        note="adam, decay",
    ),
    _chain(
        before=[partial(parts.adam, bias_correction=False)],
        after=[partial(parts.decay, 0.1, peak=0.02)],
        note="parts.adam without bias correction, corrected decay",
    ),
    _chain(
        before=[partial(parts.momentum), partial(parts.polar, scale="match_rms_adamw")],
        after=[partial(parts.decay, 0.1), partial(parts.qk_clip)],
        params="matrices",
        needs=("observations",),
        note="MuonClip",
    ),
    _chain(
        before=[partial(parts.adam, nesterov=True)],
        after=[partial(parts.decay, 0.1)],
        note="parts.adam with Nesterov, decay",
    ),
    _chain(before=[partial(parts.laprop)], note="parts.laprop"),
    _chain(
        learning_rate=1.0,
        before=[partial(parts.prodigy, weight_decay=0.1)],
        fixed=("estim_lr0",),
        note="parts.prodigy",
    ),
    _chain(
        before=[
            partial(optax.ema, 0.9),
            partial(parts.psgd, precond_lr=0.3),
            partial(parts.match_norm),
        ],
        after=[partial(parts.pin_radius)],
        params="matrices",
        note="parts.psgd of momentum, Hyperball",
    ),
    _chain(
        before=[
            partial(parts.momentum),
            partial(parts.psgd, precond_lr=0.3, init_scale=1.0, whiten="gradient", seed=1),
        ],
        params="matrices",
        note="parts.psgd of the gradient",
    ),
    _chain(
        before=[
            partial(parts.psgd, precond_lr=0.1, geometry="Q0.5EQ1.5", damping=1e-6, bound_decay=0.5)
        ],
        params="matrices",
        note="parts.psgd in the geometry Q0.5EQ1.5",
    ),
    _row(optim.mars, learning_rate=0.02, weight_decay=0.01),
    _row(optim.cautious, base_optimizer=_adam(), weight_decay=1e-3),
    _row(
        optim.grams,
        base_optimizer=partial(optax.adamw, learning_rate=0.05, weight_decay=0.1),
    ),
    _row(
        contrib.schedule_free,
        partial(optim.muon, learning_rate=0.02),
        learning_rate=0.02,
        params="matrices",
        fixed=("b1",),
        note="optim.muon",
    ),
    _row(
        contrib.schedule_free,
        partial(
            optim.chain,
            learning_rate=0.02,
            before=[partial(parts.polar), partial(parts.normalize), partial(parts.match_norm)],
        ),
        learning_rate=0.02,
        params="matrices",
        fixed=("b1",),
        note="optim.chain",
    ),
    _row(
        optax.adamw,
        learning_rate=0.05,
        lookahead=partial(optim.ema_nesterov, 0.5, decay=0.6, start=1, stop=4, scheduled_by="own"),
        readout=partial(optim.weight_ema, 3.0, start=2, stop=5, blend=0.6, exclude="own/bias"),
        note="optim.ema_nesterov, optim.weight_ema",
    ),
    _row(
        optim.muon,
        learning_rate=0.02,
        lookahead=partial(optim.outer_nesterov, 0.7, momentum=0.6, every=2),
        readout=partial(optim.weight_ema, 2.5),
        params="matrices",
        note="optim.outer_nesterov, optim.weight_ema",
    ),
]

# The rows whose updates outside of jit are tested on explicit axes, which takes longest there: one
# of each kind of state, parameters and further arguments. `make laws` tests all of them.
EAGER = [
    row
    for row in ROWS
    if os.environ.get("LAWS") == "all"
    or row.name
    in (
        *("optax.adamw", "optax.adafactor (factored)", "optax.noisy_sgd", "optax.polyak_sgd"),
        *("optax.chain (sgd, backtracking line search)", "optax.chain (sgd, reduce_on_plateau)"),
        *("optax.lookahead", "optax.MultiSteps", "optax.conditionally_mask", "optax.partition"),
        *("optax.contrib.sophia", "optax.contrib.sam (opaque)", "optax.contrib.dpsgd"),
        *("optax.contrib.schedule_free_adamw", "optax.contrib.prodigy", "optax.contrib.galore"),
        *("optax.contrib.split_real_and_imaginary", "optim.muon", "optim.shampoo", "optim.mars"),
        *("optim.cautious", "optax.adamw (optim.ema_nesterov, optim.weight_ema)"),
    )
]


@dataclass(frozen=True)
class Check:
    """A row of the table in one layout of devices and one dtype; it is tested on several laws."""

    row: Row
    layout: str
    dtype: str

    @property
    def laws(self) -> tuple[int, ...]:
        return tuple(law for law in LAYOUTS[self.layout] if not self.row.why_not(law, self.dtype))


def _checks() -> Iterator[Check]:
    """Yields all checks; first those that represent their family well."""
    # Those with a way "eager", ours before others.
    first = sorted(ROWS, key=lambda row: (row not in EAGER, not row.name.startswith("optim.")))
    for number, row in enumerate(first):
        yield from (Check(row, layout, DTYPES[0]) for layout in HOWS)
        start = number % len(DTYPES)  # so that each dtype is the first one of some rows
        for dtype in (*DTYPES[start:], *DTYPES[:start]):
            yield Check(row, "one device", dtype)


CHECKS = list(_checks())


def _shown() -> set[Row]:
    """Returns the chains with a part that no row before them has, and all rows of other kinds."""
    shown: set[Row] = set()
    known: set[Any] = set()
    for row in ROWS:
        used = {recipe.func for recipe in recipes_within(row.recipe)}
        if optim.chain not in used or not used <= known:
            shown.add(row)
        known |= used
    return shown


# These on one device; and each pair of a family, a layout and a dtype, with all the laws and ways
# of the layout.
_SHOWN = _shown()
SHORT = short.covering(
    CHECKS,
    pairs=[lambda x: x.row.family, lambda x: x.layout, lambda x: x.dtype],
    each=[lambda x: x.row if x.layout == "one device" and x.row in _SHOWN else None],
)


def marks(row: Row, layout: str, dtype: str = DTYPES[0]) -> Any:
    """Returns the marks of the tests of a row: `long`, unless the check is one of `SHORT`."""
    return () if Check(row, layout, dtype) in SHORT else pytest.mark.long


def case_name(row: Row, how: str) -> str:
    """Returns the name that a row has with a way to call a step, in tests and on command lines."""
    return f"{row.name}-{how}"


def ways(layout: str) -> list[Any]:
    """Returns the values of a test's arguments `row` and `how`, for a layout of several devices.

    Of the short checks, each family has one way to call a step, and each way occurs.
    """
    every = [
        (row, how) for row in ROWS for how in HOWS[layout] if "eager" not in how or row in EAGER
    ]
    quick = short.covering(
        [case for case in every if not marks(case[0], layout)],
        pairs=[lambda case: case[0].family],
        each=[lambda case: case[1]],
    )
    return [
        pytest.param(
            row,
            how,
            id=case_name(row, how),
            marks=() if (row, how) in quick else pytest.mark.long,
        )
        for row, how in every
    ]


# What no law can be kept with: the row, and the words of the error that the user gets.
REFUSED = [
    (
        _row(
            optax.chain,
            partial(optax.monitor, measures={"norm": _norm}),
            _sgd(),
            note="monitor, sgd",
            notes="its state is empty at first and grows at the first step",
        ),
        "changed the structure of its state",
    ),
    (
        _row(optax.sm3, learning_rate=0.1, notes="refuses parameters without axes", note="scalars"),
        "optax.sm3 cannot update the group 'own'",
    ),
    (
        _row(
            optax.chain,
            partial(optax.scale_by_distance_over_gradients),
            partial(optax.scale_by_learning_rate, 1.0),
            fixed=("reps_rel",),
            note="distance over gradients, scalars",
            notes="gives updates of shape (1,) for parameters without axes",
        ),
        r"an update of shape \(1,\) for the parameter own/scale of shape \(\)",
    ),
]

NOT_ROWS = {
    "optim.frozen": "moves nothing; it stands in every run, as the third group",
    "optax.freeze": "takes a tree of booleans; optim.frozen() freezes a group",
    "optax.selective_transform": "takes a tree of booleans, as freeze",
    "optax.inject_hyperparams": "makes factories; here every float takes a schedule without it",
    "optax.inject_stateful_hyperparams": "makes factories, as inject_hyperparams",
    "optax.set_to_zero": "is what optim.frozen() returns",
    "optax.measure_with_ema": "a measurement for optax.monitor, which is refused",
    "optax.matrix_inverse_pth_root": "a function of matrices",
    "optax.sigmoid_binary_cross_entropy": "a loss",
    "optax.update_infinity_moment": "a function of moments",
    "optax.update_moment_per_elem_norm": "a function of moments",
    "optax.contrib.schedule_free_eval_params": "what Optimizer.eval_params calls",
}


def unclassified() -> list[str]:
    """Lists the factories of the installed optax that the tables do not mention.

    A factory is mentioned if it is in a row, is called by one, or is in `NOT_ROWS`.
    """
    rows = ROWS + [row for row, _ in REFUSED]
    inside = [recipe.func for row in rows for recipe in recipes_within(row.recipe)]
    called = [function for factory in inside for function in functions_called(factory)]
    known = {id(function) for function in (*inside, *called)}
    return [
        name for name, function in factories() if id(function) not in known and name not in NOT_ROWS
    ]


def functions_called(factory: Callable[..., Any]) -> Iterator[Any]:
    """Finds what the source of a function calls: the objects, because a name may be another's."""
    plain: Any = factory.func if isinstance(factory, partial) else factory
    known = vars(sys.modules[plain.__module__])
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        # "transform.scale_by_adam" is looked up in the module of the factory.
        first, *rest = ast.unparse(node.func).split(".")
        found = known.get(first)
        for attribute in rest:
            found = getattr(found, attribute, None)
        if found is not None:
            yield found


def factories() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Lists what makes an optimizer, or a part of one, among the public names of optax and ours."""
    for package in (optim, optax, contrib):
        for name, thing in vars(package).items():
            makes = inspect.isfunction(thing) or isinstance(thing, partial)
            if name.startswith("_") or not (makes or thing is optax.MultiSteps):
                continue
            signature = inspect.signature(thing)
            said = str(signature.return_annotation)
            silent = signature.return_annotation is inspect.Signature.empty
            if silent or "Transformation" in said:
                yield f"{package.__name__}.{name}", thing


def tree_of(row: Row, dtype: str) -> dict[str, Any]:
    """Makes the parameters of a row: its own, a neighbour's and a frozen one."""
    shapes: dict[str, tuple[int, ...]] = {"kernel": (4, 3), "bias": (3,), "scale": ()}
    if row.params == "no scalar":
        del shapes["scale"]
    if row.params == "matrices":
        shapes = {"kernel": (4, 3), "stack": (2, 3, 4)}
    if row.empty:
        shapes["empty"] = (0, 3)
    keys = iter(jax.random.split(jax.random.key(1), 8))
    mixed = ("bfloat16", "float32", "float16", "bfloat16")
    kinds = iter(mixed if dtype == "mixed" else (dtype,) * 4)

    def draw(shape: tuple[int, ...], kind: str) -> Any:
        x = 0.5 + jax.random.normal(next(keys), shape)
        if row.params == "complex":
            return (x + 1j * jax.random.normal(next(keys), shape)).astype(
                "complex128" if kind == "float64" else "complex64"
            )
        return x.astype(kind)

    own = {
        name: draw(shape, kind) for (name, shape), kind in zip(shapes.items(), kinds, strict=False)
    }
    other = 1 + jax.random.normal(jax.random.key(2), (3,))
    low = dtype if dtype != "mixed" else "bfloat16"
    return {"own": own, "other": {"w": other.astype(low)}, "frozen": {"w": jnp.ones(2, low)}}


def markdown() -> str:
    """Writes the table for docs/laws.md."""
    lines = [
        "| optimizer | needs | laws | remarks |",
        "| --- | --- | --- | --- |",
    ]
    for row in ROWS:
        broken = {law if isinstance(law, int) else law[0] for law in row.exempt}
        kept = [str(law) for law in LAWS if law not in broken]
        lines.append(_line(row, "all" if not broken else ", ".join(kept)))
    lines += [_line(row, "refused") for row, _ in REFUSED]
    return "\n".join(lines) + "\n"


def _line(row: Row, laws: str) -> str:
    needs = [name for name in row.needs if name != "grad"]
    needs += ["gradients of single examples"] if row.per_example else []
    first = f"{', '.join(row.fixed)} sets the first state and cannot follow a schedule"
    remarks = [row.notes or (first if row.fixed else ""), *row.exempt.values()]
    remarks += ["complex parameters"] if row.params == "complex" else []
    remarks += ["matrices only"] if row.params == "matrices" else []
    remarks += ["no parameters without axes"] if row.params == "no scalar" else []
    remarks += [] if row.empty else ["no parameters without elements"]
    remarks += ["full batches only"] if checks.needs(row.recipe, checks.FULL_BATCH) else []
    return f"| {row.name} | {', '.join(needs)} | {laws} | {'; '.join(filter(None, remarks))} |"
