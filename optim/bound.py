"""Runs the groups of an optimizer: clips, updates every group, rounds, packs the state.

Start with `BoundOptimizer.update`. Each group's optimizer receives a flat dict {path name: array}
of the group's parameters only. In contrast to `optax.partition` there are no MaskedNodes, so that
an optimizer that compares trees, or evaluates the loss at other parameters (line searches), works
in a group as it does alone.

The scalars of a state are packed into one vector for each dtype: each leaf of a donated state adds
about a microsecond to a step, and the state of many groups has many scalars.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.typing import ArrayLike

from optim import adapter, checks
from optim.declarations import model_of
from optim.dtypes import LowPrecision, round_to, widen
from optim.factories import SlowParams, evaluate, learning_rate_of, name_of, nodes_of
from optim.groups import Group, GroupError, group_error_context
from optim.layer_decay import Layers, depends_on_steps, layer_scales
from optim.parts.base import OBSERVATIONS
from optim.paths import did_you_mean, flatten, unflatten
from optim.state_dtypes import Leaf, check_rules, find_leaves, store_leaves, widen_leaves
from optim.tracing import require_whole
from optim.wrappers import EmaNesterov, Lookahead, WeightEma


class OptimizerState(NamedTuple):
    """The state of an `optim.Optimizer`.

    Attributes:
        scalars: every rank-0 value of every group and the step count, packed by dtype: {"int32":
            (n,), "float32": (m,)}.
        groups: group name -> the state of its optimizer, with None in place of scalars.
        master: path -> float32 copy of a low-precision parameter; empty but for
            low_precision="master".
        lookahead: the state of the lookahead, with None in place of scalars; without one, an empty
            tuple.
        readout: the same of the readout.
    """

    scalars: dict[str, jax.Array]
    groups: dict[str, Any]
    master: dict[str, jax.Array]
    lookahead: Any = ()
    readout: Any = ()


class Unpacked(NamedTuple):
    """The state of an `optim.Optimizer` before its scalars are packed."""

    # The leaves of a tuple are in the order of its fields. So the last two scalars that `pack`
    # finds of dtype int32 are `skipped` and `step`, whatever the groups are.

    groups: dict[str, Any]  # group name -> the state of its optimizer
    lookahead: Any  # or ()
    readout: Any  # or ()
    skipped: Any  # the number of updates that were skipped, int32
    step: Any  # the number of updates, int32


def _is_scalar(x: Any) -> bool:
    # Extended dtypes are those of typed PRNG keys.
    return x.ndim == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def pack(state: optax.OptState) -> tuple[dict[str, jax.Array], Any]:
    """Splits a state into a vector of scalars for each dtype name, and the rest of the tree."""
    leaves, structure = jax.tree.flatten(state)
    scalars: dict[str, list[Any]] = {}
    for x in filter(_is_scalar, leaves):
        scalars.setdefault(x.dtype.name, []).append(x)
    # None is a tree without leaves, so the rest has the arrays only.
    rest = structure.unflatten([None if _is_scalar(x) else x for x in leaves])
    return {dtype: jnp.stack(values) for dtype, values in scalars.items()}, rest


def unpack(scalars: Mapping[str, jax.Array], rest: Any, template: Any) -> Any:
    """Restores the state that `pack` has split."""
    # `template` has the structure, shapes and dtypes of the state.
    leaves, structure = jax.tree.flatten(template)
    # `pack` took scalars and tensors in the order of the leaves; they return in that order.
    tensors = iter(jax.tree.leaves(rest))
    values = {dtype: iter([v[i] for i in range(v.size)]) for dtype, v in scalars.items()}
    return structure.unflatten(
        [next(values[x.dtype.name]) if _is_scalar(x) else next(tensors) for x in leaves]
    )


def packed(state: Unpacked) -> OptimizerState:
    """Packs the state of an optimizer, without the copies of low_precision="master"."""
    scalars, rest = pack(state)
    return OptimizerState(scalars, rest.groups, {}, rest.lookahead, rest.readout)


class Updates(NamedTuple):
    """What an optimizer would do to the parameters in a step; see `Optimizer.updates`."""

    # Both are by path name, and at least float32.

    updates: dict[str, jax.Array]
    # what `updates` are added to: the copy of low_precision="master", if there is one
    weights: dict[str, jax.Array]


class BoundOptimizer(NamedTuple):
    """An optimizer bound to one tree of parameters, whose groups are known."""

    groups: Mapping[str, Group]
    clip_norm: optax.ScalarOrSchedule | None
    layer_decay: float | None
    low_precision: LowPrecision
    layers: Layers | None
    lookahead: Lookahead | None
    readout: WeightEma | None
    states: Mapping[str, str] | None
    params: Any  # a pytree of arrays, or of anything with a shape
    labels: dict[str, str]  # path name -> group name, of every parameter

    def trainable(self) -> dict[str, Any]:
        """Returns the parameters by path name, without those of frozen groups."""
        frozen = {name for name, group in self.groups.items() if group.is_frozen}
        by_path = flatten(self.params)
        return {path: x for path, x in by_path.items() if self.labels[path] not in frozen}

    def split(self, trainable: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns group name -> path name -> leaf, for each group that is not frozen."""
        return {
            name: {path: x for path, x in trainable.items() if self.labels[path] == name}
            for name, group in self.groups.items()
            if not group.is_frozen
        }

    def layer_scales(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the factors of layer-wise decay; an empty dict if `layer_decay` is None."""
        # Expects all parameters, because the number of layers is counted among them.
        if self.layer_decay is None:
            return {}
        return layer_scales(by_path, self.layer_decay, self.layers, self.trainable())

    def template(self) -> Unpacked:
        """Returns the shapes of the state before packing."""
        return jax.eval_shape(self._init_unpacked, self.trainable())

    def unpacked(self, state: OptimizerState) -> Unpacked:
        """Returns a state with its scalars at their places."""
        tensors = (state.groups, state.lookahead, state.readout)
        return unpack(state.scalars, tensors, self.template())

    def copies(self) -> dict[str, Any]:
        """Returns the float32 copies for low_precision="master", by path name."""
        trainable = self.trainable() if self.low_precision == "master" else {}
        return widen({path: x for path, x in trainable.items() if jnp.finfo(x.dtype).bits < 32})

    def check(self) -> None:
        """Raises GroupError if a parameter cannot be trained or an argument is out of range."""
        # Traced arguments pass: check them as numbers before. Of a schedule, step 0 is checked.
        for path, value in own_floats(self).items():
            if callable(value) and (why := checks.wrong_float(path, evaluate(value, 0, path))):
                wrong = f"The schedule of {path} goes wrong at step 0: it {why}"
                raise GroupError(wrong, argument=path)
        by = None if self.lookahead is None else self.lookahead.scheduled_by
        if by is not None and (why := _wrong_schedule_of(self.groups, by)):
            wrong = f"lookahead.scheduled_by is {by!r}{why}"
            raise GroupError(wrong, argument="lookahead.scheduled_by")
        if self.readout is not None and (why := self.readout.wrong_pattern(self.trainable())):
            raise GroupError(why, argument="readout.exclude")
        for name, group_params in self.split(self.trainable()).items():
            recipe = self.groups[name].optimizer
            if (why := checks.wrong_parameter(recipe, group_params)) is not None:
                raise GroupError(why, name, "match")
            with group_error_context(name, self.groups[name], group_params):
                wrong = checks.wrong_argument(recipe)
            if wrong is not None:
                raise GroupError(f"In group {name!r}, {wrong[1]}", name, f"optimizer.{wrong[0]}")

    def kept_norms(self) -> dict[str, dict[str, jax.Array]]:
        """Computes norms of matrices that groups keep: group name -> path name -> the smallest."""
        found: dict[str, dict[str, jax.Array]] = {}
        for name, group_params in self.split(self.trainable()).items():
            with group_error_context(name, self.groups[name], group_params):
                found[name] = checks.kept_norms(self.groups[name].optimizer, group_params)
        return found

    def refuse_zeros(self, norms: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises GroupError if a norm that `kept_norms` returned is 0; they are known numbers."""
        for name, of_group in norms.items():
            if (wrong := checks.zero_matrix(self.groups[name].optimizer, of_group)) is not None:
                raise GroupError(f"In group {name!r}: {wrong}", name, "optimizer")

    def init(self) -> OptimizerState:
        """Returns the state before the first step; see `Optimizer.init`."""
        self.check()
        trainable = self.trainable()
        unpacked = self._init_unpacked(trainable)
        if self.states is not None:
            self._check_states(self.states, unpacked.groups)
        for name, group_params in self.split(widen(trainable)).items():
            with group_error_context(name, self.groups[name], group_params):
                # Run once here, so that an error is raised now and not at the first evaluation.
                jax.eval_shape(eval_params, unpacked.groups[name], group_params)
                _refuse_state(self, name, unpacked.groups[name])
        norms = self.kept_norms()
        if not any(isinstance(x, Tracer) for x in jax.tree.leaves(norms)):
            self.refuse_zeros(norms)
        return packed(unpacked)._replace(master=self.copies())

    def update(
        self,
        grads: optax.Updates,
        state: OptimizerState,
        *,
        skip: ArrayLike | None = None,
        key: jax.Array | None = None,
        extra: Mapping[str, Any],
    ) -> tuple[Any, OptimizerState]:
        """Updates the parameters by one step; raises GroupError if an optimizer raises."""
        trainable = self.trainable()
        old = self.unpacked(state)
        # The copies of low_precision="master" replace the rounded parameters.
        wide = {**widen(trainable), **state.master}
        found, groups = self._updates(grads, old, wide, extra)
        groups = self._stored(groups, old.step, key)
        after = {path: w + found.updates[path] for path, w in wide.items()}
        after, lookahead, readout = self._wrapped(after, old)
        back = round_to(after, trainable, self.low_precision, old.step, key)
        master = {path: after[path] for path in state.master}
        count = old.skipped
        if skip is not None:
            # The rounded parameters, because float16 has no finite numbers above 65504.
            skip = jnp.asarray(skip) | ~all_finite(back)
            back, master, groups, lookahead, readout = jax.tree.map(
                lambda o, n: jnp.where(skip, o, n),
                (trainable, state.master, old.groups, old.lookahead, old.readout),
                (back, master, groups, lookahead, readout),
            )
            count = count + skip.astype(jnp.int32)
        new_params = unflatten(self.params, {**flatten(self.params), **back})
        new = Unpacked(groups, lookahead, readout, count, old.step + 1)
        return new_params, packed(new)._replace(master=master)

    def updates(
        self, grads: optax.Updates, state: OptimizerState, *, extra: Mapping[str, Any]
    ) -> Updates:
        """Computes what `update` adds to the parameters; see `Optimizer.updates`."""
        wide = {**widen(self.trainable()), **state.master}
        return self._updates(grads, self.unpacked(state), wide, extra)[0]

    def follow(
        self, grads: optax.Updates, state: OptimizerState, *, extra: Mapping[str, Any]
    ) -> tuple[Updates, OptimizerState]:
        """Computes updates along the path of another optimizer; see `Optimizer.follow`."""
        old = self.unpacked(state)
        # It must not depend on a path of the parameters that is its own.
        if self.lookahead is not None:
            raise GroupError(
                "The optimizer has a lookahead, whose state follows the parameters that it sets"
                " itself. It cannot follow those of another optimizer: remove the lookahead.",
                argument="lookahead",
            )
        for name, of_group in old.groups.items():
            if depends_on_steps(of_group):
                raise GroupError(
                    f"The state of {name_of(self.groups[name].optimizer)} in group {name!r} has"
                    f" copies of the parameters or the length of a searched step, which belong to"
                    f" its own path. It cannot follow the parameters of another optimizer: choose"
                    f" an optimizer whose state is made of gradients.",
                    name,
                    "optimizer",
                )
        found, groups = self._updates(grads, old, widen(self.trainable()), extra)
        new = old._replace(groups=self._stored(groups, old.step), step=old.step + 1)
        return found, packed(new)._replace(master=self.copies())

    def eval_params(self, state: OptimizerState) -> dict[str, Any]:
        """Returns the trainable parameters that evaluation must use, by path name."""
        unpacked, trainable = self.unpacked(state), self.trainable()
        found: dict[str, Any] = {}
        for name, group_params in self.split(trainable).items():
            found |= eval_params(unpacked.groups[name], group_params)
        own = {} if self.lookahead is None else self.lookahead.weights(unpacked.lookahead)
        if self.readout is not None:
            weights = {**widen(trainable), **state.master, **own}
            own = self.readout.evaluated(weights, unpacked.readout, unpacked.step)
        return found | {path: x.astype(trainable[path].dtype) for path, x in own.items()}

    def displacement(self, state: OptimizerState) -> jax.Array | None:
        """Returns how far a lookahead displaces the parameters; see `Optimizer.displacement`."""
        if not isinstance(self.lookahead, EmaNesterov):
            return None
        unpacked = self.unpacked(state)
        last = unpacked.step - 1
        peak, rate = unpacked.lookahead.peak, self._rate_of_lookahead(last)
        return self.lookahead.displacement(last, peak, rate)

    def stored_leaves(self) -> dict[str, list[Leaf]]:
        """Returns the arrays of each group's state that `states` may store in another dtype."""
        templates = jax.eval_shape(self._init_groups, self.trainable())
        return find_leaves(self.states or {}, templates, flatten(self.params))

    def _check_states(self, states: Mapping[str, str], groups: Mapping[str, Any]) -> None:
        """Raises GroupError if a rule of `states` fits no array, or an array that must stay."""
        found = self.stored_leaves()
        check_rules(states, found)
        for name, leaves in found.items():
            narrow = [leaf.name for leaf in leaves if leaf.stored != "float32"]
            if narrow and depends_on_steps(groups[name]):
                raise GroupError(
                    f"states stores {narrow[0]!r} of group {name!r} in bfloat16, but the state of "
                    f"{name_of(self.groups[name].optimizer)} has copies of the parameters or the "
                    f"length of a searched step, which must stay in float32. Restrict the pattern "
                    f"to other groups: it may begin with the name of a group and a slash.",
                    argument="states",
                )

    def _stored(
        self, groups: dict[str, Any], step: ArrayLike = 0, key: jax.Array | None = None
    ) -> dict[str, Any]:
        """Rounds the states of the groups to the dtypes of `states`."""
        if self.states is None:
            return groups
        leaves = self.stored_leaves()
        # With one key for all, arrays of equal shapes would be rounded with equal noise.
        key = jax.random.key(0) if key is None else key
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(groups)}
        return {n: store_leaves(x, leaves[n], step, keys[n]) for n, x in groups.items()}

    def _init_groups(self, trainable: dict[str, Any]) -> dict[str, Any]:
        groups = {}
        with model_of(self.params):
            for name, group_params in self.split(widen(trainable)).items():
                group = self.groups[name]
                with group_error_context(name, group, group_params):
                    groups[name] = adapter.init(group.optimizer, group_params)
        return groups

    def _init_unpacked(self, trainable: dict[str, Any]) -> Unpacked:
        wide = widen(trainable)
        groups = self._stored(self._init_groups(trainable))
        zero = jnp.zeros((), jnp.int32)
        lookahead = () if self.lookahead is None else self.lookahead.init(wide)
        readout = () if self.readout is None else self.readout.init(wide)
        return Unpacked(groups, lookahead, readout, zero, zero)

    def _wrapped(self, after: dict[str, Any], old: Unpacked) -> tuple[dict[str, Any], Any, Any]:
        """Returns the parameters after lookahead and readout, and the states of both."""
        weights, lookahead, readout = after, old.lookahead, old.readout
        if (ahead := self.lookahead) is not None:
            rate, made = self._rate_of_lookahead(old.step), old.step + 1 - old.skipped
            after, weights, lookahead = ahead.advance(after, lookahead, old.step, made, rate)
        if self.readout is not None:
            readout = self.readout.advance(weights, readout, old.step)
        return after, lookahead, readout

    def _rate_of_lookahead(self, step: ArrayLike) -> Any:
        """Returns the learning rate of the group that schedules the lookahead; None without one."""
        by = None if self.lookahead is None else self.lookahead.scheduled_by
        if by is None:
            return None
        return evaluate(learning_rate_of(self.groups[by].optimizer), step, "learning_rate")

    def _updates(
        self, grads: Any, old: Unpacked, wide: dict, extra: Mapping[str, Any]
    ) -> tuple[Updates, dict[str, Any]]:
        """Runs every group's optimizer on the weights `wide`; returns new, widened states, too."""
        given = flatten(grads)
        grads = widen({path: given[path] for path in wide})
        step = old.step
        scales = self.layer_scales({**flatten(self.params), **wide})
        clipped = grads if self.clip_norm is None else clip(grads, self.clip_norm, step)
        moves, groups, before = {}, {}, old.groups
        if self.states is not None:  # `_stored` has rounded them
            leaves = self.stored_leaves()
            before = {name: widen_leaves(x, leaves[name]) for name, x in before.items()}
        for name, group_params in self.split(wide).items():
            within = extra_arguments(extra, group_params, self.params)
            if "value" in extra:
                within["grad"] = {path: grads[path] for path in group_params}
            given = {path: clipped[path] for path in group_params}
            group = self.groups[name]
            if group.maximize:
                given, within = jax.tree.map(jnp.negative, given), negated(within)
            if OBSERVATIONS in extra:  # by path; `maximize` does not change them
                within[OBSERVATIONS] = extra[OBSERVATIONS]
            with group_error_context(name, group, group_params), jax.named_scope(name):
                updates, groups[name] = adapter.update(
                    group.optimizer, given, before[name], group_params, step, within
                )
            moves |= {
                # Scales updates, not gradients: Adam would cancel a factor of the gradient.
                path: u * scales[path] if path in scales else u
                for path, u in updates.items()
            }
        moves = {path: moves[path].astype(w.dtype) for path, w in wide.items()}
        return Updates(moves, wide), groups


