"""Combines groups into one optimizer; `BoundOptimizer` in bound.py runs them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optim import adapter, checks
from optim.bound import BoundOptimizer, OptimizerState, Unpacked, Updates, own_floats, packed
from optim.descent import Updated
from optim.dtypes import LowPrecision
from optim.factories import evaluate, named_floats, nodes_of
from optim.groups import Group, assign
from optim.layer_decay import Layers, wrong_layers
from optim.paths import flatten, names, unflatten
from optim.state_dtypes import wrong_states
from optim.wrappers import EmaNesterov, Lookahead, OuterNesterov, WeightEma

Params = TypeVar("Params")  # any pytree of arrays


class Optimizer(NamedTuple):
    """The groups and options that `optimizer` combined, without parameters and state.

    The attributes are the arguments of `optimizer`.
    """

    groups: Mapping[str, Group]
    clip_norm: optax.ScalarOrSchedule | None = None
    layer_decay: float | None = None
    low_precision: LowPrecision = "nearest"
    layers: Layers | None = None
    lookahead: Lookahead | None = None
    readout: WeightEma | None = None
    states: Mapping[str, str] | None = None

    def bind(self, params: Any) -> BoundOptimizer:
        """Binds the optimizer to parameters, which it compares with the groups' patterns.

        Args:
            params: a pytree of arrays, or of anything with a shape.

        Raises:
            GroupError: if no group takes a parameter, or a group takes none.
        """
        # As optax does; ShapeDtypeStructs and tracers stay as they are.
        kinds = (bool, int, float, complex, np.ndarray, np.generic)
        params = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, kinds) else x, params)
        return BoundOptimizer(*self, params, assign(self.groups, flatten(params)))

    def label(self, params: Any) -> Any:
        """Returns a tree like `params` of group names; the first that takes a parameter has it.

        Args:
            params: a pytree of arrays, or of anything with a shape.

        Raises:
            GroupError: if no group takes a parameter, or a group takes none.
        """
        return unflatten(params, self.bind(params).labels)

    def trainable(self, params: Any) -> dict[str, Any]:
        """Returns path name -> parameter that is updated: those of groups that are not frozen.

        Args:
            params: a pytree of arrays, or of anything with a shape.

        Raises:
            GroupError: see `label`.
        """
        return self.bind(params).trainable()

    def layer_scales(self, params: Any) -> dict[str, Any]:
        """Computes the factors of layer-wise decay; see `layer_decay.layer_scales`.

        Args:
            params: a pytree of arrays.

        Returns:
            Path name -> factor, without factors of 1; empty if `layer_decay` is None.

        Raises:
            GroupError: see `label`; or if the layer of a parameter is not known.
        """
        if self.layer_decay is None:
            return {}
        bound = self.bind(params)
        return bound.layer_scales(flatten(bound.params))

    def hyperparameters(self, step: ArrayLike) -> dict[str, dict[str, Any]]:
        """Evaluates every float argument of the groups' optimizers at a step.

        Args:
            step: an int or an int32 scalar, counted from 0.

        Returns:
            Group name -> argument name -> value, without arguments that are None. A finished
            transformation does not show its arguments, and has none here.

        Raises:
            ValueError: if a schedule fails, or returns no scalar.
        """
        return {
            name: {key: evaluate(value, step, key) for key, value in self.schedules(name).items()}
            for name in self.groups
        }

    def schedules(self, name: str) -> dict[str, Any]:
        """Returns argument name -> float, traced scalar or schedule of the optimizer of a group.

        Args:
            name: that of the group; KeyError if there is none.
        """
        return {key: x for key, _, _, x, _ in named_floats(self.groups[name].optimizer)}

    def own_floats(self) -> dict[str, Any]:
        """Returns path -> float, traced scalar or schedule of what belongs to no group.

        The paths are "clip_norm", unless it is None, "lookahead.step_size", "readout.blend", ...
        """
        return own_floats(self)

    def position(self, state: OptimizerState) -> jax.Array:
        """Returns how many calls of `update` led to a state, int32: the step of the next one."""
        # The last field of `bound.Unpacked`.
        return state.scalars["int32"][-1]

    def skipped(self, state: OptimizerState) -> jax.Array:
        """Returns how many of the updates that led to a state were skipped, int32."""
        # The last field but one of `bound.Unpacked`.
        return state.scalars["int32"][-2]

    def displacement(self, state: OptimizerState, params: Any) -> jax.Array | None:
        """Returns how far `ema_nesterov` has displaced the parameters in the last update.

        Args:
            state: what `update` returned.
            params: the parameters that it returned.

        Returns:
            A scalar, 0 where the lookahead does not act: the step size of the lookahead, scaled by
            its schedules, at which the gradient of the next update is taken. An update that was
            skipped has displaced nothing, and this is what it would have had. None without
            `ema_nesterov`.
        """
        return self.bind(params).displacement(state)

    def init(self, params: Any) -> OptimizerState:
        """Makes the state before the first step, whose float leaves are at least float32.

        Args:
            params: a pytree of float arrays.

        Raises:
            GroupError: see `label`; or if a parameter cannot be trained, such as one of integers;
                or an argument is out of range, such as b1=1, or a schedule at step 0.
        """
        return self.bind(params).init()

    def update(
        self,
        grads: Any,
        state: OptimizerState,
        params: Params,
        *,
        skip: ArrayLike | None = None,
        key: jax.Array | None = None,
        **extra: Any,
    ) -> tuple[Params, OptimizerState]:
        """Updates the parameters by one step.

        Args:
            grads: a tree like `params`, or a dict {path name: gradient} of the trainable
                parameters.
            state: what `init` or the last `update` returned.
            params: the parameters before the step.
            skip: a boolean scalar. If true, or if the parameters after the step would not be
                finite, parameters and state stay unchanged, and only the step count increases. None
                never skips.
            key: a PRNG key of the run, for low_precision="stochastic"; None for the same noise in
                every run.
            **extra: arguments that some optimizers need: value, value_fn, grad_fn, obj_fn, ... A
                function takes all parameters; each group's optimizer receives it as a function of
                the group's parameters.

        Returns:
            The parameters after the step, in their dtypes; and the new state, with the shapes,
            dtypes and strong types of the old state.
        """
        return self.bind(params).update(grads, state, skip=skip, key=key, extra=extra)

    def updates(self, grads: Any, state: OptimizerState, params: Any, **extra: Any) -> Updates:
        """Computes what the optimizers of the groups add to the parameters in a step.

        That is the step of `update` before its lookahead, before its rounding to low precision and
        whether or not it is skipped. It is returned as the optimizers return it, and not as the
        difference of the parameters, in which small updates of large weights would be rounded away.

        Args:
            grads: as for `update`.
            state: as for `update`; it stays valid.
            params: the parameters before the step.
            **extra: as for `update`.

        Returns:
            The updates of the trainable parameters, and the weights that they are added to.
        """
        return self.bind(params).updates(grads, state, extra=extra)

    def follow(
        self, grads: Any, state: OptimizerState, params: Any, **extra: Any
    ) -> tuple[Updates, OptimizerState]:
        """Computes the updates of a step at parameters that another optimizer moves.

        The updates are not applied. The state advances by the gradients that it is given, so that
        repeated calls with the parameters and gradients of a run compute what this optimizer would
        do at each point of the run.

        Args:
            grads: as for `update`, at `params`.
            state: what `init` or the last `follow` returned.
            params: the parameters before the step.
            **extra: as for `update`.

        Returns:
            The updates as `updates` returns them; and the state after the step. Copies of
            low_precision="master" are those of `params`, and a readout does not advance.

        Raises:
            GroupError: the state depends on the steps that this optimizer makes itself: that of a
                lookahead, of an average such as schedule-free's, or of a line search.

        Example:
            >>> import jax.numpy as jnp, optax, optim
            >>> from functools import partial
            >>> sgd = partial(optax.sgd, learning_rate=1.0, momentum=0.5)
            >>> other = optim.optimizer({"all": optim.group(".*", sgd)})
            >>> params, grads = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
            >>> state = other.init(params)
            >>> for _ in range(2):  # the parameters stay
            ...     found, state = other.follow(grads, state, params)
            >>> print(found.updates["w"])
            [-1.5 -1.5]
        """
        return self.bind(params).follow(grads, state, extra=extra)

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer as an optax transformation; see `transformation`."""
        return transformation(self)

    def eval_params(self, state: "OptimizerState | TransformationState", params: Params) -> Params:
        """Returns the parameters that evaluation must use.

        Args:
            state: the state that `update` returned with `params`, of this optimizer or its `tx`.
            params: the parameters that are trained.

        Returns:
            A tree like `params`: the readout, if there is one; the weights without the displacement
            of a lookahead; averages for groups that keep them (schedule-free, optax.lookahead);
            else `params`.
        """
        bound = self.bind(params)
        return unflatten(params, {**flatten(params), **bound.eval_params(to_paths(bound, state))})


