"""The values of every hyperparameter over a run, computed from the schedules."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

import optim
from optim.checks import wrong_float, wrong_schedule
from trainer.engine.program import Program

Sampled = tuple[np.ndarray, np.ndarray]  # steps, values

_SAMPLES = 10_000  # the most steps at which a schedule is evaluated to find its peak


class Hyperparameter(NamedTuple):
    """The values of a float argument of an optimizer over a run.

    Attributes:
        peak: the largest value.
        peak_step: the first step that has it, counted from 1 like the rows of metrics.jsonl; for
            runs of more than 10,000 steps, one of 10,000 that are equally far apart.
        first: the value of the first step.
        final: that of the last step.
        constant: whether it is no schedule, or one whose values are equal.
    """

    peak: float
    peak_step: int
    first: float
    final: float
    constant: bool

    def __str__(self) -> str:
        """Returns "0.95 constant", or "peak 0.02 at step 100, final 0"."""
        if self.constant:
            return f"{self.final:.4g} constant"
        return f"peak {self.peak:.4g} at step {self.peak_step:,}, final {self.final:.4g}"


def find_hyperparameters(program: Program) -> dict[str, dict[str, Hyperparameter]]:
    """Finds the values of every float argument of the optimizers of a program.

    Args:
        program: the program; it is not compiled.

    Returns:
        Group name -> argument -> values. The name "" has `clip_norm` of `optim.optimizer` if the
        gradients are clipped.

    Raises:
        GroupError: a schedule returns what its argument does not take.

    Example:
        >>> from trainer.config import load
        >>> from trainer.engine.loading import load as load_program
        >>> found = find_hyperparameters(load_program(load(["configs/muon_vit.yaml"])))
        >>> print(found["matrices"]["learning_rate"])  # doctest: +ELLIPSIS
        peak 0.02 at step 51, final 5...e-08
        >>> print(found["rest"]["b2"], "|", found[""]["clip_norm"])
        0.999 constant | 1 constant
    """
    return describe(sample(program))


def describe(
    sampled: Mapping[str, Mapping[str, Sampled]],
) -> dict[str, dict[str, Hyperparameter]]:
    """Describes sampled values.

    Args:
        sampled: as `sample` returned them.
    """
    return {
        group: {name: _describe(*values) for name, values in arguments.items()}
        for group, arguments in sampled.items()
        if arguments
    }


def _describe(steps: np.ndarray, values: np.ndarray) -> Hyperparameter:
    peak = int(np.argmax(values))
    return Hyperparameter(
        peak=float(values[peak]),
        peak_step=int(steps[peak]) + 1,
        first=float(values[0]),
        final=float(values[-1]),
        constant=bool(np.all(values == values[0])),
    )


def sample(program: Program) -> dict[str, dict[str, Sampled]]:
    """Samples all float arguments over the run.

    Args:
        program: the program; it is not compiled.

    Returns:
        Group name -> argument -> (steps, values), steps counted from 0; the name "" has
        `clip_norm`, if there is one.

    Raises:
        GroupError: a schedule returns what its argument does not take.
    """
    optimizer, steps = program.experiment.optimizer, program.experiment.steps
    at = np.unique(np.linspace(0, steps - 1, min(steps, _SAMPLES)).astype(np.int32))
    scheduled_arguments = {name: optimizer.schedules(name) for name in optimizer.groups}

    # One program, because compiling one for each operation takes a second; and with the inputs as
    # an argument, so that another learning rate does not compile it again.
    @jax.jit
    def scheduled(hyperparams: Any, at: Any) -> Any:
        optimizer = program.inputs.insert(program.experiment, hyperparams).optimizer
        clip_norm = optimizer.clip_norm
        return {
            name: {
                key: jax.vmap(value)(at)
                for key, value in optimizer.schedules(name).items()
                if callable(value)
            }
            for name in optimizer.groups
        }, jax.vmap(clip_norm)(at) if callable(clip_norm) else 1.0

    # A plan uses no accelerator.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values, bounds = jax.device_get(scheduled(program.inputs.pack(), at))
    if (why := wrong_float("clip_norm", bounds)) is not None:
        message = f"The schedule of clip_norm goes wrong: it {why}"
        raise optim.GroupError(message, argument="clip_norm")
    for name, arguments in values.items():
        if (wrong := wrong_schedule(optimizer.groups[name].optimizer, arguments)) is not None:
            raise optim.GroupError(
                f"In group {name!r}, the schedule of {wrong[0]} goes wrong: it {wrong[1]}",
                name,
                f"optimizer.{wrong[0]}",
            )
    found = {
        name: {key: (at, _over(at, x, values[name].get(key))) for key, x in arguments.items()}
        for name, arguments in scheduled_arguments.items()
    }
    if optimizer.clip_norm is not None:
        found[""] = {"clip_norm": (at, _over(at, optimizer.clip_norm, bounds))}
    return found


def _over(at: np.ndarray, value: Any, scheduled: Any) -> np.ndarray:
    """Returns the values at some steps: those of a schedule, or a number again and again."""
    return np.asarray(scheduled) if callable(value) else np.full(at.shape, value)
