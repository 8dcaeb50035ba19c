"""Optimizers for JAX that keep their laws: groups, schedules, and what optax lacks.

Stands alone: it knows jax and optax, and nothing of the trainer.
"""

from optim import schedules
from optim.cautious import cautious, grams
from optim.groups import Group, GroupError, frozen, group
from optim.mars import mars
from optim.muon import muon
from optim.optimizer import Optimizer, optimizer
from optim.packing import OptimizerState
from optim.rprop import rprop
from optim.scion import scion
from optim.shampoo import shampoo
from optim.soap import soap

__all__ = [
    "Group",
    "GroupError",
    "Optimizer",
    "OptimizerState",
    "cautious",
    "frozen",
    "grams",
    "group",
    "mars",
    "muon",
    "optimizer",
    "rprop",
    "schedules",
    "scion",
    "shampoo",
    "soap",
]
