"""Follows a run with another optimizer: what it would do at each point that the run visits.

The run is trained by its own compiled program, so that it has its own bits. A second program, which
is called before each step, computes the gradient at the parameters of the run, the update that the
run's optimizer makes of it, and the one that the other optimizer would make, whose state advances
along the path of the run. The second update is never applied. Begin with `shadow`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.dtypes import widen
from optim.paths import flatten
from trainer.config import Builder, Config, ConfigError
from trainer.config.full import complete
from trainer.engine.experiment import as_optimizer, with_place
from trainer.engine.inputs import find_inputs
from trainer.engine.mesh import ambient, replicated
from trainer.engine.plan import make_plan
from trainer.engine.program import Program, load_located
from trainer.engine.step import State, StepMetrics, shadow_step
from trainer.messages import UserError, joined, plural
from trainer.sweep.confounders import WITHOUT_EFFECT, arguments, differing_arguments
from trainer.train.continuation import begin_with

# What changes neither the points that a run visits nor the gradients there.
FREE = ("optimizer", "ema_decay", "eval_every", "metrics", "train_metrics", *WITHOUT_EFFECT)
_REQUIRED = ("model", "data", "loss", "steps", "optimizer")


@dataclass(frozen=True)
class Angles:
    """How the updates of two optimizers compare at the recorded steps, for some parameters."""

    # All of these parameters count as one vector. What would be divided by 0 is NaN.

    own: np.ndarray  # the norm of the update of the run's optimizer, [rows]
    other: np.ndarray  # that of the update of the other optimizer, [rows]
    cosine: np.ndarray  # of the angle between the two updates, [rows]
    # the cosine of the angle between the first update and the negative gradient
    own_descent: np.ndarray
    other_descent: np.ndarray  # that of the second update

    @property
    def ratio(self) -> np.ndarray:
        """The norm of the other update over that of the run's, [rows]."""
        return _quotient(self.other, self.own)


@dataclass(frozen=True)
class Shadowed:
    """The updates of two optimizers at the points of one run."""

    total: int  # the steps of the whole run
    length: int  # how many of them were to be computed
    steps: tuple[int, ...]  # the recorded ones, counted from 1, [rows]
    losses: np.ndarray  # of the batches of these steps, before the step, [rows]
    # path name -> group in the run's optimizer, of the parameters that one of the two updates
    groups: Mapping[str, str]
    sizes: Mapping[str, int]  # path name -> number of elements
    frozen: tuple[str, ...]  # the groups of the run that neither optimizer updates
    products: np.ndarray  # of the parameters in `groups`, [rows, parameters, 9], see `_products`
    ended: str = ""  # a sentence about a step that was not finite; "" if there was none

    def over(self, paths: Sequence[str]) -> Angles:
        """Returns the angles of the updates of some parameters."""
        order = list(self.groups)
        return _angles(self.products[:, [order.index(path) for path in paths]])

    def by_group(self) -> dict[str, list[str]]:
        """Returns group -> path names; the last one, "all", has those of all groups if several."""
        found: dict[str, list[str]] = {}
        for path, group in self.groups.items():
            found.setdefault(group, []).append(path)
        if len(found) > 1:
            name = next(name for name in ("all", "all groups") if name not in found)
            found[name] = list(self.groups)
        return found


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.divide(a, b, out=np.full(np.shape(b), np.nan), where=b != 0)


def _products(a: Any, b: Any, g: Any) -> jax.Array:
    """Returns the largest absolute values of three vectors, and inner products of them, [9]."""
    # Each vector is divided by its largest value first, because the square of a small number would
    # be 0 in float32. The products are aa, bb, gg, ab, ag and bg.
    a, b, g = widen((a, b, g))
    sizes = [jnp.max(jnp.abs(x), initial=0) for x in (a, b, g)]
    a, b, g = (x / jnp.where(size == 0, 1, size) for x, size in zip((a, b, g), sizes, strict=True))
    pairs = (a, a), (b, b), (g, g), (a, b), (a, g), (b, g)
    inner = [jnp.sum((x * jnp.conj(y)).real) for x, y in pairs]
    return jnp.stack([*sizes, *inner]).astype(jnp.float32)


def _angles(products: np.ndarray) -> Angles:
    """Combines the products of several parameters, [rows, parameters, 9], in float64."""
    a, b, g, aa, bb, gg, ab, ag, bg = np.moveaxis(np.asarray(products, float), -1, 0)
    own, other, gradient = (
        np.sqrt(np.sum(size**2 * square, 1)) for size, square in ((a, aa), (b, bb), (g, gg))
    )

    def cosine(inner: np.ndarray, norms: np.ndarray) -> np.ndarray:
        return np.clip(_quotient(np.sum(inner, 1), norms), -1, 1)

    return Angles(
        own=own,
        other=other,
        cosine=cosine(a * b * ab, own * other),
        own_descent=-cosine(a * g * ag, own * gradient) + 0.0,
        other_descent=-cosine(b * g * bg, other * gradient) + 0.0,
    )


