"""The history of a challenge: a report with a table of its entries, and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Cell, Column, Figure, Panel, Report, Series, Table
from trainer.studies.challenge import Entry, Rules
from trainer.sweep.target_rule import LEVEL, Comparison, Reached, TargetRule, compare


@dataclass(frozen=True)
class Row:
    """An entry in the history.

    Attributes:
        entry: the entry.
        record: whether it has fewer steps than every entry before it.
        before: the best entry before it; None if there is none.
        comparison: with that entry; None without an exchange, or if one has not reached the target.
        doubts: what it says of an older entry that it runs again, as a sentence; "" for none.
    """

    entry: Entry
    record: bool
    before: Entry | None
    comparison: Comparison | None
    doubts: str


def history(rules: Rules, entries: Sequence[Entry]) -> list[Row]:
    """Puts entries in their order beside the best entry before each.

    Args:
        rules: of the challenge.
        entries: in the order of the table.
    """
    rows: list[Row] = []
    best: Entry | None = None
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        record = entry.steps is not None and (best is None or entry.steps < (best.steps or 0))
        record = record and not entry.text.doubts
        found = _compared(rules, best, entry)
        doubted = by_name.get(entry.text.doubts)
        rows.append(Row(entry, record, best, found, _doubts(rules, entry, doubted)))
        best = entry if record else best
    return rows


def _compared(rules: Rules, old: Entry | None, new: Entry) -> Comparison | None:
    exchange = rules.challenge.exchange
    if exchange is None or old is None or old.steps is None or new.steps is None:
        return None
    assert old.reached is not None and new.reached is not None
    return compare(rules.rule, old.reached, new.reached, exchange)


def _doubts(rules: Rules, entry: Entry, old: Entry | None) -> str:
    """Returns what an entry says of the older one that it runs again."""
    if not entry.text.doubts:
        return ""
    if old is None or old.reached is None:
        return f"It doubts {entry.text.doubts}, which is no entry with a result."
    if entry.offences or entry.reached is None:
        return f"It doubts {old.name}, and cannot be judged itself."
    return _verdict_on(rules, old, entry.reached)


def _verdict_on(rules: Rules, old: Entry, found: Reached) -> str:
    assert old.reached is not None
    claimed = old.reached.step
    runs = plural(found.runs, "run")
    if claimed is None:
        return f"{old.name} had not reached the target."
    if found.step is not None and found.step <= claimed:
        return f"It confirms {old.name}: {runs} have reached the target after {found.step} steps."
    if found.statistic <= -rules.rule.margin:
        return (
            f"It refutes {old.name}: where the mean of {runs} is closest to the target, after"
            f" {found.closest:,} steps, it is {found.mean:.6g}, and worse than the target at p at"
            f" most {LEVEL:g}."
        )
    return f"It neither confirms nor refutes {old.name}: {runs} do not decide."


def make_table(rules: Rules, entries: Sequence[Entry], made: str = "") -> Report:
    """Makes the report of a challenge, which `trainer.report.write.write` writes.

    Args:
        rules: of the challenge.
        entries: their verdicts, in the order of the table.
        made: how it was made, such as the command.
    """
    rows = history(rules, entries)
    records = [row for row in rows if row.record]
    goal = rules.challenge.goal
    target = f"{goal.metric} {rules.rule.target:g} on the {goal.select_on} split"
    verdict = f"No entry has reached {target}."
    if records:
        last = records[-1].entry
        what = f"{last.text.title} ({last.name})"
        verdict = f"The record is {last.steps:,} steps to {target}: {what}."
    rule = (
        f"The target is {target}. {rules.rule.rule} is the rule: {rules.rule.formula} is at"
        f" least {rules.rule.margin:.3g}, which is p = {LEVEL:g} for a standard deviation of"
        f" {rules.rule.sigma:g}."
    )
    refused = tuple(
        f"{row.entry.name}: {' '.join(row.entry.offences)}" for row in rows if row.entry.offences
    )
    unchecked = tuple(
        f"{row.entry.name} names {joined(row.entry.packages)}, whose code is not checked."
        for row in rows
        if row.entry.packages
    )
    doubts = tuple(f"{row.entry.name}: {row.doubts}" for row in rows if row.doubts)
    block = Block(
        text=(rule, *doubts),
        warnings=(*refused, *unchecked),
        figures=(_figure(rules, rows),) if records else (),
        tables=(_table(rules.rule, rows),),
    )
    return Report(
        title=rules.title,
        verdict=(verdict,),
        arms=tuple(row.entry.name for row in records),
        panels=(Panel("entries", "Entries", "tests", (block,)),),
        made=made,
    )


def _note(rule: TargetRule) -> str:
    """Returns the note below the table, which explains its columns."""
    return (
        "steps is the step of the rule, the same for all runs of an entry; a record has fewer steps"
        f" than every entry before it. needed is what {rule.formula} must be at least. p against is"
        " the one-sided p that an entry is better than the best one before it, at equal steps: a"
        f" record whose p is above {LEVEL:g} reaches the target earlier, and is not shown to be"
        " better."
    )


def _table(rule: TargetRule, rows: Sequence[Row]) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        entry, found = row.entry, row.entry.reached
        verdict = "reached" if entry.steps else "not shown"
        verdict = "against the rules" if entry.offences else verdict
        cells.append(
            (
                entry.name,
                verdict + (", record" if row.record else ""),
                entry.steps,
                None if found is None else found.runs,
                None if found is None else found.mean,
                None if found is None else found.statistic,
                None if found is None else found.limit,
                row.before.name if row.before is not None and row.comparison else None,
                None if row.comparison is None else row.comparison.p,
                entry.text.title,
                entry.text.by or None,
                entry.text.date or None,
            )
        )
    columns = (
        Column("entry", "entry"),
        Column("verdict", "verdict"),
        Column("steps", "steps", "integer"),
        Column("runs", "runs", "integer"),
        Column("mean", "mean", "number"),
        Column("statistic", rule.formula, "number"),
        Column("needed", "needed", "number"),
        Column("against", "against"),
        Column("p_against", "p against", "p"),
        Column("title", "what"),
        Column("by", "by"),
        Column("date", "date"),
    )
    return Table("entries", "Entries", columns, tuple(cells), _note(rule)).compact()


def _figure(rules: Rules, rows: Sequence[Row]) -> Figure:
    """Draws the steps of the entries in their order; those of the records are connected."""
    reached = [(i, row) for i, row in enumerate(rows) if row.entry.steps is not None]
    points = [(i, row.entry.steps or 0) for i, row in reached]
    records = [(i, row.entry.steps or 0) for i, row in reached if row.record]
    xs, ys = zip(*points, strict=True)
    line_x, line_y = zip(*records, strict=True)
    last = records[-1]
    return Figure(
        name="records",
        title=f"Steps to {rules.challenge.goal.metric} {rules.rule.target:g}",
        description=(
            f"The steps of {plural(len(points), 'result')} that have reached the target,"
            f" and the record after each; the last record is {last[1]:,}."
        ),
        x=Axis("", labels=tuple(row.entry.name for row in rows)),
        y=Axis("steps"),
        series=(
            Series("points", "", xs, ys, label="entries"),
            Series("steps", "", (*line_x, len(rows) - 1), (*line_y, last[1]), label="record"),
        ),
        table=Table(
            "records",
            "Steps of the entries",
            (Column("entry", "entry"), Column("steps", "steps", "integer")),
            tuple((row.entry.name, row.entry.steps) for _, row in reached),
        ),
    )
