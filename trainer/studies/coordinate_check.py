"""Measures how activations, and their changes in the first steps, depend on the width of a model.

A coordinate check (Yang et al., arXiv:2203.03466, appendix D.1) trains a model for a few steps at
several widths. If initial values and learning rates scale with the width as they should, the
changes of all activations have the same size at all widths. Depths can be compared in their place;
below, they are called widths as well. Begin with `check`. The verdict, its tables and its pictures
follow.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from optim.dtypes import widen
from trainer import config as configs
from trainer.config import Builder, Call, Config, ConfigError, Source, Tree, join, leaves
from trainer.config.full import complete
from trainer.config.tree import child_trees, longest_key
from trainer.config.wording import describe, known_names
from trainer.engine.program import Program, load_located
from trainer.engine.width import width_warnings
from trainer.logits import ChunkedLogits
from trainer.messages import UserError, joined, plural, table
from trainer.report.document import Axis, Block, Column, Figure, Panel, Report, Series, Table
from trainer.studies.rate_test import RateRun, with_constant_rates

LIMIT = 0.25  # half of the smallest wrong power of the width in the theory, 1/2
LEVEL = 0.05  # of the intervals of all slopes together
_ROUNDING = 1e-5  # a change of less than this share of an activation may be that of rounding
# Of the change until the last step. Behind kernels that start at 0, the first step has no gradient,
# and only weight decay changes the weights, by as much as the learning rate was divided.
_NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class WidthSeries:
    """The configs of a coordinate check."""

    path: str  # the config path of the width
    by_width: Mapping[int, Config]  # by increasing width
    notes: tuple[str, ...]  # sentences about what else differs between widths, and about heads
    what: str = "width"  # or "depth", for sentences


@dataclass(frozen=True)
class Slope:
    """A fit of log(size) = a constant for each seed + value * log(width)."""

    value: float
    # the standard error of the value, from the residuals; they hold what differs between seeds,
    # and how far the sizes are from a power
    error: float
    degrees: int  # of freedom of the residuals


def fit(widths: Sequence[int], sizes: np.ndarray) -> Slope | None:
    """Fits a power of the width to sizes [seeds, widths]; None if one is 0 or not finite.

    Example:
        >>> sizes = np.array([[1.0, 2.0, 4.0], [3.0, 6.0, 12.0]])
        >>> slope = fit([10, 20, 40], sizes)
        >>> round(slope.value, 6), round(slope.error, 6), slope.degrees
        (1.0, 0.0, 3)
    """
    if not np.all(np.isfinite(sizes) & (sizes > 0)):
        return None
    x, y = np.log(np.asarray(widths, float)), np.log(sizes)
    x, y = x - x.mean(), y - y.mean(1, keepdims=True)
    spread = len(y) * float(x @ x)
    value = float((y @ x).sum()) / spread
    degrees = y.size - len(y) - 1
    error = math.sqrt(float(np.square(y - value * x).sum()) / degrees / spread)
    return Slope(value, error, degrees)


@dataclass(frozen=True)
class Found:
    """What a coordinate check has measured."""

    series: WidthSeries
    seeds: tuple[int, ...]
    steps: tuple[int, ...]  # after how many steps activations were measured, increasing
    # module -> root mean squares of its activations, [1 + steps, seeds, widths], the first at the
    # start; NaN after a step that was not finite
    sizes: Mapping[str, np.ndarray]
    # module -> root mean squares of the changes since the start, [steps, seeds, widths]
    changes: Mapping[str, np.ndarray]
    constants: Mapping[str, float]  # config path -> the learning rate that replaced a schedule
    warnings: tuple[str, ...]  # of the plan, about learning rates that do not fit the width
    examples: int  # how many the batch has of which activations were measured

    @property
    def widths(self) -> list[int]:
        """The widths, increasing."""
        return list(self.series.by_width)

    def slopes(self) -> dict[tuple[str, int], Slope]:
        """Returns (module, number of steps) -> the slope of its changes, if they have one."""
        # There is none for changes that may be rounding, or are below 1% of those at the last step.
        fits: dict[tuple[str, int], Slope | None] = {}
        for module, changes in self.changes.items():
            least = np.maximum(_ROUNDING * self.sizes[module][0], _NEGLIGIBLE * changes[-1])
            for step, change in zip(self.steps, changes, strict=True):
                if not np.any(change < least):
                    fits[module, step] = fit(self.widths, change)
        return {key: slope for key, slope in fits.items() if slope is not None}

    def ended(self) -> list[tuple[int, int]]:
        """Returns the (width, seed) of the runs that had a step that was not finite."""
        last = next(iter(self.changes.values()))[-1]
        return [(self.widths[i], self.seeds[j]) for i, j in np.argwhere(~np.isfinite(last.T))]


def check(
    series: WidthSeries,
    seeds: int = 3,
    steps: Sequence[int] = (1, 3, 10),
    keep_schedules: bool = False,
    vocabulary: Sequence[str] = (),
    log: Callable[[str], None] = lambda _: None,
) -> Found:
    """Trains the model at each width, and measures the activations of one batch."""
    # The batch is the first microbatch after those of the steps. Without `keep_schedules` the rates
    # are the largest of their schedules: a warm-up from 0 would leave the first steps without a
    # change. Raises UserError for too few widths or seeds, or runs shorter than the steps.
    widths, stops, what = list(series.by_width), tuple(sorted(set(steps))), series.what
    if len(widths) < 2 or seeds * (len(widths) - 1) < 2:
        raise UserError(
            f"A slope with its error needs three {what}s, or two {what}s and two seeds. The check"
            f" was given {plural(len(widths), what)} and {plural(seeds, 'seed')}."
        )
    programs, constants = _programs(series, keep_schedules, vocabulary)
    own = programs[widths[-1]].experiment
    if stops[-1] > own.steps:
        raise UserError(
            f"The config has {plural(own.steps, 'step')}, and activations are to be measured after"
            f" {stops[-1]}. Write smaller numbers in --steps, or more with --set steps=N."
        )
    numbers = tuple(range(own.seed, own.seed + seeds))
    examples = own.data.batch_size // own.microbatches
    found: list[list[list[dict[str, np.ndarray]]]] = []  # [widths][seeds][1 + steps]
    for width, program in programs.items():
        program.compile(program.abstract_state())
        sizes = jax.jit(partial(_sizes, program))  # which the runs share
        runs = (RateRun(program, program.inputs.values, seed) for seed in numbers)
        found.append([list(measure_run(run, stops, examples, sizes)) for run in runs])
        log(f"{series.path}={width}: {plural(seeds, 'run')} of {plural(stops[-1], 'step')}")
    scaling, warnings = getattr(own.model, "width_scaling", None), list[str]()
    if scaling is not None:
        params = programs[widths[-1]].abstract_state().params
        warnings = width_warnings(own.optimizer, params, scaling)
    return Found(series, numbers, stops, *_arrays(found), constants, tuple(warnings), examples)


def _programs(
    series: WidthSeries, keep_schedules: bool, vocabulary: Sequence[str]
) -> tuple[dict[int, Program], dict[str, float]]:
    """Builds the program of each width, before any is trained: a width may not fit the model."""
    # Returns them by width, and config path -> the learning rate that replaced a schedule.
    programs: dict[int, Program] = {}
    constants: dict[str, float] = {}
    for width, config in series.by_width.items():
        program = load_located(config, vocabulary)
        if program.experiment.warm_start is not None:
            text = f"coordinate_check begins with the first parameters of each {series.what}"
            raise ConfigError(f"{text}: remove warm_start.", config.argument_source("warm_start"))
        if not keep_schedules:
            constant, constants = with_constant_rates(config, program.experiment, vocabulary)
            program = load_located(constant, vocabulary) if constants else program
        program.abstract_state()
        programs[width] = program
    return programs, constants


def _arrays(
    found: Sequence[Sequence[Sequence[Mapping[str, np.ndarray]]]],
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns module -> sizes [1 + steps, seeds, widths], and -> changes [steps, seeds, widths]."""
    # Of modules with the same numbers, as a block and its last layer, the shortest path is kept.
    modules = sorted(found[0][0][0], key=lambda name: (name == "outputs", name.count("/"), name))
    kept: dict[bytes, tuple[str, np.ndarray]] = {}
    for module in modules:
        # [widths, seeds, 1 + steps, 2]
        both = np.array([[[each[module] for each in run] for run in runs] for runs in found])
        kept.setdefault(both.tobytes(), (module, both))
    order = sorted(kept.values(), key=lambda each: (each[0] == "outputs", each[0]))
    return {name: x[..., 0].T for name, x in order}, {name: x[..., 1].T[1:] for name, x in order}


