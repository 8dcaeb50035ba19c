"""How a transformer continues a text: with the keys and values of the tokens so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainer.models.decoder import Gpt
from trainer.models.model import LanguageModel


def language_model(module: Gpt, kv_heads: int) -> LanguageModel:
    """Returns the LanguageModel of a `trainer.models.decoder.Gpt`.

    The cache is a dict: `position`, the number of tokens so far, int32; and `layers`, the arrays
    `key` and `value` of each layer, [batch, length, kv_heads, head_dim], with a leading axis for
    the layers of a scan. What is decoded is one document: where its tokens contain `end_of_text`,
    the tokens before it are still attended to.

    Args:
        module: the module.
        kv_heads: its number of heads of keys and values.
    """

    def empty_cache(params: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
        if not 1 <= length <= module.max_length:
            raise ValueError(
                f"models.gpt was asked to remember {length} tokens, but a sequence has 1 to "
                f"{module.max_length} (max_length). Take a shorter prompt or continuation."
            )
        dtype = params["embed"]["embedding"].dtype
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
