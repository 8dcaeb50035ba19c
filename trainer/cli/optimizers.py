"""The command optimizers: lists what a config can name as an optimizer, or describes one."""

import argparse
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.cli.docstrings import summary_of
from trainer.cli.optimizer_families import PIECES
from trainer.cli.resolving import ignore_optimizer_warnings
from trainer.cli.terminal import show
from trainer.config import gin_writer, join, yaml_writer
from trainer.config.schema import argument_docs
from trainer.config.signatures import Parameter
from trainer.messages import DONE

if TYPE_CHECKING:
    from trainer.cli.optimizer_facts import Facts
    from trainer.cli.optimizer_families import Published

_WIDTH = 100
_NAME = 40
# What `Cost.needs` says -> what it means to the user of a run.
NEEDS = {
    "matrices": "kernels in a group of their own: it takes matrices only",
    "at least one axis": "parameters with at least one axis",
    "whole batches": "the same examples at every step, as with data.digits(batch_size=None)",
    "gradients of single examples": "the gradient of every example, which Lockstep computes",
    "value": "the value of the loss, which Lockstep passes on",
    "value_fn": "further evaluations of the loss (value_fn), which Lockstep passes on",
    "obj_fn": "derivatives of the loss (obj_fn), which Lockstep passes on",
    "grad_fn": "a second gradient (grad_fn), which Lockstep passes on",
    "observations": "a model that observes what it reads, such as models.gpt with qk_norm=False",
}


def run(arguments: argparse.Namespace) -> int:
    """Prints the list, or the page of the optimizer that is named."""
    from trainer.cli.optimizer_facts import find_optimizer

    ignore_optimizer_warnings()
    if arguments.name is None:
        show("\n".join(_list(arguments.vocabulary)))
    else:
        facts, others = find_optimizer(arguments.name, arguments.vocabulary)
        show("\n".join(_page(facts, others)))
    return DONE


def _list(packages: Sequence[str]) -> Iterator[str]:
    from trainer.cli.optimizer_facts import families
    from trainer.engine.flops import KERNEL

    yield from textwrap.wrap(
        "State is in bytes, and FLOPs are those of an update, each for one element of a float32"
        f" kernel of {KERNEL[0]}x{KERNEL[1]} under the config that `python -m trainer optimizers"
        " NAME` prints. They include those of an optimizer inside, which is named after 'with'.",
        _WIDTH,
    )
    unknown: dict[str, list[str]] = {}
    for family, members in families(packages).items():
        yield f"\n{family:{_NAME}}{'state':>9}{'FLOPs':>9}  needs; paper"
        if not members:
            yield f"  none at its top level; {family}.MODULE.NAME is the name of one in a module"
        for facts in members:
            state, flops, why = figures(facts)
            inside = f"with {', '.join(facts.inside)}" if facts.inside else ""
            paper = facts.references[0].short if facts.references else ""
            remarks = "; ".join(filter(None, (needs_in_words(facts), inside, paper)))
            yield f"  {facts.name:{_NAME - 2}}{state:>9}{flops:>9}  {remarks}".rstrip()
            if why:
                unknown.setdefault(why, []).append(facts.name)
    yield "\nWhere FLOPs are -:"
    for why, names in unknown.items():
        yield from _wrapped(f"{why}: {', '.join(names)}.", "  ")
    for title, names in PIECES.items():
        yield f"\n{title}"
        yield from _wrapped(", ".join(names), "  ")


def figures(facts: "Facts") -> tuple[str, str, str]:
    """Returns the bytes of state and the FLOPs of each element, "-" if not known, and why not."""
    if (cost := facts.cost) is None:
        return "-", "-", facts.failure or "its arguments have no default"
    state = f"{cost.state_bytes:.3g}"
    return state, "-" if cost.flops is None else f"{cost.flops:,.0f}", cost.why


def needs_in_words(facts: "Facts") -> str:
    """Returns what an optimizer needs besides gradients, in few words; "" if nothing."""
    return ", ".join(facts.cost.needs) if facts.cost else ""


