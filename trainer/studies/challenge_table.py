"""The history of a challenge: a report with a table of its entries, and a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Cell, Column, Figure, Panel, Report, Series, Table
from trainer.studies.challenge import Entry, Rules
from trainer.sweep.target_rule import CONFIRMING, LASTING, LEVEL, Lead, TargetRule, lead_of

PROVISIONAL, CONFIRMED, REFUTED = "provisional", "confirmed", "refuted"


class Confirmation(NamedTuple):
    """What the first entry that doubts another by the rules says of it."""

    # CONFIRMED, REFUTED or PROVISIONAL; "" of one that has not reached the target, or is a doubt
    status: str
    sentence: str  # on the status


@dataclass(frozen=True)
class HistoryRow:
    """An entry in the history."""

    entry: Entry
    record: bool  # whether it has fewer steps than every entry before it, and was not refuted
    before: Entry | None  # the best entry before it; None if there is none
    # with that entry; None without an exchange, or if one has not reached the target
    comparison: Lead | None
    doubts: str  # what it says of the entry that it runs again, as a sentence; "" for none
    confirmation: Confirmation  # what the entries that doubt it say of it


def history(rules: Rules, entries: Sequence[Entry]) -> list[HistoryRow]:
    """Puts entries in the order of the table beside the best entry before each."""
    rows: list[HistoryRow] = []
    best: Entry | None = None
    by_name = {entry.name: entry for entry in entries}
    for entry in entries:
        confirmation = confirmation_of(rules, entry, entries)
        record = confirmation.status in (PROVISIONAL, CONFIRMED)
        record = record and (best is None or (entry.steps or 0) < (best.steps or 0))
        found, exchange = None, rules.challenge.exchange
        if exchange is not None and best is not None and None not in (best.steps, entry.steps):
            assert best.reached is not None and entry.reached is not None  # it has steps
            found = lead_of(rules.rule, best.reached, entry.reached, exchange)
        doubts = verdict_on(rules, by_name.get(entry.text.doubts), entry).sentence
        rows.append(HistoryRow(entry, record, best, found, doubts, confirmation))
        best = entry if record else best
    return rows


def confirmation_of(rules: Rules, entry: Entry, others: Iterable[Entry]) -> Confirmation:
    """Says whether an entry that reached the target is provisional, confirmed or refuted."""
    # Of `others`, in the order of the table, the first that doubts it by the rules counts, so that
    # a result is not confirmed by trying until somebody does.
    if entry.steps is None or entry.text.doubts:
        return Confirmation("", "")
    for each in others:
        if each.text.doubts == entry.name and not each.offences and each.reached is not None:
            status, sentence = verdict_on(rules, entry, each)
            return Confirmation(status, f"{each.name}: {sentence}")
    return Confirmation(
        PROVISIONAL,
        f"{entry.name} is provisional until {plural(rules.challenge.seeds, 'seed')} that somebody"
        f" else draws pass at {CONFIRMING:g} after {entry.steps:,} steps.",
    )


def verdict_on(rules: Rules, old: Entry | None, new: Entry) -> Confirmation:
    """Returns what an entry says of the one that it doubts, by the mean at that one's steps."""
    # `old` is the entry that is doubted; None if there is none of this name.
    if not new.text.doubts:
        return Confirmation("", "")
    if old is None or old.steps is None:
        return Confirmation("", f"It doubts {new.text.doubts}, which is not accepted.")
    mean = new.means.get(old.steps)
    if new.offences or new.reached is None or mean is None:
        return Confirmation(PROVISIONAL, f"It doubts {old.name}, and cannot be judged itself.")
    runs, planned = new.reached.runs, rules.challenge.seeds
    what = f"{old.name}: after {old.steps:,} steps the mean of {plural(runs, 'run')} is {mean:.6g}"
    statistic = float(rules.rule.statistic(mean, runs))
    if statistic >= rules.rule.limit(runs, planned, CONFIRMING) * (1 - 1e-9):
        better = f"better than the target at p at most {CONFIRMING:g}"
        return Confirmation(CONFIRMED, f"It confirms {what}, {better}.")
    if statistic <= -rules.rule.limit(runs, planned):
        worse = f"worse than the target at p at most {LEVEL:g}"
        return Confirmation(REFUTED, f"It refutes {what}, {worse}.")
    return Confirmation(PROVISIONAL, f"It neither confirms nor refutes {what}.")


def _about_tries(rules: Rules, entries: Sequence[Entry]) -> str:
    """Says how often one of so many entries is accepted that are not better than the target."""
    tries = sum(not entry.text.doubts for entry in entries)
    some = 1 - (1 - LEVEL) ** tries
    at = "" if rules.rule.rule == LASTING else " by its mean at one step"
    return (
        f"Each entry that doubts no other is a try: {tries}. If the expected value of every one"
        f" were at the target, at least one would be accepted{at} with a probability of about"
        f" {some:.2g}, and confirmed, too, with about {some * CONFIRMING:.2g}."
        " Configurations that were tried and not entered are not counted."
    )


