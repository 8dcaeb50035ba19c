"""Compares two configs or runs: configs, what results depend on, metrics, and programs of steps."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import config as configs
from trainer.config import Builder, Call, Config, ConfigError, Tree
from trainer.config.full import complete
from trainer.config.tree import child_trees, join, same, walk
from trainer.config.vocabulary import RUN, SWEEP
from trainer.config.wording import brief
from trainer.messages import UserError, refuse_os_errors
from trainer.workdir import check_files, fingerprint_differences, read_record
from trainer.writers import read_metrics
from trainer.writers.lines import PREFIXES

_ABSENT = object()  # None is a value of a config
_ORDER = " (order)"  # appended to the path of a dict whose keys are in another order
# Differences of these keys of a fingerprint are differences of the config.
OF_CONFIG = ("config", "seed", "data_seed", "batch_size")


@dataclass(frozen=True)
class Side:
    """One side of a comparison."""

    path: str  # as the user gave it
    config: Config  # resolved
    is_run: bool  # whether it is the folder of a run, or of a trial of a sweep
    fingerprint: Mapping[str, Any]  # of the last process of the run; empty if it is not known
    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl, sorted by step; empty if there are none

    @property
    def is_sweep(self) -> bool:
        """Whether the config is that of a sweep."""
        return self.config.root.name == SWEEP.root


def read_side(path: str, search_paths: Sequence[str] = ()) -> Side:
    """Reads one side of a comparison, executing nothing; raises UserError if it cannot."""
    folder = Path(path)
    if not folder.exists():
        raise UserError(
            f"{path} does not exist: name a config file, or the folder of a run or of a trial."
        )
    if not folder.is_dir():
        return Side(path, _load(path, search_paths), False, {}, ())
    check_files(folder)
    if not (folder / "config.yaml").exists():
        raise UserError(f"{path} has no config.yaml: {_what_else(folder)}")
    metrics = folder / "metrics.jsonl"
    with refuse_os_errors(f"{path} cannot be read"):
        record = read_record(folder / "run.json") or {}
        rows = read_metrics(metrics) if metrics.exists() else []
    config = _load(str(folder / "config.yaml"), search_paths)
    return Side(path, config, True, record.get("fingerprint", {}), rows)


def _load(file: str, search_paths: Sequence[str]) -> Config:
    try:
        config = configs.load([file], search_paths=search_paths)
        # YAML is read in the same way for both kinds.
        given = config.root.kwargs.keys()
        if given.isdisjoint(SWEEP.marks) or not given.isdisjoint(RUN.marks):
            return config
        mistake = None
    except ConfigError as error:
        mistake = error
    try:
        return configs.load([file], search_paths=search_paths, language=SWEEP)
    except ConfigError as error:
        raise mistake or error from None


def _what_else(folder: Path) -> str:
    """Says what a folder without a config.yaml is, and what to name instead."""
    if not (folder / "plan.json").exists():
        return "it is not the folder of a run or of a trial."
    if trials := sorted(folder.glob("trials/*/*/*/config.yaml")):
        return f"it is that of a sweep. Name one of its trials, such as {trials[0].parent}."
    return "it is that of a sweep without finished trials. Name the file of an arm in its arms/."


class Difference(NamedTuple):
    """A path at which two configs differ."""

    path: str
    # such as "0.95", "0.999 (default)" or "-" if A has no such path; of a call its function, such
    # as "optax.adamw()", whose arguments have paths of their own
    a: str
    b: str


@dataclass(frozen=True)
class ConfigDifferences:
    """How two configs differ."""

    paths: tuple[Difference, ...]  # in the order of A
    # path -> the side, "A" or "B", that names a value which the other side has as the default
    repeated: Mapping[str, str]
    notes: tuple[str, ...]  # about defaults that are not known or not compared


def compare_configs(a: Side, b: Side, vocabulary: Sequence[str] = ()) -> ConfigDifferences:
    """Compares two resolved configs path by path, with the defaults of their functions."""
    # Both are configs of runs, or both of sweeps. Defaults are shown where the other side has
    # another value at the same path, but not where it has no such path: those of two different
    # functions would be too many.
    notes: list[str] = []
    full_a = _completed(a, "A", vocabulary, notes)
    full_b = _completed(b, "B", vocabulary, notes)
    named = [{path for path, _ in walk(side.config.root)} for side in (a, b)]
    found: list[Difference] = []
    repeated: dict[str, str] = {}
    for path, x, y in _walk(full_a, full_b, ""):
        by_a, by_b = (path.removesuffix(_ORDER) in paths for paths in named)
        equal = x is not _ABSENT and y is not _ABSENT and _equal(x, y, by_a and by_b)
        if equal and by_a != by_b:
            repeated[path] = "A" if by_a else "B"
        elif not equal and (by_a or by_b or (x is not _ABSENT and y is not _ABSENT)):
            found.append(Difference(path, _shown(x, by_a), _shown(y, by_b)))
    return ConfigDifferences(tuple(found), repeated, tuple(notes))


def _completed(side: Side, name: str, vocabulary: Sequence[str], notes: list[str]) -> Call:
    if side.is_sweep:
        notes[:] = ["The files of sweeps are compared as they are, without defaults."]
        return side.config.root
    try:
        Builder(side.config, vocabulary).check()  # `complete` expects a config without mistakes
        return complete(side.config, vocabulary)[0]
    except ConfigError as error:
        notes.append(f"The defaults of {name} are not known: {error}")
        return side.config.root


def _walk(a: Tree, b: Tree, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the path of each node of two trees with its bare values in both."""
    x, y = _bare(a), _bare(b)
    yield path, x, y
    old, new = _children(a), _children(b)
    if isinstance(a, dict) and isinstance(b, dict) and list(old) != list(new):
        if set(old) == set(new):
            yield f"{path}{_ORDER}", list(old), list(new)
    for key in [*old, *(key for key in new if key not in old)]:
        yield from _walk(old.get(key, _ABSENT), new.get(key, _ABSENT), join(path, key))