def _page(facts: "Facts", others: Sequence[str]) -> Iterator[str]:
    yield from _wrapped(f"{facts.name}: {facts.summary or 'it has no docstring.'}")
    if others:
        yield f"Of the same name: {', '.join(others)}."
    yield f"\nFamily: {facts.family}."
    for need in facts.cost.needs if facts.cost else ():
        yield from _wrapped(f"Needs: {NEEDS.get(need, need)}.", "  ", first="")
    yield from _costs(facts)
    for reference in facts.references:
        yield from _wrapped(f"Paper: {reference.text}", "  ", first="")
    if facts.composition is not None:
        yield from _composition(facts.composition)
    else:
        if facts.rule:
            yield "\nUpdate rule" if re.search("<-|=", facts.rule) else "\nDescription"
            yield from textwrap.indent(facts.rule, "  ").split("\n")
        yield "\nArguments"
        yield from _arguments(facts)
    if facts.config is None:
        yield ""
        yield from _wrapped(f"There is no config to paste: {_why_no_config(facts)}.")
        return
    for title, text in (
        ("A config to paste, in YAML", yaml_writer.dump(facts.config.root)),
        ("The same in Gin", gin_writer.dump_gin(facts.config.root)),
    ):
        yield f"\n{title}"
        yield from textwrap.indent(text.rstrip("\n"), "  ").split("\n")
    for space in facts.spaces:
        source = f"from {space.source}" if space.source else "ours: none is published"
        yield ""
        yield from _wrapped(f"A search space, {source}")
        yield from space_block(facts, space)
        if space.remark:
            yield from _wrapped(f"# {space.remark}", "  # ", first="  ")


def _composition(given: "Published") -> Iterator[str]:
    """Yields how a published composition was compared, and what its config below is made of."""
    from trainer.config.tree import functions
    from trainer.config.vocabulary import Vocabulary

    compared = "Compared with no other program as a whole."
    if given.compared:
        compared = f"Compared with another program: row {given.compared!r} of docs/references.md."
    yield from _wrapped(compared, "  ", first="")
    if given.remark:
        yield from _wrapped(f"Remark: {given.remark}.", "  ", first="")
    yield "\nMade of (the command optimizers describes each of them, with its arguments)"
    for name in dict.fromkeys(functions(given.optimizer)):
        text = summary_of(inspect.getdoc(Vocabulary().function(name).call) or "")
        yield from _wrapped(f"{name}: {text}", "      ", first="  ")


def _costs(facts: "Facts") -> Iterator[str]:
    from trainer.engine.flops import KERNEL

    if facts.cost is None:
        yield from _wrapped(f"State and FLOPs: not known: {_why_no_config(facts)}.", "  ", first="")
        return
    state, flops, why = figures(facts)
    inside = f", that of {', '.join(facts.inside)} included" if facts.inside else ""
    kernel = f"for each element of a float32 kernel of {KERNEL[0]}x{KERNEL[1]}"
    yield from _wrapped(f"State: {state} bytes {kernel}{inside}.", "  ", first="")
    counted = f"not known: {why}" if why else f"{flops} {kernel} in an update{inside}"
    yield from _wrapped(f"FLOPs: {counted}.", "  ", first="")


def _arguments(facts: "Facts") -> Iterator[str]:
    from optim.factories import kind_of

    if not facts.function.parameters:
        yield "  none"
    schedules = facts.schedules()
    call = facts.function.call
    described = argument_docs(call.func if isinstance(call, partial) else call)
    for name, parameter in facts.function.parameters.items():
        if kind := {"float": "; a float", "floats": "; floats"}.get(kind_of(call, name) or "", ""):
            scheduled = schedules.get(name, True)
            kind += f", for a sweep{' or a schedule' if scheduled else '; no schedule'}"
        default = "required" if parameter.required else f"default {_default(parameter)}"
        yield f"  {name}: {default}{kind}"
        if text := described.get(name):
            yield from _wrapped(summary_of(text), "      ")


def _default(parameter: Parameter) -> str:
    if (value := parameter.default) is inspect.Parameter.empty:
        return "[]"
    if type(value) is tuple:  # and not a finished transformation
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool | int | float | str | None):
        return yaml_writer.scalar_text(value)
    return getattr(value, "__name__", type(value).__name__)


def _why_no_config(facts: "Facts") -> str:
    if facts.family in PIECES:
        return "it is no optimizer by itself"
    if facts.failure:
        return facts.failure
    given = [name for name, each in facts.function.parameters.items() if each.required]
    return f"the values of {' and '.join(given)} are for you to choose"


def space_block(facts: "Facts", space: Any) -> Iterator[str]:
    """Yields the lines of a space as an arm of a sweep has it, for the config of `facts`."""
    yield "  space:"
    for axis, text in space.axes.items():
        yield f"    {join(facts.path, axis) if axis else facts.path}: {text}"


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    start = indent if first is None else first
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
