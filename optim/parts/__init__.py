"""Parts of optimizers of matrices, which `optim.chain` composes.

A part is an optax transformation. Its updates are what the part before it returned: directions of
ascent before the learning rate, and steps, which are added to the parameters, after it.

The matrices of a parameter are its last two axes, [inputs, outputs] as in flax, and every axis
before them is batch, unless `matrices` says otherwise; see `optim.layouts`. Programs in torch store
[outputs, inputs]: what they call a row is an output here.
"""

from optim.parts.decay import cautious_decay
from optim.parts.directions import momentum, momentum_mixture, normalize, polar
from optim.parts.lengths import floor, match_norm, match_rms, pin_radius, radial_brake

__all__ = [
    "cautious_decay",
    "floor",
    "match_norm",
    "match_rms",
    "momentum",
    "momentum_mixture",
    "normalize",
    "pin_radius",
    "polar",
    "radial_brake",
]
