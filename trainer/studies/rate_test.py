"""Raises a learning rate exponentially until training diverges: a learning rate range test.

The test is that of Smith (arXiv:1506.01186) for one group of the optimizer. What the rate does is
told apart from what the other groups learn meanwhile by a second run of each seed, with the same
batches, whose rate stays at its first value: the difference of the two losses is what is judged.
Begin with `rate_test`; the rest is what it suggests, in sentences, a space to paste, and pictures.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer import config as configs
from trainer.config import Builder, Call, Config, ConfigError, Source, Tree, join
from trainer.config.full import complete
from trainer.config.tree import child_trees
from trainer.config.wording import known_names
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program, load_located
from trainer.engine.step import StepMetrics
from trainer.messages import UserError, joined, plural
from trainer.report.document import Axis, Block, Column, Figure, Panel, Report, Series, Table
from trainer.train.continuation import begin_with

_RUNNING = 5  # steps in a row whose loss is above that of the run whose rate stays
_OF_NOISE, _OF_GAIN, _OF_LOSS = 4.0, 0.1, 0.1  # see `diverged_at`
_WINDOW = 20  # the part of the steps that is half a window of `local_line`
_MOST = 1_000_000  # steps of a schedule that are looked at


@dataclass(frozen=True)
class Rates:
    """A learning rate that rises exponentially."""

    path: str  # its config path
    low: float
    high: float
    steps: int  # the number of steps from the first to the last rate

    @property
    def values(self) -> np.ndarray:
        """The rate of each step, [steps]."""
        return self.low * (self.high / self.low) ** (np.arange(self.steps) / (self.steps - 1))


@dataclass(frozen=True)
class RangeTest:
    """The losses of a range test."""

    rates: Rates
    seeds: tuple[int, ...]
    losses: np.ndarray  # of the runs whose rate rises, [seeds, steps]; NaN after a run has diverged
    steady: np.ndarray  # of the runs whose rate stays at the first value, [seeds, steps]
    # the step at which each run diverged, counted from 0; None for one that did not
    ends: tuple[int | None, ...]
    paste: str  # the config path to which a value of the rate is written in a space

    @property
    def differences(self) -> np.ndarray:
        """What the rising rate has changed in the loss, [seeds, steps]; below 0 it is better."""
        return self.losses - self.steady

    @property
    def last(self) -> int:
        """How many steps all runs have in common."""
        return min(self.rates.steps if end is None else end for end in self.ends)

    @property
    def mean(self) -> np.ndarray:
        """The mean difference over the seeds, smoothed, of the steps that all runs have."""
        return self._line()[0]

    @property
    def lowest(self) -> int:
        """The step of the smallest mean difference."""
        return int(np.argmin(np.where(self._inner(), self.mean, np.inf)))

    @property
    def steepest(self) -> int:
        """The step of the steepest descent of the mean difference, before the lowest."""
        before = self._inner() & (np.arange(self.last) <= self.lowest)
        return int(np.argmin(np.where(before, self._line()[1], np.inf)))

    @property
    def onset(self) -> int:
        """The step from which on, to the lowest, the gain is at least a tenth of the largest."""
        small = self.mean[: self.lowest] > 0.1 * self.mean[self.lowest]
        return int(np.flatnonzero(small)[-1]) + 1 if small.any() else 0

    @property
    def fell(self) -> bool:
        """Whether the rising rate lowered the loss by more than twice the noise of a step."""
        noise = _noise(self.differences[:, : self.last].mean(0))
        return bool(self._inner().any() and -self.mean[self.lowest] > 2 * noise)

    def _line(self) -> tuple[np.ndarray, np.ndarray]:
        return local_line(self.differences[:, : self.last].mean(0), self.rates.steps)

    def _inner(self) -> np.ndarray:
        """Returns at which steps a whole window of `local_line` lies before the divergence."""
        half, at = _half(self.rates.steps), np.arange(self.last)
        return (at >= half) & (at < self.last - half)


def _half(steps: int) -> int:
    return max(2, steps // _WINDOW)


def _noise(differences: np.ndarray) -> float:
    """Returns the standard deviation of one of the differences [n] about their course."""
    if len(differences) < 2:
        return 0.0
    # The median of the absolute difference of two normal numbers is 0.954 of their deviation.
    return float(np.median(np.abs(np.diff(differences)))) / 0.954


def local_line(values: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits a line to the values [n] around each one: returns its value there, and its slope.

    A window has a tenth of the steps of the test.

    Example:
        >>> level, slope = local_line(np.array([0.0, 2.0, 4.0, 6.0, 8.0]), 100)
        >>> level.tolist(), slope.round(6).tolist()
        ([0.0, 2.0, 4.0, 6.0, 8.0], [2.0, 2.0, 2.0, 2.0, 2.0])
    """
    half = _half(steps)
    level, slope = np.empty(len(values)), np.empty(len(values))
    for at in range(len(values)):
        near = np.arange(max(0, at - half), min(len(values), at + half + 1))
        x, y = near - near.mean(), values[near]
        slope[at] = float(x @ y) / max(float(x @ x), 1.0)
        level[at] = y.mean() + slope[at] * (at - near.mean())
    return level, slope