def optimizer(
    groups: Mapping[str, Group],
    clip_norm: float | None = None,
    layer_decay: float | None = None,
    low_precision: LowPrecision = "nearest",
    layers: Mapping[str, str | int] | None = None,
    lookahead: EmaNesterov | OuterNesterov | None = None,
    readout: WeightEma | None = None,
    states: Mapping[str, str] | None = None,
) -> Optimizer:
    """Combines groups into one optimizer.

    Args:
        groups: group name -> group; the first group that takes a parameter updates it.
        clip_norm: the largest global norm of the gradients of all trainable parameters; larger
            gradients are scaled down to it (Pascanu et al. 2013, arXiv:1211.5063). A float or a
            schedule; None does not clip.
        layer_decay: the factor of the learning rate from one layer to the layer below it (see
            `layer_scales`); None for no decay.
        low_precision: how bfloat16 and float16 parameters are rounded after an update, which is
            computed in float32: "nearest" rounds the sum; "master" keeps a float32 copy in the
            state and rounds only the parameters that the model uses; "stochastic" rounds up or down
            at random, without bias (Zamirai et al. 2020, arXiv:2010.06192).
        layers: for layer_decay, the layers of parameters with unusual names: pattern of whole paths
            -> "embedding", "head", "stacked" or a number (see `layer_scales`).
        lookahead: `ema_nesterov` or `outer_nesterov`, which wraps the optimizers of all groups:
            after their update, it changes the parameters that the model gets. None changes nothing.
        readout: `weight_ema`, which averages the parameters of all groups for evaluation; None
            evaluates the parameters, or what the lookahead or a group evaluates.
        states: pattern of arrays of the optimizers' states -> how they are stored between the
            steps; the first pattern that matches an array holds, and arrays that none matches stay
            in float32. A pattern must match the whole name of the field that has the array, such
            as "mu" and "nu" of Adam, or the group's name, a slash and that name:
            {"matrices/momentum": "bfloat16"}. Arithmetic stays in float32: an array is widened
            before a step, and after it "bfloat16" rounds it to the nearest number and "bfloat16
            stochastic" up or down at random, without bias. An average with a decay above 1 -
            2**-9 = 0.998, such as nu of Adam with b2=0.999, needs the latter: rounded to the
            nearest number, it never falls. None stores all as the optimizers themselves do.

    Returns:
        The optimizer, for any parameters that its groups cover.

    Raises:
        ValueError: if there are no groups, or an argument is outside its range.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, optax, optim
        >>> from functools import partial
        >>> warmup = optim.schedules.warmup_cosine(0.02, warmup_steps=2, decay_steps=10)
        >>> optimizer = optim.optimizer(
        ...     {
        ...         "matrices": optim.group(".*/kernel", partial(optim.muon, learning_rate=warmup)),
        ...         "rest": optim.group(".*", partial(optax.adamw, learning_rate=1e-3)),
        ...     },
        ...     clip_norm=1.0,
        ... )
        >>> params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        >>> state = optimizer.init(params)
        >>> grads = jax.tree.map(jnp.ones_like, params)
        >>> params, state = jax.jit(optimizer.update)(grads, state, params)
        >>> print(params["dense"]["bias"].round(4), optimizer.position(state))
        [-0.001 -0.001 -0.001] 1
        >>> print(optimizer.hyperparameters(1)["matrices"]["learning_rate"])
        0.01
    """
    wrong = _wrong_kind(groups, lookahead, readout)
    wrong = wrong or checks.wrong_option(groups, clip_norm, layer_decay, low_precision)
    if wrong is None and layers is not None:
        wrong = wrong_layers(layers)
        if layer_decay is None:
            wrong = "layers is used by layer_decay only: set layer_decay, or remove layers."
    wrong = wrong or (None if states is None else wrong_states(states))
    if wrong is not None:
        raise ValueError(wrong)
    options = (clip_norm, layer_decay, low_precision, layers)
    return Optimizer(dict(groups), *options, lookahead, readout, states)


