"""Follows a run with another optimizer: what it would do at each point that the run visits.

The run is trained by its own compiled program, so that it has its own bits. A second program, which
is called before each step, computes the gradient at the parameters of the run, the update that the
run's optimizer makes of it, and the one that the other optimizer would make, whose state advances
along the path of the run. The second update is never applied. Begin with `shadow`;
`make_shadow_report` and its neighbours tell what was seen, in sentences, tables and pictures.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optim.dtypes import widen
from optim.paths import flatten
from trainer.config import Builder, Config, ConfigError
from trainer.config.full import complete
from trainer.engine.experiment import as_optimizer
from trainer.engine.plan import make_plan
from trainer.engine.program import Program, find_inputs, load_located
from trainer.engine.step import ShadowedStep, StepMetrics
from trainer.messages import UserError, joined, plural, table
from trainer.report.document import Axis, Block, Cell, Column, Figure, Panel, Report, Series, Table
from trainer.sweep.confounders import WITHOUT_EFFECT, arguments, differing_arguments
from trainer.train.continuation import begin_with, trace_shadow

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
    configs: Mapping[str, Config], vocabulary: Sequence[str], keep_unknown: bool = False
) -> dict[str, dict[str, str]]:
    """Returns the arguments in which configs differ, as `differing_arguments` does."""
    # Functions that are not found raise ConfigError, or with `keep_unknown` have no defaults.
    roots = {name: complete(x, vocabulary, keep_unknown)[0] for name, x in configs.items()}
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
        traced = trace_shadow(program, self.other, other, self._compare)
        self._compared = traced.lower().compile()
        if program.experiment.warm_start is None:
            self.state = program.init()
        else:
            self.state = begin_with(program, config, vocabulary).first_state(program)
        self.opt_state = self.other.first_opt_states()(self.state.params, self._hyperparams)

    def _compare(self, found: ShadowedStep) -> tuple[jax.Array, jax.Array]:
        """Returns the products of a step and its loss."""
        own, theirs, zero = found.own.updates, found.other.updates, jnp.zeros(())
        products = [
            _products(own.get(path, zero), theirs.get(path, zero), found.grads[path])
            for path in self.paths
        ]
        return jnp.stack(products), found.loss

    def advance(self) -> tuple[jax.Array, jax.Array, StepMetrics]:
        """Compares the updates of the next step, and then makes it, asynchronously."""
        # Returns products [parameters, 9], the loss before the step, and the metrics of the step.
        batch = next(self._batches)
        self.opt_state, (products, loss) = self._compared(
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


_TITLES = ("elements", "cosine", "from", "to", "norm B / A", "from", "to", "A to -G", "B to -G")
_MEDIANS = ("cosine", "cosine_from", "cosine_to", "ratio", "ratio_from", "ratio_to")
_MEDIANS += ("descent_a", "descent_b")
_COLUMNS = {  # by the names of `Angles`
    "cosine": Column("cosine", "cosine of A and B", "number"),
    "ratio": Column("ratio", "norm B / A", "number"),
    "own": Column("norm_a", "norm of A", "number"),
    "other": Column("norm_b", "norm of B", "number"),
    "own_descent": Column("descent_a", "cosine of A and -G", "number"),
    "other_descent": Column("descent_b", "cosine of B and -G", "number"),
}
# Of the groups: the name of a figure, its title, and what its table has; the first one is drawn.
_FIGURES = (
    ("groups", "Cosine of the two updates", tuple(_COLUMNS)),
    ("ratio", "Norm of B's update over that of A's", ("ratio", "own", "other")),
    ("descent_a", "Cosine of A's update and -G", ("own_descent",)),
    ("descent_b", "Cosine of B's update and -G", ("other_descent",)),
)


def notes_on_groups(found: Shadowed) -> list[str]:
    """Returns what was computed, and what it does not show."""
    lines = [
        "A is the optimizer of --config, and trains the run. B is that of --shadow: at each step it"
        " computes its update for the same parameters and batch, which is never applied."
        f" {plural(len(found.steps), 'step')} of the first {found.length:,} were recorded, of a run"
        f" of {found.total:,}.",
        "The state of B, such as its momentum and second moments, is built from gradients at the"
        " points that A visits, and not at those that B would have visited. So this describes"
        " directions along the path of A; it does not show how B would train, nor which of the two"
        " is better.",
        "An update is what an optimizer adds to the parameters in a step, with the learning rate,"
        " the schedule, the clipping and the weight decay of its config, before rounding to the"
        " precision of the parameters. A factor of the whole update, such as another learning rate,"
        " changes the ratio of norms and not the cosine. Over several groups, the learning rates of"
        " the groups are weights. G is the gradient before clipping.",
    ]
    if found.frozen:
        lines.append(f"Neither optimizer updates the groups {joined(found.frozen)} of A.")
    return lines


def sentences(found: Shadowed) -> list[str]:
    """Returns a sentence for each group, and for all of them, after one about an early end."""
    parts = found.by_group().items()
    return [
        *([found.ended] if found.ended else []),
        *(_sentence(name, found.over(paths), len(found.steps)) for name, paths in parts),
    ]


def _sentence(name: str, angles: Angles, rows: int) -> str:
    """Says which angles were seen between the updates of some parameters."""
    still = [
        f"that of {which} is 0 at {'each' if zeros == rows else f'{zeros:,}'} of"
        f" {plural(rows, 'recorded step')}"
        for which, norms in (("A", angles.own), ("B", angles.other))
        if (zeros := int(np.sum(norms == 0)))
    ]
    why = f" The updates have an angle only where neither is 0, and {joined(still)}."
    if np.isnan(angles.cosine).all():
        return f"{name}: no cosine.{why}"
    middle, low, high = _spread(angles.cosine)
    ratio, least, most = _spread(angles.ratio)
    return (
        f"{name}: the cosine of the two updates is {_text(middle)} in the median, from {_text(low)}"
        f" to {_text(high)}; the norm of B's is {_text(ratio)} times that of A's, from"
        f" {_text(least)} to {_text(most)}.{why if still else ''}"
    )


def _spread(values: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Returns the median, the smallest and the largest of the values that exist, or None."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None, None
    return float(np.median(known)), float(known.min()), float(known.max())


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def _medians(angles: Angles) -> list[float | None]:
    """Returns the cells of a table with one row for some parameters, beside their number."""
    descents = (_spread(x)[0] for x in (angles.own_descent, angles.other_descent))
    return [*_spread(angles.cosine), *_spread(angles.ratio), *descents]


def table_of_groups(found: Shadowed) -> list[str]:
    """Returns the lines of a table of the groups for a terminal."""
    rows = [
        (name, f"{_elements(found, paths):,}", *map(_text, _medians(found.over(paths))))
        for name, paths in found.by_group().items()
    ]
    return table([("group", *_TITLES), *rows], right=range(1, len(_TITLES) + 1))


def _elements(found: Shadowed, paths: Sequence[str]) -> int:
    return sum(found.sizes[path] for path in paths)


def make_shadow_report(found: Shadowed, title: str) -> Report:
    """Makes the report of two optimizers."""
    groups = {name: found.over(paths) for name, paths in found.by_group().items()}
    figures = (*(_figure(found, groups, *each) for each in _FIGURES), _parameters(found))
    block = Block(
        text=tuple(notes_on_groups(found)), figures=figures, tables=(_medians_table(found),)
    )
    panel = Panel("updates", "Updates of two optimizers", "describes", (block,))
    return Report(title, tuple(sentences(found)), tuple(groups), (panel,))


def _cells(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else float(x) for x in values]


def _figure(
    found: Shadowed, groups: Mapping[str, Angles], name: str, title: str, fields: tuple[str, ...]
) -> Figure:
    """Draws one quantity of each group over the steps."""
    curves = {group: [getattr(angles, x) for x in fields] for group, angles in groups.items()}
    rows = [
        (group, step, *cells)
        for group, columns in curves.items()
        for step, *cells in zip(found.steps, *map(_cells, columns), strict=True)
    ]
    drawn = {group: columns[0] for group, columns in curves.items()}
    columns = *Column.named(group="text", step="integer"), *(_COLUMNS[x] for x in fields)
    return Figure(
        name=name,
        title=title,
        description=f"{title} at each recorded step, of each group of A.",
        x=Axis("step"),
        y=Axis(
            _COLUMNS[fields[0]].title,
            log=name == "ratio" and all(np.all(y > 0) for y in drawn.values()),
        ),
        series=tuple(
            Series("line", group, found.steps, y.tolist(), label=group)
            for group, y in drawn.items()
        ),
        table=Table(name, title, columns, tuple(rows)),
    )


def _parameters(found: Shadowed) -> Figure:
    """Draws the cosine of each parameter; its table has all that was recorded."""
    angles = {path: found.over([path]) for path in found.groups}
    losses = _cells(found.losses)
    rows = [
        (path, found.groups[path], step, loss, *cells)
        for path, each in angles.items()
        for step, loss, *cells in zip(
            found.steps, losses, *(_cells(getattr(each, x)) for x in _COLUMNS), strict=True
        )
    ]
    columns = Column.named(parameter="code", group="text", step="integer", loss="number")
    columns = *columns, *_COLUMNS.values()
    return Figure(
        name="parameters",
        title="Cosine of the two updates, by parameter",
        description="The cosine of the two updates of each parameter, in the style of its group.",
        x=Axis("step"),
        y=Axis("cosine of A and B"),
        series=tuple(
            Series("line", found.groups[path], found.steps, each.cosine.tolist(), label=path)
            for path, each in angles.items()
        ),
        table=Table("parameters", "Updates of each parameter", columns, tuple(rows)),
    )


def _medians_table(found: Shadowed) -> Table:
    """Returns the medians over the recorded steps, of each group and each parameter."""
    parts = [(name, None, paths) for name, paths in found.by_group().items()]
    parts += [(found.groups[path], path, [path]) for path in found.groups]
    rows: list[tuple[Cell, ...]] = [
        (group, path, _elements(found, paths), *_medians(found.over(paths)))
        for group, path, paths in parts
    ]
    medians = (Column(*each, "number") for each in zip(_MEDIANS, _TITLES[1:], strict=True))
    columns = *Column.named(group="text", parameter="code", elements="integer"), *medians
    title = "Medians over the recorded steps, with the smallest and the largest value"
    return Table("medians", title, columns, tuple(rows))