def diverged_at(losses: np.ndarray, steady: np.ndarray) -> int | None:
    """Returns the first step of a divergence, counted from 0, or None.

    A run has diverged if its loss is not finite; or if it is above that of the run whose rate stays
    for five steps, in the mean by more than 4 times the noise of a difference, a tenth of the
    largest gain so far, and a tenth of the loss.

    Example:
        >>> steady = np.full(9, 2.0)
        >>> diverged_at(np.array([2.0, 1.9, 1.5, 1.6, 2.5, 3.0, 4.0, 5.0, 6.0]), steady)
        4
        >>> diverged_at(np.array([2.0, 1.9, 1.5, 1.6, np.nan, 1.6, 1.6, 1.6, 1.6]), steady)
        4
    """
    differences = losses - steady
    bad = np.flatnonzero(~np.isfinite(differences))
    end = int(bad[0]) if len(bad) else len(losses)
    for at in range(end - _RUNNING + 1):
        window = differences[at : at + _RUNNING]
        if np.all(window > 0):
            before = differences[: at + 1]
            gain = max(0.0, -float(before.min()))
            of_loss = _OF_LOSS * abs(float(steady[at]))
            if window.mean() > max(_OF_NOISE * _noise(before), _OF_GAIN * gain, of_loss):
                return at
    return end if end < len(losses) else None


