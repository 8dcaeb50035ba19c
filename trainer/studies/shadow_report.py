"""What was seen of two optimizers along the path of one: sentences, tables and pictures."""

from collections.abc import Mapping, Sequence

import numpy as np

from trainer.messages import joined, plural, table
from trainer.report.document import Axis, Block, Cell, Column, Figure, Panel, Report, Series, Table
from trainer.studies.shadow import Angles, Shadowed

_TITLES = ("elements", "cosine", "from", "to", "norm B / A", "from", "to", "A to -G", "B to -G")
_MEDIANS = ("cosine", "cosine_from", "cosine_to", "ratio", "ratio_from", "ratio_to")
_MEDIANS += ("descent_a", "descent_b")
_COLUMNS = {  # by the names of `Angles`
    "cosine": Column("cosine", "cosine of A and B", "number"),
    "ratio": Column("ratio", "norm B / A", "number"),
    "own": Column("norm_a", "norm of A", "number"),
    "other": Column("norm_b", "norm of B", "number"),
    "own_descent": Column("descent_a", "cosine of A and -G", "number"),
    "other_descent": Column("descent_b", "cosine of B and -G", "number"),
}
# Of the groups: the name of a figure, its title, and what its table has; the first one is drawn.
_FIGURES = (
    ("groups", "Cosine of the two updates", tuple(_COLUMNS)),
    ("ratio", "Norm of B's update over that of A's", ("ratio", "own", "other")),
    ("descent_a", "Cosine of A's update and -G", ("own_descent",)),
    ("descent_b", "Cosine of B's update and -G", ("other_descent",)),
)


def notes_on_groups(found: Shadowed) -> list[str]:
    """Returns what was computed, and what it does not show."""
    lines = [
        "A is the optimizer of --config, and trains the run. B is that of --shadow: at each step it"
        " computes its update for the same parameters and batch, which is never applied."
        f" {plural(len(found.steps), 'step')} of the first {found.length:,} were recorded, of a run"
        f" of {found.total:,}.",
        "The state of B, such as its momentum and second moments, is built from gradients at the"
        " points that A visits, and not at those that B would have visited. So this describes"
        " directions along the path of A; it does not show how B would train, nor which of the two"
        " is better.",
        "An update is what an optimizer adds to the parameters in a step, with the learning rate,"
        " the schedule, the clipping and the weight decay of its config, before rounding to the"
        " precision of the parameters. A factor of the whole update, such as another learning rate,"
        " changes the ratio of norms and not the cosine. Over several groups, the learning rates of"
        " the groups are weights. G is the gradient before clipping.",
    ]
    if found.frozen:
        lines.append(f"Neither optimizer updates the groups {joined(found.frozen)} of A.")
    return lines


def sentences(found: Shadowed) -> list[str]:
    """Returns a sentence for each group, and for all of them, after one about an early end."""
    parts = found.by_group().items()
    return [
        *([found.ended] if found.ended else []),
        *(_sentence(name, found.over(paths), len(found.steps)) for name, paths in parts),
    ]


def _sentence(name: str, angles: Angles, rows: int) -> str:
    """Says which angles were seen between the updates of some parameters."""
    still = [
        f"that of {which} is 0 at {'each' if zeros == rows else f'{zeros:,}'} of"
        f" {plural(rows, 'recorded step')}"
        for which, norms in (("A", angles.own), ("B", angles.other))
        if (zeros := int(np.sum(norms == 0)))
    ]
    why = f" The updates have an angle only where neither is 0, and {joined(still)}."
    if np.isnan(angles.cosine).all():
        return f"{name}: no cosine.{why}"
    middle, low, high = _spread(angles.cosine)
    ratio, least, most = _spread(angles.ratio)
    return (
        f"{name}: the cosine of the two updates is {_text(middle)} in the median, from {_text(low)}"
        f" to {_text(high)}; the norm of B's is {_text(ratio)} times that of A's, from"
        f" {_text(least)} to {_text(most)}.{why if still else ''}"
    )


def _spread(values: np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Returns the median, the smallest and the largest of the values that exist, or None."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None, None, None
    return float(np.median(known)), float(known.min()), float(known.max())


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}".replace("-", "−")