def check_alike(config: Config, other: Config, vocabulary: Sequence[str] = ()) -> None:
    """Raises UserError if two configs differ in more than their optimizers."""
    # What changes no update, such as `log_every` and `metrics`, may differ as well.
    Builder(config, vocabulary).check()
    if missing := [name for name in _REQUIRED if name not in other.root.kwargs]:
        raise UserError(
            f"The config of --shadow has no {joined(missing)}. Name a whole config, or the files of"
            " --config and then the file that changes the optimizer, each with --shadow."
        )
    Builder(other, vocabulary).check()
    found = differing({"config": config, "shadow": other}, vocabulary)
    if not (wrong := {path: x for path, x in found.items() if path.partition(".")[0] not in FREE}):
        return
    texts = [
        f"{path} is {values['config']}{_place(config, path)} and in --shadow"
        f" {values['shadow']}{_place(other, path)}"
        for path, values in wrong.items()
    ]
    raise UserError(
        "--config and --shadow differ in more than the optimizer, so that they have no gradients in"
        f" common: {joined(texts, 3)}. --set changes both, as in --set {next(iter(wrong))}=VALUE."
    )


def differing(
    configs: Mapping[str, Config], vocabulary: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Returns the arguments in which configs differ, as `differing_arguments` does."""
    roots = {name: complete(config, vocabulary)[0] for name, config in configs.items()}
    return differing_arguments({name: dict(arguments(x, "")) for name, x in roots.items()})


def _place(config: Config, path: str) -> str:
    """Returns where a value was written, " (a.yaml:3)"; "" if it is a default."""
    return "" if (source := config.argument_source(path)) is None else f" ({source})"


def shadow(
    config: Config,
    other: Config,
    steps: int | None = None,
    every: int | None = None,
    vocabulary: Sequence[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> Shadowed:
    """Trains a run, and compares the updates of its optimizer with those of another one."""
    # `steps` are the first ones of the run, None for all; schedules are those of the whole run.
    # `every` is from one recorded step to the next, None for a fiftieth. Raises UserError if the
    # configs differ in more than the optimizer, the numbers do not fit, or an optimizer cannot be
    # compared in this way.
    check_alike(config, other, vocabulary)
    program = load_located(config, vocabulary, steps_per_call=1)
    total = program.experiment.steps
    steps = total if steps is None else steps
    every = max(1, steps // 50) if every is None else every
    _check_steps(total, steps, every)
    run = Shadow(program, config, other, vocabulary)
    if not (rows := list(run.rows(steps, every, log))):
        raise UserError(f"{run.ended} No step was recorded before: write a smaller --every.")
    params = flatten(run.state.params)
    labels = flatten(program.experiment.optimizer.label(run.state.params))
    groups = {path: labels[path] for path in run.paths}
    return Shadowed(
        total=total,
        length=steps,
        steps=tuple(step for step, _, _ in rows),
        losses=np.array([loss for _, loss, _ in rows]),
        groups=groups,
        sizes={path: params[path].size for path in run.paths},
        frozen=tuple(dict.fromkeys(x for x in labels.values() if x not in groups.values())),
        products=np.stack([products for _, _, products in rows]),
        ended=run.ended,
    )


def _check_steps(total: int, steps: int, every: int) -> None:
    if not 1 <= steps <= total:
        raise UserError(
            f"--steps={steps}: the config has {plural(total, 'step')}. Write --steps={total} or"
            f" fewer, or set the steps of both configs, as in --set steps={max(1, steps)}."
        )
    if not 1 <= every <= steps:
        raise UserError(
            f"--every={every}: it must be at least 1 and at most {steps}, the number of steps, so"
            " that a step is recorded."
        )


class Shadow:
    """A run of one step a call, and another optimizer that follows it; see `shadow`."""

    # `state` is that of the run, `opt_state` that of the other optimizer; no step of the program
    # `other` is compiled. `paths` are the parameters that one of the two optimizers updates.
    # `ended` is a sentence about a step that was not finite; "" if there was none.

    def __init__(
        self, program: Program, config: Config, other: Config, vocabulary: Sequence[str] = ()
    ):
        self.program = program
        make_plan(program, config)
        own = program.experiment.optimizer
        if own.lookahead is not None:
            raise ConfigError(
                "The optimizer of --config has a lookahead, which moves the parameters beside the"
                " updates of its groups, and only those are compared. Remove the lookahead.",
                config.argument_source("optimizer.lookahead"),
            )
        self.other = _with_optimizer(program, other, vocabulary)
        make_plan(self.other, other)
        params = program.abstract_state().params
        theirs = self.other.experiment.optimizer
        self.paths = list(dict.fromkeys([*own.trainable(params), *theirs.trainable(params)]))
        self.ended = ""
        self._batches = program.feed.batches(0)
        self._hyperparams = self.other.inputs.pack()
        self._compared = self._compile(other)
        if program.experiment.warm_start is None:
            self.state = program.init()
        else:
            self.state = begin_with(program, config, vocabulary).first_state(program)
        shardings = jax.tree.map(lambda x: x.sharding, self.other.abstract_state().opt_state)
        init = jax.jit(self.other.first_opt_state, out_shardings=shardings)
        self.opt_state = init(self.state.params, self._hyperparams)

    def _compile(self, other: Config) -> Any:
        """Compiles `_compare`; raises ConfigError if the other optimizer cannot follow the run."""
        opt_state = self.other.abstract_state().opt_state
        whole = replicated(self.program.mesh)
        out = jax.tree.map(lambda x: x.sharding, opt_state), whole, whole
        compare = jax.jit(self._compare, donate_argnums=1, out_shardings=out)
        arguments = self._hyperparams, self.program.feed.abstract_batch()
        try:
            traced = compare.trace(self.program.abstract_state(), opt_state, *arguments)
        except optim.GroupError as error:
            raise with_place(error, other) from error
        return traced.lower().compile()

    def _compare(
        self, state: State, opt_state: Any, hyperparams: Any, batch: Any
    ) -> tuple[Any, jax.Array, jax.Array]:
        """Returns the next state of the other optimizer, the products of the step and its loss."""
        experiment = self.program.inputs.insert(self.program.experiment, state.hyperparams)
        other = self.other.inputs.insert(self.other.experiment, hyperparams).optimizer
        with ambient(self.program.mesh, self.program.sharding.axes_of(state.params)):
            found = shadow_step(experiment, other, state, opt_state, batch)
        own, theirs, zero = found.own.updates, found.other.updates, jnp.zeros(())
        products = [
            _products(own.get(path, zero), theirs.get(path, zero), found.grads[path])
            for path in self.paths
        ]
        return found.opt_state, jnp.stack(products), found.loss

    def advance(self) -> tuple[jax.Array, jax.Array, StepMetrics]:
        """Compares the updates of the next step, and then makes it, asynchronously."""
        # Returns products [parameters, 9], the loss before the step, and the metrics of the step.
        batch = next(self._batches)
        self.opt_state, products, loss = self._compared(
            self.state, self.opt_state, self._hyperparams, self.program.feed.to_devices(batch)
        )
        if self.program.simulated:
            jax.block_until_ready(products)
        self.state, [metrics] = self.program.advance(self.state, [batch])
        return products, loss, metrics

    def rows(
        self, steps: int, every: int, log: Callable[[str], None] = lambda _: None
    ) -> Iterator[tuple[int, float, np.ndarray]]:
        """Yields the recorded steps with their losses and products, until one is not finite."""
        pending: list[StepMetrics] = []
        for step in range(1, steps + 1):
            if pending:  # so that at most two steps wait for the devices, with their batches
                jax.block_until_ready(pending[-1].arrays)
            products, loss, metrics = self.advance()
            pending.append(metrics)
            if step % every and step < steps:
                continue
            finite = StepMetrics.stack_on_host(pending)["finite"].astype(bool)
            found = jax.device_get(products)
            first = step - len(pending) + 1
            pending = []
            if not finite.all():
                at = first + int(np.argmin(finite))
                self.ended = f"Step {at:,} of --config is not finite, and the study ends there."
            elif not np.isfinite(found).all():
                self.ended = f"{_not_finite(found)} at step {step:,}, and the study ends there."
            if self.ended:
                return
            if step % every == 0:
                yield step, float(loss), found
            if step * 10 // steps > (step - 1) * 10 // steps:
                log(f"{step:,} of {plural(steps, 'step')}")


def _not_finite(products: np.ndarray) -> str:
    """Says which update is not finite, from the largest values of the updates."""
    own, other = np.isfinite(products[:, 0]).all(), np.isfinite(products[:, 1]).all()
    names = [name for name, fine in (("--config", own), ("--shadow", other)) if not fine]
    return f"The update of {joined(names or ['--config or --shadow'])} is not finite"


def _with_optimizer(program: Program, other: Config, vocabulary: Sequence[str]) -> Program:
    """Returns the program of the same model and data with the optimizer of another config."""
    units = program.experiment.units_of(other)
    optimizer = as_optimizer(Builder(other, vocabulary).build("optimizer", units=units))
    # Without what is computed beside the step, which may not fit this optimizer.
    experiment = dataclasses.replace(
        program.experiment, optimizer=optimizer, diagnostics=(), ema_decay=None, hooks=()
    )
    return Program(experiment, find_inputs(other, vocabulary, experiment))