def _bare(tree: Tree) -> Any:
    """Returns a node without its children: a call without arguments, an empty dict, a leaf."""
    if isinstance(tree, Call):
        return Call(tree.name, {}, tree.partial)
    if isinstance(tree, dict):
        return {}
    return [] if isinstance(tree, list) and _children(tree) else tree


def _children(tree: Tree) -> Mapping[Any, Tree]:
    """Returns the children of a node; a list of numbers or words is shown as a whole."""
    if isinstance(tree, list) and not any(isinstance(x, Call | dict | list) for x in tree):
        return {}
    return child_trees(tree)


def _equal(x: Any, y: Any, both_named: bool) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (x, y))
    # An integer equals a default that is the same float, because the builder converts it.
    return same(x, y) or (numbers and not both_named and x == y)


def _shown(value: Any, named: bool) -> str:
    if value is _ABSENT:
        return "-"
    return brief(value) if named else f"{brief(value)} (default)"


def compare_fingerprints(a: Side, b: Side) -> list[str]:
    """Lists the differences of two runs in versions, machine, code and data."""
    return [
        f"{change}" + (f" (changes the {change.kind})" if change.kind != "bits" else "")
        for change in fingerprint_differences(a.fingerprint, b.fingerprint)
        if change.key not in OF_CONFIG
    ]


def check_sides(a: Side, b: Side) -> None:
    """Raises UserError for one file or folder twice, or the config of a run and of a sweep."""
    if Path(a.path).resolve() == Path(b.path).resolve():
        raise UserError(f"{a.path} and {b.path} are the same: name two configs or runs.")
    if a.is_sweep != b.is_sweep:
        sweep, run = (a, b) if a.is_sweep else (b, a)
        raise UserError(
            f"{sweep.path} is the config of {SWEEP.what}, and {run.path} is that of {RUN.what}:"
            " they have nothing in common. Compare a trial of the sweep, or the file of an arm in"
            " the folder of the sweep, arms/."
        )


