"""Optimizers for JAX that keep their laws: groups, schedules, and what optax lacks.

Stands alone: it knows jax and optax, and nothing of the trainer.
"""

from optim.groups import Group, GroupError, frozen, group
from optim.optimizer import Optimizer, OptimizerState, optimizer

__all__ = ["Group", "GroupError", "Optimizer", "OptimizerState", "frozen", "group", "optimizer"]
