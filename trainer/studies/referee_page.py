"""The record of a referee: what it prints, and a report with every try and the keeps in order."""

import math
from collections.abc import Mapping
from typing import Any

from trainer.messages import UserError, plural
from trainer.report.document import (
    Axis,
    Block,
    Column,
    Columns,
    Figure,
    Panel,
    Report,
    Series,
    Table,
)
from trainer.report.statistics.keeps import e_of_wins, typical_difference
from trainer.studies.referee import TRY, Judge, Try, noise_of


def result(judge: Judge, each: Try) -> dict[str, Any]:
    """Returns what is known of a try, as `referee try --json` prints it."""
    pairs = judge.pairs(each)
    _, wins, losses = judge.verdict_of(each)
    interval = typical_difference(pairs.gains) if pairs.gains else None
    screen = judge.place(each) / "screen"
    known = judge.runner.runs(screen)[TRY] if (screen / "plan.json").exists() else {}
    found = (known, *judge.both(judge.place(each) / "pairs"))
    runs = [run for every in found for run in every.values()]
    return {
        "try": each.number,
        "note": each.note,
        "verdict": each.verdict or None,
        "decided_by": each.stage or None,
        "why": each.why,
        "baseline": each.baseline,
        "changes": list(each.changes),
        "wins": wins,
        "losses": losses,
        "e_value": float(e_of_wins(wins, losses)),
        "e_value_to_keep": each.levels.keep,
        "e_value_against": float(e_of_wins(losses, wins)),
        "e_value_to_discard": each.levels.discard,
        "typical_improvement": None if interval is None else [_number(x) for x in interval],
        "runs": len(runs),
        "seconds": round(sum(run.summary.seconds or 0 for run in runs), 3),
        "next": _NEXT.get(each.verdict, "Start the same command again: it goes on."),
    }


_NEXT = {
    "keep": "The config of this try is the baseline of the next one.",
    "discard": "The baseline stays: propose another change.",
    "undecided": "It counts as discarded, and the baseline stays: propose a larger change.",
}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def check_verdicts(judge: Judge) -> None:
    """Computes the verdicts of all tries from their runs; UserError if the ledger has others."""
    for each in judge.tries:
        if each.stage == "pairs" and (found := judge.verdict_of(each)[0]) != each.verdict:
            raise UserError(
                f"The ledger says {each.verdict} of try {each.number}, and its runs say {found}:"
                f" files in {judge.place(each)} were changed, or the ledger was."
            )


def found_sentences(judge: Judge) -> list[str]:
    """Says what the referee has found, in a few sentences."""
    rules, keeps, tries = judge.rules, judge.keeps, judge.tries
    ended = [each for each in tries if each.verdict]
    screened = sum(not each.seeds for each in ended)
    lines = [
        f"{plural(len(keeps), 'keep')} of {plural(len(ended), 'try')}; {screened} ended"
        " before pairs were computed."
    ]
    if len(ended) < len(tries):
        lines.append(f"Try {tries[-1].number} has not ended: start its command again.")
    lines.append(
        f"The expected share of keeps that were not better than their baseline by"
        f" {rules.goal.relevant:g} in a typical run is at most {rules.error:g}."
    )
    if keeps:
        last = keeps[-1]
        baseline = judge.baseline(len(keeps)).relative_to(judge.folder)
        lines.append(
            f"The baseline is that of try {last.number}: {baseline}. Gains of"
            " keeps do not add up: `referee finish` measures the gain of all together."
        )
    for gain in judge.gains():
        low, high = gain.improvement.low, gain.improvement.high
        within = "" if low is None or high is None else f", 95% from {low:.3g} to {high:.3g}"
        lines.append(
            f"On {plural(gain.improvement.n, 'fresh seed')} the mean improvement of the last"
            f" baseline over the first is {gain.improvement.value:.3g}{within}, in {gain.row}: from"
            f" {gain.first:.4g} to {gain.last:.4g}."
        )
    if judge.ledger.of("finish"):
        lines.append("It is finished: no more changes are tried.")
    else:
        left = rules.most_tries - judge.decided
        lines.append(
            f"The next try is kept at an e-value of {judge.next_levels.keep:.4g}, and"
            f" {plural(left, 'try')} more can be decided."
        )
    return lines