def measure_run(
    run: RateRun, stops: Sequence[int], examples: int, sizes: Callable[..., Any]
) -> Iterator[dict[str, np.ndarray]]:
    """Yields what `sizes` returns at the start and after each of the stops, numbers of steps."""
    # Copies, because the step donates the state.
    first = jax.tree.map(jnp.copy, (run.state.params, run.state.model_state))
    probe = next(run.program.feed.batches(stops[-1]))
    batch = {name: x[:examples] for name, x in probe.items()}
    start = jax.device_get(sizes(first, first, batch))
    yield start
    for stop in stops:
        while len(run.losses) < stop:
            run.advance(min(run.program.block_rule.steps, stop - len(run.losses)))
            if np.isnan(run.losses[-1]):
                lost = {name: np.full(2, np.nan) for name in start}
                yield from [lost] * sum(each >= stop for each in stops)
                return
        yield jax.device_get(sizes(first, (run.state.params, run.state.model_state), batch))


def _sizes(program: Program, first: tuple[Any, Any], now: tuple[Any, Any], batch: Any) -> Any:
    """Returns module -> (size, change) of its activations."""
    before = activations(program, *first, batch)
    return {
        name: jnp.stack([_rms(x), _rms(x - before[name])])
        for name, x in activations(program, *now, batch).items()
    }


