"""The optimizers that torch.optim and other packages for PyTorch also have, and where they differ.

`SAME` says with which arguments they agree, `DIFFERENT` where the definitions differ and why: at
constant learning rates, and under a cosine with warm-up. The names can be read without these
packages; `difference` needs them. tests/optim/test_torch.py asserts the bounds, and
tests/references.py prints the differences.
"""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optax
import optax.contrib

import optim
from optim import parts
from tests.cosine import COSINE, STEPS, with_cosine
from tests.programs import relative_difference, train

contrib = optax.contrib
torch: Any = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
t: Any = torch and torch.optim


class Case(NamedTuple):
    """One comparison.

    Attributes:
        theirs: makes a torch optimizer from parameters.
        ours: a recipe of an optimizer of optax or of ours.
        why: what differs, in a case of `DIFFERENT`; a remark on the arguments in one of `SAME`.
        matrices: whether there are only matrices, which torch keeps as [outputs, inputs].
        bfloat16: whether torch's Muon may cast to bfloat16, as it does whatever it is given.
        constant: whether the learning rate cannot follow a schedule.
        package: whose optimizer it is.
    """

    theirs: Callable[[list[Any]], Any]
    ours: partial
    why: str = ""
    matrices: bool = False
    bfloat16: bool = False
    constant: bool = False
    package: str = "torch.optim"

    @property
    def is_installed(self) -> bool:
        """Whether torch and the package of the optimizer are installed."""
        return (
            torch is not None and importlib.util.find_spec(self.package.split(".")[0]) is not None
        )