def _medians(angles: Angles) -> list[float | None]:
    """Returns the cells of a table with one row for some parameters, beside their number."""
    descents = (_spread(x)[0] for x in (angles.own_descent, angles.other_descent))
    return [*_spread(angles.cosine), *_spread(angles.ratio), *descents]


def table_of_groups(found: Shadowed) -> list[str]:
    """Returns the lines of a table of the groups for a terminal."""
    rows = [
        (name, f"{_elements(found, paths):,}", *map(_text, _medians(found.over(paths))))
        for name, paths in found.by_group().items()
    ]
    return table([("group", *_TITLES), *rows], right=range(1, len(_TITLES) + 1))


def _elements(found: Shadowed, paths: Sequence[str]) -> int:
    return sum(found.sizes[path] for path in paths)


def make_shadow_report(found: Shadowed, title: str) -> Report:
    """Makes the report of two optimizers."""
    groups = {name: found.over(paths) for name, paths in found.by_group().items()}
    figures = (*(_figure(found, groups, *each) for each in _FIGURES), _parameters(found))
    block = Block(
        text=tuple(notes_on_groups(found)), figures=figures, tables=(_medians_table(found),)
    )
    panel = Panel("updates", "Updates of two optimizers", "describes", (block,))
    return Report(title, tuple(sentences(found)), tuple(groups), (panel,))


def _cells(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(x) else float(x) for x in values]


def _figure(
    found: Shadowed, groups: Mapping[str, Angles], name: str, title: str, fields: tuple[str, ...]
) -> Figure:
    """Draws one quantity of each group over the steps."""
    curves = {group: [getattr(angles, x) for x in fields] for group, angles in groups.items()}
    rows = [
        (group, step, *cells)
        for group, columns in curves.items()
        for step, *cells in zip(found.steps, *map(_cells, columns), strict=True)
    ]
    drawn = {group: columns[0] for group, columns in curves.items()}
    columns = *Column.named(group="text", step="integer"), *(_COLUMNS[x] for x in fields)
    return Figure(
        name=name,
        title=title,
        description=f"{title} at each recorded step, of each group of A.",
        x=Axis("step"),
        y=Axis(
            _COLUMNS[fields[0]].title,
            log=name == "ratio" and all(np.all(y > 0) for y in drawn.values()),
        ),
        series=tuple(
            Series("line", group, found.steps, y.tolist(), label=group)
            for group, y in drawn.items()
        ),
        table=Table(name, title, columns, tuple(rows)),
    )


def _parameters(found: Shadowed) -> Figure:
    """Draws the cosine of each parameter; its table has all that was recorded."""
    angles = {path: found.over([path]) for path in found.groups}
    losses = _cells(found.losses)
    rows = [
        (path, found.groups[path], step, loss, *cells)
        for path, each in angles.items()
        for step, loss, *cells in zip(
            found.steps, losses, *(_cells(getattr(each, x)) for x in _COLUMNS), strict=True
        )
    ]
    columns = Column.named(parameter="code", group="text", step="integer", loss="number")
    columns = *columns, *_COLUMNS.values()
    return Figure(
        name="parameters",
        title="Cosine of the two updates, by parameter",
        description="The cosine of the two updates of each parameter, in the style of its group.",
        x=Axis("step"),
        y=Axis("cosine of A and B"),
        series=tuple(
            Series("line", found.groups[path], found.steps, each.cosine.tolist(), label=path)
            for path, each in angles.items()
        ),
        table=Table("parameters", "Updates of each parameter", columns, tuple(rows)),
    )


def _medians_table(found: Shadowed) -> Table:
    """Returns the medians over the recorded steps, of each group and each parameter."""
    parts = [(name, None, paths) for name, paths in found.by_group().items()]
    parts += [(found.groups[path], path, [path]) for path in found.groups]
    rows: list[tuple[Cell, ...]] = [
        (group, path, _elements(found, paths), *_medians(found.over(paths)))
        for group, path, paths in parts
    ]
    medians = (Column(*each, "number") for each in zip(_MEDIANS, _TITLES[1:], strict=True))
    columns = *Column.named(group="text", parameter="code", elements="integer"), *medians
    title = "Medians over the recorded steps, with the smallest and the largest value"
    return Table("medians", title, columns, tuple(rows))
