"""Runs the groups as one optimizer: clip, move every group, round, pack the state.

Each group's optimizer sees a flat dict {path name: array} of its own parameters and nothing else.
That is optax's `partition` without its MaskedNodes, so that an optimizer that compares trees, or
evaluates the loss at other parameters (line searches), works in a group as it does alone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optim import checks, evaluation, interop, laws, recipes
from optim.extras import extra_arguments, negated
from optim.groups import Group, GroupError, assign, first, told_with_the_group, wrong_groups
from optim.layer_decay import Layers, layer_scales, refuse_states, wrong_layers
from optim.norms import all_finite, clip
from optim.packing import OptimizerState, pack, unpack
from optim.paths import as_arrays, flatten, unflatten
from optim.rounding import LowPrecision, round_to


class Optimizer(NamedTuple):
    """Everything that moves the parameters; made by `optimizer`."""

    groups: Mapping[str, Group]
    clip_norm: Any = None
    layer_decay: float | None = None
    low_precision: LowPrecision = "nearest"
    layers: Layers | None = None

    def label(self, params: Any) -> Any:
        """Names the group of every parameter.

        Args:
            params: a pytree of arrays, or of anything with a shape.

        Returns:
            A tree like `params` of group names: of the first group that takes the parameter.

        Raises:
            GroupError: a parameter that no group takes, or a group that takes none.
        """
        return unflatten(params, assign(self.groups, flatten(as_arrays(params))))

    def trainable(self, params: Any) -> dict[str, Any]:
        """Lists the parameters that move, by path name: all but those of frozen groups."""
        named = flatten(as_arrays(params))
        labels = assign(self.groups, named)
        return {path: x for path, x in named.items() if not self.groups[labels[path]].is_frozen}

    def layer_scales(self, params: Any) -> dict[str, Any]:
        """Tells the factors of layer-wise learning-rate decay, see `layer_decay.layer_scales`."""
        if self.layer_decay is None:
            return {}
        named = flatten(as_arrays(params))
        return layer_scales(named, self.layer_decay, self.layers, self.trainable(params))

    def hyperparameters(self, step: Any) -> dict[str, dict[str, Any]]:
        """Tells the value of every float argument at a step.

        Args:
            step: an int or an int32 scalar, counted from 0.

        Returns:
            Group name -> argument name -> value. Arguments that are None are left out, and so are
            those of finished transformations, which do not show them.
        """
        return {
            name: {k: v(step) if callable(v) else v for k, v in self.schedules(name).items()}
            for name in self.groups
        }

    def schedules(self, name: str) -> dict[str, Any]:
        """Lists the float arguments of a group's optimizer: each a float or a schedule."""
        return recipes.hyperparameters(self.groups[name].optimizer)

    def position(self, state: OptimizerState) -> Any:
        """Tells where the schedules stand: the calls of `update` so far, int32."""
        return state.scalars["int32"][-1]

    def skipped(self, state: OptimizerState) -> Any:
        """Tells how many of them were skipped, int32."""
        return state.scalars["int32"][-2]

    def init(self, params: Any) -> OptimizerState:
        """Makes the state before the first step.

        Args:
            params: a pytree of float arrays.

        Returns:
            The state; float leaves are at least float32.

        Raises:
            GroupError: see `label`; or a parameter that cannot be trained, such as one of integers;
                or an argument that cannot be right, such as b1=1.
        """
        free = self.trainable(params)
        for name, own in self._split(free).items():
            recipe = self.groups[name].optimizer
            if (why := checks.wrong_parameter(recipe, own)) is not None:
                raise GroupError(why, name, "match")
            if (wrong := checks.wrong_argument(recipe)) is not None:
                raise GroupError(f"In group {name!r}, {wrong[1]}", name, f"optimizer.{wrong[0]}")
        unpacked = self._init_unpacked(free)
        for name, own in self._split(laws.widen(free)).items():
            with told_with_the_group(name, self.groups[name]):
                jax.eval_shape(evaluation.eval_params, unpacked["groups"][name], own)
                if self.layer_decay is not None:
                    refuse_states(unpacked["groups"][name])
        scalars, tensors = pack(unpacked)
        return OptimizerState(scalars, tensors["groups"], self.copies(params))

    def update(
        self,
        grads: Any,
        state: OptimizerState,
        params: Any,
        *,
        skip: Any = None,
        key: Any = None,
        **extra: Any,
    ) -> tuple[Any, OptimizerState]:
        """Moves the parameters by one step.

        Args:
            grads: a tree like `params`, or a dict {path name: gradient} of the trainable
                parameters.
            state: what `init` or the last `update` returned.
            params: the parameters before the step.
            skip: a boolean scalar: where true, or where the parameters after the step would not
                be finite, parameters and state stay as they are, and only the schedules move on.
                None where nothing is ever skipped.
            key: a PRNG key of the run, for low_precision="stochastic"; None for the same noise in
                every run.
            **extra: what some optimizers need: value, value_fn, grad_fn, obj_fn, ... A function
                takes all the parameters; each group's optimizer sees it as a function of that
                group's own.

        Returns:
            The parameters after the step, in their dtypes; and the new state, with the avals of the
            old.
        """
        params = as_arrays(params)
        free = self.trainable(params)
        named_grads = flatten(grads)
        named_grads = {path: named_grads[path] for path in free}
        old = self._unpacked(state, free)
        wide = {**laws.widen(free), **state.master}
        moves, groups = self._moves(named_grads, old, wide, params, extra)
        after = {path: w + moves[path].astype(w.dtype) for path, w in wide.items()}
        back = round_to(after, free, self.low_precision, old["step"], key)
        master = {path: after[path] for path in state.master}
        count = old["skipped"]
        if skip is not None:
            skip = jnp.asarray(skip) | ~all_finite(back)
            back, master, groups = jax.tree.map(
                lambda o, n: jnp.where(skip, o, n),
                (free, state.master, old["groups"]),
                (back, master, groups),
            )
            count = count + skip.astype(jnp.int32)
        scalars, tensors = pack({"groups": groups, "skipped": count, "step": old["step"] + 1})
        new_params = unflatten(params, {**flatten(params), **back})
        return new_params, OptimizerState(scalars, tensors["groups"], master)

    @property
    def tx(self) -> optax.GradientTransformationExtraArgs:
        """Gives the optimizer as an optax transformation, see `interop.transformation`."""
        return interop.transformation(self)

    def eval_params(self, state: OptimizerState, params: Any) -> Any:
        """Gives the parameters that evaluation must use.

        Args:
            state: the state that goes with `params`, of this optimizer or of its `tx`.
            params: the parameters that are trained.

        Returns:
            A tree like `params`: averages where an optimizer keeps them (schedule-free), else
            `params`.
        """
        named = flatten(params)
        free = self.trainable(params)
        groups = self._unpacked(interop.to_paths(self, state, params), free)["groups"]
        for name, own in self._split(free).items():
            named |= evaluation.eval_params(groups[name], own)
        return unflatten(params, named)

    def split(self, params: Any) -> dict[str, dict[str, Any]]:
        """Deals the trainable parameters to their groups: group name -> path -> leaf."""
        return self._split(self.trainable(params))

    def template(self, params: Any) -> dict[str, Any]:
        """Tells the shapes of the state before it is packed: "groups", "skipped" and "step"."""
        return jax.eval_shape(self._init_unpacked, self.trainable(params))

    def copies(self, params: Any) -> dict[str, Any]:
        """Makes the float32 copies of low_precision="master", by path name."""
        free = self.trainable(params) if self.low_precision == "master" else {}
        return laws.widen({path: x for path, x in free.items() if jnp.finfo(x.dtype).bits < 32})

    def _split(self, free: dict[str, Any]) -> dict[str, dict[str, Any]]:
        deal: dict[str, dict[str, Any]] = {n: {} for n, g in self.groups.items() if not g.is_frozen}
        for path, x in free.items():
            deal[first(self.groups, path, x)][path] = x
        return deal

    def _init_unpacked(self, free: dict[str, Any]) -> dict[str, Any]:
        parts = self._split(laws.widen(free))
        groups = {}
        for name, own in parts.items():
            with told_with_the_group(name, self.groups[name]):
                groups[name] = laws.init(self.groups[name].optimizer, own)
        zero = jnp.zeros((), jnp.int32)
        return {"groups": groups, "skipped": zero, "step": zero}  # in this order, see `position`

    def _unpacked(self, state: OptimizerState, free: dict[str, Any]) -> dict[str, Any]:
        template = jax.eval_shape(self._init_unpacked, free)
        return unpack(state.scalars, state.groups, template)

    def _moves(
        self, grads: dict, old: dict, wide: dict, params: Any, extra: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs every group's optimizer: the updates by path, the new states by group."""
        step = old["step"]
        grads = laws.widen(grads)
        scales = self.layer_scales(unflatten(params, {**flatten(params), **wide}))
        clipped = grads if self.clip_norm is None else clip(grads, self.clip_norm, step)
        moves, groups = {}, {}
        for name, own in self._split(wide).items():
            within = extra_arguments(extra, own, params)
            if "value" in extra:
                within["grad"] = {path: grads[path] for path in own}
            given = {path: clipped[path] for path in own}
            if self.groups[name].maximize:
                given, within = jax.tree.map(jnp.negative, given), negated(within)
            with told_with_the_group(name, self.groups[name]):
                updates, groups[name] = laws.update(
                    self.groups[name].optimizer,
                    given,
                    old["groups"][name],
                    own,
                    step,
                    within,
                )
            moves |= {
                path: u * scales[path] if path in scales else u for path, u in updates.items()
            }
        return moves, groups


def optimizer(
    groups: Mapping[str, Group],
    clip_norm: float | None = None,
    layer_decay: float | None = None,
    low_precision: LowPrecision = "nearest",
    layers: Mapping[str, str | int] | None = None,
) -> Optimizer:
    """Puts groups together into one optimizer.

    Args:
        groups: group name -> group; the first group that takes a parameter moves it.
        clip_norm: the largest global norm of the gradients of all trainable parameters; larger
            gradients are scaled down to it (Pascanu et al. 2013, arXiv:1211.5063). A float or a
            schedule; None never clips.
        layer_decay: the factor of the learning rate from one layer to the layer below it (see
            `layer_scales`); None for no such decay.
        low_precision: how bfloat16 and float16 parameters take their updates, which are computed in
            float32: "nearest" rounds the sum; "master" keeps a float32 copy in the state and rounds
            only what the model sees; "stochastic" rounds up or down at random, right on average
            (Zamirai et al. 2020, arXiv:2010.06192).
        layers: for layer_decay, which layers parameters of unusual names belong to: pattern of
            whole paths -> "embedding", "head", "stacked" or a number (see `layer_scales`).

    Returns:
        The optimizer. It fits any parameters that its groups cover.

    Raises:
        ValueError: no groups, or an argument outside its range.
    """
    wrong = wrong_groups(groups)
    wrong = wrong or checks.wrong_option(groups, clip_norm, layer_decay, low_precision)
    if wrong is None and layers is not None:
        wrong = wrong_layers(layers)
        if layer_decay is None:
            wrong = "layers says which layers layer_decay slows down, and layer_decay is None."
    if wrong is not None:
        raise ValueError(wrong)
    return Optimizer(dict(groups), clip_norm, layer_decay, low_precision, layers)