def _of(package: str, optimizer: str, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
    """Makes an optimizer of a package other than torch, which is imported when it is called."""

    def make(params: list[Any]) -> Any:
        made = getattr(importlib.import_module(package), optimizer)(params, *args, **kwargs)
        if package == "schedulefree":
            made.train()
        return made

    return make


def _package(package: str, optimizer: str, *args: Any, **kwargs: Any) -> Callable[..., Case]:
    """Makes a case of a package other than torch: `_package(...)(ours, why)`."""
    return partial(Case, _of(package, optimizer, *args, **kwargs), package=package)


_PRODIGY = partial(_package, "prodigyopt", "Prodigy")
_FREE = partial(_package, "schedulefree")
_OTHERS = partial(_package, "pytorch_optimizer")


def _warm_up(step: Any) -> Any:
    """The warm-up of schedulefree over 5 steps, which does not begin at 0."""
    return optax.linear_schedule(0.02 / 5, 0.02, 5 - 1)(step)


def _one_step_later(step: Any) -> Any:
    return (step + 1) ** 0.25


def _l2(decay: float, recipe: partial) -> partial:
    return partial(optax.chain, partial(optax.add_decayed_weights, decay), recipe)


SAME = {
    "SGD": Case(lambda p: t.SGD(p, 0.1), partial(optax.sgd, 0.1)),
    "SGD, momentum": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9), partial(optax.sgd, 0.1, momentum=0.9)
    ),
    "SGD, Nesterov and weight decay": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        _l2(0.01, partial(optax.sgd, 0.1, momentum=0.9, nesterov=True)),
        "torch's weight_decay is L2: it enters the momentum",
    ),
    "Adam": Case(lambda p: t.Adam(p, 0.01), partial(optax.adam, 0.01)),
    "Adam, weight decay": Case(
        lambda p: t.Adam(p, 0.01, weight_decay=0.1),
        _l2(0.1, partial(optax.adam, 0.01)),
        "torch's weight_decay is L2 here, and decoupled in AdamW",
    ),
    "AdamW": Case(
        lambda p: t.AdamW(p, 0.01, (0.8, 0.95), 1e-6, 0.1),
        partial(optax.adamw, 0.01, 0.8, 0.95, 1e-6, weight_decay=0.1),
    ),
    "Adamax": Case(lambda p: t.Adamax(p, 0.01), partial(optax.adamax, 0.01)),
    "Adamax, weight decay": Case(
        lambda p: t.Adamax(p, 0.01, weight_decay=0.1),
        _l2(0.1, partial(optax.adamax, 0.01)),
        "torch's weight_decay is L2; optax.adamaxw has decoupled weight decay",
    ),
    "NAdam, weight decay": Case(
        lambda p: t.NAdam(
            p, 0.01, weight_decay=0.1, momentum_decay=1e9, decoupled_weight_decay=True
        ),
        partial(optax.nadamw, 0.01, weight_decay=0.1),
        "with torch's decoupled_weight_decay=True, and without its momentum schedule",
    ),
    "NAdam": Case(
        lambda p: t.NAdam(p, 0.01, momentum_decay=1e9),
        partial(optax.nadam, 0.01),
        "torch's momentum schedule is disabled by a very large momentum_decay",
    ),
    "RAdam": Case(
        lambda p: t.RAdam(p, 0.01, eps=0.0),
        partial(optax.radam, 0.01, eps=0.0),
        "torch adds eps before the bias correction, optax after it",
    ),
    "Adagrad": Case(
        lambda p: t.Adagrad(p, 0.1, eps=0.0, initial_accumulator_value=0.1),
        partial(optax.adagrad, 0.1, initial_accumulator_value=0.1, eps=0.0),
        "torch adds eps to the root, optax under it; torch's accumulator begins at 0 by default",
    ),
    "Adadelta": Case(
        lambda p: t.Adadelta(p, 0.5, 0.9, 1e-6), partial(optax.adadelta, 0.5, 0.9, 1e-6)
    ),
    "Adadelta, weight decay": Case(
        lambda p: t.Adadelta(p, 0.5, 0.9, 1e-6, 0.1),
        partial(optax.adadelta, 0.5, 0.9, 1e-6, weight_decay=0.1),
        "L2 in both",
    ),
    "RMSprop": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9),
        partial(optax.rmsprop, 0.01, 0.9, eps_in_sqrt=False),
        "optax adds eps under the root by default",
    ),
    "RMSprop, centered, momentum": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, centered=True, momentum=0.8),
        partial(
            optax.chain,
            partial(optax.scale_by_stddev, 0.9, eps_in_sqrt=False),
            partial(optax.trace, 0.8),
            partial(optax.scale_by_learning_rate, 0.01),
        ),
        "torch multiplies the momentum by the learning rate of the step",
    ),
    "Adafactor": Case(
        lambda p: t.Adafactor(p, 0.01),
        partial(optax.adafactor, 0.01, min_dim_size_to_factor=1),
        "torch factors matrices of any size, and caps the learning rate at 1 / sqrt(step)",
    ),
    "Muon": Case(
        lambda p: t.Muon(p, 0.02, 0.1, 0.9),
        partial(optim.muon, 0.02, 0.9, weight_decay=0.1),
        "with torch's cast to bfloat16 taken out",
        matrices=True,
    ),
    "Muon, match_rms_adamw": Case(
        lambda p: t.Muon(p, 0.02, 0.0, 0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"),
        partial(optim.muon, 0.02, 0.9, nesterov=False, scale="match_rms_adamw"),
        "with torch's cast to bfloat16 taken out",
        matrices=True,
    ),
    "Prodigy, use_bias_correction": _PRODIGY(weight_decay=0.1, use_bias_correction=True, d0=0.01)(
        partial(contrib.prodigy, 1.0, estim_lr0=0.01, weight_decay=0.1),
        "optax always corrects Adam's bias",
    ),
    "Prodigy, default": _PRODIGY(d0=0.01)(
        partial(optim.chain, 1.0, [partial(parts.prodigy, estim_lr0=0.01)])
    ),
    "Prodigy, all options": _PRODIGY(
        *(1.0, (0.8, 0.95), 0.9, 1e-6, 0.1),
        use_bias_correction=True,
        safeguard_warmup=True,
        d0=0.01,
        d_coef=0.7,
        growth_rate=1.02,
    )(
        partial(
            optim.chain,
            1.0,
            [partial(parts.prodigy, 0.8, 0.95, 0.9, 1e-6, 0.1, True, True, 0.01, 0.7, 1.02)],
        ),
    ),
    "AdamWScheduleFree": _FREE("AdamWScheduleFree", 0.02, weight_decay=0.1)(
        partial(contrib.schedule_free_adamw, 0.02, weight_decay=0.1)
    ),
    "AdamWScheduleFree, warmup_steps": _FREE(
        "AdamWScheduleFree", 0.02, weight_decay=0.1, warmup_steps=5
    )(
        partial(contrib.schedule_free_adamw, _warm_up, weight_decay=0.1),
        "warm_up is optax.linear_schedule(peak / 5, peak, 4), in place of optax's warmup_steps",
    ),
    "SGDScheduleFree": _FREE("SGDScheduleFree", 0.02, weight_decay=0.1)(
        partial(contrib.schedule_free_sgd, 0.02, weight_decay=0.1)
    ),
    "AdaBelief": _OTHERS("AdaBelief", 0.02)(partial(optax.adabelief, 0.02)),
    "AdEMAMix": _OTHERS("AdEMAMix", 0.02, weight_decay=0.1, weight_decouple=True)(
        partial(contrib.ademamix, 0.02, weight_decay=0.1)
    ),
    "ADOPT, clip one step later": _OTHERS("ADOPT", 0.02)(
        partial(contrib.adopt, 0.02, clip_value_fn=_one_step_later),
        "pytorch_optimizer counts the first step, which moves nothing",
    ),
    "Fromage": _OTHERS("Fromage", 0.02)(partial(optax.fromage, 0.02)),
    "Lion": _OTHERS("Lion", 0.02, weight_decay=0.1)(partial(optax.lion, 0.02, weight_decay=0.1)),
    "NovoGrad": _OTHERS(
        "NovoGrad", 0.02, (0.9, 0.25), weight_decay=0.1, weight_decouple=False, eps=1e-6
    )(
        partial(optax.novograd, 0.02, 0.9, 0.25, eps=1e-6, weight_decay=0.1),
        "without pytorch_optimizer's decoupled weight decay, which is not the paper's",
    ),
    "SM3": _OTHERS("SM3", 0.1, momentum=0.9, eps=1e-8)(partial(optax.sm3, 0.1, 0.9)),
    "Yogi": _OTHERS("Yogi", 0.02)(partial(optax.yogi, 0.02)),
}