def make_table(rules: Rules, entries: Sequence[Entry], made: str = "") -> Report:
    """Makes the report of a challenge, which `trainer.report.write.write` writes."""
    # `entries` are in the order of the table; `made` is how it was made, such as the command.
    rows = history(rules, entries)
    records = [row for row in rows if row.record]
    goal = rules.challenge.goal
    target = f"{goal.metric} {rules.rule.target:g} on the {goal.select_on} split"
    verdict = [f"No entry has reached {target}."]
    if records:
        last = records[-1].entry
        what = f"{last.text.title} ({last.name})"
        verdict = [f"The record is {last.steps:,} steps to {target}: {what}."]
        verdict.append(records[-1].confirmation.sentence)
        sure = [row.entry for row in records if row.confirmation.status == CONFIRMED]
        if sure and sure[-1] is not last:
            verdict.append(
                f"The last confirmed record is {sure[-1].steps:,} steps: {sure[-1].name}."
            )
    rule = (
        f"The target is {target}. {rules.rule.rule} is the rule: {rules.rule.formula} is at"
        f" least {rules.rule.margin:.3g}, which is p = {LEVEL:g} for a standard deviation of"
        f" {rules.rule.sigma:g}."
    )
    refused = tuple(f"{x.name}: {' '.join(x.offences)}" for x in entries if x.offences)
    unchecked = tuple(
        f"{each.name} names {joined(each.packages)}, whose code is not checked."
        for each in entries
        if each.packages
    )
    doubts = tuple(f"{row.entry.name}: {row.doubts}" for row in rows if row.doubts)
    block = Block(
        text=(rule, _about_tries(rules, entries), *doubts),
        warnings=(*refused, *unchecked),
        figures=(_figure(rules, rows),) if records else (),
        tables=(_table(rules.rule, rows),),
    )
    arms = tuple(row.entry.name for row in records)
    panel = Panel("entries", "Entries", "tests", (block,))
    return Report(rules.title, tuple(verdict), arms, (panel,), made=made)


def _table(rule: TargetRule, rows: Sequence[HistoryRow]) -> Table:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        entry, found = row.entry, row.entry.reached
        verdict = "reached" if entry.steps else "not shown"
        verdict = "against the rules" if entry.offences else verdict
        status = row.confirmation.status
        status = "" if status == PROVISIONAL and not row.record else status
        cells.append(
            (
                entry.name,
                ", ".join(filter(None, (verdict, "record" if row.record else "", status))),
                entry.steps,
                *(getattr(found, name, None) for name in ("runs", "mean", "statistic", "limit")),
                row.before.name if row.before is not None and row.comparison else None,
                None if row.comparison is None else row.comparison.p,
                entry.text.title,
                entry.text.by or None,
                entry.text.date or None,
            )
        )
    titles = (
        *Column.named(entry="text", verdict="text", steps="integer", runs="integer", mean="number"),
        Column("statistic", rule.formula, "number"),
        *Column.named(needed="number", against="text"),
        Column("p_against", "p against", "p"),
        Column("title", "what"),
        *Column.named(by="text", date="text"),
    )
    note = (
        "steps is the step of the rule, the same for all runs of an entry; a record has fewer steps"
        " than every entry before it, and is provisional until somebody else has confirmed it."
        f" needed is what {rule.formula} must be at least. p against is the one-sided p that an"
        " entry is better than the best one before it, at equal steps: a record whose p is above"
        f" {LEVEL:g} reaches the target earlier, and is not shown to be better."
    )
    return Table("entries", "Entries", titles, tuple(cells), note).compact()


def _figure(rules: Rules, rows: Sequence[HistoryRow]) -> Figure:
    """Draws the steps of the entries in their order; those of the records are connected."""
    reached = {i: row.entry.steps for i, row in enumerate(rows) if row.entry.steps is not None}
    records = {i: steps for i, steps in reached.items() if rows[i].record}
    last = [*records.values()][-1]
    places, columns = (*records, len(rows) - 1), Column.named(entry="text", steps="integer")
    cells = tuple((rows[i].entry.name, steps) for i, steps in reached.items())
    return Figure(
        name="records",
        title=f"Steps to {rules.challenge.goal.metric} {rules.rule.target:g}",
        description=(
            f"The steps of {plural(len(reached), 'result')} that have reached the target,"
            f" and the record after each; the last record is {last:,}."
        ),
        x=Axis("", labels=tuple(row.entry.name for row in rows)),
        y=Axis("steps"),
        series=(
            Series("points", "", tuple(reached), tuple(reached.values()), label="entries"),
            Series("steps", "", places, (*records.values(), last), label="record"),
        ),
        table=Table("records", "Steps of the entries", columns, cells),
    )
