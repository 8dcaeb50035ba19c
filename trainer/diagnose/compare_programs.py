"""Compares the programs that two configs compile for a step, as StableHLO."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from trainer.config import Config
from trainer.engine.loading import load_located
from trainer.engine.plan import make_plan

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
    # Raises ConfigError if the config has a mistake, or does not fit the devices of this machine.
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
    """Counts the operations of a StableHLO text by kind; the body of a loop counts once.

    Example:
        >>> count_operations('"stablehlo.gather"(%0) <{a = #stablehlo.gather<>}> call @f(%1)')
        Counter({'gather': 1, 'call': 1})
    """
    names = (kind or call for kind, call in _OPERATION.findall(text))
    return Counter(name for name in names if name not in _NO_OPERATIONS)


def counts(a: StepProgram, b: StepProgram) -> list[tuple[str, int, int]]:
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
