"""Counts the floating-point operations of a traced function, and what an optimizer costs.

Nothing is run or compiled: an optimizer's state comes from `jax.eval_shape`, and the operations of
its update from XLA's estimate of the program before it is compiled.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

import optim
from optim import checks, factories
from optim.factories import ArgumentError, recipes_with_paths
from optim.parts.base import OBSERVATIONS
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


# A kernel of a transformer's perceptron, [inputs, outputs] in float32.
KERNEL = (768, 3072)
Shapes = Mapping[str, tuple[int, ...]]
_EXAMPLES = 2  # gradients of single examples have a leading axis

# Operations of which XLA's estimate says nothing: they call a library.
_FACTORIZATIONS = frozenset(
    value.name for name, value in vars(jax.lax.linalg).items() if name.endswith("_p")
)
_RANDOM = frozenset(["random_bits", "threefry2x32", "rng_bit_generator"])


@dataclass(frozen=True)
class Cost:
    """What an optimizer keeps and computes, per element of a kernel of shape `KERNEL`."""

    state_bytes: float  # without the values that do not grow with the kernel
    flops: float | None  # of an update, its addition to the parameter included; None if not known
    why: str  # why `flops` is None; "" otherwise
    needs: tuple[str, ...]  # besides a gradient, such as "matrices"


def measure_optimizer(recipe: partial) -> Cost:
    """Measures an optimizer as the only group of a run; raises GroupError if it accepts no kernel.

    Example:
        >>> from functools import partial
        >>> import optax
        >>> cost = measure_optimizer(partial(optax.sgd, learning_rate=0.1, momentum=0.9))
        >>> cost.state_bytes, round(cost.flops)  # the momentum is one float32
        (4.0, 4)
    """
    per_example = checks.needs(recipe, checks.EXAMPLES) is not None
    # The floats of the optimizer are inputs, as they are in a run.
    values = {path: x for path, x in factories.float_paths(recipe).items() if isinstance(x, float)}
    try:
        state, program, asked = _trace(recipe, {"kernel": KERNEL}, values)
    except ValueError:  # a factory decides by one of them in Python
        state, program, asked = _trace(recipe, {"kernel": KERNEL}, {})
    needs = []  # first which parameters it takes, if not all: it is asked for smaller ones
    if not _accepts(recipe, {"bias": (3,), "scale": ()}):
        needs = ["at least one axis"] if _accepts(recipe, {"bias": (3,)}) else ["matrices"]
    needs += ["whole batches"] if checks.needs(recipe, checks.FULL_BATCH) else []
    needs += ["gradients of single examples"] if per_example else []
    needs += [*asked, *([OBSERVATIONS] if checks.observations_read(_alone(recipe).groups) else [])]
    why = "it grows with the examples of a batch" if per_example else _unknown(program, asked)
    return _cost(state, program, why, needs)


def measure_part(recipe: partial) -> Cost:
    """Measures a transformation by itself, as `optim.chain` calls it; raises ValueError.

    Example:
        >>> from functools import partial
        >>> import optax
        >>> measure_part(partial(optax.trace, decay=0.9)).flops
        2.0
    """
    part = factories.instantiate(recipe, 0, jnp.float32)
    reads = {name: {"kernel": jnp.ones(())} for name in getattr(part, "reads", ())}

    def trace(shape: tuple[int, ...]) -> tuple[Any, Any]:
        x = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
        state = jax.eval_shape(part.init, x)

        def update(grads: Any, state: Any, params: Any, rate: Any) -> Any:
            given = {"grad": grads, "learning_rate": rate, OBSERVATIONS: reads}
            return part.update(grads, state, params, **given)

        rate = jax.ShapeDtypeStruct((), jnp.float32)
        return state, jax.jit(update).trace(x, state, x, rate)

    state, program = trace(KERNEL)
    needs = ["whole batches"] if checks.needs(recipe, checks.FULL_BATCH) else []
    needs += [OBSERVATIONS] if reads else []
    try:
        trace((3,))
    except ValueError:
        needs.append("matrices")
    return _cost(state, program, _unknown(program), needs)


def _cost(state: Any, program: Any, why: str, needs: list[str]) -> Cost:
    """Returns the cost of a traced update, of whose operations `why` says why they are unknown."""
    # Scalars and PRNG keys of the state do not count.
    arrays = [x for x in jax.tree.leaves(state) if x.ndim and max(x.shape) >= min(KERNEL)]
    size = sum(x.size * x.dtype.itemsize for x in arrays) / math.prod(KERNEL)
    if why:
        return Cost(size, None, why, tuple(needs))
    estimate: Mapping[str, float] = program.lower().cost_analysis() or {}
    # XLA counts roots and exponentials apart from additions and products.
    found = estimate.get("flops", 0.0) + estimate.get("transcendentals", 0.0)
    return Cost(size, found / math.prod(KERNEL), "", tuple(needs))


def follows_schedules(recipe: partial, factory: Callable[..., Any]) -> dict[str, bool]:
    """Returns float argument of a factory -> whether it can follow a schedule."""
    # Some cannot: their first value stays in the state, or the factory compares them in Python.
    # Each argument gets a schedule, and an update is traced; arguments that are None are left out.
    # `recipe` is the optimizer of a group, a partial of `factory` or with one inside.
    prefix, inner = next(each for each in recipes_with_paths(recipe) if each[1].func is factory)
    found = {}
    for name, value, _ in factories.floats(inner):
        argument, _, index = name.partition("[")
        # A tuple that is a default must be bound before one of its elements can be replaced.
        whole = factories.bound(inner)
        whole.apply_defaults()
        tuples = {argument: whole.arguments[argument]} if index else {}
        path = f"{prefix}.{name}".lstrip(".")
        able = _accepts_schedule(_bind(recipe, inner, tuples), path, value)
        found[argument] = found.get(argument, True) and able
    return found


def _bind(recipe: Any, inner: partial, values: Mapping[str, Any]) -> Any:
    """Returns a recipe in which one of those inside it, or the recipe itself, has more values."""
    if recipe is inner:
        return partial(inner, **values) if values else inner
    if isinstance(recipe, partial):
        args = [_bind(each, inner, values) for each in recipe.args]
        keywords = {name: _bind(each, inner, values) for name, each in recipe.keywords.items()}
        return partial(recipe.func, *args, **keywords)
    return recipe


def _accepts_schedule(recipe: partial, path: str, value: Any) -> bool:
    def schedule(step: Any) -> Any:
        return value * (1 - 0.01 * step)

    scheduled = factories.map_floats(recipe, lambda each, x: schedule if each == path else x)
    try:
        _trace(scheduled, {"kernel": (4, 3)}, {})
    except (ValueError, TypeError) as error:
        # Others are about the value: optim.grams refuses a weight decay beside that of its base.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ArgumentError | TypeError):
            cause = cause.__cause__
        return cause is None
    return True


def _trace(
    recipe: partial, shapes: Shapes, values: Mapping[str, float]
) -> tuple[Any, Any, tuple[str, ...]]:
    """Traces an update, in which the floats of the optimizer at some paths are inputs."""
    # Returns the state, the program, and what it asks of the loss.
    lead = (_EXAMPLES,) if checks.needs(recipe, checks.EXAMPLES) else ()
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    grads = {name: jax.ShapeDtypeStruct(lead + each.shape, each.dtype) for name, each in x.items()}
    state = jax.eval_shape(_alone(recipe).init, x)
    asked: dict[str, None] = {}
    read = checks.observations_read(_alone(recipe).groups)
    observed: Any = {OBSERVATIONS: {name: dict.fromkeys(x, jnp.ones(())) for name in read}}

    def update(values: Any, grads: Any, state: Any, params: Any, value: Any) -> Any:
        given = factories.map_floats(recipe, lambda path, x: values.get(path, x))
        return _alone(given).update(grads, state, params, **_loss(grads, value, asked), **observed)

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    traced = jax.jit(update).trace({path: scalar for path in values}, grads, state, x, scalar)
    # The scalars of all groups are packed in vectors, which do not grow with the kernel.
    _, used = reading(traced, jax.tree.map(lambda _: True, traced.out_info))
    found = ["value"] if used[-1] else []
    return state, traced, (*found, *asked)


def _alone(recipe: partial) -> optim.Optimizer:
    return optim.optimizer({"all": optim.group(".*", recipe)})


def _loss(grads: Any, value: Any, asked: dict[str, None]) -> dict[str, Any]:
    """Returns the extra arguments of an update; a function notes its name in `asked`."""

    def function(name: str, returned: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(params: Any, *_: Any) -> Any:
            asked[name] = None
            return returned(params)

        return call

    def squares(params: Any) -> Any:
        return sum(jnp.vdot(x, x) for x in jax.tree.leaves(params))

    functions = {name: function(name, squares) for name in ("value_fn", "obj_fn")}
    functions["grad_fn"] = function("grad_fn", lambda params: params)
    return {"value": value, "grad": grads, **functions}


def _accepts(recipe: partial, shapes: Shapes) -> bool:
    try:
        _trace(recipe, shapes, {})
    except ValueError:  # a GroupError is one
        return False
    return True


def _unknown(program: Any, asked: tuple[str, ...] = ()) -> str:
    """Returns why the operations of an update are not known; "" if they are."""
    if functions := [name for name in asked if name != "value"]:
        return f"it calls {' and '.join(functions)}, the model's own function"
    found = {each.primitive.name: each for each in equations(program.jaxpr)}
    if factorizations := sorted(_FACTORIZATIONS & found.keys()):
        return f"it factorizes matrices ({', '.join(factorizations)}), which XLA does not count"
    if _RANDOM & found.keys():
        return "it draws random numbers, by operations on integers"
    if "while" in found:
        return "it has a loop whose length depends on the values"
    for each in [each for each in equations(program.jaxpr) if each.primitive.name == "cond"]:
        counts = [count_flops(branch, elementwise=True) for branch in each.params["branches"]]
        if max(counts) > min(counts) + math.prod(KERNEL) // 10:
            return "it computes more in some steps than in others"
    return ""
