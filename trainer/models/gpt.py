"""A decoder-only transformer for text, with stacked layers, and how it continues a text."""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optim.dtypes import widen
from trainer.config.wording import known_names
from trainer.constraints import constrain
from trainer.logits import SOFT_CAPS, ChunkedLogits, wide
from trainer.messages import check_positive
from trainer.models import layers
from trainer.models.attention import IMPLEMENTATIONS, ROTATIONS, CausalAttention, rotary_angles
from trainer.models.linen_model import from_our_linen
from trainer.models.model import TRANSFORMER_SHARDING, Heads, LanguageModel, Model, WidthScaling

EMBED_DTYPES = ("bfloat16", "float16", "float32")
"""The values of the argument `embed_dtype` of `gpt`, besides None."""


class Embed(nn.Module):
    """Looks up tokens in `embedding` [vocab_size, width]."""

    vocab_size: int
    width: int
    initial: layers.Initializer
    norm: functools.partial | None  # of the embedded tokens; None does not normalize them

    @nn.compact
    def __call__(self, tokens: jax.Array, dtype: DTypeLike | None) -> tuple[jax.Array, jax.Array]:
        """Maps int32 [batch, tokens] to [batch, tokens, width]; returns the embedding, too."""
        # The dtype is that of the result, for an embedding that is stored in another one than the
        # other parameters; None stands for that of the embedding.
        embedding = self.param("embedding", self.initial, (self.vocab_size, self.width))
        embedding = constrain(embedding, "vocabulary", None)
        # A token that is not in the vocabulary becomes NaN, which ends the run. The gradients of a
        # token are added in float32: in bfloat16, the sum of any number of ones ends at 256.
        x = jnp.take(widen(embedding), tokens, axis=0).astype(dtype or embedding.dtype)
        x = constrain(x, "batch", None, None)
        return x if self.norm is None else self.norm(name="norm")(x), embedding


class Head(nn.Module):
    """Holds `kernel` [width, vocab_size] of the last features, and `bias` [vocab_size] or none."""

    width: int
    vocab_size: int
    initial: layers.Initializer
    use_bias: bool

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        """Returns kernel and bias."""
        kernel = self.param("kernel", self.initial, (self.width, self.vocab_size))
        kernel = constrain(kernel, None, "vocabulary")
        bias = self.param("bias", layers.zeros, (self.vocab_size,)) if self.use_bias else None
        return kernel, bias


