"""Runs one row of the table in one dtype, once, and says for every law how it went.

The row's optimizer moves one group among three: a neighbour moves another part of the parameters, a
third is frozen, and one loss couples them all. Its reference is the factory called by itself, in
float32 (float64 for float64), on its own part of the parameters, with Python floats for arguments.
"""

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optim
from optim.factories import kind_of
from tests.laws_table import Row, tree_of

STEPS = 5
NEIGHBOUR = partial(optax.adam, learning_rate=0.03)


def tree_to_split(row: Row, rows: int, columns: int) -> dict[str, Any]:
    """Makes parameters of a row that several devices can share.

    Args:
        row: the row.
        rows: a number that divides the first axes.
        columns: the length of the second axes.

    Returns:
        Its own parameters, a neighbour's and a frozen one.
    """
    shapes: dict[str, tuple[int, ...]] = {"kernel": (8, columns), "bias": (rows,), "scale": ()}
    if row.params == "matrices":
        shapes = {"kernel": (8, columns), "stack": (rows, columns, 2)}
    if row.params == "no scalar":
        del shapes["scale"]
    keys = iter(jax.random.split(jax.random.key(3), 4))
    own = {name: 0.5 + jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    if row.params == "complex":
        own = {name: x * (1 + 0.5j) for name, x in own.items()}
    other = jnp.arange(float(rows))
    return {"own": own, "other": {"w": other}, "frozen": {"w": jnp.ones(rows)}}


def split_close(row: Row) -> Callable[[Any, Any], None]:
    """Returns what asserts that arrays of a sharded update are those of one device."""
    # Inverse roots of small eigenvalues magnify another order of sums, and so does a division of
    # small elements of rotated gradients by their own means.
    wide = (
        "optim.shampoo",
        "optim.chain (KL-SOAP)",
        "optim.chain (parts.shampoo that grafts its mean onto Adam)",
    )
    far = 5e-3 if row.name in wide else 2e-4
    return partial(np.testing.assert_allclose, rtol=far, atol=far / 10)


def loss(params: Any) -> Any:
    """Couples all parameters, smoothly, neither quadratic nor convex; at least float32."""
    # Without empty ones, which have no mean.
    wide = [_wide(x) for x in jax.tree.leaves(params) if x.size]
    parts = [y for x in wide for y in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    total = sum(jnp.sum(jnp.sin(x + 0.1 * i)) for i, x in enumerate(parts))
    return jnp.log1p(total**2) + sum(jnp.mean((x - 0.3) ** 2) for x in parts)


def _wide(x: Any) -> Any:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def grad_fn(params: Any, _: Any) -> Any:
    return jax.grad(loss)(params)


def gradients(params: Any, per_example: bool) -> tuple[Any, Any]:
    value, grads = jax.value_and_grad(loss)(params)
    if per_example:
        grads["own"] = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads["own"])
    return value, grads


def observed(own: Any, prefix: str = "own/") -> Any:
    """What a model observes of the row's parameters: logits, of which every other one is large."""
    return {
        "attention_logits": {
            prefix + name: 80.0 + 60.0 * (jnp.arange(x.shape[-1]) % 2)
            for name, x in own.items()
            if jnp.ndim(x)
        }
    }


def rate(step: Any) -> Any:
    """The factor by which the tests schedule every learning rate."""
    return 1.0 - 0.1 * step


def drift(step: Any) -> Any:
    """The factor by which they schedule every other float."""
    return 1.0 - 0.01 * step


def with_floats(value: Any, change: Callable[[str, float], Any], call: bool) -> Any:
    """Changes every float argument of a recipe, defaults included, and of the recipes inside it.

    Args:
        value: a recipe, or a container of them.
        change: (name, float) -> what stands for it.
        call: whether to call each factory, instead of giving a recipe.

    Returns:
        Another recipe, or an optax transformation.
    """
    again = partial(with_floats, change=change, call=call)
    if isinstance(value, optax.GradientTransformation):
        return value
    if isinstance(value, dict):
        return {key: again(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(again(x) for x in value)
    if not isinstance(value, partial):
        return value
    bound = inspect.signature(value.func).bind(*value.args, **value.keywords)
    given = set(bound.arguments)
    bound.apply_defaults()
    for name, x in list(bound.arguments.items()):
        if isinstance(x, float) and kind_of(value.func, name) == "float":
            bound.arguments[name] = change(name, x)
        elif name in given:
            uncalled = kind_of(value.func, name) == "partial"
            bound.arguments[name] = with_floats(x, change, call and not uncalled)
        elif not isinstance(x, tuple | dict):  # *args and **kwargs stay
            del bound.arguments[name]
    factory = value.func if call else partial(partial, value.func)
    return factory(*bound.args, **bound.kwargs)


def scheduled(recipe: partial, fixed: tuple[str, ...] = ()) -> partial:
    """Makes every float of a recipe a schedule; the learning rates fall, the others drift."""

    def change(name: str, x: float) -> Any:
        factor = rate if name == "learning_rate" else drift
        return x if name in fixed else (lambda t: x * factor(t))

    return with_floats(recipe, change, call=False)


def reference_of(
    recipe: partial, factors: Any, fixed: tuple[str, ...] = ()
) -> optax.GradientTransformationExtraArgs:
    """Calls the factories with what `rate` and `drift` make of their floats at a step."""

    def change(name: str, x: float) -> Any:
        return x if name in fixed else x * factors[int(name != "learning_rate")]

    tx = with_floats(recipe, change, call=True)
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    return optax.with_extra_args_support(tx)


def make_optimizer(row: Row, **options: Any) -> optim.Optimizer:
    """Puts the row in the first of three groups."""
    return optim.optimizer(
        {
            "own": optim.group("own/.*", scheduled(row.recipe, row.fixed)),
            "frozen": optim.group("frozen/.*", partial(optim.frozen)),
            "other": optim.group(".*", scheduled(NEIGHBOUR)),
        },
        **wrappers(row, lambda _, x: lambda t: x * drift(t)),
        **options,
    )


def wrappers(row: Row, change: Callable[[str, float], Any]) -> dict[str, Any]:
    """Makes the lookahead and the readout of a row, with other floats, for `optim.optimizer`."""
    return {
        "lookahead": with_floats(row.lookahead, change, call=True),
        "readout": with_floats(row.readout, change, call=True),
    }


def step(optimizer: optim.Optimizer, row: Row, params: Any, state: Any) -> tuple[Any, Any]:
    value, grads = gradients(params, row.per_example)
    functions = {"value_fn": loss, "obj_fn": loss, "grad_fn": grad_fn}
    extra = {"value": value, "observations": observed(params["own"]), **functions}
    return optimizer.update(grads, state, params, **extra)


def compile_run(optimizer: optim.Optimizer, row: Row) -> Callable[[Any, Any], Any]:
    """Compiles `stop` steps: a scan in a while loop, its carry donated."""

    def one(carry: Any, _: Any) -> tuple[Any, None]:
        return step(optimizer, row, *carry), None

    def laws_run(carry: Any, stop: Any) -> Any:
        return jax.lax.while_loop(
            lambda c: c[0] < stop,
            lambda c: (c[0] + 1, jax.lax.scan(one, c[1], None, length=1)[0]),
            (jnp.int32(0), carry),
        )[1]

    return jax.jit(laws_run, donate_argnums=0)


class Reference:
    """Plain optax, alone: the row on its own parameters, and the neighbour on its own.

    It follows the parameters that we found, step by step, so that rounding to a low precision does
    not add up; its state is its own. `make` calls the factories, by default `reference_of`.
    """

    def __init__(self, row: Row, params: Any, make: Callable[..., Any] = reference_of):
        self.row, self.make = row, make
        self.pair = row.recipe.func is optax.lookahead
        own = jax.tree.map(_wide, params["own"])
        self.slow = own
        at_start = optax.LookaheadParams(own, own) if self.pair else own
        self.state = make(row.recipe, (1.0, 1.0)).init(at_start)
        other = jax.tree.map(_wide, params["other"])
        self.wrapped = ReferenceWrapper(row, {"own": own, "other": other})
        self.other_state = reference_of(NEIGHBOUR, (1.0, 1.0)).init(other)

    def step(self, params: Any, t: int) -> Any:
        """Gives the parameters that must follow `params`, wide."""
        value, grads = _gradients(params, self.row.per_example)
        factors = np.asarray([rate(t), drift(t)], jnp.result_type(value.dtype))
        wide, grads = jax.tree.map(_wide, (params, grads))
        own = optax.LookaheadParams(wide["own"], self.slow) if self.pair else wide["own"]
        held = params if self.row.needs else None  # else one program does for every low precision
        moves, self.state = _reference_update(self.row, self.make)(
            grads["own"], self.state, own, factors, value, held
        )
        if self.pair:
            self.slow = optax.apply_updates(self.slow, moves.slow)
            moves = moves.fast
        others, self.other_state = _neighbour(
            grads["other"], self.other_state, wide["other"], factors
        )
        after = dict(wide)
        after["own"] = jax.tree.map(jnp.add, wide["own"], moves)
        after["other"] = jax.tree.map(jnp.add, wide["other"], others)
        return {**after, **self.wrapped.step({k: after[k] for k in ("own", "other")}, t)}


class ReferenceWrapper:
    """What lookaheads and readouts are by their papers: steps of NumPy, on whole trees.

    Attributes:
        evaluated: the parameters that are evaluated.
    """

    def __init__(self, row: Row, start: Any):
        self.row = row
        self.slow = self.average = self.evaluated = jax.tree.map(np.asarray, start)
        self.moves = jax.tree.map(np.zeros_like, self.slow)

    def step(self, after: Any, t: int) -> Any:
        """Gives the parameters of the model that follow those after the groups' updates."""
        weights = held = jax.tree.map(np.asarray, after)
        if self.row.lookahead is not None:
            kind, given = self.row.lookahead.func, self.row.lookahead.keywords
            size = float(self.row.lookahead.args[0])
            if kind is optim.ema_nesterov:
                held = self._ema_nesterov(weights, given, size, t)
            elif (t + 1) % given["every"] == 0:
                weights = held = self._outer_nesterov(weights, given, size, t)
        self.evaluated = weights
        if self.row.readout is not None:
            self.evaluated = self._read(weights, self.row.readout, t + 1)
        return held

    def _ema_nesterov(self, new: Any, given: Any, size: float, t: int) -> Any:
        decay = given["decay"] * drift(t)
        self.moves = jax.tree.map(
            lambda m, x, old: _as(decay * m + (1 - decay) * (x - old), x),
            *(self.moves, new, self.slow),
        )
        self.slow = new
        if not given["start"] <= t + 1 < given["stop"]:
            return new
        # The learning rate of the group is the largest at the first step.
        size *= drift(t + 1) * rate(t) / rate(0)
        return jax.tree.map(lambda x, m: _as(x + size * m, x), new, self.moves)

    def _outer_nesterov(self, new: Any, given: Any, size: float, t: int) -> Any:
        momentum, size = given["momentum"] * drift(t), size * drift(t)
        change = jax.tree.map(np.subtract, self.slow, new)
        self.moves = jax.tree.map(lambda m, d: _as(momentum * m + d, d), self.moves, change)
        self.slow = jax.tree.map(
            lambda x, d, m: _as(x - size * (d + momentum * m), x), self.slow, change, self.moves
        )
        return self.slow

    def _read(self, new: Any, readout: partial, made: int) -> Any:
        given = {"start": 0, "stop": made + 1, "blend": 1.0, "exclude": "", **readout.keywords}
        horizon = readout.args[0] * drift(made - 1)
        if made <= given["start"]:
            self.average = new
        elif made < given["stop"]:
            self.average = jax.tree.map(
                lambda a, x: _as(a + (x - a) / horizon, x), self.average, new
            )
        blend = given["blend"] * drift(made) * (made >= given["start"])
        read = jax.tree.map(lambda x, a: _as((1 - blend) * x + blend * a, x), new, self.average)
        apart = [path.split("/") for path in [given["exclude"]] if path]
        for part, name in apart:
            if name in read[part]:
                read[part][name] = new[part][name]
        return read


def _as(x: Any, like: Any) -> Any:
    return np.asarray(x, like.dtype)


@cache
def _reference_update(row: Row, make: Callable[..., Any]) -> Callable[..., Any]:
    def reference_update(grads, state, own, factors, value, params):
        def of_own(function: Any) -> Any:
            def value_fn(own: Any, *args: Any) -> Any:
                true = jax.tree.map(lambda w, p: w.astype(p.dtype), own, params["own"])
                return function({**params, "own": true}, *args)

            return value_fn

        given = {
            "value": value,
            "grad": grads,
            "value_fn": of_own(loss),
            "obj_fn": of_own(loss),
            "grad_fn": lambda own, i: jax.tree.map(_wide, of_own(grad_fn)(own, i)["own"]),
            "observations": observed(own, "") if "observations" in row.needs else {},
        }
        extra = {name: given[name] for name in row.needs}
        return make(row.recipe, factors, row.fixed).update(grads, state, own, **extra)

    return jax.jit(reference_update)


@jax.jit
def _neighbour(grads: Any, state: Any, own: Any, factors: Any) -> Any:
    return reference_of(NEIGHBOUR, factors).update(grads, state, own)


@partial(jax.jit, static_argnums=1)
def _gradients(params: Any, per_example: bool) -> Any:
    return gradients(params, per_example)


# How far we may be from the reference, which compiles to another program.
TOLERANCE = {"float32": 2e-5, "float64": 1e-10, "bfloat16": 2**-7, "float16": 2**-9, "mixed": 2**-7}


class Trajectory(NamedTuple):
    """What one row did in one dtype, as NumPy arrays."""

    start: Any
    avals: list[Any]
    params: list[Any]
    states: list[Any]
    wanted: list[Any]
    told: list[Any]
    compiled: int
    at_once: Any
    resumed: Any
    evaluated: Any
    evaluated_wanted: Any


@lru_cache(maxsize=1)  # the tests come pair by pair
def trajectory(row: Row, dtype: str) -> Trajectory | str:
    """Runs a row; gives the traceback where it cannot."""
    with jax.enable_x64(dtype == "float64"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="optax")
        try:
            return _run(row, dtype)
        except Exception:
            return traceback.format_exc()


def _run(row: Row, dtype: str) -> Trajectory:
    device = jax.devices()[0]
    start = tree_of(row, dtype)
    optimizer = make_optimizer(row)
    host = to_host(start)
    run = compile_run(optimizer, row)
    carry = jax.device_put((start, optimizer.init(start)), device)
    first = carry_of = to_host(carry)
    avals = [avals_of(carry)]
    reference = Reference(row, host)
    params, states, wanted = [host], [first[1]], []
    with compilations_of("laws_run") as count:
        for t in range(STEPS):
            wanted.append(to_host(reference.step(params[-1], t)))
            carry = run(carry, np.int32(1))
            avals.append(avals_of(carry))
            carry_of = to_host(carry)
            params.append(carry_of[0])
            states.append(carry_of[1])
        middle = jax.device_put((params[2], states[2]), device)
        resumed = to_host(run(middle, np.int32(STEPS - 2)))
        at_once = to_host(run(jax.device_put(first, device), np.int32(STEPS)))
        compiled = len(count)
    evaluated = to_host(optimizer.eval_params(states[-1], params[-1]))
    return Trajectory(
        start=host,
        avals=avals,
        params=params,
        states=states,
        wanted=wanted,
        told=[optimizer.hyperparameters(t) for t in range(STEPS)],
        compiled=compiled,
        at_once=at_once,
        resumed=resumed,
        evaluated=evaluated,
        evaluated_wanted=_evaluation(row, reference, params[-1]),
    )


def avals_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype.name, jax.typeof(x).weak_type), tree)


def to_host(tree: Any) -> Any:
    """Copies a tree to NumPy; keys of random numbers come back as keys."""

    def one(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(np.array(jax.random.key_data(x)))
        return np.array(x)

    return jax.tree.map(one, tree)


def numbers(tree: Any) -> Any:
    """Shows keys as the numbers they are made of."""
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if key(x) else x), tree)


def _evaluation(row: Row, reference: Reference, params: Any) -> Any:
    if row.lookahead is not None or row.readout is not None:
        return {**params, **reference.wrapped.evaluated}
    if reference.pair:
        return {**params, "own": to_host(reference.slow)}
    if hasattr(reference.state, "z"):  # schedule-free
        wide = jax.tree.map(_wide, params["own"])
        return {
            **params,
            "own": optax.contrib.schedule_free_eval_params(reference.state, wide),
        }
    return params


@contextmanager
def compilations_of(name: str) -> Iterator[list[str]]:
    """Lists the compilations of one jitted function while the block runs."""
    names: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event.endswith("backend_compile_duration") and details.get("fun_name") == f"jit({name})":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
