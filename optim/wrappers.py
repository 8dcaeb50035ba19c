"""What wraps the optimizers of all groups: lookaheads and a readout.

A lookahead, EMA-Nesterov or Nesterov momentum of every K-th step, receives the weights after the
step of the groups' optimizers, and returns the parameters that the model gets for the next
gradient. A readout averages the weights, and evaluation uses what it returns in place of them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optim import checks
from optim.dtypes import compute_dtype, wide_zeros
from optim.factories import evaluate
from optim.paths import fullmatch, nearest_paths
from optim.schedules import Steps, step_count

ByPath = dict[str, jax.Array]  # path name -> array, at least float32


Ahead = tuple[ByPath, ByPath, Any]
"""The parameters at which the next gradient is taken, the weights that are evaluated, the state."""


def _late_start(wrapper: str, acts: str, start: int, steps: int) -> tuple[str, str] | None:
    """Returns "start" and a sentence, if a wrapper would begin after a run of so many steps."""
    if start < steps:
        return None
    return "start", (
        f"The {wrapper} would never {acts}: its start is {start:,}, and the run has {steps:,}"
        f" steps. Lower start, or remove the {wrapper}."
    )


class EmaNesterovState(NamedTuple):
    """The state of `ema_nesterov`."""

    weights: ByPath  # without the displacement
    moves: ByPath  # the average of their changes
    peak: Any  # the largest learning rate so far, a scalar; () without `scheduled_by`


class EmaNesterov(NamedTuple):
    """The arguments of `ema_nesterov`, which makes it; `start` and `stop` are integers."""

    step_size: optax.ScalarOrSchedule
    decay: optax.ScalarOrSchedule
    start: int
    stop: int | None
    scheduled_by: str | None

    floats = ("step_size", "decay")  # the arguments that are numbers, traced scalars or schedules

    def wrong_steps(self, steps: int) -> tuple[str, str] | None:
        """Returns an argument that does not fit a run of so many steps, and a sentence; or None."""
        return _late_start("lookahead", "act", self.start, steps)

    def describe(self) -> str:
        """Returns a line for the plan; steps are counted from 1, as in metrics.jsonl."""
        end = "the last" if self.stop is None else f"step {self.stop:,}"
        by = f", scheduled by group {self.scheduled_by!r}" if self.scheduled_by else ""
        return f"optim.ema_nesterov displaces from step {self.start + 1:,} to {end}{by}"

    def init(self, wide: ByPath) -> EmaNesterovState:
        """Returns the state before the first step, for parameters of at least float32."""
        return EmaNesterovState(
            weights={path: copied(x) for path, x in wide.items()},
            moves={path: wide_zeros(x) for path, x in wide.items()},
            peak=() if self.scheduled_by is None else jnp.zeros((), compute_dtype(wide)),
        )

    def advance(self, after: ByPath, state: Any, step: Any, made: Any, rate: Any) -> Ahead:
        """Displaces the weights after a step."""
        # `step` is its position, counted from 0, and `made` the number of steps so far that were
        # not skipped, with this one. `rate` is that of the group `scheduled_by`, or None.
        decay, peak = evaluate(self.decay, step, "decay"), state.peak
        if self.scheduled_by is not None:
            peak = jnp.maximum(peak, jnp.asarray(rate, peak.dtype))
        size = self.displacement(step, peak, rate)
        moves, params = {}, {}
        for path, x in after.items():
            d = like(decay, x)
            moves[path] = d * state.moves[path] + (1 - d) * (x - state.weights[path])
            params[path] = x + like(size, x) * moves[path]
        return params, after, EmaNesterovState(after, moves, peak)

    def displacement(self, step: Any, peak: Any, rate: Any) -> jax.Array:
        """Returns how far the parameters are ahead after a step, in units of `moves`; a scalar."""
        # For `step` and `rate` see `advance`; `peak` is that of the state after the step.
        size = evaluate(self.step_size, step + 1, "step_size")
        if self.scheduled_by is not None:
            # A warm-up may begin with a rate of 0.
            size = size * (jnp.asarray(rate, peak.dtype) / jnp.where(peak > 0, peak, 1))
        acts = step + 1 >= self.start
        if self.stop is not None:
            acts &= step + 1 < self.stop
        return jnp.where(acts, size, 0.0)

    def weights(self, state: EmaNesterovState) -> ByPath:
        """Returns the weights to evaluate that differ from the parameters of the model."""
        return state.weights


class OuterNesterovState(NamedTuple):
    """The state of `outer_nesterov`."""

    weights: ByPath  # after the last outer step
    momentum: ByPath  # the sum of the changes, decayed


class OuterNesterov(NamedTuple):
    """The arguments of `outer_nesterov`, which makes it; `every` is an integer."""

    learning_rate: optax.ScalarOrSchedule
    momentum: optax.ScalarOrSchedule
    every: int

    floats = ("learning_rate", "momentum")
    scheduled_by = None  # no group: the learning rate may be a schedule

    def wrong_steps(self, steps: int) -> tuple[str, str] | None:
        """Returns an argument that does not fit a run of so many steps, and a sentence; or None."""
        if self.every <= steps:
            return None
        return "every", (
            f"The lookahead would never act: it takes an outer step after every {self.every:,} "
            f"steps, and the run has {steps:,}. Lower every, or remove the lookahead."
        )

    def describe(self) -> str:
        """Returns a line for the plan."""
        return f"optim.outer_nesterov takes an outer step after every {self.every:,} steps"

    def init(self, wide: ByPath) -> OuterNesterovState:
        """Returns the state before the first step, for parameters of at least float32."""
        return OuterNesterovState(
            weights={path: copied(x) for path, x in wide.items()},
            momentum={path: wide_zeros(x) for path, x in wide.items()},
        )

    def advance(self, after: ByPath, state: Any, step: Any, made: Any, rate: Any) -> Ahead:
        """Takes an outer step if it is time for one; see `EmaNesterov.advance`."""
        size = evaluate(self.learning_rate, step, "learning_rate")
        decay = evaluate(self.momentum, step, "momentum")
        acts = made % self.every == 0
        weights, momentum, params = {}, {}, {}
        for path, x in after.items():
            slow, d = state.weights[path], like(decay, x)
            change = slow - x  # the gradient of the outer step
            m = d * state.momentum[path] + change
            moved = slow - like(size, x) * (change + d * m)
            params[path] = jnp.where(acts, moved, x)
            weights[path] = jnp.where(acts, moved, slow)
            momentum[path] = jnp.where(acts, m, state.momentum[path])
        return params, params, OuterNesterovState(weights, momentum)

    def weights(self, state: OuterNesterovState) -> ByPath:
        """Returns the weights to evaluate that differ from the parameters of the model: none."""
        return {}


Lookahead = EmaNesterov | OuterNesterov


def ema_nesterov(
    step_size: optax.ScalarOrSchedule,
    decay: optax.ScalarOrSchedule,
    start: Steps = 0,
    stop: Steps | None = None,
    scheduled_by: str | None = None,
) -> EmaNesterov:
    """Takes gradients ahead of the weights, along the average of their past changes.

    EMA-Nesterov (arXiv:2605.25395). With the weights X, the average M of their changes and the
    optimizers of all groups as one `step`, an update is

        Y  = X + step_size * M            the parameters of the model
        X' = Y + step(gradient at Y, Y)
        M  <- decay * M + (1 - decay) * (X' - X)
        X  <- X'

    The optimizers see Y: weight decay, norms and pins act on it. Evaluation, checkpoints that are
    exported and samples use X, and so does a `readout`. X and M are part of the state, in at least
    float32; M starts at 0 and is averaged at every step, also where the lookahead does not act.

    Args:
        step_size: how far ahead the gradient is taken, in units of M; in [0, 1). Without gradients
            an update multiplies M by decay + (1 - decay) * step_size. Its authors use 0.3 to 0.6.
        decay: the decay of the average, in [0, 1).
        start: the number of updates before the first whose gradient is taken ahead.
        stop: the number of updates before the first whose gradient is taken at the weights again;
            None for no end.
        scheduled_by: the name of a group. `step_size` is multiplied by the learning rate of the
            group at the update before, divided by its largest value until then (1 during a
            warm-up). None does not scale it.

    Returns:
        The lookahead, for `optim.optimizer(lookahead=...)`.

    Raises:
        ValueError: if an argument is out of its range, or `stop` is not larger than `start`.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from functools import partial
        >>> optimizer = optim.optimizer(
        ...     {"all": optim.group(".*", partial(optax.sgd, learning_rate=1.0))},
        ...     lookahead=optim.ema_nesterov(step_size=0.5, decay=0.75),
        ... )
        >>> params = {"w": jnp.asarray([4.0])}
        >>> state = optimizer.init(params)
        >>> params, state = optimizer.update({"w": jnp.asarray([1.0])}, state, params)
        >>> print(optimizer.eval_params(state, params)["w"], params["w"])  # 3, and 3 - 0.5 / 4
        [3.] [2.875]
    """
    begin, end = step_range(start, stop, "the lookahead would never act")
    made = EmaNesterov(step_size, decay, begin, end, scheduled_by)
    raise_if_wrong("lookahead", "ema_nesterov", made)
    return made


def outer_nesterov(
    learning_rate: optax.ScalarOrSchedule, momentum: optax.ScalarOrSchedule, every: Steps
) -> OuterNesterov:
    """Takes a step of SGD with Nesterov momentum on the change of the weights over K steps.

    Snoo (arXiv:2510.15830), and MuLoCo (arXiv:2505.23725) with one worker. Every K-th update is
    followed by an outer step from W, the weights after the last one (at first the initial weights),
    with X, the weights that the optimizers of the groups have reached:

        D = W - X
        M <- momentum * M + D
        W <- W - learning_rate * (D + momentum * M)
        X <- W

    This is `torch.optim.SGD(nesterov=True)` with the gradient D. W and M are part of the state, in
    at least float32. Evaluation uses X. In the program of Snoo's authors the first outer step is
    after the first update, and here after K, as in the paper. In the program of MuLoCo's entry in
    modded-nanogpt, M is multiplied by the learning rate as it is summed, which is the same unless
    the learning rate is a schedule.

    Args:
        learning_rate: of the outer step; a learning rate of 1 without momentum changes nothing. A
            schedule is evaluated at the position of the K-th update.
        momentum: in [0, 1).
        every: K, the number of updates from one outer step to the next, at least 1. An update that
            was skipped does not count.

    Returns:
        The lookahead, for `optim.optimizer(lookahead=...)`.

    Raises:
        ValueError: if an argument is out of its range.

    Example:
        >>> import jax.numpy as jnp, optax, optim
        >>> from functools import partial
        >>> optimizer = optim.optimizer(
        ...     {"all": optim.group(".*", partial(optax.sgd, learning_rate=1.0))},
        ...     lookahead=optim.outer_nesterov(learning_rate=0.5, momentum=0.5, every=2),
        ... )
        >>> params, grads = {"w": jnp.asarray([4.0])}, {"w": jnp.asarray([1.0])}
        >>> state = optimizer.init(params)
        >>> for _ in range(2):
        ...     params, state = optimizer.update(grads, state, params)
        ...     print(params["w"])  # 3; then not 2, but 4 - 0.5 * (2 + 0.5 * 2)
        [3.]
        [2.5]
    """
    if (length := step_count("every", every)) < 1:
        raise ValueError(f"every must be at least 1, got {length}.")
    made = OuterNesterov(learning_rate, momentum, length)
    raise_if_wrong("lookahead", "outer_nesterov", made)
    return made


# Readouts.


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

    floats = ("horizon", "blend")

    def wrong_steps(self, steps: int) -> tuple[str, str] | None:
        """Returns an argument that does not fit a run of so many steps, and a sentence; or None."""
        return _late_start("readout", "average", self.start, steps)

    def wrong_pattern(self, by_path: Mapping[str, Any]) -> str | None:
        """Describes an `exclude` that matches none or all of the trainable parameters, or None."""
        if self.exclude is None:
            return None
        what = f"The pattern {self.exclude.pattern!r} of the readout's exclude"
        if not (averaged := self.averaged(by_path)):
            return f"{what} matches every parameter: nothing would be averaged."
        if len(averaged) == len(by_path):
            return (
                f"{what} matches no parameter that is trained. A pattern matches a whole path; "
                f"the nearest are {nearest_paths(self.exclude.pattern, by_path)}."
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


# What both share.


def step_range(start: Steps, stop: Steps | None, then: str) -> tuple[int, int | None]:
    """Returns two numbers of steps; raises ValueError, saying `then`, if none lies between them."""
    begin, end = step_count("start", start), None if stop is None else step_count("stop", stop)
    if end is not None and end <= begin:
        raise ValueError(
            f"stop is {end} and start is {begin}, so that {then}: make stop larger than start."
        )
    return begin, end


def raise_if_wrong(kind: str, name: str, made: Any) -> None:
    """Raises ValueError if a float of a "lookahead" or a "readout" is out of its range."""
    for argument in made.floats:
        if why := checks.wrong_float(f"{kind}.{argument}", getattr(made, argument)):
            raise ValueError(f"{argument} of optim.{name} {why}")


def copied(x: jax.Array) -> jax.Array:
    """Returns a new array with the values of a parameter, for a state."""
    # The step donates both parameters and state. A weak type would change at the first update.
    return jnp.array(x, x.dtype, copy=True)


def like(value: ArrayLike, x: jax.Array) -> jax.Array:
    """Casts a scalar to the real dtype of an array, so that a product has the array's dtype."""
    return jnp.asarray(value, jnp.finfo(x.dtype).dtype)
