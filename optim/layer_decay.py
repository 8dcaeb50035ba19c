"""Layer-wise learning-rate decay: smaller steps for lower layers."""

import re
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from optim.factories import SlowParams, nodes_of
from optim.groups import GroupError
from optim.paths import fullmatch, nearest_paths
from optim.tracing import require_whole

Layers = Mapping[str, str | int]

_KINDS = ("embedding", "head", "stacked")

# Rules for usual names; the first match decides. A layer may be at any depth. Parameters below and
# above the layers are at the top or in a module of the whole model: stage_0/norm is in a layer.
_DIGITS = r"(\d+)/.*"
_NUMBERED = rf"(?:.*?/)?(?:h|[A-Za-z]*(?:[Bb]lock|[Ll]ayer)s?)[_/]{_DIGITS}"
_WHOLE = r"(?:(?:params|model|[Tt]ransformer|encoder|decoder|backbone|vit|beit|bert|roberta)/)*"
_BELOW = (
    *("(?:pos_|patch_|token_|position_)?embed[^/]*", "posembed_input", "wte", "wpe", "norm_pre"),
    *("cls", "cls_token", "mask_token", "dist_token", "reg_token"),
)
_ABOVE = (
    *("head", "heads", "head_dist", "lm_head", "classifier", "pooler"),
    *("pre_logits", "logits_dense"),
    *("norm", "final_norm", "fc_norm", "ln_f", "layernorm", "encoder_norm", "decoder_norm"),
    *("rel_pos_bias", "relpos_bias"),  # shared by all layers, which BEiT counts to the head
)
_USUAL: tuple[tuple[str, str | int], ...] = (
    (_NUMBERED, 0),
    ("blocks/.*", "stacked"),
    *((rf"{_WHOLE}{name}(?:/.*)?", "embedding") for name in _BELOW),
    *((rf"{_WHOLE}{name}(?:/.*)?", "head") for name in _ABOVE),
)

# States with copies of parameters, or with the length of a searched step: they would not agree with
# parameters whose steps were scaled afterwards.
_STATES_THAT_DEPEND_ON_STEPS = (
    *(SlowParams, optax.contrib.ScheduleFreeState, optax.contrib.SAMState),
    *(optax.contrib.MechanicState, optax.contrib.COCOBState),
    *(optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState),
)


def depends_on_steps(state: optax.OptState) -> bool:
    """Returns whether an optimizer's state would disagree with steps that are changed later."""
    # Such a state contains copies of parameters, or the length of a step.
    return bool(nodes_of(state, _STATES_THAT_DEPEND_ON_STEPS))


def layer_scales(
    by_path: Mapping[str, Any],
    decay: float,
    layers: Layers | None = None,
    moving: Container[str] | None = None,
) -> dict[str, Any]:
    r"""Computes each parameter's factor for layer-wise learning-rate decay.

    With L layers, a parameter of layer i (from 0) has the factor decay ** (L - i), an embedding
    decay ** (L + 1), and a parameter after the layers 1 (Clark et al. 2020, arXiv:2003.10555; BEiT,
    arXiv:2106.08254, numbers them from the embedding, 0).

    `layers` is pattern of whole path names -> "embedding", "head" (after the layers), "stacked"
    (layers stacked along the first axis) or the number of a layer, to which the number in a
    capturing group of the pattern is added: {r"trunk/(\d+)/.*": 0}. These patterns precede the
    rules for usual names: of timm and BEiT (`pos_embed`, `blocks/0/...`), of Hugging Face
    (`h/0/...`, `encoder/layer/0/...`), of T5X and flax (`layers_0/...`, `encoderblock_0/...`), and
    of this package (`embed/...`, `blocks/...`). `moving` are the names of the parameters that need
    a factor; None for all. Returns path name -> float, or an array of shape (L, 1, ...) for stacked
    layers, without factors of 1.

    Raises GroupError if a parameter has no layer; no parameter has a numbered layer; a rule matches
    no parameter; two stacks of layers are numbered from 0; or stacked layers differ in their
    number. Raises ValueError inside shard_map, if a parameter is sharded.
    """
    require_whole(None, (by_path, ()), "layer_decay")
    places = {path: _layer_of(path, x, layers or {}) for path, x in by_path.items()}
    _check_places(by_path, places, layers or {}, moving)
    depth = max(place.end for place in places.values() if place is not None)
    scales: dict[str, Any] = {}
    for path, place in places.items():
        if place is None or place.kind == "head":
            continue
        if place.kind == "stacked":
            x = by_path[path]
            powers = [decay ** (depth - i) for i in range(place.end)]
            # finfo gives the real dtype of complex parameters.
            dtype = jnp.promote_types(jnp.finfo(x.dtype).dtype, jnp.float32)
            scales[path] = jnp.asarray(powers, dtype).reshape((place.end,) + (1,) * (x.ndim - 1))
        else:
            scales[path] = decay ** (depth + 1 - place.end)  # of an embedding, the end is 0
    return scales


