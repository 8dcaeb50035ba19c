"""What a report shows: panels of text, tables and figures, before it is written in any format.

`comparison.py` and its neighbours compute a `Report`; `page.py` writes it as HTML, `markdown.py`,
`latex.py` and `write.py` as Markdown, LaTeX and CSV, and `drawing.py` draws its figures as PDF and
PNG. All formats show the same numbers, because nothing is computed later, except by the page for
the trials that a reader selects.
"""

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeVar

Cell = str | int | float | None
# "number" has four significant digits; "p" is a p value; "share" is a fraction of 1, written in
# percent; "code" is a path or command
Kind = Literal["text", "integer", "number", "p", "share", "seconds", "code"]
_MOST_LABELS = 5  # labels that a legend explains
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # in CSV: lower case, without spaces, such as "steps_to_target"
    title: str  # what readers see, such as "steps to target"
    kind: Kind = "text"
    only_csv: bool = False  # because a reader could not read so many

    @classmethod
    def named(cls, **kinds: Kind) -> tuple[Self, ...]:
        """Returns columns of these names, which are also what readers see."""
        return tuple(cls(name, name, kind) for name, kind in kinds.items())

    @classmethod
    def ends(cls) -> tuple[Self, Self]:
        """Returns the columns of the ends of a 95% interval."""
        return cls("low", "95% from", "number"), cls("high", "to", "number")

    @classmethod
    def titled(
        cls, titles: Iterable[str], taken: Collection[str], kind: Kind = "text"
    ) -> list[Self]:
        """Returns columns with these titles and different names, none among `taken`.

        Example:
            >>> [c.name for c in Column.titled(["a.rate", "Muon (tuned)"], {"muon_tuned"})]
            ['a_rate', 'muon_tuned_2']
        """
        columns: list[Self] = []
        for title in titles:
            known = {*taken, *(column.name for column in columns)}
            stem = re.sub(r"\W+", "_", title.lower(), flags=re.ASCII).strip("_") or "column"
            names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
            name = next(name for name in names if name not in known)
            columns.append(cls(name, title, kind))
        return columns

    def text_of(self, value: Cell) -> str:
        """Returns a cell as readers see it."""
        if value is None:
            return "–"
        if isinstance(value, str):
            return value
        if not math.isfinite(value):
            return "not a number" if value != value else "∞" if value > 0 else "−∞"
        if self.kind == "p":
            return p_text(value)
        if self.kind == "share":
            return f"{100 * value:.3g}%"
        if self.kind == "integer":
            return f"{value:,.0f}"
        if self.kind == "seconds":
            if value < 120:
                return f"{value:.3g} s"
            return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"
        return shown(value) if abs(value) < 1e5 else f"{value:.3e}"


Columns = dict[Column, Callable[[_Record], Cell]]  # each with its cell of a record


@dataclass(frozen=True)
class Table:
    """A table; the page highlights rows by a column named "arm", which holds names of arms."""

    name: str  # the stem of its files, unique in the report
    title: str  # a caption
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]  # as many cells as columns; None for what does not exist
    note: str = ""  # sentences below the table

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        records: Iterable[_Record],
        columns: Columns[_Record],
        note: str = "",
    ) -> Self:
        """Makes a table with a row for each record."""
        rows = tuple(tuple(cell(record) for cell in columns.values()) for record in records)
        return cls(name, title, tuple(columns), rows, note)

    @property
    def by_column(self) -> list[tuple[Column, list[Cell]]]:
        """The columns, each with its cells."""
        return [(column, [row[i] for row in self.rows]) for i, column in enumerate(self.columns)]

    def place(self, name: str) -> int:
        """Returns the index of the column with a name."""
        return [column.name for column in self.columns].index(name)

    def cells(self, name: str) -> list[Cell]:
        """Returns the cells of the column with a name."""
        place = self.place(name)
        return [row[place] for row in self.rows]

    def compact(self, keep: Collection[str] = ()) -> Self:
        """Returns the table without columns that are None in all rows, except those in `keep`."""
        return self.only(lambda column, cells: column.name in keep or set(cells) != {None})

    def only(self, kept: Callable[[Column, list[Cell]], bool]) -> Self:
        """Returns the table with some of its columns, decided by them and their cells."""
        kept_at = [i for i, each in enumerate(self.by_column) if kept(*each)]
        columns = tuple(self.columns[i] for i in kept_at)
        rows = tuple(tuple(row[i] for i in kept_at) for row in self.rows)
        return replace(self, columns=columns, rows=rows)


@dataclass(frozen=True)
class Axis:
    """An axis of a figure."""

    title: str  # with the unit
    log: bool = False  # then all values are positive
    labels: tuple[str, ...] = ()  # names of categories at 0, 1, 2 and so on; empty for numbers


@dataclass(frozen=True)
class Series:
    """What a figure draws of one arm, in the style of this arm."""

    # "line" connects the points; "steps" is constant after each point; "points" are separate
    # markers; "band" fills from `y` to `high`; "interval" is a bar from `y` to `high` at each x;
    # "rule" is a line across the figure, at `y` or, without `y`, at `x`
    kind: Literal["line", "steps", "points", "band", "interval", "rule"]
    arm: str  # "" for a series of no arm, such as a target
    x: Sequence[float]
    y: Sequence[float] = ()  # the lower end of a band or interval
    high: Sequence[float] = ()  # the upper end of a band or interval; else empty
    label: str = ""  # in the legend and when a reader points at it
    faint: bool = False  # behind the others, thin and pale
    # the name of a trial for each point, or one for all of a line; empty if it does not belong to
    # trials; the page hides those that a filter leaves out
    trials: tuple[str, ...] = ()
    # how the page computes it again from the trials that a filter leaves: "best_of_k" is the
    # expected best of k trials over k; "" if it does not
    recipe: Literal["", "best_of_k"] = ""