def all_finite(by_path: Mapping[str, jax.Array]) -> jax.Array:
    """Returns whether all numbers of some arrays are finite, as a boolean scalar."""
    # jnp.stack raises for an empty list: without trainable parameters, all are finite.
    finite = [jnp.isfinite(x).all() for x in by_path.values()]
    return jnp.stack(finite or [jnp.ones((), bool)]).all()


def clip(
    grads: dict[str, jax.Array], clip_norm: optax.ScalarOrSchedule, step: ArrayLike
) -> dict[str, jax.Array]:
    """Scales all gradients by one scalar, so that their global norm is at most `clip_norm`."""
    require_whole(optax.tree.norm, (grads, ()), "clip_norm")
    norm = optax.tree.norm(grads)
    bound = jnp.asarray(evaluate(clip_norm, step, "clip_norm"), norm.dtype)
    # One scalar, so that no `where` reads the gradients. Gradients of 0 give 1 and not 0 / 0,
    # because clip_norm is positive. A norm that is NaN makes all gradients NaN, as in optax.
    scale = jnp.where(norm < bound, jnp.ones_like(norm), bound / norm)
    # g.real: a complex gradient is scaled by a real number.
    return {path: g * scale.astype(g.real.dtype) for path, g in grads.items()}


def own_floats(optimizer: Any) -> dict[str, Any]:
    """Returns the float arguments of an optimizer that belong to no group, by their paths."""
    # They are numbers, traced scalars or schedules: "clip_norm", "lookahead.decay",
    # "readout.blend". `optimizer` is an `Optimizer` or a `BoundOptimizer`.
    found = {} if optimizer.clip_norm is None else {"clip_norm": optimizer.clip_norm}
    for name in ("lookahead", "readout"):
        if (wrapper := getattr(optimizer, name)) is not None:
            found |= {f"{name}.{key}": getattr(wrapper, key) for key in wrapper.floats}
    return found


