"""Messages about calls that do not fit: what was given, what exists, what to do."""

import difflib
import re
from collections.abc import Iterable, Sequence

from trainer.config import annotations
from trainer.config.signatures import Function, Slot
from trainer.config.tree import Call, Tree
from trainer.config.units import quantity
from trainer.config.vocabulary import LANGUAGES, Vocabulary
from trainer.config.wording import brief, describe, known_names, listing, nearest
from trainer.config.yaml_reader import PARTIAL

_UNKNOWN_DTYPE = re.compile(r"data type '([^']*)' not understood")  # a message of numpy


def exception_text(error: BaseException) -> str:
    """Returns the message of an exception on one line, with its type unless a ValueError."""
    text = " ".join(str(error).split())
    if unknown := _UNKNOWN_DTYPE.search(text):
        text = f"{text.rstrip('.')}. {annotations.dtype_advice(unknown[1])}"
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def call_hint(call: Call) -> str:
    """Returns advice for a config that names a function where its result is expected."""
    return f" To pass what {call.name} returns, call it: @{call.name}() or !{call.name}."


def unknown_argument(function: Function, name: str) -> str:
    """Returns the message for an argument that a function does not have."""
    names = list(function.parameters)
    text = f"{function.name} has no argument {name!r}. "
    text += known_names(name, names, "It has") if names else "It takes no arguments."
    if function.open_ended:
        text += " It takes **kwargs, but a config names only arguments that its signature names."
    return text


def unknown_at_root(root: Call, function: Function, name: str, paths: Iterable[str]) -> str:
    """Returns the message for an argument that the root of a config does not have."""
    text = unknown_argument(function, name)
    below = [path for path in paths if path.endswith(f".{name}")]
    elsewhere = f" This config has {name} at {listing(below, 4)}." if below else ""
    own = LANGUAGES[root.name]
    for other in LANGUAGES.values():
        if other is own or name not in Vocabulary(language=other).function(other.root).parameters:
            continue
        if not difflib.get_close_matches(name, function.parameters, 1, 0.85):
            text = f"{function.name} has no argument {name!r}."
        if not root.kwargs.keys().isdisjoint(own.marks):
            return f"{text}{elsewhere} {name!r} belongs to {other.what}: {other.place}."
        return f"{text}{elsewhere} This is the config of {other.what}: {other.command}."
    return text + elsewhere


def missing_arguments(function: Function, missing: Sequence[str], slot: Slot) -> str:
    """Returns the message for required arguments that are missing."""
    what, them = ("the arguments", "them") if len(missing) > 1 else ("the argument", "it")
    text = f"{function.name} needs {what} {listing(missing)}"
    if "rngs" in missing:  # of flax's nnx
        return (
            f"{text}, and a config cannot provide rngs. models.from_nnx builds nnx modules: name"
            f" the module there without calling it, constructor = @{function.name} in Gin or"
            f" constructor: !partial:{function.name} {{}} in YAML."
        )
    hint = slot.hint
    called = annotations.takes_optimizer(hint) or annotations.accepts_anything(hint)
    if called or not annotations.takes_function(hint):
        return f"{text}: add {them}."
    return (
        f"{text}: add {them}; or, to pass {function.name} itself without calling it, write"
        f" @{function.name} in Gin and !{PARTIAL}{function.name} {{}} in YAML."
    )


def type_mismatch(tree: Tree, slot: Slot) -> str:
    """Returns the message for a value that does not fit its argument, with advice."""
    words = "a mask" if slot.takes_mask else annotations.describe(slot.hint)
    words = "the name of a dtype" if slot.takes_dtype else words
    text = f"{slot.owner} takes {words} for {slot.argument!r}, and was given {describe(tree)}."
    parts, anything = annotations.union_members(slot.hint), annotations.accepts_anything(slot.hint)
    if isinstance(tree, Call):
        if tree.name == "optim.optimizer":
            text += (
                " optim.optimizer updates all parameters of a run, so it cannot be part of another"
                " optimizer: name a single optimizer here, and add groups at the root for other"
                " parameters."
            )
        elif words == "a Group" and tree.name != "optim.group":
            text += f" Call optim.group to make a group, with {tree.name} as its optimizer."
        elif tree.partial and not annotations.takes_optimizer(slot.hint):
            text += call_hint(tree)
    elif slot.takes_mask:
        text += (
            " A mask is a function of the parameters, or a tree of booleans like theirs. To select"
            " parameters by path, use a group: optim.group(match, optimizer)."
        )
    elif slot.takes_dtype:
        text += f" {annotations.dtype_advice(tree)}"
    elif isinstance(tree, str) and (near := nearest(tree, annotations.choices(slot.hint))):
        text += f" Did you mean {near!r}?"
    elif isinstance(tree, str) and _is_number(tree) and not anything and {int, float} & {*parts}:
        text += " A number is written without quotes."
    elif isinstance(tree, float) and annotations.takes_int(slot.hint) and tree.is_integer():
        text += f" Write it as {int(tree):_}." if abs(tree) < 1e15 else ""
    elif isinstance(tree, float) and slot.takes_steps and 0 < tree < 1:
        text += f" A share of the steps of the run is written with a sign, as in '{100 * tree:g}%'."
    elif isinstance(tree, str | float) and slot.takes_steps:
        text += " A number of steps may also be '5%', '3 epochs', '1_000 examples' or '10M tokens'."
    elif isinstance(tree, str) and annotations.takes_int(slot.hint) and quantity(tree):
        text += (
            " Only numbers of steps have units: arguments that are named like warmup_steps, or"
            " annotated like Annotated[int, 'steps']."
        )
    elif isinstance(tree, str) and tree.lower() == "none" and (anything or type(None) in parts):
        text += " The value None is written None in Gin and null in YAML."
    elif words == "a Space" and isinstance(tree, list):
        text += (
            f" Values to choose from are written !space.values {{values: {brief(tree)}}} in YAML,"
            " and as the argument values of @space.values() in Gin."
        )
    elif words == "a Space" and isinstance(tree, dict):
        text += " An interval is written !space.log_uniform {low: 1e-4, high: 1e-2}, in YAML."
    elif words == "a Space":
        text += " A value that all trials have is written under set, not under space."
    elif annotations.takes_optimizer(slot.hint) and annotations.takes_callable(slot.hint):
        text += " Write a function itself as @name.of.it in Gin and !partial:name.of.it in YAML."
    elif annotations.takes_function(slot.hint) or not any(map(annotations.is_scalar, parts)):
        text += " A call is written @name.of.function() in Gin and !name.of.function in YAML."
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
