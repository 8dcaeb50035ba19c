"""Makes the configs of a model at several widths from that of one width."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from trainer import config as configs
from trainer.config import Builder, Call, Config, Source, Tree, join, leaves
from trainer.config.full import complete
from trainer.config.tree import child_trees, longest_key
from trainer.config.wording import describe, known_names
from trainer.messages import UserError, joined


@dataclass(frozen=True)
class WidthSeries:
    """The configs of a coordinate check."""

    path: str  # the config path of the width
    own: int  # the width of the config that was given
    by_width: Mapping[int, Config]  # by increasing width
    notes: tuple[str, ...]  # sentences about what else differs between widths, and about heads


def make_series(
    config: Config,
    widths: Sequence[int],
    path: str | None = None,
    scale: Mapping[str, float] | None = None,
    vocabulary: Sequence[str] = (),
) -> WidthSeries:
    """Makes a config for each width; they differ in it and in the values of `scale` only."""
    # `path` is that of the width; None for `model.width`. `scale` is config path -> power p: the
    # value there is multiplied by (width / own width)^p. Raises UserError if a path does not exist
    # or has no number, or an integer would not stay one.
    builder = Builder(config, vocabulary)
    builder.check()
    root, _ = complete(config, vocabulary)
    path = path or _width_path(root)
    own = _number(builder, root, path, "--width_path")
    if not isinstance(own, int) or own < 1:
        raise UserError(
            f"--width_path={path}: the value there is {own!r}, which is not a width: it must be an"
            " integer of at least 1."
        )
    powers = scale or {}
    scaled = {each: _number(builder, root, each, "--scale") for each in powers}
    if path in scaled:
        raise UserError(f"--scale={path}: this is the width itself, which --widths sets.")
    tables: dict[str, dict[int, float]] = {
        each: {width: _at(each, value, own, width, powers[each]) for width in widths}
        for each, value in scaled.items()
    }
    by_width: dict[int, Config] = {}
    for width in sorted(widths):
        values: dict[str, Tree] = {path: width}
        values |= {each: table[width] for each, table in tables.items()}
        by_width[width] = configs.replace(config, values, Source(f"--widths, at {path}={width}"))
    notes = [f"{x} is {joined([f'{of[w]:g}' for w in by_width])}." for x, of in tables.items()]
    return WidthSeries(path, own, by_width, (*notes, *_heads(root, path, list(by_width), tables)))


def _width_path(root: Call) -> str:
    model = root.kwargs.get("model")
    if not isinstance(model, Call):
        raise UserError(
            "The config has no call as its model, so there is no argument `width`. Name the width"
            " by its path, as in --width_path=model.width."
        )
    if "width" in model.kwargs:
        return "model.width"
    numbers = [path for path, x in leaves(model, "model") if type(x) is int]
    has = f"Its integers are {joined(numbers, 6)}." if numbers else "It has no integers."
    raise UserError(
        f"{model.name} has no argument `width`. {has} Name the width by its path, as in"
        f" --width_path={numbers[0] if numbers else 'model.net.features'}."
    )


def _number(builder: Builder, root: Call, path: str, option: str) -> int | float:
    """Returns the number at a path of a config, defaults included; raises UserError."""
    # An integer in the place of a float is a float.
    tree: Tree = root
    above, rest, parameter = "", path, None
    while rest:
        items = child_trees(tree)
        key = longest_key(items, rest)
        if key is None:
            word = rest.split(".")[0]
            known = known_names(word, items, "It has")
            place = above or "The config"
            raise UserError(f"{option}={path}: {place} has no {word!r}. {known}")
        parameter = None
        if isinstance(tree, Call):
            parameter = builder.function(tree.name).parameters.get(str(key))
        tree, above, rest = items[key], join(above, key), rest[len(str(key)) + 1 :]
    if tree is None:
        raise UserError(
            f"{option}={path}: it has no value (null). Give it that of the config's width, as in"
            f" --set {path}=1."
        )
    if isinstance(tree, bool) or not isinstance(tree, int | float):
        numbers = [join(path, n) for n, x in child_trees(tree).items() if type(x) in (int, float)]
        below = f" Below it are {joined(numbers, 4)}." if numbers else ""
        raise UserError(f"{option}={path}: {describe(tree)} is there, and not a number.{below}")
    hint = None if parameter is None else parameter.hint
    return float(tree) if float in (hint, *get_args(hint)) else tree


def _at(path: str, value: int | float, own: int, width: int, power: float) -> int | float:
    """Returns a value that is scaled with the width; an integer must stay one."""
    found = value * (width / own) ** power
    if not isinstance(value, int):
        return found
    if abs(found - round(found)) > 1e-9 * max(1.0, abs(found)) or round(found) < 1:
        raise UserError(
            f"--scale={path}={power:g}: {path} is {value} at the width {own} of the config, and"
            f" would be {found:.4g} at the width {width}, which is not an integer of at least 1."
            " Choose other widths, or give the config a width from which it scales."
        )
    return round(found)


def _heads(
    root: Call, path: str, widths: Sequence[int], tables: Mapping[str, Mapping[int, float]]
) -> list[str]:
    """Says whether the number of heads or their size grows, for a model that has heads."""
    model = root.kwargs.get("model")
    if path != "model.width" or not isinstance(model, Call) or "model.num_heads" in tables:
        return []
    heads = model.kwargs.get("num_heads")
    if type(heads) is not int:
        return []
    sizes = joined([f"{width / heads:g}" for width in widths])
    return [
        f"model.num_heads is {heads} at all widths, so that the size of a head is {sizes};"
        " --scale=model.num_heads=1 keeps the size of a head instead."
    ]