# Of the loss and its functions: a group with maximize=True receives them with the opposite sign.
_NEGATED_IF_MAXIMIZED = ("value", "grad", "value_fn", "obj_fn", "grad_fn")


def _wrong_schedule_of(groups: Mapping[str, Group], name: str) -> str | None:
    """Returns why the lookahead cannot be scheduled by a group, after its name; or None."""
    if name not in groups:
        hint = did_you_mean(name, groups)
        return f", and there is no such group.{hint} The groups are {', '.join(groups)}."
    try:
        learning_rate_of(groups[name].optimizer)
    except ValueError:
        return (
            f", and the optimizer of this group, {name_of(groups[name].optimizer)}, has "
            f"no learning rate of its own. Name a group that has one."
        )
    return None


def _refuse_state(bound: BoundOptimizer, name: str, state: optax.OptState) -> None:
    """Raises ValueError if a state rules out layer_decay, the lookahead or the readout."""
    if bound.layer_decay is not None and depends_on_steps(state):
        raise ValueError(
            "layer_decay scales the steps of the lower layers, but the state of this optimizer "
            "depends on its unscaled steps. Remove layer_decay, or put every layer in a group "
            "with its own learning rate."
        )
    if bound.lookahead is not None and depends_on_steps(state):
        raise GroupError(
            f"The state of {name_of(bound.groups[name].optimizer)} in group {name!r} has copies "
            f"of the parameters or the length of a searched step, which would not agree with "
            f"parameters that a lookahead changes. Remove the lookahead, or choose another "
            f"optimizer for the group.",
            name,
            "optimizer",
        )
    if bound.readout is not None and nodes_of(state, _KEEP_AVERAGES):
        raise GroupError(
            f"{name_of(bound.groups[name].optimizer)} in group {name!r} keeps averages of the "
            f"parameters for evaluation, and so does the readout. Remove one of them.",
            name,
            "optimizer",
        )


