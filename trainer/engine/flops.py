"""Counts the floating-point operations of a traced function, and finds what it reads.

Nothing is run or compiled.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from optim.tracing import equations, inner_jaxprs
from trainer.logits import AGAIN

# The products of attention in a call of `jax.nn.dot_product_attention(implementation="cudnn")`,
# which has no jaxpr inside.
_CUDNN_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 4}


def count_flops(jaxpr: Any, elementwise: bool = False) -> int:
    """Counts the operations of the matrix products and convolutions in a jaxpr.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> count_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 5))))
        60
    """
    # XLA's own analysis counts the body of a loop once. This one multiplies a scan by its length
    # and a shard_map by its devices, counts the body of a `while` once and the most expensive
    # branch of a `cond`. It leaves out the loop of chunked logits that computes a gradient again,
    # which a mean loss does not need. What `jax.checkpoint` computes a second time counts a second
    # time. cuDNN's attention counts as the products of attention without it: whole, under a causal
    # mask too, and without those that the kernel computes again. With `elementwise`, every other
    # operation counts as one for each element of its result.
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_count_equation(equation, elementwise) for equation in jaxpr.eqns)


def has_convolution(jaxpr: Any) -> bool:
    """Returns whether a jaxpr, or one inside of it, has a convolution."""
    return any(each.primitive.name == "conv_general_dilated" for each in equations(jaxpr))


def reading(traced: jax.stages.Traced, outputs: Any) -> tuple[Sequence[Any], list[bool]]:
    """Returns the equations that some outputs need, and for each input whether they need it."""
    # `outputs` has the structure of the outputs, and True for those that are asked about.
    jaxpr, used = partial_eval.dce_jaxpr(traced.jaxpr.jaxpr, jax.tree.leaves(outputs))
    return jaxpr.eqns, used


def _count_equation(equation: Any, elementwise: bool) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        # A multiply-add counts as two operations.
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        # Each output sums over the window and over the inputs of its group.
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * equation.outvars[0].aval.size * kernel.size // features
    if name in _CUDNN_PRODUCTS:
        query, key = (x.aval for x in equation.invars[:2])
        # Of [batch, heads, positions, width] under layout 1, else [batch, positions, heads, width].
        positions = key.shape[2 if params["layout"] == 1 else 1]
        return 2 * _CUDNN_PRODUCTS[name] * query.size * positions
    if name == "while" and AGAIN in str(equation.source_info.name_stack):
        return 0
    inner = [count_flops(sub, elementwise) for x in params.values() for sub in inner_jaxprs(x)]
    if not inner and elementwise:
        return sum(math.prod(getattr(x.aval, "shape", ())) for x in equation.outvars)
    if name == "cond":
        return max(inner, default=0)
    if name == "shard_map":
        # The jaxpr inside is the program of one device.
        sizes = [params["mesh"].shape[axis] for axis in params["newly_manual_axes"]]
        return sum(inner) * math.prod(sizes)
    return sum(inner) * (params["length"] if name == "scan" else 1)