def rate_test(
    config: Config,
    rates: Rates,
    seeds: int = 3,
    vocabulary: Sequence[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> RangeTest:
    """Trains each seed with the rising rate, and with one that stays at the first value."""
    # All runs share one compiled program, because rates are inputs of it; they are computed side by
    # side, a block of each after the other, until all have diverged. Other groups follow their
    # schedules. Raises UserError if the range is empty, or the test is longer than a run.
    if not 0 < rates.low < rates.high:
        raise UserError(
            f"--low must be above 0 and below --high, and they are {rates.low:g} and"
            f" {rates.high:g}."
        )
    if rates.steps < 20:
        raise UserError(
            f"--steps={rates.steps}: the test needs at least 20 steps, a tenth of which are"
            " smoothed together."
        )
    growth = f"{rates.path}.decay_rate"
    program = _program(config, rates, growth, vocabulary)
    seed = program.experiment.seed
    numbers = tuple(range(seed, seed + seeds))
    runs = _runs(program, growth, numbers, config, vocabulary)
    done, going = 0, runs
    while done < rates.steps and going:
        count = min(program.block_rule.steps, rates.steps - done, max(1, rates.steps // 10))
        for run in itertools.chain.from_iterable(going):
            run.advance(count)
        going = [x for x in going if diverged_at(*(np.array(run.losses) for run in x)) is None]
        done += count
        if done * 10 // rates.steps > (done - count) * 10 // rates.steps:
            log(f"{done} of {rates.steps} steps, learning rate {rates.values[done - 1]:.3g}")
    losses, steady = (
        np.array([run.losses + [np.nan] * (rates.steps - len(run.losses)) for run in each])
        for each in zip(*runs, strict=True)
    )
    ends = tuple(map(diverged_at, losses, steady))
    return RangeTest(rates, numbers, losses, steady, ends, _paste(config, rates.path))


def _program(config: Config, rates: Rates, growth: str, vocabulary: Sequence[str]) -> Program:
    """Compiles the program of a rising rate; its input `growth` is the last over the first."""
    # Raises UserError if a run is shorter than the test, or the rate is not an input.
    rise, last = rates.high / rates.low, rates.steps - 1
    rising = {"init_value": rates.low, "transition_steps": last, "decay_rate": rise}
    call, source = Call("optax.exponential_decay", rising), Source("the rising learning rate")
    program = load_located(configs.replace(config, {rates.path: call}, source), vocabulary)
    steps = program.experiment.steps
    if rates.steps > steps:
        raise UserError(
            f"--steps={rates.steps}: the config has {plural(steps, 'step')}, and the other"
            " groups follow their schedules in it. Write a smaller number, or --set steps="
            f"{rates.steps} for schedules of that length."
        )
    program.compile(program.abstract_state())
    if growth not in program.inputs.values:
        raise UserError(
            f"{rates.path} cannot rise: the optimizer decides by it in Python, as the plan of"
            " explain says of constants."
        )
    return program


def _runs(
    program: Program, growth: str, seeds: Sequence[int], config: Config, vocabulary: Sequence[str]
) -> list[tuple["RateRun", "RateRun"]]:
    """Returns the runs whose rate rises and stays, of each seed, at their first states."""
    rises = program.inputs.values
    stays = {**rises, growth: 1.0}
    warm = program.experiment.warm_start is not None
    begin = begin_with(program, config, vocabulary) if warm else None
    runs = [
        (RateRun(program, rises, seed, begin), RateRun(program, stays, seed, begin))
        for seed in seeds
    ]
    if done := int(program.experiment.optimizer.position(runs[0][0].state.opt_state)):
        raise ConfigError(
            f"The rate of rate_test rises from step 0, and warm_start begins after {done:,} steps"
            " of the optimizer: take over parameters only.",
            config.argument_source("warm_start"),
        )
    return runs


def _paste(config: Config, path: str) -> str:
    """Returns the path of the largest value of a learning rate, for the space of a sweep."""
    tree = config.at(path) if path in config.sources else None
    if isinstance(tree, Call):
        for name in ("peak_value", "init_value", "value"):
            if isinstance(tree.kwargs.get(name), int | float):
                return join(path, name)
    return path


class RateRun:
    """A run of a study, which is computed a few steps at a time."""

    # `values` are those of the program's inputs; `losses` has those of the steps so far.

    def __init__(self, program: Program, values: Mapping[str, float], seed: int, begin: Any = None):
        self.program = program.with_values(values, seed, program.experiment.data_seed)
        # `begin` is what `begin_with` returned for a config with a warm start.
        self.state = self.program.init(seed) if begin is None else begin.first_state(self.program)
        self._batches = self.program.feed.batches(0)
        self.losses: list[float] = []

    def advance(self, steps: int) -> None:
        """Computes some steps, and reads their losses; NaN from the first that is not finite."""
        batches = [next(self._batches) for _ in range(steps)]
        self.state, metrics = self.program.advance(self.state, batches)
        found = StepMetrics.stack_on_host(metrics)
        finite = np.logical_and.accumulate(np.asarray(found["finite"][:steps], bool))
        losses = np.where(finite, np.asarray(found["train/loss"][:steps], float), np.nan)
        self.losses += losses.tolist()


# The learning rates of a config.


def _rates(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    for key, below in child_trees(tree).items():
        here = join(path, key)
        if isinstance(tree, Call) and key == "learning_rate":
            yield here, below
        else:
            yield from _rates(below, here)


def with_constant_rates(
    config: Config, experiment: Experiment, vocabulary: Sequence[str] = ()
) -> tuple[Config, dict[str, float]]:
    """Replaces each schedule of a learning rate by its largest value; also returns them by path."""
    builder, units = Builder(config, vocabulary), experiment.units_of(config)
    found: dict[str, float] = {}
    for path, tree in _rates(config.root.kwargs["optimizer"], "optimizer"):
        schedule = builder.build(path, units=units) if isinstance(tree, Call) else None
        if callable(schedule) and not isinstance(schedule, partial):
            steps = jnp.arange(min(experiment.steps, _MOST))
            found[path] = float(jnp.max(jnp.asarray(jax.vmap(schedule)(steps))))
    return configs.replace(config, found, Source("the largest value of the schedule")), found


def rate_of_group(config: Config, group: str | None, vocabulary: Sequence[str] = ()) -> str:
    """Returns the config path of the rate of a group, None for the only one; or UserError."""
    # It is an error that there is no such group, or that it has no learning rate or several.
    root = _completed(config, vocabulary)
    optimizer = root.kwargs.get("optimizer")
    groups = child_trees(optimizer).get("groups") if isinstance(optimizer, Call) else None
    if not isinstance(groups, dict):
        if group not in (None, "all"):
            raise UserError(
                f"--group={group}: the config's optimizer has no groups; it is one for all"
                " parameters. Leave --group out."
            )
        above = "optimizer"
    else:
        names = [str(name) for name in groups]
        if group is None and len(names) > 1:
            raise UserError(
                f"The config's optimizer has the groups {joined(names)}. Name one, as in"
                f" --group={names[0]}."
            )
        group = names[0] if group is None else group
        if group not in names:
            known = known_names(group, names, "It has the groups")
            raise UserError(f"--group={group}: the config's optimizer has no such group. {known}")
        above = f"optimizer.groups.{group}"
    found = [path for path, _ in _rates(root, "") if f"{path}.".startswith(f"{above}.")]
    if len(found) == 1:
        return found[0]
    which = f"the group {group!r}" if isinstance(groups, dict) else "the optimizer"
    if not found:
        raise UserError(f"No argument learning_rate is in {which}, so that none can rise.")
    raise UserError(
        f"{which.capitalize()} has several learning rates: {joined(found, 4)}. The test raises one:"
        " name it by its path, as in --rate_path=" + found[0] + "."
    )


def rate_at(config: Config, path: str, vocabulary: Sequence[str] = ()) -> str:
    """Returns a config path if a learning rate is there; raises UserError if not."""
    known = [found for found, _ in _rates(_completed(config, vocabulary), "")]
    if path not in known:
        rates = joined(known, 4) or "none"
        raise UserError(f"--rate_path={path}: no learning rate is there. The config has {rates}.")
    return path


def _completed(config: Config, vocabulary: Sequence[str]) -> Call:
    Builder(config, vocabulary).check()
    return complete(config, vocabulary)[0]


_RISING, _STEADY = "rising rate", "rate stays"
_BEYOND = 3.0  # times the rate of divergence; see `space`


def space(tested: RangeTest) -> tuple[float, float] | None:
    """Returns the range that is suggested; None if the rate did not lower the loss."""
    # It begins at the rate from which on the gain is at least a tenth of the largest gain, and ends
    # at three times the smallest rate at which a run diverged, as a warm-up lets a run survive a
    # larger rate than this test; or at the largest rate that was tried, if no run diverged.
    if not tested.fell:
        return None
    rates = tested.rates.values
    ended = [rates[end] for end in tested.ends if end is not None]
    high = _BEYOND * min(ended) if ended else tested.rates.high
    return float(f"{rates[tested.onset]:.1e}"), float(f"{high:.1e}")  # two digits


def upper_end(tested: RangeTest) -> str:
    """Returns what the upper end of the range is."""
    if any(end is not None for end in tested.ends):
        return f"{_BEYOND:g} times the smallest rate of a divergence"
    return "the largest rate that was tried"


def yaml(tested: RangeTest) -> list[str]:
    """Returns the lines of a space to paste into an arm of a sweep; none without a range."""
    if (found := space(tested)) is None:
        return []
    low, high = found
    return ["space:", f"  {tested.paste}: !space.log_uniform {{low: {low:g}, high: {high:g}}}"]


def rate_sentences(tested: RangeTest) -> list[str]:
    """Returns what was seen, and what is suggested."""
    rates, found = tested.rates.values, space(tested)
    pairs = zip(tested.seeds, tested.ends, strict=True)
    ended = [(seed, end) for seed, end in pairs if end is not None]
    lines = []
    if found is None:
        lines.append(
            "The rising rate did not lower the loss by more than the noise, so that no range is"
            " suggested. The group may matter little in so few steps, or the other groups move the"
            " loss too much: more steps (--steps), seeds (--seeds) or larger batches show more."
        )
    else:
        low, high = rates[tested.steepest], rates[tested.lowest]
        lines.append(
            f"Steepest descent: at the rate {low:.2g}, of the mean over"
            f" {plural(len(tested.seeds), 'seed')}. The largest gain is"
            f" {-tested.mean[tested.lowest]:.3g}, at {high:.2g}."
        )
        if tested.onset == 0:
            lines.append("The loss falls from the first rate on: take a smaller --low.")
    if ended:
        at = joined([f"{rates[end]:.2g} (seed {seed})" for seed, end in ended], 6)
        lines.append(f"Divergence: at {at}.")
    if len(ended) < len(tested.seeds):
        left = plural(len(tested.seeds) - len(ended), "run")
        rest = f"{left} of {len(tested.seeds)} had not" if ended else "No run has"
        lines.append(f"{rest} diverged at {rates[-1]:.2g} (--high).")
    return lines


def notes(tested: RangeTest) -> list[str]:
    """Returns what was run, and what the test is."""
    rates = tested.rates
    seeds = joined([str(seed) for seed in tested.seeds])
    return [
        f"{rates.path} rises from {rates.low:g} to {rates.high:g} in {plural(rates.steps, 'step')},"
        f" for the seeds {seeds}; everything else is as in the config. A second run of each seed,"
        f" with the same batches, stays at {rates.low:g}.",
        "This is a heuristic (Smith, arXiv:1506.01186): a rate that a run of few steps survives may"
        " diverge later, and the best rate of a whole run is often below that of steepest descent.",
    ]


def make_rate_report(tested: RangeTest, title: str) -> Report:
    """Makes the report of a range test."""
    pasted = yaml(tested)
    text = (*notes(tested), *((f"To paste: {' '.join(pasted[1:]).strip()}",) if pasted else ()))
    block = Block(text=text, figures=(_losses(tested), _differences(tested)))
    panel = Panel("rates", "Loss by learning rate", "describes", (block,))
    return Report(title, tuple(rate_sentences(tested)), (_RISING, _STEADY), (panel,))


def _marks(tested: RangeTest) -> list[Series]:
    return [
        Series("rule", "", (float(tested.rates.values[end]),), label="divergence of a run")
        for end in sorted({end for end in tested.ends if end is not None})
    ]


def _losses(tested: RangeTest) -> Figure:
    """Draws the loss of each seed, with the rising rate and with the one that stays."""
    rates = tested.rates.values.tolist()
    series = [
        Series("line", arm, rates, _cut(row, end), label=f"{arm}, seed {seed}")
        for arm, losses in ((_STEADY, tested.steady), (_RISING, tested.losses))
        for seed, row, end in zip(tested.seeds, losses, tested.ends, strict=True)
    ]
    rows = tuple(
        (seed, step, rates[step], float(tested.losses[i, step]), float(tested.steady[i, step]))
        for i, seed in enumerate(tested.seeds)
        for step in range(len(rates))
        if math.isfinite(tested.steady[i, step])
    )
    columns = (
        *Column.named(seed="integer", step="integer", rate="number"),
        Column("rising", _RISING, "number"),
        Column("stays", _STEADY, "number"),
    )
    return Figure(
        name="losses",
        title="Loss while the learning rate rises",
        description="The training loss of each step, of each seed, by the learning rate.",
        x=Axis(tested.rates.path, log=True),
        y=Axis("loss of the step"),
        series=(*series, *_marks(tested)),
        table=Table("losses", "Losses", columns, rows),
    )


def _cut(losses: np.ndarray, end: int | None) -> list[float]:
    """Returns losses for a picture: what lies far beyond a divergence would flatten the rest."""
    found = losses.copy()
    if end is not None:
        top = 1.5 * np.nanmax(losses[: end + 1]) if end else np.inf
        found[end:][~(found[end:] < top)] = np.nan
    return found.tolist()


def _differences(tested: RangeTest) -> Figure:
    """Draws the differences of the losses of each seed, and their smoothed mean."""
    common = tested.rates.values[: tested.last].tolist()
    rows = tested.differences[:, : tested.last].tolist()
    series = [Series("line", _RISING, common, row, label="one seed", faint=True) for row in rows]
    series.append(Series("line", _RISING, common, tested.mean.tolist(), label="smoothed mean"))
    if tested.fell:
        at = tested.steepest
        point = (common[at],), (float(tested.mean[at]),)
        series.append(Series("points", "", *point, label="steepest descent"))
    return Figure(
        name="differences",
        title="What the rising rate changes in the loss",
        description=(
            "The loss with the rising rate minus that with the rate that stays, of each seed, and"
            " the mean over the seeds, smoothed by lines over a tenth of the steps."
        ),
        x=Axis(tested.rates.path, log=True),
        y=Axis("difference of the losses"),
        series=(*series, *_marks(tested)),
        table=Table(
            "differences",
            "Smoothed mean of the differences",
            Column.named(rate="number", difference="number"),
            tuple(zip(common, tested.mean.tolist(), strict=True)),
        ),
    )