class Gpt(nn.Module):
    """Embeds tokens, applies the blocks, and multiplies their norm by the head."""

    # The parts are made with a name: `block(name=...)`. `angles(positions, dtype=...)` returns what
    # `rotary_angles` does.

    vocab_size: int
    depth: int
    head_dim: int
    block: functools.partial
    embed: functools.partial
    norm: functools.partial
    head: functools.partial | None  # None where the embedding is the head
    angles: functools.partial
    max_length: int
    outputs: functools.partial
    z_loss: float
    remat: str | Sequence[str] | None
    scan_layers: bool
    dropout: float

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        documents: jax.Array | None = None,
        start: jax.Array | None = None,
        train: bool = False,
    ) -> ChunkedLogits:
        """Computes the logits of the token after each token, [batch, positions, vocab_size]."""
        # `tokens` and `documents` are int32 [batch, positions]; a token attends to those of its
        # document. `start` is None, or, in decoding, the number of tokens before these. `train` is
        # also for z-loss.
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"models.gpt got sequences of {tokens.shape[1]} tokens, but its max_length is "
                f"{self.max_length}. Take shorter sequences, or set max_length to "
                f"{tokens.shape[1]}."
            )
        kernel, bias = (None, None) if self.head is None else self.head(name="head")()
        # The embedding may be stored in another dtype than the other parameters.
        x, embedding = self.embed(name="embed")(tokens, None if kernel is None else kernel.dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        positions = jnp.arange(tokens.shape[1]) + (0 if start is None else start)
        angles = self.angles(positions, dtype=wide(x.dtype))
        mask = None
        if documents is not None:
            mask = documents[:, None, :, None] == documents[:, None, None, :]

        def call(layer: nn.Module, x: jax.Array) -> jax.Array:
            return layer(x, train, angles, mask, start)

        x = layers.run_stack(self.block, call, x, self.depth, self.scan_layers, self.remat)
        x = self.norm(name="norm")(x)
        kernel = embedding.T if kernel is None else kernel
        z_loss = self.z_loss if train else 0.0
        return self.outputs(features=x, kernel=kernel, bias=bias, z_loss=z_loss)


def gpt(
    vocab_size: int = 257,
    width: int = 128,
    depth: int = 4,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    mlp_dim: int | None = None,
    activation: str = "relu2",
    qk_norm: bool | str = True,
    rope_base: float = 10000.0,
    max_length: int = 1024,
    tied: bool = False,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    zero_init: bool = False,
    remat: str | Mapping[str, str] = "products",
    scan_layers: bool = True,
    dropout: float = 0.0,
    attention: str = "auto",
    loss_chunk: int | None = None,
    base_width: int | None = None,
    base_head_dim: int | None = None,
    inputs: str = "tokens",
    embed_norm: bool = False,
    bias: bool = False,
    rope: str = "full",
    attention_scale: float | None = None,
    soft_cap_form: str = "tanh",
    norm_epsilon: float | None = 1e-6,
    init_scale: float = 1.0,
    embed_init: float = 0.02,
    embed_dtype: str | None = None,
    base_depth: int | None = None,
) -> Model:
    """Returns a decoder-only transformer, pre-norm and by default without biases.

    Each token attends to itself and to the tokens before it; if the batch has `documents`, to those
    with its number there. Positions enter as rotations of queries and keys (RoPE, Su et al.,
    arXiv:2104.09864), norms are RMSNorm (Zhang and Sennrich, arXiv:1910.07467). The outputs are a
    `trainer.logits.ChunkedLogits`. The model computes in the dtype of its parameters, except norms,
    rotations, softmax and logits, which are float32. `module.apply` with
    `mutable=["intermediates"]` also returns the attention weights of each layer, as
    `blocks/attn/weights`.

    The parameters are `embed/embedding` [vocab_size, width], `norm/scale`, `head/kernel` [width,
    vocab_size] unless `tied`, and, each with a leading axis of length `depth`,
    `blocks/attn/qkv/kernel` [3, width, width], `blocks/attn/out/kernel`, `blocks/mlp/up/kernel`
    [width, mlp_dim], `blocks/mlp/gate/kernel` (only with "swiglu"), `blocks/mlp/down/kernel`,
    `blocks/attn_norm/scale`, `blocks/mlp_norm/scale`, and with `qk_norm`
    `blocks/attn/q_norm/scale` and `blocks/attn/k_norm/scale` [width / num_heads]; with `embed_norm`
    also `embed/norm/scale`. With fewer heads of keys, `blocks/attn/q/kernel` and
    `blocks/attn/kv/kernel` [2, width, num_kv_heads * head_dim] replace `qkv`. With `bias` each
    kernel has a bias beside it, such as `blocks/attn/qkv/bias` [3, width] and `head/bias`
    [vocab_size].

    Args:
        vocab_size: number of tokens; 257 are the 256 bytes and `end_of_text`.
        width: size of a token's features.
        depth: number of layers.
        num_heads: number of attention heads; must divide `width`.
        num_kv_heads: number of heads of keys and values, `num_heads` if None; must divide
            `num_heads` (grouped queries, Ainslie et al., arXiv:2305.13245).
        mlp_dim: hidden units of a block's perceptron, 4 * `width` if None.
        activation: "relu2" (squared ReLU, So et al., arXiv:2109.08668), "gelu" or "swiglu" (a third
            matrix; Shazeer, arXiv:2002.05202; for as many parameters, take mlp_dim = 8/3 * width).
        qk_norm: True divides every query and key of a head by its root mean square and multiplies
            it by a learned scale, which the heads share (Dehghani et al., arXiv:2302.05442);
            "unscaled" divides only; False does neither.
        rope_base: the base of the rotations' wavelengths; they are 2 pi to 2 pi * rope_base tokens.
        max_length: the most tokens of a sequence.
        tied: True uses the transposed embedding as the head.
        soft_cap: bounds the logits by c * tanh(logits / c) (Gemma Team, arXiv:2408.00118), or as
            `soft_cap_form` says.
        z_loss: weight of the squared logarithm of the softmax's denominator in the loss of training
            (Chowdhery et al., arXiv:2204.02311).
        zero_init: True starts `out/kernel`, `down/kernel` and `head/kernel` at 0, as
            modded-nanogpt does; False divides the deviation of the first two by sqrt(2 * depth), as
            GPT-2 does, or by that of `base_depth`.
        remat: what the backward pass of the layers does not compute again: "products" the products
            with kernels and, with attention="plain", the results of attention; "none" recomputes
            nothing; "full" recomputes everything but the layers' inputs. It may be a mapping of
            patterns, which match the whole name of a layer, block_0, block_1, ..., also of stacked
            ones, to these names, such as {"block_[0-3]": "full", ".*": "none"}; the first pattern
            that matches a layer holds. Each run of stacked layers with one policy is compiled.
        scan_layers: True stacks the layers and scans over them, so that compile time does not grow
            with depth; False keeps them apart, as `block_0/...`, `block_1/...`
        dropout: dropout rate of the embeddings and of what attention and perceptron add, in [0, 1).
        attention: "plain", "xla" and "cudnn" as in `trainer.models.attention.attend`; "auto" is
            "cudnn" (flash attention) on an NVIDIA GPU in bfloat16 or float16, "plain" on a CPU or a
            TPU, and "xla" elsewhere.
        loss_chunk: for how many tokens logits are computed at a time; None for as many as have
            2**25 logits (128 MiB) on each device. A GPU with much memory is quicker with more.
        base_width: the width for which initial values and learning rates were chosen; None scales
            nothing. With m = width / base_width, attention scores are divided by head_dim instead
            of its root, logits by m, and head and embedding start alike at all widths (muP, Yang et
            al., arXiv:2203.03466). Adam's learning rate of the kernels in `blocks` must be divided
            by m, too, in a group of their own with width_scaling=m; Muon's and that of all others
            stays, but Muon's with scale="match_rms_adamw" is divided by the root of m. The plan
            warns of a group that does otherwise.
        base_head_dim: the head_dim at `base_width`, base_width / num_heads if None. Set it to
            head_dim where wider models have more heads. Without base_width it is not used.
        inputs: key of the tokens in the batch, int32 [batch, positions].
        embed_norm: True divides each embedded token by its root mean square, and multiplies it by a
            learned scale, so that the learning rate of the embedding may be large.
        bias: True adds a learned bias, which starts at 0, to the results of all kernels, that of
            the head included; a `tied` head has none.
        rope: "full" rotates all pairs of a head's elements; "half" rotates half of them, by
            wavelengths that are spaced evenly in the logarithm from 2 pi to 2 pi * rope_base, both
            included, and in the other direction, as modded-nanogpt does with rope_base=1024.
        attention_scale: the factor of the products of queries and keys; None for 1 /
            sqrt(head_dim), or for that of `base_width`.
        soft_cap_form: "tanh", or "algebraic" for c * logits / sqrt(logits^2 + c^2).
        norm_epsilon: added to the mean squares of all norms; None for the machine epsilon of the
            dtype in which norms are computed, 1.19e-7 for float32, as in PyTorch.
        init_scale: kernels start with a deviation of init_scale / sqrt(inputs); with `zero_init`
            those that it does not start at 0.
        embed_init: the deviation with which the embedding starts.
        embed_dtype: the dtype in which the embedding is stored and in which its gradient arrives,
            such as "bfloat16"; the optimizer computes in float32 and rounds the result to it. None
            for that of the other parameters, in which the model computes.
        base_depth: the depth for which learning rates were chosen; None scales nothing. What
            attention and perceptrons add is multiplied by base_depth / depth, and their kernels
            start alike at all depths, so that Adam's rate stays (CompleteP, Dey et al.,
            arXiv:2505.01618, with alpha = 1; its eps in `blocks` is there divided by depth /
            base_depth and width / base_width). Set `embed_norm`: it needs activations of size 1.

    Raises:
        ValueError: a size is not positive; `num_heads` does not divide `width`, or `num_kv_heads`
            `num_heads`; width / num_heads is odd, or with rope="half" not a multiple of 4; a name
            is unknown; `remat` is a mapping that leaves a pattern or a layer over; `dropout`,
            `soft_cap`, `z_loss`, `rope_base`, `attention_scale`, `norm_epsilon`, `init_scale` or
            `embed_init` is out of range; `soft_cap_form` is given without `soft_cap`,
            `attention_scale` with `base_width`, or `embed_dtype` with `tied`.
            The functions of the Model raise it if the batch has no tokens or more than `max_length`
            in a sequence.

    Example:
        >>> import jax
        >>> from trainer import models
        >>> model = models.gpt(width=8, depth=2, num_heads=2)
        >>> batch = {"tokens": jax.numpy.ones((4, 16), "int32")}
        >>> params, model_state = model.init(jax.random.key(0), batch)
        >>> params["blocks"]["attn"]["qkv"]["kernel"].shape
        (2, 3, 8, 8)
        >>> outputs, _ = model.apply(params, model_state, batch, key=None, train=False)
        >>> outputs.shape
        (4, 16, 257)
    """
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    mlp_dim = 4 * width if mlp_dim is None else mlp_dim
    base = width if base_width is None else base_width
    sizes = {"vocab_size": vocab_size, "width": width, "depth": depth, "num_heads": num_heads}
    sizes |= {"num_kv_heads": kv_heads, "mlp_dim": mlp_dim, "max_length": max_length}
    chosen = {"loss_chunk": loss_chunk, "base_head_dim": base_head_dim, "base_width": base_width}
    check_positive("models.gpt", **sizes, **chosen, base_depth=base_depth)
    _check_heads(width, num_heads, kv_heads, rope)
    head_dim = width // num_heads
    names = {"activation": (activation, layers.ACTIVATIONS), "rope": (rope, ROTATIONS)}
    names |= {"attention": (attention, IMPLEMENTATIONS)}
    names |= {"soft_cap_form": (soft_cap_form, SOFT_CAPS)}
    if isinstance(qk_norm, str):
        names["qk_norm"] = (qk_norm, ("unscaled",))
    if embed_dtype is not None:
        names["embed_dtype"] = (embed_dtype, EMBED_DTYPES)
    for argument, (name, known) in names.items():
        if name not in known:
            hint = known_names(str(name), known)
            raise ValueError(f"models.gpt got {argument}={name!r}, which does not exist. {hint}")
    policies = layers.policies_of("models.gpt", remat, depth)
    is_bound = soft_cap is None or soft_cap > 0
    is_factor = attention_scale is None or attention_scale > 0
    is_added = norm_epsilon is None or norm_epsilon >= 0
    checks = (
        (0 <= dropout < 1, "0 <= dropout < 1", f"dropout={dropout}"),
        (is_bound, "a positive soft_cap, or None for no bound", soft_cap),
        (z_loss >= 0, "z_loss >= 0", f"z_loss={z_loss}"),
        (rope_base > 1, "rope_base > 1", f"rope_base={rope_base}"),
        (is_factor, "a positive attention_scale, or None for 1 / sqrt(head_dim)", attention_scale),
        (is_added, "norm_epsilon >= 0, or None for the machine epsilon", norm_epsilon),
        (0 <= init_scale < math.inf, "init_scale >= 0", f"init_scale={init_scale}"),
        (0 <= embed_init < math.inf, "embed_init >= 0", f"embed_init={embed_init}"),
    )
    for holds, needed, got in checks:
        if not holds:
            raise ValueError(f"models.gpt needs {needed}, but got {got}.")
    if soft_cap is None and soft_cap_form != "tanh":
        raise ValueError(
            f"models.gpt has soft_cap_form={soft_cap_form!r}, but no soft_cap whose form it could "
            "be. Give the bound of the logits, such as soft_cap=15.0, or leave soft_cap_form out."
        )
    if attention_scale is not None and base_width is not None:
        raise ValueError(
            f"models.gpt has attention_scale={attention_scale} and base_width={base_width}, which "
            "both decide the factor of the products of queries and keys. Leave one of them out."
        )
    if embed_dtype is not None and tied:
        raise ValueError(
            f"models.gpt has embed_dtype={embed_dtype!r} and tied=True, with which the embedding "
            "is the head, whose dtype is that of the other parameters. Leave one of them out."
        )
    first = layers.scaled_matrix(init_scale)
    known_depth = depth if base_depth is None else base_depth
    last = layers.scaled_matrix(0.0 if zero_init else init_scale * (2 * known_depth) ** -0.5)
    scale = head_dim**-0.5 if attention_scale is None else attention_scale
    if base_width is not None:
        known_dim = base_width / num_heads if base_head_dim is None else base_head_dim
        scale = math.sqrt(known_dim) / head_dim
    norm = functools.partial(layers.RmsNorm, norm_epsilon)
    shared: Any = {"last": last, "first": first, "use_bias": bias}
    heads = (num_heads, kv_heads, qk_norm, scale, attention)
    mixer = functools.partial(CausalAttention, *heads, **shared, epsilon=norm_epsilon)
    mlp = functools.partial(layers.Mlp, mlp_dim, activation, **shared)
    drawn = layers.normal(embed_init, jnp.dtype(embed_dtype or jnp.float32))
    head = layers.normal(0.0 if zero_init else init_scale * base**-0.5)
    module = Gpt(
        vocab_size=vocab_size,
        depth=depth,
        head_dim=head_dim,
        block=functools.partial(layers.Block, mixer, mlp, norm, dropout, known_depth / depth),
        embed=functools.partial(Embed, vocab_size, width, drawn, norm if embed_norm else None),
        norm=norm,
        head=None if tied else functools.partial(Head, width, vocab_size, head, bias),
        angles=functools.partial(rotary_angles, head_dim=head_dim, base=rope_base, rope=rope),
        max_length=max_length,
        outputs=functools.partial(
            ChunkedLogits,
            scale=base / width,
            soft_cap=soft_cap,
            soft_cap_form=soft_cap_form,
            chunk=loss_chunk,
        ),
        z_loss=z_loss,
        remat=policies,
        scan_layers=scan_layers,
        dropout=dropout,
    )
    why = "its queries and keys are normalized (qk_norm), so that no kernel makes logits large"
    scaled = base_width is not None
    scaling = WidthScaling(re.compile("block.*/kernel"), width / base_width) if scaled else None
    made = _with_documents(module, inputs)
    logits: dict[str, Any] = {CausalAttention.observation: why if qk_norm else jnp.max}
    return made._replace(
        language=language_model(module, kv_heads),
        width_scaling=scaling,
        sharding=(*TRANSFORMER_SHARDING, ("embed/embedding", "tensor -")),
        observations={**made.observations, **logits},
        heads=(
            Heads("num_heads", num_heads, "block.*/attn/(q|qkv|out)/.*"),
            Heads("num_kv_heads", kv_heads, "block.*/attn/kv/.*"),
        ),
    )


def _with_documents(module: Gpt, inputs: str) -> Model:
    """Returns the Model of a module that reads `documents` from the batches that have them."""
    alone, packed = (from_our_linen(module, keys) for keys in (inputs, (inputs, "documents")))

    def model_for(batch: Mapping[str, Any]) -> Any:
        _check_tokens(batch, inputs)
        return packed if "documents" in batch else alone

    def init(key: jax.Array, batch: Mapping[str, Any]) -> Any:
        return model_for(batch).init(key, batch)

    def apply(params: Any, model_state: Any, batch: Mapping[str, Any], **more: Any) -> Any:
        return model_for(batch).apply(params, model_state, batch, **more)

    def capture(params: Any, model_state: Any, batch: Mapping[str, Any]) -> Any:
        return model_for(batch).capture(params, model_state, batch)

    return alone._replace(init=init, apply=apply, capture=capture)


def _check_tokens(batch: Mapping[str, Any], inputs: str) -> None:
    """Raises ValueError if a field of a batch is not tokens, with the fields that may be."""
    fields = {name: (x.dtype, x.shape) for name, x in batch.items()}
    tokens = [
        name
        for name, (dtype, shape) in fields.items()
        if jnp.issubdtype(dtype, jnp.integer) and len(shape) == 2
    ]
    if inputs in tokens:
        return
    found = ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in fields.items())
    advice = (
        f"Set the model's argument `inputs` to {' or '.join(tokens)}."
        if tokens
        else "None of these is tokens: take a data set of text, such as data.text or data.tokens."
    )
    raise ValueError(
        f"models.gpt reads tokens as integers [batch, positions] from inputs={inputs!r}, but the "
        f"batch has {found}. {advice}"
    )


