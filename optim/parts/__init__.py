"""Parts of optimizers, which `optim.chain` composes.

A part is an optax transformation. Its updates are what the part before it returned: directions of
ascent before the learning rate, and steps, which are added to the parameters, after it.

Parts of Adam's family and decays are for parameters of any shape. The others are for matrices: the
matrices of a parameter are its last two axes, [inputs, outputs] as in flax, and every axis
before them is batch, unless `matrices` says otherwise; see `optim.layouts`. Programs in torch store
[outputs, inputs]: what they call a row is an output here.
"""

from optim.parts.adam import adam, laprop, prodigy
from optim.parts.decay import cautious_decay, decay, qk_clip
from optim.parts.directions import momentum, momentum_mixture, normalize, polar
from optim.parts.lengths import floor, graft, match_norm, match_rms, pin_radius, radial_brake
from optim.parts.psgd import psgd
from optim.parts.shampoo import shampoo
from optim.parts.soap import kl_shampoo, kl_soap, soap, trust_gate

__all__ = [
    "adam",
    "cautious_decay",
    "decay",
    "floor",
    "graft",
    "kl_shampoo",
    "kl_soap",
    "laprop",
    "match_norm",
    "match_rms",
    "momentum",
    "momentum_mixture",
    "normalize",
    "pin_radius",
    "polar",
    "prodigy",
    "psgd",
    "qk_clip",
    "radial_brake",
    "shampoo",
    "soap",
    "trust_gate",
]