def _wrong_kind(groups: Mapping[str, Any], lookahead: Any, readout: Any) -> str | None:
    """Describes a group, a lookahead or a readout that is none, or returns None."""
    if not groups:
        return "An optimizer needs at least one group; give groups={'all': group('.*', ...)}."
    for name, one in groups.items():
        if not isinstance(one, Group):
            made = "must be made by optim.group(match, optimizer)"
            return f"The group {name!r} {made}, got {one!r:.60}."
    if not isinstance(lookahead, EmaNesterov | OuterNesterov | None):
        return (
            f"lookahead must be made by optim.ema_nesterov or optim.outer_nesterov, got "
            f"{lookahead!r}. optax.lookahead is the optimizer of a group."
        )
    if not isinstance(readout, WeightEma | None):
        return f"readout must be made by optim.weight_ema, got {readout!r}."
    return None


# As an optax transformation, whose state optax's tools can read. An `OptimizerState` consists of
# flat dicts by path name, with scalars packed, which is fast. A `TransformationState` has the
# structure of `optax.partition`: values for each parameter are a tree like the parameters, with an
# `optax.MaskedNode` for parameters of other groups; a count is a scalar.


class TransformationState(NamedTuple):
    """The state of `Optimizer.tx`."""

    # Values for each parameter are a tree like the parameters; `master`, `lookahead` and `readout`
    # are empty where they are not used.

    groups: dict[str, Any]  # name -> state; `optax.MaskedNode` for parameters of other groups
    skipped: Any  # the number of skipped updates, int32
    step: Any  # the number of updates, int32
    master: Any  # the float32 copies of low_precision="master"
    lookahead: Any = ()
    readout: Any = ()

    @property
    def b1(self) -> Any:
        """For `optax.contrib.schedule_free_eval_params`, if there is one such group."""
        return self._schedule_free().b1

    @property
    def z(self) -> Any:
        """For `optax.contrib.schedule_free_eval_params`, if there is one such group."""
        return self._schedule_free().z

    def _schedule_free(self) -> optax.contrib.ScheduleFreeState:
        found = nodes_of(self.groups, optax.contrib.ScheduleFreeState)
        if len(found) != 1 or len(self.groups) != 1:
            raise AttributeError(
                "This state has no schedule-free average of all parameters. Use "
                "Optimizer.eval_params, which finds the averages of every group."
            )
        return found[0]


def transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an `optim.Optimizer` as an optax transformation."""
    # Updates have the parameters' dtypes: in low precision, parameters plus updates are rounded
    # once more than the parameters that `Optimizer.update` returns. The state is a
    # `TransformationState`; `update` also takes an `OptimizerState`, and then returns one.

    def init(params: optax.Params) -> TransformationState:
        if not jax.tree.leaves(params):  # optax.tree.map_params passes a placeholder
            own = {n: x.optimizer for n, x in optimizer.groups.items() if not x.is_frozen}
            groups = {name: adapter.init(recipe, params) for name, recipe in own.items()}
            master = params if optimizer.low_precision == "master" else ()
            wrappers = (optimizer.lookahead, optimizer.readout)
            inits = [() if wrapper is None else wrapper.init({}) for wrapper in wrappers]
            made = _map_dicts(lambda _: params, None, inits)
            zero = jnp.zeros((), jnp.int32)
            return TransformationState(groups, zero, zero, master, *made)
        bound = optimizer.bind(params)
        return to_trees(bound, bound.init())

    def update(grads: optax.Updates, state: Any, params: Any = None, **extra: Any) -> Updated:
        if params is None:
            raise ValueError("Pass the parameters: tx.update(grads, state, params).")
        bound = optimizer.bind(params)
        skip, key = extra.pop("skip", None), extra.pop("key", None)
        old = to_paths(bound, state)
        new_params, new_state = bound.update(grads, old, skip=skip, key=key, extra=extra)
        trainable, after = bound.trainable(), flatten(new_params)
        moves = {
            path: after[path] - x if path in trainable else jnp.zeros_like(x)
            # Also for frozen parameters: optax.apply_updates needs a tree like the parameters.
            for path, x in flatten(bound.params).items()
        }
        out = to_trees(bound, new_state) if isinstance(state, TransformationState) else new_state
        return unflatten(params, moves), out

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore


def to_trees(bound: BoundOptimizer, state: OptimizerState) -> TransformationState:
    """Converts the state of a bound optimizer to the state of its transformation."""
    called, structure = names(bound.params), jax.tree.structure(bound.params)

    def tree(by_path: Any) -> Any:
        return structure.unflatten([by_path.get(name, optax.MaskedNode()) for name in called])

    unpacked = bound.unpacked(state)
    groups = {
        name: _map_dicts(tree, group_params, unpacked.groups[name])
        for name, group_params in bound.split(bound.trainable()).items()
    }
    master = tree(state.master) if bound.low_precision == "master" else ()
    wrappers = _map_dicts(tree, None, (unpacked.lookahead, unpacked.readout))
    return TransformationState(groups, unpacked.skipped, unpacked.step, master, *wrappers)


def to_paths(bound: BoundOptimizer, state: Any) -> OptimizerState:
    """Converts the state of a transformation back, for `Optimizer.update`."""
    if isinstance(state, OptimizerState):
        return state
    template = bound.template()
    called, structure = names(bound.params), jax.tree.structure(bound.params)

    def select(like: Any, tree: Any) -> dict[str, Any]:
        found = dict(zip(called, structure.flatten_up_to(tree), strict=True))
        return {name: found[name] for name in like}

    groups = {
        name: _map_dicts(select, group_params, template.groups[name], state.groups[name])
        for name, group_params in bound.split(bound.trainable()).items()
    }
    lookahead, readout = _map_dicts(
        select, None, (template.lookahead, template.readout), (state.lookahead, state.readout)
    )
    low = bound.copies()
    master = select(low, state.master) if low else {}
    new = packed(Unpacked(groups, lookahead, readout, state.skipped, state.step))
    return new._replace(master=master)


def _map_dicts(change: Callable[..., Any], like: Mapping[str, Any] | None, *states: Any) -> Any:
    """Changes the dicts of a state that have the keys of `like`, or all of them."""
    # A dict whose keys are the paths of a group has values for its parameters. The state of an
    # optimizer may have other dicts, which stay as they are; all dicts of a lookahead and a readout
    # have values for parameters. Of several states, the first one has the dicts.

    def has_values(x: Any) -> bool:
        return isinstance(x, dict) and (like is None or x.keys() == like.keys())

    def one(x: Any, *others: Any) -> Any:
        return change(x, *others) if has_values(x) else (x, *others)[-1]

    return jax.tree.map(one, *states, is_leaf=has_values)