def _check_heads(width: int, num_heads: int, kv_heads: int, rope: str) -> None:
    near = layers.near_divisors(width, num_heads, even=True)
    advice = f"Choose a num_heads such as {near}" if near else "Choose an even width"
    if width % num_heads:
        raise ValueError(
            f"models.gpt divides its width among its heads, but num_heads={num_heads} does not "
            f"divide width={width}. {advice}."
        )
    if num_heads % kv_heads:
        raise ValueError(
            "models.gpt divides its heads into groups that share keys and values, but "
            f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}. Choose a num_kv_heads "
            f"such as {layers.near_divisors(num_heads, kv_heads)}."
        )
    if width // num_heads % 2:
        raise ValueError(
            "models.gpt rotates pairs of the elements of a head, but width / num_heads = "
            f"{width} / {num_heads} = {width // num_heads} is odd. {advice}."
        )
    if rope == "half" and width // num_heads % 4:
        raise ValueError(
            "models.gpt with rope='half' rotates half of the pairs of a head, but width / "
            f"num_heads = {width} / {num_heads} = {width // num_heads} is not a multiple of 4. "
            f"Choose a width such as {4 * num_heads * max(1, round(width / num_heads / 4))}, or "
            "rope='full'."
        )


def language_model(module: Gpt, kv_heads: int) -> LanguageModel:
    """Returns the LanguageModel of a `Gpt`."""
    # The cache has `position`, the number of tokens so far, and `layers`, the arrays `key` and
    # `value` of each layer, [batch, length, kv_heads, head_dim], stacked for a scan. All decoded
    # tokens are one document: tokens before an `end_of_text` are still attended to.

    def empty_cache(params: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
        if not 1 <= length <= module.max_length:
            raise ValueError(
                f"models.gpt was asked to remember {length} tokens, but a sequence has 1 to "
                f"{module.max_length} (max_length). Take a shorter prompt or continuation."
            )
        dtype = params["norm"]["scale"].dtype
        stack = (module.depth,) if module.scan_layers else ()
        empty = jnp.zeros((*stack, batch, length, kv_heads, module.head_dim), dtype)
        layer = {"attn": {"key": empty, "value": empty}}
        names = ["blocks"] if module.scan_layers else [f"block_{i}" for i in range(module.depth)]
        return {"position": jnp.zeros((), jnp.int32), "layers": dict.fromkeys(names, layer)}

    def decode(
        params: Any, model_state: Any, tokens: jax.Array, cache: Mapping[str, Any]
    ) -> tuple[jax.Array, dict[str, Any]]:
        length = jax.tree.leaves(cache["layers"])[0].shape[-3]
        if tokens.shape[1] > length:
            raise ValueError(
                f"models.gpt got {tokens.shape[1]} tokens at once, but its cache has room for "
                f"{length}. Make it with empty_cache(params, batch, length) for all tokens."
            )
        variables = {"params": params, "cache": cache["layers"]}
        position = cache["position"]
        outputs, changed = module.apply(variables, tokens, start=position, mutable=["cache"])
        after = {"position": position + tokens.shape[1], "layers": changed["cache"]}
        return outputs.whole(), after

    return LanguageModel(module.vocab_size, module.max_length, empty_cache, decode)