def _rms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x)))


def activations(program: Program, params: Any, model_state: Any, batch: Any) -> dict[str, Any]:
    """Computes what each module returns for a batch, in float32 and evaluation mode."""
    # Returns path of the module -> array; "outputs" are those of the model, the only ones of a
    # model that is no flax linen module. What does not depend on the examples, such as a kernel
    # that a module returns, is left out.
    params, model_state = widen((params, model_state))
    model = program.experiment.model
    capture = getattr(model, "capture", None)

    def forward(batch: Any) -> dict[str, Any]:
        if capture is None:
            outputs = model.apply(params, model_state, batch, key=None, train=False)[0]
            seen: dict[str, tuple[Any, ...]] = {}
        else:
            outputs, seen = capture(params, model_state, batch)
        named = dict(_arrays_in("outputs", outputs))
        for module, calls in seen.items():
            for index, result in enumerate(calls):
                name = f"{module}[{index}]" if len(calls) > 1 else module
                named |= _arrays_in(name, result)
        return named

    more = {name: jnp.concatenate([x, x[:1]]) for name, x in batch.items()}
    larger = jax.eval_shape(forward, more)
    found = {
        name: x.astype(jnp.float32)
        for name, x in forward(batch).items()
        if x.shape != larger[name].shape and jnp.issubdtype(x.dtype, jnp.floating)
    }
    # The place of an array is left out where it is the only one: "embed" for "embed[0]".
    short = [name.partition("[")[0] for name in found]
    return {
        brief if short.count(brief) == 1 else name: x
        for brief, (name, x) in zip(short, found.items(), strict=True)
    }


