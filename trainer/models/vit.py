"""A vision transformer with stacked layers."""

import functools
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from optim.dtypes import widen
from trainer.constraints import constrain
from trainer.logits import wide
from trainer.messages import check_positive
from trainer.models import layers
from trainer.models.attention import Qkv
from trainer.models.layers import Block, LayerNorm, Linear, Mlp, matrix, small
from trainer.models.linen_model import from_our_linen
from trainer.models.model import TRANSFORMER_SHARDING, Heads, Model


class Attention(nn.Module):
    """Multi-head self-attention over the tokens [batch, tokens, width]."""

    # If the collection `intermediates` is mutable, it gets the weights, [batch, heads, queries,
    # keys], as `weights`.

    num_heads: int
    dropout: float
    qk_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [batch, tokens, width] to an array of the same shape."""
        batch, tokens, width = x.shape
        # [batch, tokens, heads, head_dim]
        qkv = Qkv(3, self.num_heads, name="qkv")(x)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        if self.qk_norm:
            query, key = LayerNorm(name="q_norm")(query), LayerNorm(name="k_norm")(key)
        # [batch, heads, queries, keys]
        scores = widen(jnp.einsum("bqhd,bkhd->bhqk", query, key))
        weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5).astype(x.dtype)
        self.sow("intermediates", "weights", weights)
        weights = nn.Dropout(self.dropout, deterministic=not train)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, width)
        mixed = constrain(mixed, "batch", None, "heads")
        return Linear(width, use_bias=False, roles=("heads", None), name="out")(mixed)


class Embed(nn.Module):
    """Embeds the patches of images as tokens, by one matrix, and adds their positions."""

    width: int
    patch_size: int
    cls_token: bool
    positions: str

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images [batch, height, width, channels] to [batch, tokens, width]."""
        size = self.patch_size
        batch, height, width, channels = images.shape
        if height % size or width % size:
            raise ValueError(
                f"models.vit cuts images into patches of {size} by {size} pixels, but the images "
                f"are {height} by {width}. Choose a patch_size that divides both."
            )
        patches = images.reshape(batch, height // size, size, width // size, size, channels)
        # To [batch, rows, columns, size, size, channels]
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)
        kernel = self.param("kernel", matrix, (patches.shape[-1], self.width))
        x = layers.rows_times(patches, constrain(kernel, None, None))
        if self.positions == "sincos2d":
            x = x + sincos2d(height // size, width // size, self.width).astype(x.dtype)
        if self.cls_token:
            token = self.param("token", small, (self.width,)).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(token, (batch, 1, self.width)), x], axis=1)
        if self.positions == "learned":
            x = x + self.param("position", small, x.shape[1:]).astype(x.dtype)
        return constrain(x, "batch", None, None)


def sincos2d(rows: int, columns: int, width: int) -> jax.Array:
    """Returns fixed embeddings of the positions of patches, float32 [rows * columns, width]."""
    # The four quarters of an embedding are the sines and cosines of the column, and the sines and
    # cosines of the row, multiplied by `width` / 4 frequencies from 1 to 1e-4. The width of a token
    # is a multiple of 4.
    frequencies = 1e-4 ** (np.arange(width // 4) / max(width // 4 - 1, 1))
    row, column = np.divmod(np.arange(rows * columns), columns)
    angles = [place[:, None] * frequencies for place in (column, row)]
    found = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)], axis=1)
    return jnp.asarray(found, jnp.float32)  # computed in float64, a constant of the program


