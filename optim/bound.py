"""Runs the groups of an optimizer: clips, updates every group, rounds, packs the state.

Each group's optimizer receives a flat dict {path name: array} of the group's parameters only. In
contrast to `optax.partition` there are no MaskedNodes, so that an optimizer that compares trees, or
evaluates the loss at other parameters (line searches), works in a group as it does alone.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim import adapter, checks, evaluation
from optim.declarations import model_of
from optim.dtypes import widen
from optim.extras import extra_arguments, negated
from optim.groups import Group, GroupError, group_error_context
from optim.instantiation import evaluate
from optim.layer_decay import Layers, layer_scales, refuse_states
from optim.norms import all_finite, clip
from optim.packing import OptimizerState, Unpacked, pack, unpack
from optim.paths import flatten, unflatten
from optim.rounding import LowPrecision, round_to


class BoundOptimizer(NamedTuple):
    """An optimizer bound to one tree of parameters, whose groups are known.

    Attributes:
        groups: see `optim.optimizer`, as for the next four.
        params: the parameters, a pytree of arrays, or of anything with a shape.
        labels: path name -> group name, of every parameter.
    """

    groups: Mapping[str, Group]
    clip_norm: optax.ScalarOrSchedule | None
    layer_decay: float | None
    low_precision: LowPrecision
    layers: Layers | None
    params: Any
    labels: dict[str, str]

    def trainable(self) -> dict[str, Any]:
        """Returns the parameters by path name, without those of frozen groups."""
        frozen = {name for name, group in self.groups.items() if group.is_frozen}
        by_path = flatten(self.params)
        return {path: x for path, x in by_path.items() if self.labels[path] not in frozen}

    def split(self, trainable: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Divides trainable parameters, or values for each of them, among the groups.

        Args:
            trainable: path name -> leaf, for parameters of groups that are not frozen.

        Returns:
            Group name -> path name -> leaf; each group that is not frozen is there.
        """
        moving = [name for name, group in self.groups.items() if not group.is_frozen]
        by_group: dict[str, dict[str, Any]] = {name: {} for name in moving}
        for path, x in trainable.items():
            by_group[self.labels[path]][path] = x
        return by_group

    def layer_scales(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Computes the factors of layer-wise decay; an empty dict if `layer_decay` is None.

        Args:
            by_path: path name -> array, all parameters.
        """
        if self.layer_decay is None:
            return {}
        return layer_scales(by_path, self.layer_decay, self.layers, self.trainable())

    def template(self) -> Unpacked:
        """Returns the shapes of the state before packing."""
        return jax.eval_shape(self._init_unpacked, self.trainable())

    def copies(self) -> dict[str, Any]:
        """Returns the float32 copies for low_precision="master", by path name."""
        trainable = self.trainable() if self.low_precision == "master" else {}
        return widen({path: x for path, x in trainable.items() if jnp.finfo(x.dtype).bits < 32})

    def check(self) -> None:
        """Raises GroupError if a parameter cannot be trained, or an argument is out of range.

        Traced arguments pass: check them as numbers before. Of a schedule, the value at step 0 is
        checked.
        """
        if callable(self.clip_norm):
            at_start = evaluate(self.clip_norm, 0, "clip_norm")
            if (why := checks.wrong_float("clip_norm", at_start)) is not None:
                wrong = f"The schedule of clip_norm goes wrong at step 0: it {why}"
                raise GroupError(wrong, argument="clip_norm")
        for name, group_params in self.split(self.trainable()).items():
            recipe = self.groups[name].optimizer
            if (why := checks.wrong_parameter(recipe, group_params)) is not None:
                raise GroupError(why, name, "match")
            with group_error_context(name, self.groups[name], group_params):
                wrong = checks.wrong_argument(recipe)
            if wrong is not None:
                raise GroupError(f"In group {name!r}, {wrong[1]}", name, f"optimizer.{wrong[0]}")

    def init(self) -> OptimizerState:
        """Returns the state before the first step; see `Optimizer.init`."""
        self.check()
        trainable = self.trainable()
        unpacked = self._init_unpacked(trainable)
        for name, group_params in self.split(widen(trainable)).items():
            with group_error_context(name, self.groups[name], group_params):
                # Raises before the first step what the first evaluation would raise.
                jax.eval_shape(evaluation.eval_params, unpacked.groups[name], group_params)
                if self.layer_decay is not None:
                    refuse_states(unpacked.groups[name])
        scalars, tensors = pack(unpacked)
        return OptimizerState(scalars, tensors.groups, self.copies())

    def update(
        self,
        grads: optax.Updates,
        state: OptimizerState,
        *,
        skip: ArrayLike | None = None,
        key: jax.Array | None = None,
        extra: Mapping[str, Any],
    ) -> tuple[Any, OptimizerState]:
        """Updates the parameters by one step; see `Optimizer.update`.

        Args:
            grads: a tree like `params`, or a dict {path name: gradient} of the trainable
                parameters.
            state: what `init` or the last `update` returned.
            skip: a boolean scalar, or None.
            key: a PRNG key of the run, or None.
            extra: extra arguments for the optimizers, by name.

        Returns:
            The parameters after the step, in their dtypes; and the new state.

        Raises:
            GroupError: if the optimizer of a group raises an error; see `adapter.update`.
        """
        trainable = self.trainable()
        given = flatten(grads)
        old = self._unpacked(state)
        # The copies of low_precision="master" replace the rounded parameters.
        wide = {**widen(trainable), **state.master}
        moves, groups = self._moves({path: given[path] for path in trainable}, old, wide, extra)
        after = {path: w + moves[path].astype(w.dtype) for path, w in wide.items()}
        back = round_to(after, trainable, self.low_precision, old.step, key)
        master = {path: after[path] for path in state.master}
        count = old.skipped
        if skip is not None:
            # The rounded parameters, because float16 has no finite numbers above 65504.
            skip = jnp.asarray(skip) | ~all_finite(back)
            back, master, groups = jax.tree.map(
                lambda o, n: jnp.where(skip, o, n),
                (trainable, state.master, old.groups),
                (back, master, groups),
            )
            count = count + skip.astype(jnp.int32)
        scalars, tensors = pack(Unpacked(groups, count, old.step + 1))
        new_params = unflatten(self.params, {**flatten(self.params), **back})
        return new_params, OptimizerState(scalars, tensors.groups, master)

    def eval_params(self, state: OptimizerState) -> dict[str, Any]:
        """Returns the trainable parameters that evaluation must use, by path name."""
        groups = self._unpacked(state).groups
        found: dict[str, Any] = {}
        for name, group_params in self.split(self.trainable()).items():
            found |= evaluation.eval_params(groups[name], group_params)
        return found

    def _init_unpacked(self, trainable: dict[str, Any]) -> Unpacked:
        split = self.split(widen(trainable))
        groups = {}
        with model_of(self.params):
            for name, group_params in split.items():
                group = self.groups[name]
                with group_error_context(name, group, group_params):
                    groups[name] = adapter.init(group.optimizer, group_params)
        zero = jnp.zeros((), jnp.int32)
        return Unpacked(groups, zero, zero)

    def _unpacked(self, state: OptimizerState) -> Unpacked:
        return unpack(state.scalars, state.groups, self.template())

    def _moves(
        self, grads: dict, old: Unpacked, wide: dict, extra: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs every group's optimizer; returns updates by path and new states by group."""
        step = old.step
        grads = widen(grads)
        scales = self.layer_scales({**flatten(self.params), **wide})
        clipped = grads if self.clip_norm is None else clip(grads, self.clip_norm, step)
        moves, groups = {}, {}
        for name, group_params in self.split(wide).items():
            within = extra_arguments(extra, group_params, self.params)
            if "value" in extra:
                within["grad"] = {path: grads[path] for path in group_params}
            given = {path: clipped[path] for path in group_params}
            group = self.groups[name]
            if group.maximize:
                given, within = jax.tree.map(jnp.negative, given), negated(within)
            with group_error_context(name, group, group_params), jax.named_scope(name):
                updates, groups[name] = adapter.update(
                    group.optimizer,
                    given,
                    old.groups[name],
                    group_params,
                    step,
                    within,
                )
            moves |= {
                # After the optimizer, as a factor of the learning rate: Adam would cancel a factor
                # of the gradient.
                path: u * scales[path] if path in scales else u
                for path, u in updates.items()
            }
        return moves, groups
