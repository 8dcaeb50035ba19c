"""The optimizers that torch.optim also has: with which arguments they agree, and where they part.

`SAME` says with which arguments they agree, `DIFFERENT` where the definitions differ and why. The
names can be read without torch; `difference` needs it. tests/test_torch.py asserts the bounds, and
tests/references.py prints the differences.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import optax
import optax.contrib

import optim
from tests.programs import relative_difference, train

STEPS = 50
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
    """

    theirs: Callable[[list[Any]], Any]
    ours: partial
    why: str = ""
    matrices: bool = False
    bfloat16: bool = False


SAME = {
    "SGD": Case(lambda p: t.SGD(p, 0.1), partial(optax.sgd, 0.1)),
    "SGD, momentum": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9), partial(optax.sgd, 0.1, momentum=0.9)
    ),
    "SGD, Nesterov and weight decay": Case(
        lambda p: t.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        partial(
            optax.chain,
            partial(optax.add_decayed_weights, 0.01),
            partial(optax.sgd, 0.1, momentum=0.9, nesterov=True),
        ),
        "torch's weight_decay is L2: it enters the momentum",
    ),
    "Adam": Case(lambda p: t.Adam(p, 0.01), partial(optax.adam, 0.01)),
    "Adam, weight decay": Case(
        lambda p: t.Adam(p, 0.01, weight_decay=0.1),
        partial(optax.chain, partial(optax.add_decayed_weights, 0.1), partial(optax.adam, 0.01)),
        "torch's weight_decay is L2 here, and decoupled in AdamW",
    ),
    "AdamW": Case(
        lambda p: t.AdamW(p, 0.01, (0.8, 0.95), 1e-6, 0.1),
        partial(optax.adamw, 0.01, 0.8, 0.95, 1e-6, weight_decay=0.1),
    ),
    "Adamax": Case(lambda p: t.Adamax(p, 0.01), partial(optax.adamax, 0.01)),
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
    "RMSprop": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9),
        partial(optax.rmsprop, 0.01, 0.9, eps_in_sqrt=False),
        "optax adds eps under the root by default",
    ),
    "RMSprop, centered, momentum": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, centered=True, momentum=0.8),
        partial(optax.rmsprop, 0.01, 0.9, eps_in_sqrt=False, centered=True, momentum=0.8),
    ),
    "Rprop": Case(lambda p: t.Rprop(p, 0.01), partial(optim.rprop, 0.01)),
    "Rprop, limits": Case(
        lambda p: t.Rprop(p, 0.1, (0.4, 1.5), (0.02, 0.15)),
        partial(optim.rprop, 0.1, 0.4, 1.5, 0.02, 0.15),
    ),
    "Rprop, a limit below the first step": Case(
        lambda p: t.Rprop(p, 0.1, step_sizes=(1e-5, 0.05)),
        partial(optim.rprop, 0.1, min_step_size=1e-5, max_step_size=0.05),
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
        "torch raises the momentum during the run (Dozat's schedule), optax keeps it constant",
    ),
    "RMSprop, defaults": Case(
        lambda p: t.RMSprop(p, 0.01, 0.9, 1e-3),
        partial(optax.rmsprop, 0.01, 0.9, 1e-3),
        "torch adds eps to the root, optax under it",
    ),
    "Adagrad, defaults": Case(
        lambda p: t.Adagrad(p, 0.1),
        partial(optax.adagrad, 0.1),
        "torch's accumulator begins at 0 with eps=1e-10 outside the root, optax's at 0.1 with"
        " eps=1e-7 under it",
    ),
    "Rprop, optax's": Case(
        lambda p: t.Rprop(p, 0.01),
        partial(optax.rprop, 0.01),
        "optax 0.2.8 applies each step one update late",
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
        "optax corrects the bias of the momentum and of the gradient before Nesterov mixes them",
        matrices=True,
    ),
}


def problem(matrices: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Draws the first parameters and the gradients of every step."""
    rng = np.random.default_rng(0)
    shapes = {"w": (4, 6), "v": (6, 3)} if matrices else {"w": (4, 6), "b": (5,)}
    draw = lambda: {k: rng.standard_normal(s) for k, s in shapes.items()}  # noqa: E731
    return draw(), [{k: g + 0.3 for k, g in draw().items()} for _ in range(STEPS)]


def ours(case: Case) -> dict[str, Any]:
    """Trains with the recipe as the one group of an optimizer, as a run does.

    Returns:
        {name: the parameters after every step}.
    """
    start, grads = problem(case.matrices)
    return train(optim.optimizer({"all": optim.group(".*", case.ours)}).tx, start, grads)


def theirs(case: Case) -> dict[str, Any]:
    """Trains with torch; returns what `ours` does."""
    start, grads = problem(case.matrices)
    turn = np.transpose if case.matrices else np.copy
    params = {k: torch.tensor(turn(v).copy(), requires_grad=True) for k, v in start.items()}
    optimizer, seen = case.theirs(list(params.values())), {k: [] for k in params}
    with contextlib.nullcontext() if case.bfloat16 else _muon_in_float64():
        for g in grads:
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


def difference(case: Case) -> float:
    """Returns the largest difference over all steps, relative to the largest parameter."""
    mine, other = ours(case), theirs(case)
    assert all(x.dtype == np.float64 for x in [*mine.values(), *other.values()])
    start = problem(case.matrices)[0]
    assert all(np.abs(mine[k][-1] - start[k]).max() > 1e-3 for k in start)
    return relative_difference(mine, other)
