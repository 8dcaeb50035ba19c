"""Readouts: averages of the weights, which evaluation uses in place of the weights."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from optim.factories import evaluate
from optim.lookahead import ByPath, copied, like, raise_if_wrong, step_range
from optim.patterns import fullmatch, nearest
from optim.schedules import Steps, step_count


class WeightEmaState(NamedTuple):
    """The state of `weight_ema`."""

    average: ByPath  # until `start` the weights themselves


class WeightEma(NamedTuple):
    """The arguments of `weight_ema`, which makes it; `start` and `stop` are integers."""

    horizon: optax.ScalarOrSchedule
    start: int
    stop: int | None
    blend: optax.ScalarOrSchedule
    exclude: re.Pattern[str] | None

    def floats(self) -> dict[str, Any]:
        """Returns the float arguments by name: numbers, traced scalars or schedules."""
        return {"horizon": self.horizon, "blend": self.blend}

    def wrong_steps(self, steps: int) -> tuple[str, str] | None:
        """Returns an argument that does not fit a run of so many steps, and a sentence; or None."""
        if self.start < steps:
            return None
        return "start", (
            f"The readout would never average: its start is {self.start:,}, and the run has "
            f"{steps:,} steps. Lower start, or remove the readout."
        )

    def wrong_pattern(self, by_path: Mapping[str, Any]) -> str | None:
        """Describes an `exclude` that matches none or all of the trainable parameters, or None."""
        if self.exclude is None:
            return None
        what = f"The pattern {self.exclude.pattern!r} of the readout's exclude"
        averaged = self.averaged(by_path)
        if not averaged:
            return f"{what} matches every parameter: nothing would be averaged."
        if len(averaged) == len(by_path):
            return (
                f"{what} matches no parameter that is trained. A pattern matches a whole path; "
                f"the nearest are {nearest(self.exclude.pattern, by_path)}."
            )
        return None

    def averaged(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries whose parameters are averaged."""
        return {
            path: x
            for path, x in by_path.items()
            if self.exclude is None or fullmatch(self.exclude, path) is None
        }

    def describe(self) -> str:
        """Returns a line for the plan; steps are counted from 1, as in metrics.jsonl."""
        first = f"step {self.start:,}" if self.start else "the first step"
        last = "the last" if self.stop is None else f"step {self.stop - 1:,}"
        but = f", except {self.exclude.pattern!r}" if self.exclude is not None else ""
        return f"optim.weight_ema averages from {first} to {last}{but}"

    def init(self, wide: ByPath) -> WeightEmaState:
        """Returns the state before the first step, for parameters of at least float32."""
        return WeightEmaState({path: copied(x) for path, x in self.averaged(wide).items()})

    def advance(self, weights: ByPath, state: Any, step: Any) -> WeightEmaState:
        """Averages the weights after the update at position `step`, counted from 0."""
        horizon = evaluate(self.horizon, step, "horizon")
        made = step + 1
        moves = made > self.start
        if self.stop is not None:
            moves &= made < self.stop
        average = {}
        for path, old in state.average.items():
            x = weights[path]
            new = jnp.where(moves, old + (x - old) / like(horizon, x), old)
            average[path] = jnp.where(made <= self.start, x, new)
        return WeightEmaState(average)

    def evaluated(self, weights: ByPath, state: Any, made: Any) -> ByPath:
        """Returns the weights to evaluate after `made` updates, by path name."""
        found, share = dict(weights), evaluate(self.blend, made, "blend")
        for path, average in state.average.items():
            x = weights[path]
            blend = like(share, x)
            found[path] = jnp.where(made < self.start, x, (1 - blend) * x + blend * average)
        return found


def weight_ema(
    horizon: Steps | optax.ScalarOrSchedule,
    start: Steps = 0,
    stop: Steps | None = None,
    blend: optax.ScalarOrSchedule = 1.0,
    exclude: str | None = None,
) -> WeightEma:
    """Evaluates an exponential moving average of the weights, or a blend of both.

    After every update from `start` on, the average A of the weights W becomes

        A <- A + (W - A) / horizon

    and evaluation uses (1 - blend) * W + blend * A. After `start` updates, A is W; before them,
    evaluation uses W. Training does not change. The average is part of the state, in at least
    float32; W is in float32, before it is rounded to the dtype of the parameters. With
    `optim.ema_nesterov`, W are the weights without the displacement.

    With horizon=150, start=2400, stop=2900, blend=0.6 and exclude="embed/.*", this is the tail-EMA
    of record 46 of modded-nanogpt's optimizer track. A decay d is the horizon 1 / (1 - d).

    Args:
        horizon: the length of the average in steps, at least 1; half of the weight is on the last
            0.7 horizons. As a float it is an input of a config's program; a whole number, or one
            with a unit such as "5%", is a constant of it.
        start: the number of updates after which the average begins.
        stop: the number of updates from which on the average does not change any more; None for no
            end.
        blend: the weight of the average in what is evaluated, in [0, 1]; a schedule is evaluated at
            the number of updates.
        exclude: a regular expression of whole path names, such as "embed/.*": these parameters are
            not averaged, and have no state. None averages all that are trained.

    Returns:
        The readout, for `optim.optimizer(readout=...)`.

    Raises:
        ValueError: if an argument is out of its range, `stop` is not larger than `start`, or
            `exclude` is not a regular expression.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from functools import partial
        >>> optimizer = optim.optimizer(
        ...     {"all": optim.group(".*", partial(optax.sgd, learning_rate=1.0))},
        ...     readout=optim.weight_ema(horizon=2, blend=0.5),
        ... )
        >>> params = {"w": jnp.asarray([4.0])}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.update({"w": jnp.asarray([2.0])}, state, params)
        >>> print(params["w"], optimizer.eval_params(state, params)["w"])  # the average is 3
        [2.] [2.5]
    """
    begin, end = step_range(start, stop, "nothing would be averaged")
    length = step_count("horizon", horizon) if isinstance(horizon, str) else horizon
    try:
        pattern = None if exclude is None else re.compile(exclude)
    except re.error as error:
        raise ValueError(
            f"exclude is {exclude!r}, which is not a regular expression: {error}."
        ) from None
    made = WeightEma(length, begin, end, blend, pattern)
    raise_if_wrong("readout", "weight_ema", made)
    return made
