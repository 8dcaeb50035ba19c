"""A report of invented numbers, with names that each format has to escape."""

import math

from trainer.report.document import (
    Axis,
    Block,
    Column,
    Figure,
    Panel,
    Report,
    Series,
    Table,
    Trials,
)

HOSTILE = r"a_b & 100% #1 $x$ {~^\`"
ARMS = (HOSTILE, "[sgd]*x* | <b>", "adamw")
COMMAND = "python -m trainer sweep extend out/first --arm adamw --axis learning_rate --high 0.3"

_MEANS = (
    Column("arm", "arm"),
    Column("n", "n", "integer"),
    Column("mean", "mean test accuracy", "share"),
    Column("low", "95% low", "share"),
    Column("high", "95% high", "share"),
)


def _means(workload: str) -> Table:
    rows = (
        (ARMS[0], 8, 0.97123, 0.96912, 0.97334),
        (ARMS[1], 1, 0.95, None, None),
        (ARMS[2], 8, 0.96011, 0.95, 0.97022),
    )
    return Table(f"arms_{workload}", "Test accuracy", _MEANS, rows, "Student's t, 95%.")


def _pairs() -> Table:
    columns = (
        Column("pair", "pair"),
        Column("difference", "difference", "number"),
        Column("difference_low", "95% low", "number"),
        Column("difference_high", "95% high", "number"),
        Column("p_holm", "p (Holm)", "p"),
        Column("better", "P(A > B)", "share"),
        Column("better_low", "low", "share"),
        Column("better_high", "high", "share"),
    )
    rows = (
        (f"{ARMS[0]} - {ARMS[1]}", 0.0112, 0.0012, 0.0212, 3e-7, 0.9, 0.6, 0.97),
        ("ϵ β₁ – 中文", -0.0112, -0.0212, -0.0012, 0.034, 0.5, 0.2, 0.8),
        ("adamw - none", None, None, None, None, None, None, None),
    )
    return Table("pairs", "Differences", columns, rows, "")


def _ledger() -> Table:
    columns = (
        Column("arm", "arm"),
        Column("trials", "trials", "integer"),
        Column("flops", "FLOPs", "integer"),
        Column("seconds", "seconds", "seconds"),
        Column("rate", "learning rate", "number"),
        Column("loss", "worst loss", "number"),
        Column("space", "search space"),
        Column("folder", "folder", "code"),
    )
    space = "learning_rate: log_uniform(1e-05, 1); weight_decay: choice(0, 0.1, 0.2, 0.5)"
    rows = (
        (ARMS[0], 64, 123_456_789_012_345, 4321.5, 3e-5, math.inf, space, "../trials/a b/c|d"),
        (ARMS[1], 1024, 3, 12.0, 0.1, math.nan, "", "../trials/`x`/__y__"),
        (ARMS[2], 0, None, None, None, -math.inf, "learning_rate: 0.1", None),
    )
    return Table("ledger", "What each arm cost", columns, rows)


def _figure(workload: str) -> Figure:
    columns = (Column("arm", "arm"), Column("k", "k", "integer"), Column("best", "best", "number"))
    rows = tuple((arm, k, 0.9 + k / 100) for arm in ARMS for k in range(1, 5))
    series = tuple(
        Series("line", arm, (1.0, 2.0, 3.0, 4.0), (0.91, 0.92, math.nan, 0.94 - 0.01 * index))
        for index, arm in enumerate(ARMS)
    )
    return Figure(
        f"tuning_{workload}",
        "Best of k trials",
        "Three lines rise from 0.91; ]( that of <b> is the lowest.",
        Axis("k trials"),
        Axis("best accuracy"),
        series,
        Table(f"tuning_{workload}_numbers", "Best of k trials", columns, rows),
    )


def _trials(workload: str) -> Trials:
    columns = (
        Column("trial", "trial"),
        Column("arm", "arm"),
        Column("end", "end"),
        Column("accuracy", "validation accuracy", "share"),
        Column("learning_rate", "learning_rate", "number"),
        Column("folder", "folder", "code"),
    )
    rows = tuple(
        (
            f"{index:02}",
            arm,
            "done" if index else "diverged",
            0.5 + 0.01 * index if index else None,
            10.0**-index,
            f"../trials/{arm}/{index:02}",
        )
        for arm in ARMS
        for index in range(9)
    )
    command = "python -m trainer --config={folder}/config.yaml --workdir=again"
    table = Table(f"trials_{workload}", "Trials", columns, rows)
    return Trials(workload, table, "accuracy", "max", ("learning_rate",), command)


def example() -> Report:
    """Returns a report on two workloads and three arms."""
    verdicts = tuple(
        f"On {workload}, {ARMS[0]} is better than adamw by 1.1% [0.1%, 2.1%], p = 0.034."
        for workload in ("digits", "fashion")
    )
    warning = f"The best learning rate of adamw is at the edge of its space: run `{COMMAND}`."
    each = ("digits", "fashion")
    panels = (
        Panel("verdict", "Verdict", "tests", (Block(text=(*verdicts, "On the test split.")),)),
        Panel("ledger", "Costs", "describes", (Block(tables=(_ledger(),)),)),
        Panel("arms", "Arms", "tests", tuple(Block(w, tables=(_means(w),)) for w in each)),
        Panel("pairs", "Pairs", "tests", (Block("digits", tables=(_pairs(),)),)),
        Panel(
            "tuning",
            "Tuning curves",
            "describes",
            tuple(Block(w, warnings=(warning,), figures=(_figure(w),)) for w in each),
        ),
        Panel("trials", "Trials", "describes", ()),
    )
    title = f"{ARMS[0]} and others"
    return Report(title, verdicts, ARMS, panels, tuple(map(_trials, each)), "By Lockstep 0.1.")


def empty() -> Report:
    """Returns a report in which nothing could be computed."""
    table = Table("arms", "Test accuracy", _MEANS, ())
    panels = (
        Panel("arms", "Arms", "tests", (Block(warnings=("All diverged.",), tables=(table,)),)),
    )
    return Report("Nothing", ("Not decided: all trials diverged.",), (), panels)