class Vit(nn.Module):
    """Embeds patches, applies the blocks, pools the tokens and classifies."""

    depth: int
    block: functools.partial
    embed: functools.partial
    num_classes: int
    pool: str
    dropout: float
    scan_layers: bool
    remat: str | Sequence[str] | None

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Maps images [batch, height, width, channels] to logits [batch, num_classes]."""
        x = nn.Dropout(self.dropout, deterministic=not train)(self.embed(name="embed")(images))

        def call(layer: nn.Module, x: jax.Array) -> jax.Array:
            return layer(x, train, train)  # the second is for attention

        x = layers.run_stack(self.block, call, x, self.depth, self.scan_layers, self.remat)
        x = LayerNorm(name="norm")(x)
        x = x[:, 0] if self.pool == "cls" else x.mean(axis=1, dtype=wide(x.dtype)).astype(x.dtype)
        logits = Linear(self.num_classes, roles=(None, "vocabulary"), name="head")(x)
        return constrain(logits, "batch", None)  # losses and metrics read whole rows


def vit(
    width: int = 64,
    depth: int = 4,
    num_heads: int = 4,
    mlp_dim: int | None = None,
    patch_size: int = 2,
    num_classes: int = 10,
    pool: str = "gap",
    dropout: float = 0.0,
    scan_layers: bool = True,
    inputs: str = "image",
    qk_norm: bool = False,
    positions: str = "learned",
    remat: str | Mapping[str, str] | None = None,
) -> Model:
    """Returns a vision transformer, pre-norm and without biases except in the head.

    The parameters are `embed/kernel`, `embed/position` (and `embed/token`), `norm/scale`,
    `head/kernel`, `head/bias`, and, each with a leading axis of length `depth`,
    `blocks/attn/qkv/kernel` [3, width, width], `blocks/attn/out/kernel` [width, width],
    `blocks/mlp/up/kernel` [width, mlp_dim], `blocks/mlp/down/kernel` [mlp_dim, width],
    `blocks/attn_norm/scale` and `blocks/mlp_norm/scale` [width]; with `qk_norm` also
    `blocks/attn/q_norm/scale` and `blocks/attn/k_norm/scale` [width / num_heads]. The model
    computes in the dtype of its parameters, but norms, softmax and pooling at least in float32.
    The number of positions follows from the size of the images in the batch. `module.apply` with
    `mutable=["intermediates"]` also returns the attention weights of each layer, as
    `blocks/attn/weights`.

    Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv:2010.11929).

    Args:
        width: size of a token.
        depth: number of layers.
        num_heads: number of attention heads; must divide `width`.
        mlp_dim: width of the hidden layer of a block, 4 * `width` if None.
        patch_size: side of a square patch in pixels; must divide height and width of the images.
        num_classes: number of classes; the outputs are logits [batch, num_classes].
        pool: "gap" averages the tokens; "cls" adds a token and classifies by it.
        dropout: dropout rate of embeddings, attention weights and block outputs, in [0, 1).
        scan_layers: True stacks the layers and scans over them, so that compile time does not grow
            with depth; False keeps them apart, as `block_0/...`, `block_1/...` Both compute the
            same function.
        inputs: key of the images in the batch, [batch, height, width, channels].
        qk_norm: True normalizes every query and every key of a head to mean 0 and variance 1 and
            multiplies them by a learned scale, so that attention logits cannot grow without bound
            at high learning rates (Dehghani et al., arXiv:2302.05442). The heads share the scale.
        positions: "learned" adds the parameter `embed/position` to the tokens; "sincos2d" adds to
            the patches fixed sines and cosines of their rows and columns (Beyer et al.,
            arXiv:2205.01580).
        remat: what the backward pass of the layers does not compute again: "products" the products
            with kernels; "none" recomputes nothing; "full" recomputes everything but the layers'
            inputs. None is "products" for stacked layers, and else "none". It may be a mapping of
            patterns, which match the whole name of a layer, block_0, block_1, ..., also of stacked
            ones, to these names, such as {"block_[0-3]": "full", ".*": "none"}; the first pattern
            that matches a layer holds. Each run of stacked layers with one policy is compiled.

    Raises:
        ValueError: a size is not positive, `num_heads` does not divide `width`, `pool`,
            `positions` or `remat` is unknown, `remat` is a mapping that leaves a pattern or a layer
            over, `width` is not a multiple of 4 with
            positions="sincos2d", or `dropout` is outside [0, 1).

    Example:
        >>> import jax
        >>> from trainer import models
        >>> model = models.vit(width=8, depth=2, num_heads=2)
        >>> batch = {"image": jax.numpy.ones((4, 8, 8, 1))}
        >>> params, model_state = model.init(jax.random.key(0), batch)
        >>> params["blocks"]["attn"]["qkv"]["kernel"].shape
        (2, 3, 8, 8)
        >>> outputs, _ = model.apply(params, model_state, batch, key=None, train=False)
        >>> outputs.shape
        (4, 10)
    """
    mlp_dim = 4 * width if mlp_dim is None else mlp_dim
    sizes = {"width": width, "depth": depth, "num_heads": num_heads, "mlp_dim": mlp_dim}
    check_positive("models.vit", **sizes, patch_size=patch_size, num_classes=num_classes)
    if width % num_heads:
        raise ValueError(
            f"models.vit divides its width among its heads, but num_heads={num_heads} does not "
            f"divide width={width}. Choose a num_heads such as "
            f"{layers.near_divisors(width, num_heads)}."
        )
    if pool not in ("gap", "cls"):
        raise ValueError(f"models.vit needs pool='gap' or pool='cls', but got pool={pool!r}.")
    if positions not in ("learned", "sincos2d"):
        raise ValueError(
            "models.vit needs positions='learned' or positions='sincos2d', but got "
            f"positions={positions!r}."
        )
    if positions == "sincos2d" and width % 4:
        raise ValueError(
            f"models.vit with positions='sincos2d' needs a width that is a multiple of 4, but got "
            f"width={width}."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"models.vit needs 0 <= dropout < 1, but got dropout={dropout}.")
    attention = functools.partial(Attention, num_heads, dropout, qk_norm)
    block = functools.partial(Block, attention, functools.partial(Mlp, mlp_dim), LayerNorm, dropout)
    embed = functools.partial(Embed, width, patch_size, pool == "cls", positions)
    policies = layers.policies_of("models.vit", remat, depth)
    module = Vit(depth, block, embed, num_classes, pool, dropout, scan_layers, policies)
    heads = (Heads("num_heads", num_heads, "block.*/attn/(qkv|out)/.*"),)
    return from_our_linen(module, inputs)._replace(sharding=TRANSFORMER_SHARDING, heads=heads)