@dataclass(frozen=True)
class Figure:
    """A figure."""

    name: str  # the stem of its files, unique in the report
    title: str  # a caption
    description: str  # for readers who cannot see it: what is drawn and what stands out
    x: Axis
    y: Axis
    # the foremost last; without points that are not finite; an infinite band reaches out
    series: tuple[Series, ...]
    table: Table  # the numbers of the figure

    @property
    def legend(self) -> dict[tuple[str, str], bool]:
        """What a legend explains beside arms: (kind, label) -> whether it is faint."""
        # It has no labels that name an arm, as the legend has the arm, and none if there are many.
        names = {series.arm for series in self.series if series.arm}
        labels = {
            (series.kind, series.label): series.faint
            for series in self.series
            if series.label and not any(arm in series.label for arm in names)
        }
        if {"line", "steps"} & {each.kind for each in self.series if each.faint and each.trials}:
            labels[("line", "single trials")] = True
        return labels if len(labels) <= _MOST_LABELS else {}


@dataclass(frozen=True)
class Block:
    """What a panel shows of one workload, or of all."""

    title: str = ""  # the workload; "" if it is the only one or it concerns all
    text: tuple[str, ...] = ()  # paragraphs
    warnings: tuple[str, ...] = ()  # sentences about what limits the conclusions
    figures: tuple[Figure, ...] = ()  # shown before the tables
    tables: tuple[Table, ...] = ()

    def named(self, title: str, prefix: str) -> Self:
        """Returns the block with a title, whose figures and tables have names with a prefix."""

        def renamed(table: Table) -> Table:
            return replace(table, name=f"{prefix}{table.name}")

        figures = tuple(
            replace(figure, name=f"{prefix}{figure.name}", table=renamed(figure.table))
            for figure in self.figures
        )
        return replace(self, title=title, figures=figures, tables=tuple(map(renamed, self.tables)))


@dataclass(frozen=True)
class Panel:
    """A section of the report."""

    name: str  # for links: "verdict", "ledger"
    title: str  # the heading
    # "tests" if it concludes from all runs: the page greys it while trials are filtered
    kind: Literal["tests", "describes"]
    blocks: tuple[Block, ...]  # one for each workload, or a single one


@dataclass(frozen=True)
class Trials:
    """The trials of a workload, which the page sorts and filters."""

    workload: str  # its name
    # one row a trial; its columns "trial", "arm" and "end" exist always; "folder" is the path of
    # the trial's folder from that of the report
    table: Table
    goal: str  # the column by which trials were compared; None in those that diverged or failed
    better: Literal["min", "max"]  # which value is the best
    axes: tuple[str, ...]  # the columns of the search spaces
    command: str  # repeats a trial, with "{folder}" and "{trial}" to be replaced

    @property
    def best_first(self) -> list[tuple[Cell, ...]]:
        """The rows of the table, the best first, those without a number in the goal last."""
        sign, place = 1 if self.better == "min" else -1, self.table.place(self.goal)

        def order(row: tuple[Cell, ...]) -> tuple[bool, float]:
            goal = row[place]
            if isinstance(goal, int | float) and not math.isnan(goal):
                return False, sign * goal
            return True, 0.0

        return sorted(self.table.rows, key=order)


@dataclass(frozen=True)
class Report:
    """A report."""

    title: str  # what was compared
    verdict: tuple[str, ...]  # a sentence for each workload
    arms: tuple[str, ...]  # the names of all arms, in the order of their styles
    panels: tuple[Panel, ...]  # in the order of the page
    trials: tuple[Trials, ...] = ()  # one for each workload with a search
    made: str = ""  # the version of Lockstep and the command

    @property
    def sections(self) -> list[Panel]:
        """The panels, with one for the trials inserted before the methods, if there is none yet."""
        panels, names = list(self.panels), [panel.name for panel in self.panels]
        if self.trials and "trials" not in names:
            at = names.index("methods") if "methods" in names else len(panels)
            panels.insert(at, Panel("trials", "Trials", "describes", ()))
        return panels

    @property
    def warnings(self) -> tuple[str, ...]:
        """What limits the verdict: the warnings of its panel."""
        return tuple(w for panel in self.panels[:1] for b in panel.blocks for w in b.warnings)

    def shown(self) -> "Report":
        """Returns the report without the columns that are in CSV only."""
        trials = tuple(
            replace(each, table=each.table.only(lambda column, _: not column.only_csv))
            for each in self.trials
        )
        return replace(self, trials=trials)

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [f for panel in self.panels for block in panel.blocks for f in block.figures]

    @property
    def tables(self) -> list[Table]:
        """All tables, those of the figures and of the trials included."""
        of_panels = [t for panel in self.panels for block in panel.blocks for t in block.tables]
        return [*of_panels, *(f.table for f in self.figures), *(each.table for each in self.trials)]


def p_text(p: float) -> str:
    """Returns a p value with two digits, or as many as keep it on its side of 0.05.

    Example:
        >>> p_text(0.0123), p_text(0.04996), p_text(0.05004), p_text(1e-7)
        ('0.012', '0.04996', '0.05', '< 0.0001')
    """
    if p < 1e-4:
        return "< 0.0001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 17))
    return next((text for text in texts if (float(text) < 0.05) == (p < 0.05)), repr(p))


def p_sentence(p: float) -> str:
    """Returns a p value as a sentence has it, such as "p = 0.012" or "p < 0.0001"."""
    text = p_text(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def shown(x: float) -> str:
    """Returns a number with four significant digits."""
    return f"{x + 0.0:.4g}".replace("-", "−")  # + 0.0 makes -0 a 0