DIFFERENT = {
    "Adam, amsgrad": Case(
        lambda p: t.Adam(p, 0.01, amsgrad=True),
        partial(optax.amsgrad, 0.01),
        "torch takes the maximum before the bias correction, optax after it",
    ),
    "NAdam, momentum schedule": Case(
        lambda p: t.NAdam(p, 0.01),
        partial(optax.nadam, 0.01),
        "torch raises the momentum during the run (Dozat's schedule), optax keeps it constant;"
        " equal with a large momentum_decay, as above",
    ),
    "RMSprop, defaults": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, 1e-3),
        partial(optax.rmsprop, 0.01, 0.9, 1e-3),
        "torch adds eps to the root, optax under it; equal with eps_in_sqrt=False, as above",
    ),
    "RMSprop, momentum": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, centered=True, momentum=0.8),
        partial(optax.rmsprop, 0.01, 0.9, eps_in_sqrt=False, centered=True, momentum=0.8),
        "torch multiplies the momentum by the learning rate of the step, optax adds steps that have"
        " the rates of their own; equal as the chain of scale_by_stddev, trace and"
        " scale_by_learning_rate above",
    ),
    "Adagrad, defaults": Case(
        lambda p: t.Adagrad(p, 0.1),
        partial(optax.adagrad, 0.1),
        "torch's accumulator begins at 0 with eps=1e-10 outside the root, optax's at 0.1 with"
        " eps=1e-7 under it; equal with the arguments above",
    ),
    "Rprop, optax's": Case(
        lambda p: t.Rprop(p, 0.01),
        partial(optax.rprop, 0.01),
        "optax 0.2.8 applies each step one update late",
        constant=True,
    ),
    "Adafactor, weight decay": Case(
        lambda p: t.Adafactor(p, 0.01, weight_decay=0.1),
        partial(optax.adafactor, 0.01, min_dim_size_to_factor=1, weight_decay_rate=0.1),
        "torch multiplies the decay by the learning rate, optax does not",
    ),
    "Muon, bfloat16": Case(
        lambda p: t.Muon(p, 0.02, 0.1, 0.9),
        partial(optim.muon, 0.02, 0.9, weight_decay=0.1),
        "torch orthogonalizes in bfloat16",
        matrices=True,
        bfloat16=True,
    ),
    "Muon, optax's": Case(
        lambda p: t.Muon(p, 0.02, 0.0, 0.9),
        partial(optax.contrib.muon, 0.02, beta=0.9),
        "optax corrects the bias of the momentum and of the gradient before Nesterov mixes them;"
        " equal as optim.muon",
        matrices=True,
    ),
    "Prodigy": _PRODIGY(weight_decay=0.1, d0=0.01)(
        partial(contrib.prodigy, 1.0, estim_lr0=0.01, weight_decay=0.1),
        "the authors correct Adam's bias only with use_bias_correction=True, optax always; equal as"
        " parts.prodigy, as above",
    ),
    "DAdaptAdam": _OTHERS("DAdaptAdam", 1.0, d0=0.01)(
        partial(contrib.dadapt_adamw, 1.0, estim_lr0=0.01),
        "pytorch_optimizer corrects Adam's bias only with bias_correction=True, optax always",
    ),
    "AdamWScheduleFree, optax's warmup_steps": _FREE(
        "AdamWScheduleFree", 0.02, weight_decay=0.1, warmup_steps=5
    )(
        partial(contrib.schedule_free_adamw, 0.02, 5, weight_decay=0.1),
        "optax begins at the rate 0, the authors at peak / warmup_steps, and optax 0.2.8 weighs a"
        " step by the rate of the next; equal with a schedule as learning_rate, as above",
        constant=True,
    ),
    "Lamb": _OTHERS("Lamb", 0.02, weight_decay=0.1, weight_decouple=False)(
        partial(optax.lamb, 0.02, weight_decay=0.1),
        "pytorch_optimizer does not correct the second moment's bias and bounds the norm of the"
        " weights by 10; optax's is the paper's, as above",
    ),
    "Adan": _OTHERS("Adan", 0.02, weight_decay=0.1)(
        partial(optax.adan, 0.02, weight_decay=0.1),
        "optax 0.2.8 weighs the change of the gradient by 1 - b2 = 0.08, the paper and its authors'"
        " program by b2 = 0.92",
    ),
    "ADOPT": _OTHERS("ADOPT", 0.02)(
        partial(contrib.adopt, 0.02),
        "pytorch_optimizer clips by (step + 1)^(1/4), the paper and optax by step^(1/4); equal with"
        " clip_value_fn, as above",
    ),
    "Lion, cautious": _OTHERS("Lion", 0.02, cautious=True)(
        partial(optim.cautious, partial(optax.lion, 0.02, weight_decay=0.0)),
        "of n elements of which k are kept, the paper and its authors' Lion multiply them by"
        " n / (k + 1), and it is n / k here, as in their AdamW",
    ),
}