Rows = Sequence[Mapping[str, Any]]

_CLOCKED = "perf/"  # timings, in which equal runs differ
_EVALUATIONS = tuple(PREFIXES.values())


class LastValues(NamedTuple):
    """The last values of a metric in two runs."""

    name: str
    a: tuple[int, float] | None  # step and value in A; None if it has none
    b: tuple[int, float] | None
    # the first step at which both have a value and these differ; None if there is none, or if the
    # metric is a timing
    first: int | None


@dataclass(frozen=True)
class RowDifferences:
    """How the rows of two runs differ, apart from timings."""

    shared: tuple[int, ...]  # the steps of which both runs have a row, increasing
    only_a: int  # how many steps only A has a row of
    only_b: int
    first: int | None  # the first shared step whose rows differ; None if none do
    names: tuple[str, ...]  # the metrics that differ in that row, and those that only one run has
    metrics: tuple[LastValues, ...]  # of every metric: evaluations first, timings last

    @property
    def equal_up_to(self) -> int | None:
        """The last shared step before the first difference; None if there is none."""
        equal = [step for step in self.shared if self.first is None or step < self.first]
        return equal[-1] if equal else None


def compare_rows(a: Rows, b: Rows) -> RowDifferences:
    """Compares the rows of two runs, from `writers.read_metrics`, bit for bit."""
    old, new = ({row["step"]: row for row in rows} for rows in (a, b))
    shared = [step for step in old if step in new]
    found = ((step, _differing(old[step], new[step])) for step in shared)
    first, names = next(((step, names) for step, names in found if names), (None, ()))
    only_a, only_b = (len(rows) - len(shared) for rows in (old, new))
    finals = []
    for name in sorted({name for row in [*a, *b] for name in row} - {"step"}, key=_order):
        x, y = ({row["step"]: row[name] for row in rows if name in row} for rows in (a, b))
        differing = (step for step in x if step in y and _bits(x[step]) != _bits(y[step]))
        since = None if name.startswith(_CLOCKED) else next(differing, None)
        last_a, last_b = (max(values.items(), default=None) for values in (x, y))
        finals.append(LastValues(name, last_a, last_b, since))
    return RowDifferences(tuple(shared), only_a, only_b, first, tuple(names), tuple(finals))


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys(name for name in [*a, *b] if not name.startswith(_CLOCKED))
    return [name for name in names if _bits(a.get(name)) != _bits(b.get(name))]


def _bits(value: Any) -> str:
    """Returns a text that is equal for equal bits: NaN equals NaN, and -0.0 differs from 0.0."""
    return "" if value is None else repr(float(value))


def _order(name: str) -> tuple[int, str]:
    """Sorts evaluations first and timings last."""
    ranks = [*_EVALUATIONS, "", _CLOCKED]
    rank = next((r for r, start in enumerate(ranks) if start and name.startswith(start)), 2)
    return rank, name


def metrics_to_plot(finals: Sequence[LastValues]) -> list[str]:
    """Returns at most two metrics to plot, which both runs have; the loss comes first."""
    # They are of the validation split, else of the test split, else of training.
    both = [each.name for each in finals if each.a and each.b]
    for start in (*_EVALUATIONS, "train/"):
        if names := [name for name in both if name.startswith(start)]:
            return sorted(names, key=lambda name: name != f"{start}loss")[:2]
    return []


# The programs that two configs compile for a step, as StableHLO.

# "stablehlo.add" is an operation, "#stablehlo.dot" an attribute of one.
_OPERATION = re.compile(r"(?<![#\w.])(?:stablehlo|chlo)\.(\w+)|\b(call) @")
_NO_OPERATIONS = ("return", "mesh")
_VALUE = re.compile(r"%\w+(?:#\d+)?")  # %12, %arg3, %5#1
_INPUT = re.compile(r"(stablehlo\.slice % \[\d+:\d+\] : )\(tensor<\d+xf\d+>\)( -> tensor<1xf\d+>)")
_SUFFIX = re.compile(r"(@\w+?)_\d+\b")  # of all but the first function of a name
# Attributes that are not compared: the number of the output that takes the buffer of an argument,
# and shardings that shard no axis.
_ATTRIBUTES = re.compile(
    r"tf\.aliasing_output = \d+ : i32(?:, )?"
    r"|(?:, )?sdy\.sharding = #sdy\.sharding<@mesh, \[(?:\{\}(?:, )?)*\]>"
)
_NO_ATTRIBUTES = re.compile(r"(?<=>) \{(?:, )?\}")
_IN_SIGNATURE = re.compile(r"(?<=,) (?=%|tensor)|(?<=\)) (?=->)")