def extra_arguments(
    extra: Mapping[str, Any], group_params: dict[str, Any], params: optax.Params
) -> dict[str, Any]:
    """Restricts the extra arguments of a train step to one group's parameters."""
    # Functions such as value_fn take all parameters in their own dtypes. The functions that are
    # returned take the group's parameters, widened; the others stay as they are before the step.
    # Scalars, also results of functions, become float32 (float64 under x64).

    # The default float: a line search transposes its function at a Python 1.0.
    dtype, whole = jnp.result_type(float), jax.tree.structure(params)

    def cut(tree: Any) -> Any:
        # Where the parameters are a single array, any scalar has their structure.
        if jax.tree.structure(tree) == whole and not jax.tree_util.treedef_is_leaf(whole):
            by_path = flatten(tree)
            return widen({path: by_path[path] for path in group_params})
        return jax.tree.map(at_dtype, tree)

    def at_dtype(x: Any) -> Any:
        x = jnp.asarray(x)
        floating = x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating else widen(x)

    def restrict(function: Callable[..., Any]) -> Callable[..., Any]:
        def of_own(wide: dict[str, Any], *args: Any, **others: Any) -> Any:
            # The loss needs all parameters, in their own dtypes.
            by_path = flatten(params)
            true = {path: w.astype(by_path[path].dtype) for path, w in wide.items()}
            # optax passes the extra arguments that `arguments` lists, which `function` cannot take.
            taken = {name: value for name, value in others.items() if name not in extra}
            return cut(function(unflatten(params, {**by_path, **true}), *args, **taken))

        of_own.__signature__ = inspect.Signature(arguments)  # pyright: ignore
        return of_own

    # optax's line searches raise if an extra argument is not an argument of value_fn.
    kind = inspect.Parameter
    arguments = [
        kind("params", kind.POSITIONAL_ONLY),
        kind("args", kind.VAR_POSITIONAL),
        *(kind(name, kind.KEYWORD_ONLY) for name in extra if name.isidentifier()),
    ]
    return {name: restrict(x) if callable(x) else cut(x) for name, x in extra.items()}