def last_hash(judge: Judge) -> str:
    """Says with which hash the ledger ends."""
    return (
        f"The last hash of the ledger is {judge.ledger.head}. Once it is published, nobody can"
        " change what was before it unseen."
    )


def make_page(judge: Judge, made: str) -> Report:
    """Makes the report of a referee, which `trainer.report.write.write` writes."""
    rules = judge.rules
    results = [result(judge, each) for each in judge.tries]
    how = (
        f"A pair is a run with the change and one without, on one seed; it is won if the first is"
        f" better by more than {rules.goal.relevant:g} in {rules.goal.row}. A change is kept if the"
        f" e-value of its pairs reaches {rules.most_tries} / ({rules.error:g} * (keeps + 1)), which"
        " is e-LOND, discarded if that of losing reaches"
        f" {1 / rules.error:.4g}, and undecided after {plural(rules.pairs, 'pair')}, or once those"
        " that are left cannot decide."
    )
    share = (
        f"The rate of {rules.error:g} is an expectation over many such loops, of the share of keeps"
        " that were not better than their own baseline. One loop of many keeps may well have a"
        " false one. A later try that undoes it counts as any other."
    )
    figures = (_ladder(judge),) if judge.keeps else ()
    block = Block(
        text=(noise_of(judge).sentence, how, share, last_hash(judge)),
        figures=figures,
        tables=(_table(results),),
    )
    panel = Panel("tries", "Tries", "tests", (block,))
    title = rules.title or judge.folder.name
    return Report(title, tuple(found_sentences(judge)), (), (panel,), made=made)


def _table(results: list[dict[str, Any]]) -> Table:
    def of(name: str, index: int | None = None) -> Any:
        if index is None:
            return lambda x: x[name]
        return lambda x: None if x[name] is None else x[name][index]

    columns: Columns[Mapping[str, Any]] = {
        Column("try", "try", "integer"): of("try"),
        Column("verdict", "verdict"): of("verdict"),
        Column("decided_by", "decided by"): of("decided_by"),
        Column("wins", "won", "integer"): of("wins"),
        Column("losses", "lost", "integer"): of("losses"),
        Column("e_value", "e-value", "number"): of("e_value"),
        Column("e_value_to_keep", "to keep", "number"): of("e_value_to_keep"),
        Column("low", "typical improvement, 95% from", "number"): of("typical_improvement", 0),
        Column("high", "to", "number"): of("typical_improvement", 1),
        Column("baseline", "over baseline", "integer"): of("baseline"),
        Column("runs", "runs", "integer"): of("runs"),
        Column("seconds", "time", "seconds"): of("seconds"),
        Column("note", "note"): lambda x: x["note"] or None,
        Column("changes", "changes"): lambda x: "; ".join(x["changes"]),
        Column("why", "why"): of("why"),
    }
    note = (
        "The interval is that of the median difference of a pair, and holds although the number of"
        " pairs depended on them; it is empty with few pairs. time is the sum over runs."
    )
    return Table.of("tries", "Tries", results, columns, note)


def _ladder(judge: Judge) -> Figure:
    """Draws the metric of each baseline, on the seeds on which it was kept, over the tries."""
    numbers, values, bases = [], [], []
    for each in judge.keeps:
        both = judge.both(judge.place(each) / "pairs")
        row = judge.rules.goal.row
        first, second = (
            [x for run in runs.values() if (x := run.value(row)) is not None] for runs in both
        )
        if first and second:
            numbers.append(each.number)
            bases.append(sum(first) / len(first))
            values.append(sum(second) / len(second))
    columns = Column.named(number="integer", before="number", after="number")
    cells = tuple(zip(numbers, bases, values, strict=True))
    return Figure(
        name="keeps",
        title=f"{judge.rules.goal.row} of each keep and of its baseline",
        description=(
            f"{plural(len(numbers), 'keep')}: the mean over the runs of its pairs, and that of the"
            " baseline on the same seeds."
        ),
        x=Axis("try"),
        y=Axis(judge.rules.goal.row),
        series=(
            Series("points", "", tuple(numbers), tuple(bases), label="baseline", faint=True),
            Series("points", "", tuple(numbers), tuple(values), label="keep"),
        ),
        table=Table("keeps", "Keeps", columns, cells),
    )