@dataclass(frozen=True)
class StepProgram:
    """The program of a step, before it is compiled."""

    text: str  # StableHLO
    operations: Mapping[str, int]  # kind -> number in the text; the body of a loop counts once
    flops: int  # of matrix products and convolutions; the body of a loop counts as often as it runs
    state_bytes: int
    # config path -> value, for the floats that the program takes as inputs
    inputs: Mapping[str, float]
    constants: Mapping[str, float]  # the same for the other floats of the config


def lower_step(config: Config, vocabulary: Sequence[str] = ()) -> StepProgram:
    """Builds the program of a step, with the floats of the config as inputs, and lowers it."""
    from trainer.engine.plan import make_plan
    from trainer.engine.program import load_located

    program = load_located(config, vocabulary)
    plan = make_plan(program, config)
    state = program.abstract_state()
    text = program.trace(state).lower().as_text()
    return StepProgram(
        text=text,
        operations=count_operations(text),
        flops=plan.flops,
        state_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
        inputs=plan.inputs,
        constants={path: value for path, (value, _) in plan.constants.items()},
    )


def count_operations(text: str) -> Mapping[str, int]:
    """Counts the operations of a StableHLO text by kind; the body of a loop counts once."""
    names = (kind or call for kind, call in _OPERATION.findall(text))
    return Counter(name for name in names if name not in _NO_OPERATIONS)


def count_differences(a: StepProgram, b: StepProgram) -> list[tuple[str, int, int]]:
    """Returns (name, a, b): totals, then kinds that differ in number, those that do most first."""
    kinds = [
        (kind, a.operations.get(kind, 0), b.operations.get(kind, 0))
        for kind in sorted({*a.operations, *b.operations})
    ]
    differing = [each for each in kinds if each[1] != each[2]]
    return [
        ("FLOPs", a.flops, b.flops),
        ("state bytes", a.state_bytes, b.state_bytes),
        ("inputs", len(a.inputs), len(b.inputs)),
        ("operations", sum(a.operations.values()), sum(b.operations.values())),
        *sorted(differing, key=lambda each: -abs(each[2] - each[1])),
    ]


def normalized(text: str) -> list[str]:
    r"""Returns the lines of StableHLO without the names of values and the numbers of functions.

    An operation that is added would otherwise change the names of all values after it. Every
    argument and result of a function has a line of its own.

    Example:
        >>> normalized("func.func @f_3(%arg0: tensor<f32>, %arg1: i1) {\n  %4 = a.b %3#1 : i1")
        ['func.func @f(%: tensor<f32>,', '%: i1) {', '% = a.b % : i1']
    """
    lines = []
    for line in _NO_ATTRIBUTES.sub("", _ATTRIBUTES.sub("", text)).splitlines():
        line = _SUFFIX.sub(r"\1", _VALUE.sub("%", line)).strip()
        # Another number of inputs would change the lines of all of them.
        line = _INPUT.sub(r"\1inputs\2", line)
        lines += _IN_SIGNATURE.split(line) if line.startswith("func.func") else [line]
    return lines


def unified_diff(a: StepProgram, b: StepProgram) -> list[str]:
    """Returns a diff of the `normalized` lines of two programs, with one line of context."""
    # It is empty if the programs differ only in which values their operations take.
    old, new = normalized(a.text), normalized(b.text)
    return list(difflib.unified_diff(old, new, "A", "B", n=1, lineterm=""))