def wrong_layers(layers: Any) -> str | None:
    """Describes what is wrong with the argument `layers` of `optimizer`, or returns None."""
    if not isinstance(layers, Mapping):
        return f"layers must be a mapping of patterns of parameters to layers, got {layers!r}."
    for pattern, where in layers.items():
        try:
            re.compile(pattern)
        except re.error as error:
            return f"The pattern {pattern!r} of layers is not a regular expression: {error}."
        number = isinstance(where, int) and not isinstance(where, bool) and where >= 0
        if where not in _KINDS and not number:
            return (
                f"In layers, {pattern!r} must be 'embedding', 'head', 'stacked' or a number from "
                f"0, got {where!r}."
            )
    return None


class _Place(NamedTuple):
    """The layer of a parameter: its rule, and the number of layers up to and including it."""

    pattern: str
    kind: str
    end: int
    stack: str


def _layer_of(path: str, x: Any, layers: Layers) -> _Place | None:
    for pattern, where in [*layers.items(), *_USUAL]:
        compiled = re.compile(pattern)
        # The rules of this file need no time limit.
        match = fullmatch(compiled, path) if pattern in layers else compiled.fullmatch(path)
        if match is None:
            continue
        if where == "stacked":
            return _Place(pattern, "stacked", x.shape[0] if x.ndim else 0, "")
        if isinstance(where, str):
            return _Place(pattern, where, 0, "")
        found = match.groups()[:1]
        if found and not str(found[0]).isdecimal():
            raise GroupError(
                f"In layers, {pattern!r} has a number as its value, so its capturing group must "
                f"match the number of a layer: in {path} it matches {found[0]!r}.",
                argument="layers",
            )
        number = where + int(found[0] if found else 0)
        # The path up to the number is the name of the stack: "encoder/layer_".
        return _Place(pattern, "layer", number + 1, path[: match.start(1)] if found else "")
    return None


def _check_places(
    by_path: Mapping[str, Any],
    places: Mapping[str, _Place | None],
    layers: Layers,
    moving: Container[str] | None,
) -> None:
    """Raises GroupError if the parameters of a model cannot be assigned to layers."""
    known = [place for place in places.values() if place is not None]
    used = {place.pattern for place in known}
    for pattern in layers:
        if pattern not in used:
            raise GroupError(
                f"The pattern {pattern!r} of layers matches no parameter that earlier patterns do "
                f"not match. A pattern matches a whole path; the nearest are "
                f"{nearest_paths(pattern, by_path)}.",
                argument="layers",
            )
    # A model with blocks/... may have parameters there that are not stacked.
    stacked = {p: by_path[p] for p, place in places.items() if place and place.kind == "stacked"}
    if len({x.shape[:1] for x in stacked.values()}) > 1:
        described = [f"{path} {tuple(x.shape)}" for path, x in stacked.items()]
        raise GroupError(
            f"layer_decay uses the first axis of these parameters as their layers, but its "
            f"length differs: {', '.join(described)}. Set in layers the layer of those that are "
            f"not stacked.",
            argument="layer_decay",
        )
    lost = [p for p, place in places.items() if place is None and (moving is None or p in moving)]
    if lost:
        raise GroupError(
            f"layer_decay: The parameter {lost[0]} has no layer"
            f"{f', and {len(lost) - 1} more' if len(lost) > 1 else ''}. Set its layer in "
            f"layers of the optimizer: {{'{lost[0]}': 'embedding'}}, 'head' for a parameter "
            f"after the layers, 'stacked', or the number of its layer.",
            argument="layer_decay",
        )
    stacks = {place.stack for place in known if place.pattern == _NUMBERED}
    if len(stacks) > 1:
        raise GroupError(
            f"layer_decay: several stacks of layers are numbered from 0: "
            f"{' and '.join(sorted(stacks))}. Set in layers of the optimizer the first number of "
            f"each: {{{', '.join(f'{stack + _DIGITS!r}: 0' for stack in sorted(stacks))}}}.",
            argument="layer_decay",
        )
    if not any(place.end for place in known):
        tops = ", ".join(sorted({path.split("/")[0] for path in by_path}))
        raise GroupError(
            f"layer_decay: no parameter belongs to a numbered layer, such as blocks/... (stacked) "
            f"or block_0/...; got {tops}. Set them in layers of the optimizer.",
            argument="layer_decay",
        )
