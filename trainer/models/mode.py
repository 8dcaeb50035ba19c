"""Finds the arguments of `__call__` by which a flax module distinguishes training."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.config.wording import known_names

Mode = Callable[[bool], dict[str, Any]]
"""A function of `train` that returns the keyword arguments of `__call__` for that mode."""

_TRUE_IN_TRAINING = (
    *("train", "training", "is_train", "is_training", "train_mode", "training_mode"),
    "enable_dropout",
)
_TRUE_IN_EVALUATION = (
    *("deterministic", "use_running_average"),
    *("eval", "evaluation", "is_eval", "is_evaluation", "eval_mode"),
    *("inference", "is_inference", "inference_mode"),
    *("test", "testing", "is_test", "is_testing", "test_mode"),
)
KNOWN: Mapping[str, bool] = {
    **dict.fromkeys(_TRUE_IN_TRAINING, True),
    **dict.fromkeys(_TRUE_IN_EVALUATION, False),
}
"""Name of a mode argument -> its value in training; in evaluation it has the other value."""

_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def call_mode(
    module: type,
    inputs: str | Sequence[str],
    train_kwargs: Mapping[str, Any] | None,
    eval_kwargs: Mapping[str, Any] | None,
    maker: str,
) -> Mode:
    """Returns a function for the mode arguments of a module's `__call__`, such as `train`."""
    # The user's arguments override KNOWN. Raises ValueError if the values of a boolean argument are
    # not known; `__call__` does not have an argument; one is set for training or evaluation only;
    # or an input, which is passed by position, would be one.
    keywords = {True: dict(train_kwargs or {}), False: dict(eval_kwargs or {})}
    keys = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    parameters = _parameters(module.__call__)
    positional = [x.name for x in parameters.values() if x.kind in (x.POSITIONAL_ONLY, _EITHER)]
    taken = positional[: len(keys)]  # by the inputs
    keyword = (_EITHER, inspect.Parameter.KEYWORD_ONLY)
    named = {x.name: x for x in parameters.values() if x.name not in taken and x.kind in keyword}
    call = f"{module.__name__}.__call__"
    for name, key in zip(parameters, keys, strict=False):
        if name not in named and name in {*KNOWN, *keywords[True], *keywords[False]}:
            raise ValueError(
                f"{maker} passes its inputs by position, and {key!r} would be the argument "
                f"{name!r} of {call}, which tells the module whether it trains. List fewer inputs, "
                f"or put {name!r} after the arguments that take them."
            )
    open_ended = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    for name in {**keywords[True], **keywords[False]}:
        if name not in named and not open_ended:
            hint = known_names(name, named, "It has")
            raise ValueError(f"{call} has no argument {name!r}. {hint}".rstrip())
        missing = [train for train in (True, False) if name not in keywords[train]]
        if missing and not (name in KNOWN and name in named):
            where, other = "eval_kwargs", "train_kwargs"
            where, other = (where, other) if missing[0] else (other, where)
            raise ValueError(
                f"{maker} got the argument {name!r} of {call} in {where} alone. Give its other "
                f"value in {other}, or the same value in both."
            )
    for name, parameter in named.items():
        if name not in {*KNOWN, *keywords[True]} and _is_boolean(parameter):
            raise ValueError(
                f"{call} has a boolean argument {name!r}, and {maker} does not know its values in "
                f"training and in evaluation. Give both, such as train_kwargs={{{name!r}: True}} "
                f"and eval_kwargs={{{name!r}: False}}, or name it 'train' or 'deterministic'."
            )

    def mode(train: bool) -> dict[str, Any]:
        # KNOWN has the values in training.
        known = {name: value == train for name, value in KNOWN.items() if name in named}
        return {**known, **keywords[train]}

    return mode


def mode_attributes(module: object) -> dict[str, bool]:
    """Returns the boolean attributes of a linen or nnx module whose names are in KNOWN."""
    values = vars(module).items()
    return {name: value for name, value in values if name in KNOWN and type(value) is bool}


def describe_mode(mode: Callable[[bool], Mapping[str, Any]] | None) -> str:
    """Describes the function `mode` of a `Model` in one line of the plan; "" if it has none.

    Example:
        >>> describe_mode(lambda train: {"train": train})
        'model: train=True in training, False in evaluation'
    """
    if mode is None:
        return ""
    training, evaluation = mode(True), mode(False)
    settings = [
        f"{name}={value!r} in training and evaluation"
        if value == evaluation[name]
        else f"{name}={value!r} in training, {evaluation[name]!r} in evaluation"
        for name, value in training.items()
    ]
    return f"model: {'; '.join(settings) or 'the same in training and evaluation'}"


def _parameters(call: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        signature = inspect.signature(call, eval_str=True)
    except Exception:  # an annotation that only type checkers can evaluate
        signature = inspect.signature(call)
    return dict(list(signature.parameters.items())[1:])  # without self


def _is_boolean(parameter: inspect.Parameter) -> bool:
    hint = parameter.annotation
    if isinstance(hint, str):
        # A string that could not be evaluated: "bool", "bool | None", "Optional[bool]".
        words = hint.replace("typing.", "").removeprefix("Optional[").removesuffix("]").split("|")
        return type(parameter.default) is bool or "bool" in [word.strip() for word in words]
    if typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        return type(parameter.default) is bool or bool in typing.get_args(hint)
    return type(parameter.default) is bool or hint is bool