def problem(matrices: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draws the first parameters and the gradients of every step."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 6), "v": (6, 3)} if matrices else {"w": (4, 6), "b": (5,)}
    draw = lambda: {k: rng.standard_normal(s) for k, s in shapes.items()}  # noqa: E731
    return draw(), [{k: g + 0.3 for k, g in draw().items()} for _ in range(STEPS)]


def ours(case: Case, cosine: bool) -> dict[str, Any]:
    """Trains with the recipe as the one group of an optimizer, as a run does.

    Returns:
        {name: the parameters after every step}.
    """
    start, grads = problem(case.matrices)
    recipe = with_cosine(case.ours) if cosine else case.ours
    return train(optim.optimizer({"all": optim.group(".*", recipe)}).tx, start, grads)


def theirs(case: Case, cosine: bool) -> dict[str, Any]:
    """Trains with torch; returns what `ours` does."""
    start, grads = problem(case.matrices)
    turn = np.transpose if case.matrices else np.copy
    params = {k: torch.tensor(turn(v).copy(), requires_grad=True) for k, v in start.items()}
    with contextlib.redirect_stdout(io.StringIO()):  # prodigyopt prints
        optimizer, seen = case.theirs(list(params.values())), {k: [] for k in params}
    [group] = optimizer.param_groups
    rates = group["lr"] * (COSINE if cosine else np.ones(STEPS))
    with contextlib.nullcontext() if case.bfloat16 else _muon_in_float64():
        for g, group["lr"] in zip(grads, rates.tolist(), strict=True):
            for k, p in params.items():
                p.grad = torch.tensor(turn(g[k]).copy())
            optimizer.step()
            for k, p in params.items():
                seen[k].append(turn(p.detach().numpy()).copy())
    return {k: np.stack(v) for k, v in seen.items()}


@contextlib.contextmanager
def _muon_in_float64() -> Iterator[None]:
    # torch.optim.Muon orthogonalizes in bfloat16 whatever it is given; a copy, since it then
    # divides in place.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda self: self.clone()):
        yield


def difference(case: Case, cosine: bool = False) -> float:
    """Returns the largest difference over all steps, relative to the largest parameter.

    Args:
        case: the comparison.
        cosine: whether the learning rates follow a cosine with warm-up.
    """
    mine, other = ours(case, cosine), theirs(case, cosine)
    assert all(x.dtype == np.float64 for x in [*mine.values(), *other.values()])
    start = problem(case.matrices)[0]
    assert all(np.abs(mine[k][-1] - start[k]).max() > 1e-3 for k in start)
    return relative_difference(mine, other)
