"""Optimizers for JAX that keep their laws: groups, schedules, and what optax lacks.

Stands alone: it knows jax and optax, and nothing of the trainer.
"""

from optim import schedules
from optim.groups import Group, GroupError, frozen, group
from optim.muon import muon
from optim.optimizer import Optimizer, OptimizerState, optimizer

__all__ = [
    "Group",
    "GroupError",
    "Optimizer",
    "OptimizerState",
    "frozen",
    "group",
    "muon",
    "optimizer",
    "schedules",
]
