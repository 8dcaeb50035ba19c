"""The sentences in which a config is refused: what was given, what exists, what to do."""

from collections.abc import Sequence

from trainer.config import annotations
from trainer.config.signatures import Function
from trainer.config.slots import Slot
from trainer.config.tree import Call, Key, Tree
from trainer.config.units import quantity
from trainer.config.wording import describe, known_names, listing


def said(error: Exception) -> str:
    """Returns what a function said when it refused what it was given."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def call_it(call: Call) -> str:
    """Returns what to do where a function was given in place of what it returns."""
    return f" To give it what {call.name} returns, call it: @{call.name}() or !{call.name}."


def unknown_argument(function: Function, name: str) -> str:
    """Returns that a function has no argument of this name."""
    names = list(function.parameters)
    text = f"{function.name} has no argument {name!r}. "
    text += known_names(name, names, "It has") if names else "It takes none."
    if function.open_ended:
        text += " It takes **kwargs, but a config names only arguments that its signature names."
    return text


def missing_arguments(function: Function, missing: Sequence[str]) -> str:
    """Returns that a function needs more arguments."""
    many = len(missing) > 1
    what, them = ("the arguments", "them") if many else ("the argument", "it")
    text = f"{function.name} needs {what} {listing(missing)}"
    if "rngs" in missing:  # of flax's nnx
        return (
            f"{text}, and a config gives no rngs: an nnx module is built by models.from_nnx, so"
            f" name it there without a call, constructor = @{function.name} in Gin or constructor:"
            f" !partial:{function.name} {{}} in YAML."
        )
    return f"{text}: add {them}."


def misfit_key(key: Key, slot: Slot) -> str:
    """Returns that a key of a dict is none that is asked for."""
    words = annotations.words(slot.hint)
    return (
        f"{slot.owner} takes {words} as a key of {slot.argument!r}, and was given {describe(key)}."
    )


def misfit(tree: Tree, slot: Slot) -> str:
    """Returns that a value does not fit its place, and what may have been meant."""
    words = "a mask" if slot.takes_mask else annotations.words(slot.hint)
    text = f"{slot.owner} takes {words} for {slot.argument!r}, and was given {describe(tree)}."
    if isinstance(tree, Call):
        if tree.name == "optim.optimizer":
            text += (
                " It moves every parameter by its groups, so it stands at the root alone: name a"
                " single optimizer here, and another group there for what else is to move."
            )
        elif words == "a Group" and tree.name != "optim.group":
            text += f" A group is made by optim.group: give it {tree.name} as its optimizer."
        elif tree.partial and not annotations.mentions_recipe(slot.hint):
            text += call_it(tree)
    elif slot.takes_mask:
        text += (
            " A mask is a function of the parameters, or a tree of booleans like theirs. Patterns"
            " of paths stand in groups: optim.group(match, optimizer)."
        )
    elif isinstance(tree, str) and slot.takes_steps:
        text += " A number of steps may also be '5%', '3 epochs' or '1_000 examples'."
    elif isinstance(tree, str) and annotations.takes_int(slot.hint) and quantity(tree):
        text += (
            " Only numbers of steps have units: arguments that are named like warmup_steps, or"
            " annotated like Annotated[int, 'steps']."
        )
    elif isinstance(tree, str) and _is_number(tree) and annotations.takes_number(slot.hint):
        text += " A number is written without quotes."
    elif isinstance(tree, str) and tree.lower() == "none" and annotations.takes_none(slot.hint):
        text += " The value None is written None in Gin and null in YAML."
    elif annotations.mentions_recipe(slot.hint) and annotations.takes_callable(slot.hint):
        text += " A function itself is written @name.of.it in Gin and !partial:name.of.it in YAML."
    elif annotations.takes_function(slot.hint) or not annotations.takes_leaf(slot.hint):
        text += " A call is written @name.of.function() in Gin and !name.of.function in YAML."
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
