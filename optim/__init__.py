"""Parameter groups, schedules, and optimizers that optax does not have.

Depends on jax and optax only, and can be used without `trainer`.
"""

from optim import parts, schedules
from optim.bound import OptimizerState
from optim.cautious import cautious, grams
from optim.chain import chain
from optim.groups import Group, GroupError, frozen, group
from optim.mars import mars
from optim.muon import muon
from optim.optimizer import Optimizer, optimizer
from optim.scion import scion
from optim.shampoo import shampoo
from optim.soap import soap
from optim.wrappers import ema_nesterov, outer_nesterov, weight_ema

__all__ = [
    "Group",
    "GroupError",
    "Optimizer",
    "OptimizerState",
    "cautious",
    "chain",
    "ema_nesterov",
    "frozen",
    "grams",
    "group",
    "mars",
    "muon",
    "optimizer",
    "outer_nesterov",
    "parts",
    "schedules",
    "scion",
    "shampoo",
    "soap",
    "weight_ema",
]


def __getattr__(name: str) -> str:
    """Returns `__version__`, the version of the installed package, read on first access."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("lockstep-jax")
