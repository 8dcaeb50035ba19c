"""Finds the floats of a config that are inputs of the compiled program.

A program is compiled for the structure of a config: its functions, integers, strings and shapes.
The floats of the optimizer, its schedules included, are inputs of the program instead, in a single
run as in a sweep, so that another learning rate needs no compilation. The train step builds the
optimizer from them while it is traced.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optim.factories import instantiate
from optim.optax_schedules import traceable
from trainer.config import Builder, Config, Floats, leaves
from trainer.engine.experiment import Experiment, as_optimizer
from trainer.engine.precision import in_roles

INPUT = "input"  # in an annotation: Annotated[float, "input"], for floats outside the optimizer


@dataclass(frozen=True)
class Inputs:
    """The floats of an experiment that its compiled program takes as an array."""

    # config path -> value, sorted by path
    values: Mapping[str, float] = field(default_factory=dict)
    # config path -> (value, why it is not an input), for floats that are constants of the program
    constants: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    # builds the field "optimizer" of the experiment, and those of "loss" and "ema_decay" that
    # have inputs, with floats replaced by path
    rebuild: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {}

    def pack(self) -> np.ndarray:
        """Returns the values as one array, [inputs], in JAX's default float type."""
        # One array, because every leaf of the state adds to the time of a dispatch.
        return np.asarray(list(self.values.values()), jnp.result_type(float))

    def with_values(self, values: Mapping[str, float]) -> "Inputs":
        """Returns the same inputs with other values, config path -> value for every input."""
        return replace(self, values={path: values[path] for path in self.values})

    def insert(self, experiment: Experiment, hyperparams: Any) -> Experiment:
        """Returns an experiment with its inputs replaced by values [inputs]."""
        # The values are in the order of `pack`, and may be traced.
        if not self.values:
            return experiment
        # Not dataclasses.replace, which would compare the traced values with their ranges.
        inserted = copy.copy(experiment)
        by_path = {path: hyperparams[index] for index, path in enumerate(self.values)}
        for name, value in self.rebuild(by_path).items():
            made = in_roles(value, experiment.roles) if name == "optimizer" else value
            object.__setattr__(inserted, name, made)
        return inserted

    def keep_traceable(self, traces: Callable[["Inputs"], bool]) -> "Inputs":
        """Returns these inputs without untraceable ones, which become constants."""
        # `traces` returns whether the program can be traced with some of these inputs.

        def find(paths: list[str]) -> list[str]:
            """Finds the paths that cannot be traced even alone, by bisection."""
            if not paths or traces(self._only(paths)):
                return []
            # Each call of `traces` costs a trace; if one of n paths is wrong, about 2 log2(n).
            half = len(paths) // 2
            return find(paths[:half]) + find(paths[half:]) if half else paths

        wrong = set(find(list(self.values)))
        why = "its function decides by it in Python"
        constants = {path: (self.values[path], why) for path in self.values if path in wrong}
        inputs = self._only([path for path in self.values if path not in wrong])
        return replace(inputs, constants={**self.constants, **constants})

    def _only(self, paths: Sequence[str]) -> "Inputs":
        return replace(self, values={path: self.values[path] for path in paths})


def find_inputs(config: Config, vocabulary: Sequence[str], experiment: Experiment) -> Inputs:
    """Finds the inputs of an experiment."""
    # These are the floats of the config's optimizer, `ema_decay`, and the arguments of the loss
    # that are annotated as `Annotated[float, "input"]`: values, and defaults of the functions that
    # it names. A float by which a function decides in Python is one of the constants.
    builder = Builder(config, vocabulary)
    units = experiment.units_of(config)
    roots = [name for name in ("optimizer", "loss", "ema_decay") if name in config.sources]

    def build(names: Iterable[str], floats: Floats) -> dict[str, Any]:
        return {name: builder.build(name, units=units, floats=floats) for name in names}

    found: dict[str, float] = {}

    def collect(path: str, value: float, hint: Any) -> float:
        if path.split(".")[0] != "loss" or INPUT in get_args(hint):
            found[path] = value
        return value

    build(roots, Floats(collect))

    def rebuild(by_path: Mapping[str, Any]) -> Mapping[str, Any]:
        # A loss without inputs is not made again: its function may be slow, or read a file.
        names = {"optimizer", *(path.split(".")[0] for path in by_path)}
        # `traceable` replaces the schedules of optax that branch in Python on their floats.
        floats = Floats(lambda path, value, _: by_path.get(path, value), function=traceable)
        fields = build(names, floats)
        return {**fields, "optimizer": as_optimizer(fields["optimizer"])}

    others = {
        path: (value, f"it belongs to {path.split('.')[0]}")
        for path, value in leaves(config.root)
        if path.split(".")[0] in ("model", "loss")  # not watchdog and the like, outside the program
        and isinstance(value, float)
        and path not in found
    }
    # Sorted, so that a program does not depend on the order of the entries in a config.
    return Inputs(dict(sorted(found.items())), others, rebuild).keep_traceable(_factories_trace)


def _factories_trace(inputs: Inputs) -> bool:
    """Returns whether the optimizer's schedules and factories can be called with the inputs."""
    # This is faster than to trace the whole program, which `Program.abstract_state` does later.

    def call(hyperparams: jax.Array, step: jax.Array) -> Any:
        optimizer = inputs.rebuild(dict(zip(inputs.values, hyperparams, strict=True)))["optimizer"]
        for group in optimizer.groups.values():
            instantiate(group.optimizer, step, hyperparams.dtype)
        return optimizer.hyperparameters(step)

    try:
        jax.eval_shape(call, inputs.pack(), jax.ShapeDtypeStruct((), jnp.int32))
    except Exception:  # whatever a function raises for an argument that is traced
        return False
    return True