def negated(extra: Any) -> Any:
    """Reverses the sign of the loss, its gradient and their functions, for maximize=True."""

    def negative(x: Any) -> Any:
        if not callable(x):
            return jax.tree.map(jnp.negative, x)

        # wraps copies __signature__, which optax's line searches read.
        @functools.wraps(x)
        def function(*args: Any, **kwargs: Any) -> Any:
            return negative(x(*args, **kwargs))

        return function

    return {name: negative(x) if name in _NEGATED_IF_MAXIMIZED else x for name, x in extra.items()}


# Averages of parameters, for evaluation.


def may_keep_averages(path: str) -> bool:
    """Returns whether `eval_params` may compute averages from a leaf of a state."""
    # It looks for the names of the fields of such states in the leaf's path name. If no leaf of a
    # state has one, the parameters themselves are evaluated.
    return bool({"z", "slow", "lookahead", "readout"} & set(path.split("/")))


_KEEP_AVERAGES = (optax.contrib.ScheduleFreeState, SlowParams)


def eval_params(state: optax.OptState, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the parameters to evaluate: averages from the state, if there are any."""
    # Schedule-free evaluates the average of its iterates, lookahead its slow parameters. The result
    # is in the dtypes of `params`.
    found = dict(params)
    for node in nodes_of(state, _KEEP_AVERAGES):
        held = node.slow if isinstance(node, SlowParams) else node.z
        # `z` and the slow parameters are shaped like the parameters that the optimizer received.
        if not isinstance(held, Mapping) or held.keys() != params.keys():
            raise ValueError(
                "It keeps averages for evaluation, but a wrapper such as optax.flatten changes the "
                "tree of parameters that it receives. Move it out of the wrapper."
            )
        # Inside optax.partition or optax.masked, other parameters are MaskedNodes.
        averages: Any = {p: x for p, x in held.items() if not isinstance(x, optax.MaskedNode)}
        if isinstance(node, optax.contrib.ScheduleFreeState):
            # optax computes (y - (1 - b1) * z) / b1, where z is at least float32.
            wide = widen({path: params[path] for path in averages})
            averages = optax.contrib.schedule_free_eval_params(node._replace(z=averages), wide)
        found |= {path: x.astype(params[path].dtype) for path, x in averages.items()}
    return found
