"""Columns of tables, made from names and titles."""

import itertools
import re
from collections.abc import Collection, Iterable

from trainer.report.document import Column, Kind

INTERVAL = (Column("low", "95% from", "number"), Column("high", "to", "number"))


def named_columns(**kinds: Kind) -> tuple[Column, ...]:
    """Returns columns of these names, which are also what readers see."""
    return tuple(Column(name, name, kind) for name, kind in kinds.items())


def column_name(text: str, taken: Collection[str] = ()) -> str:
    """Returns a text as the name of a column, lower case, without spaces, and not among `taken`.

    Example:
        >>> column_name("matrices.learning_rate"), column_name("Muon (tuned)", {"muon_tuned"})
        ('matrices_learning_rate', 'muon_tuned_2')
    """
    name = re.sub(r"\W+", "_", text.lower(), flags=re.ASCII).strip("_") or "column"
    names = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(2)))
    return next(each for each in names if each not in taken)


def columns_of(
    titles: Iterable[str], taken: Collection[str], kind: Kind = "text", only_csv: bool = False
) -> list[Column]:
    """Returns columns with these titles and different names, none among `taken`."""
    columns: list[Column] = []
    for title in titles:
        name = column_name(title, {*taken, *(column.name for column in columns)})
        columns.append(Column(name, title, kind, only_csv))
    return columns
