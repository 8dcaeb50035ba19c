"""A model as a pair of functions, and what models read from a batch."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp


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
        observations: name of an observation -> "", or why the model cannot make it; see the
            protocol's `apply`.
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
    observations: Mapping[str, str] = {}


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