def _arrays_in(name: str, result: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a result, by the name of the module and their places in it."""

    def is_chunked(x: Any) -> bool:
        return isinstance(x, ChunkedLogits)

    for path, x in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_chunked):
        yield name + jax.tree_util.keystr(path), x.whole() if is_chunked(x) else jnp.asarray(x)


# The configs of several widths.


def make_series(
    config: Config,
    widths: Sequence[int],
    path: str | None = None,
    scale: Mapping[str, float] | None = None,
    vocabulary: Sequence[str] = (),
) -> WidthSeries:
    """Makes a config for each width; they differ in it and in the values of `scale` only."""
    # `path` is that of the width; None for `model.width`. `scale` is config path -> power p: the
    # value there is multiplied by (width / own width)^p. Raises UserError if a path does not exist
    # or has no number, or an integer would not stay one.
    builder = Builder(config, vocabulary)
    builder.check()
    root, _ = complete(config, vocabulary)
    path = path or _width_path(root)
    own = _number(builder, root, path, "--width_path")
    what = "depth" if path.rpartition(".")[2] == "depth" else "width"
    if not isinstance(own, int) or own < 1:
        raise UserError(
            f"--width_path={path}: the value there is {own!r}, which is not a {what}: it must be"
            " an integer of at least 1."
        )
    powers = scale or {}
    scaled = {each: _number(builder, root, each, "--scale") for each in powers}
    if path in scaled:
        raise UserError(f"--scale={path}: this is the {what} itself, which --widths sets.")
    tables: dict[str, dict[int, float]] = {
        each: {width: _at(each, value, powers[each], what, own, width) for width in widths}
        for each, value in scaled.items()
    }
    by_width: dict[int, Config] = {}
    for width in sorted(widths):
        values: dict[str, Tree] = {path: width}
        values |= {each: table[width] for each, table in tables.items()}
        by_width[width] = configs.replace(config, values, Source(f"--widths, at {path}={width}"))
    notes = [f"{x} is {joined([f'{of[w]:g}' for w in by_width])}." for x, of in tables.items()]
    notes += _heads(root, path, list(by_width), tables)
    return WidthSeries(path, by_width, tuple(notes), what)


def _width_path(root: Call) -> str:
    model = root.kwargs.get("model")
    if not isinstance(model, Call):
        raise UserError(
            "The config has no call as its model, so there is no argument `width`. Name the width"
            " by its path, as in --width_path=model.width."
        )
    if "width" in model.kwargs:
        return "model.width"
    numbers = [path for path, x in leaves(model, "model") if type(x) is int]
    has = f"Its integers are {joined(numbers, 6)}." if numbers else "It has no integers."
    raise UserError(
        f"{model.name} has no argument `width`. {has} Name the width by its path, as in"
        f" --width_path={numbers[0] if numbers else 'model.net.features'}."
    )


def _number(builder: Builder, root: Call, path: str, option: str) -> int | float:
    """Returns the number at a path of a config, defaults included; raises UserError."""
    # An integer in the place of a float is a float.
    tree: Tree = root
    above, rest, parameter = "", path, None
    while rest:
        items = child_trees(tree)
        if (key := longest_key(items, rest)) is None:
            word = rest.split(".")[0]
            known = known_names(word, items, "It has")
            place = above or "The config"
            raise UserError(f"{option}={path}: {place} has no {word!r}. {known}")
        parameter = None
        if isinstance(tree, Call):
            parameter = builder.function(tree.name).parameters.get(str(key))
        tree, above, rest = items[key], join(above, key), rest[len(str(key)) + 1 :]
    if tree is None:
        raise UserError(
            f"{option}={path}: it has no value (null). Give it that of the config's width, as in"
            f" --set {path}=1."
        )
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        numbers = [join(path, n) for n, x in child_trees(tree).items() if type(x) in (int, float)]
        below = f" Below it are {joined(numbers, 4)}." if numbers else ""
        raise UserError(f"{option}={path}: {describe(tree)} is there, and not a number.{below}")
    hint = None if parameter is None else parameter.hint
    return float(tree) if float in (hint, *get_args(hint)) else tree


def _at(path: str, value: float, power: float, what: str, own: int, width: int) -> int | float:
    """Returns a value that is scaled with the width; an integer must stay one."""
    found = value * (width / own) ** power
    if not isinstance(value, int):
        return found
    if abs(found - round(found)) > 1e-9 * max(1.0, abs(found)) or round(found) < 1:
        raise UserError(
            f"--scale={path}={power:g}: {path} is {value} at the {what} {own} of the config, and"
            f" would be {found:.4g} at the {what} {width}, which is not an integer of at least 1."
            f" Choose other {what}s, or give the config a {what} from which it scales."
        )
    return round(found)


def _heads(
    root: Call, path: str, widths: Sequence[int], tables: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Says whether the number of heads or their size grows, for a model that has heads."""
    model = root.kwargs.get("model")
    if path != "model.width" or not isinstance(model, Call) or "model.num_heads" in tables:
        return []
    heads = model.kwargs.get("num_heads")
    if type(heads) is not int:
        return []
    sizes = joined([f"{width / heads:g}" for width in widths])
    return [
        f"model.num_heads is {heads} at all widths, so that the size of a head is {sizes};"
        " --scale=model.num_heads=1 keeps the size of a head instead."
    ]


Kind = Literal["grows", "shrinks", "keeps", "not decided"]

_NOTE = (
    "A slope is the power of the {what} with which the root mean square grows; ± is half of its"
    f" interval, which holds with {1 - LEVEL:.0%} for all slopes of changes together. A module"
    f" grows or shrinks if an interval is beyond ±{LIMIT:g}, and keeps its size if all of them are"
    " within: theory knows the powers 0, 1/2 and 1. – is a size of 0, or a change of less than 1%"
    " of that until the last step."
)


@dataclass(frozen=True)
class Judged:
    """The slope of the changes of a module after some steps."""

    module: str  # its path
    step: int  # after how many steps
    slope: Slope
    half: float  # half the width of the interval of the slope

    @property
    def kind(self) -> Kind:
        """What the interval says: it is beyond the limit, within it, or across it."""
        low, high = self.slope.value - self.half, self.slope.value + self.half
        if low > LIMIT:
            return "grows"
        if high < -LIMIT:
            return "shrinks"
        return "keeps" if -LIMIT < low and high < LIMIT else "not decided"

    def __str__(self) -> str:
        return f"{self.slope.value:.2f} ± {self.half:.2f}"


def judge_slopes(found: Found) -> list[Judged]:
    """Returns the slopes of all changes, with intervals that hold together."""
    from scipy.special import stdtrit

    slopes = found.slopes()
    below = 1 - LEVEL / 2 / max(1, len(slopes))  # the level of the upper end of an interval
    return [
        Judged(*at, slope, float(stdtrit(slope.degrees, below)) * slope.error)
        for at, slope in slopes.items()
    ]


def changes_passed(found: Found) -> bool:
    """Returns whether each change was shown to keep its size."""
    judged = judge_slopes(found)
    return bool(judged) and not found.ended() and all(x.kind == "keeps" for x in judged)


def verdict_on_widths(found: Found) -> list[str]:
    """Returns the sentences of the verdict, which say no more than the intervals."""
    judged, sentences, what = judge_slopes(found), [], found.series.what
    if ended := found.ended():
        runs = joined([f"{width} (seed {seed})" for width, seed in ended], 4)
        sentences.append(f"Runs had a loss or gradient that is not finite, at the {what} {runs}.")
    if not judged:
        return [*sentences, f"No change has a slope: it is 0 or not finite at some {what}."]
    for kind, words in (("grows", "grow"), ("shrinks", "shrink")):
        # Of each module the steepest slope, the steepest module first.
        steepest: dict[str, str] = {}
        for x in sorted(judged, key=lambda x: -abs(x.slope.value)):
            if x.kind == kind:
                steepest.setdefault(x.module, f"slope {x} after {plural(x.step, 'step')}")
        if names := [f"{module} ({text})" for module, text in steepest.items()]:
            sentences.append(f"Changes {words} with the {what} in {joined(names, 4)}.")
    if open_ones := [x for x in judged if x.kind == "not decided"]:
        widest = max(open_ones, key=lambda x: x.half)
        modules = list(dict.fromkeys(x.module for x in open_ones))
        sentences.append(
            f"{plural(len(open_ones), 'slope')} of {len(judged)}"
            f" {'is' if len(open_ones) == 1 else 'are'} not decided, in {joined(modules, 4)}: the"
            f" intervals reach across ±{LIMIT:g}, as {widest} in {widest.module}. More"
            f" seeds (--seeds) or {what}s make them narrower."
        )
    if all(x.kind == "keeps" for x in judged):
        most = max(judged, key=lambda x: abs(x.slope.value))
        sentences.append(
            f"No slope of the {len(judged)} is beyond ±{LIMIT:g}: the largest is {most}, in"
            f" {most.module} after {plural(most.step, 'step')}."
        )
    return sentences


def _slopes(found: Found) -> Table:
    """Returns the table of slopes, whose cells are text."""
    judged = {(x.module, x.step): x for x in judge_slopes(found)}
    rows: list[tuple[str, ...]] = []
    for module, sizes in found.sizes.items():
        start = fit(found.widths, sizes[0])
        kinds = [judged[key].kind for step in found.steps if (key := (module, step)) in judged]
        last = found.changes[module][-1].mean(0)  # [widths]
        with np.errstate(all="ignore"):
            ratio = last[-1] / last[0]
        rows.append(
            (
                module,
                "–" if start is None else f"{start.value:.2f}",
                *(str(judged.get((module, step), "–")) for step in found.steps),
                f"{ratio:.3g}" if np.isfinite(ratio) and ratio > 0 else "–",
                " and ".join(dict.fromkeys(kinds)) or "–",
            )
        )
    titles = (
        Column("module", "module"),
        Column("start", "at the start"),
        *(Column(f"after_{step}", f"change, {plural(step, 'step')}") for step in found.steps),
        Column("ratio", f"change {found.widths[-1]} / {found.widths[0]}"),
        Column("verdict", "verdict"),
    )
    title, note = f"Slopes against the {found.series.what}", _NOTE.format(what=found.series.what)
    return Table("slopes", title, titles, tuple(rows), note)


def printed(found: Found) -> list[str]:
    """Returns the lines of the table of slopes for a terminal."""
    slopes = _slopes(found)
    titles = [each.title for each in slopes.columns]
    rows = [[str(cell) for cell in row] for row in slopes.rows]
    return table([titles, *rows], right=range(1, len(titles) - 1))


def notes_on_widths(found: Found) -> list[str]:
    """Returns what differs between the widths, and how it was measured."""
    seeds = joined([str(seed) for seed in found.seeds])
    lines = [
        f"{found.series.path} is {joined([str(width) for width in found.widths])}, with the seeds"
        f" {seeds}. Activations are those of {plural(found.examples, 'example')} of the batch after"
        " those of the steps.",
        *found.series.notes,
    ]
    if found.constants:
        rates = joined([f"{path} = {value:.4g}" for path, value in found.constants.items()], 4)
        lines.append(f"Schedules of learning rates are replaced by their largest value: {rates}.")
    if list(found.sizes) == ["outputs"]:
        lines.append(
            "Only the outputs of the model are compared: it is no flax linen module, and nothing"
            " says what its layers return."
        )
    return lines


def make_coordinate_report(found: Found, title: str) -> Report:
    """Makes the report of a coordinate check."""
    figures = tuple(_figure(found, index) for index in range(len(found.steps)))
    text, slopes = tuple(notes_on_widths(found)), (_slopes(found),)
    block = Block(text=text, warnings=found.warnings, figures=figures, tables=slopes)
    panel = Panel("slopes", f"Changes of activations by {found.series.what}", "tests", (block,))
    return Report(title, tuple(verdict_on_widths(found)), tuple(found.sizes), (panel,))


def _figure(found: Found, index: int) -> Figure:
    """Draws the changes of each module after some steps: every seed, and the geometric mean."""
    after, widths, what = plural(found.steps[index], "step"), found.widths, found.series.what
    columns = Column.named(seed="integer", change="number", size="number")
    series: list[Series] = []
    rows: list[tuple[str | int | float, ...]] = []
    for module, changes in found.changes.items():
        of_seeds = changes[index]  # [seeds, widths]
        sizes = found.sizes[module][1 + index]
        for (j, i), change in np.ndenumerate(of_seeds.T):
            rows.append((module, widths[j], found.seeds[i], float(change), float(sizes[i, j])))
        if np.any(of_seeds > 0):
            points = np.tile(widths, len(of_seeds)).tolist(), of_seeds.ravel().tolist()
            series.append(Series("points", module, *points, faint=True))
            with np.errstate(all="ignore"):
                mean = np.exp(np.log(of_seeds).mean(0))
            series.append(Series("line", module, widths, mean.tolist()))
    return Figure(
        name=f"changes_after_{found.steps[index]}",
        title=f"Changes of activations after {after}",
        description=(
            f"The root mean square of the change of each module's activations after {after}, over"
            f" the {what}; a level line is a change that does not depend on it."
        ),
        x=Axis(found.series.path, log=True),
        y=Axis(f"RMS of the change after {after}", log=True),
        series=tuple(series),
        table=Table(
            f"changes_after_{found.steps[index]}",
            f"Changes after {after}",
            (Column("module", "module"), Column(what, what, "integer"), *columns),
            tuple(rows),
        ),
    )
