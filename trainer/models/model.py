"""A model as a pair of functions, what models read from a batch, and how they are told to train.

`call_mode` finds the arguments of `__call__` by which a flax module distinguishes training.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from trainer.config.wording import known_names


class LanguageModel(NamedTuple):
    """How a language model continues a text, one token or several at a time."""

    vocab_size: int  # its tokens are 0, 1, ..., vocab_size - 1
    max_length: int  # the most positions of a sequence
    # of (params, batch, length): an empty cache of keys and values, a pytree with room for
    # `length` tokens of `batch` sequences
    empty_cache: Callable[..., Any]
    # of (params, model_state, tokens, cache): takes the next tokens, int32 [batch, positions],
    # and the cache of those before them; returns the logits after each of them, float32 [batch,
    # positions, vocab_size], and the cache with them
    decode: Callable[..., tuple[Any, Any]]


class WidthScaling(NamedTuple):
    """How a model is scaled with its width by muP (Yang et al., arXiv:2203.03466)."""

    hidden: re.Pattern[str]  # paths of kernels whose inputs and outputs both grow
    ratio: float  # its width over that for which initial values and learning rates were chosen


class Heads(NamedTuple):
    """A number of attention heads, of which each device must have whole ones."""

    argument: str  # of the model, that is the number
    count: int
    match: str  # a pattern of the paths of the kernels and biases that consist of these heads


class Model(NamedTuple):
    """The two functions of a `trainer.protocols.Model`.

    Args:
        init: the protocol's `init`.
        apply: the protocol's `apply`.
        mode: `mode(train)` returns the mode arguments of the model's module, such as `train` and
            `deterministic`, by name, for the plan; None if the module has none.
        language: how to continue a text, for a language model; None for any other model.
        width_scaling: how it is scaled with its width, for the plan; None if it is not.
        module: the flax linen module that it calls; None for any other model.
        bind: `bind(params, model_state)` returns the flax nnx module that it calls, with these
            values, in evaluation mode; None for any other model.
        capture: `capture(params, model_state, batch)` returns the outputs, in evaluation mode, and
            what each module returned, such as "blocks/mlp" -> its results, one for each call; those
            of stacked layers have a leading axis. None for a model that is no flax linen module.
        sharding: (pattern of paths, mesh axes) for the parameters that the mesh axis "tensor"
            splits, in the grammar of the experiment's `sharding`, whose rules come before these.
        heads: the numbers of heads that "tensor" must divide where `sharding` splits by it.
        observations: name of an observation -> what merges those of microbatches, or a text that
            says why the model cannot make it; see `trainer.protocols.Model`.
    """

    init: Callable[..., Any]
    apply: Callable[..., Any]
    mode: Callable[[bool], Mapping[str, Any]] | None = None
    language: LanguageModel | None = None
    width_scaling: WidthScaling | None = None
    module: Any = None
    bind: Callable[..., Any] | None = None
    capture: Callable[..., tuple[Any, dict[str, tuple[Any, ...]]]] | None = None
    sharding: Sequence[tuple[str, str]] = ()
    heads: Sequence[Heads] = ()
    observations: Mapping[str, Callable[..., Any] | str] = {}


TRANSFORMER_SHARDING = (
    ("block.*/attn/(q|kv|qkv)/kernel", "- tensor"),
    ("block.*/mlp/(up|gate)/kernel", "- tensor"),
    ("block.*/(attn/out|mlp/down)/kernel", "tensor -"),
    ("block.*/(attn/(q|kv|qkv)|mlp/(up|gate))/bias", "tensor"),
    ("head/kernel", "- tensor"),
    ("head/bias", "tensor"),
)
"""The default `Model.sharding` of a stack of transformer blocks with a head.

The products with kernels that are split by columns, and then with those that are split by rows,
need one sum over the devices for attention and one for the perceptron (Shoeybi et al., Megatron-LM,
arXiv:1909.08053). What is added to columns is split as they are: if "fsdp" alone split biases, the
compiler would exchange the parts of each of them with a collective of its own.
"""


def pick_inputs(batch: Mapping[str, Any], inputs: str | Sequence[str]) -> tuple[Any, ...]:
    """Returns the arrays of a batch that a model reads, or raises ValueError without such a key."""
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    if missing := [name for name in names if name not in batch]:
        raise ValueError(
            f"The model reads {', '.join(map(repr, missing))} from the batch, but the data set "
            f"has {', '.join(map(repr, sorted(batch)))}. Set the model's argument `inputs`."
        )
    return tuple(batch[name] for name in names)


def check_real(batch: Mapping[str, Any], inputs: str | Sequence[str]) -> None:
    """Raises ValueError if an input is complex: a cast to real parameters drops imaginary parts."""
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    for name, x in zip(names, pick_inputs(batch, inputs), strict=True):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ValueError(
                f"The model reads {name!r} from the batch, {x.dtype}{list(x.shape)}, and computes "
                "with real numbers. Store the real and the imaginary parts as channels of one "
                "array, or as two arrays."
            )


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
