"""Computes a report from results: its panels, in their order."""

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.messages import UserError
from trainer.report.document import Block, Panel, Report
from trainer.report.pairs import compare_arms
from trainer.report.panels.arms import arms_block
from trainer.report.panels.axes import axes_block
from trainer.report.panels.curves import curves_block
from trainer.report.panels.learning_rate import learning_rate_block
from trainer.report.panels.ledger import ledger_block
from trainer.report.panels.methods import methods_block
from trainer.report.panels.pairs import pairs_block
from trainer.report.panels.targets import targets_block
from trainer.report.panels.trials import trials_of
from trainer.report.panels.tuning import tuning_block
from trainer.report.panels.workloads import workloads_block
from trainer.report.results import Workload
from trainer.report.spaces import axes_of
from trainer.report.verdict import verdict
from trainer.report.wording import joined


def make_report(workloads: Sequence[Workload], folder: Path, made: str = "") -> Report:
    """Computes a report.

    Args:
        workloads: what is reported, in the order of the page; at least one, with different names.
        folder: the folder that the report will be in, from which it links to the runs.
        made: how the report was made, such as the command.
    """
    names = axes_of(workloads)
    several = len(workloads) > 1
    prefixes = _prefixes([each.name for each in workloads]) if several else [""]
    pairs = [compare_arms(each) for each in workloads]
    verdicts = [verdict(w, p) for w, p in zip(workloads, pairs, strict=True)]
    if several:
        verdicts = [f"{w.name}: {text}" for w, text in zip(workloads, verdicts, strict=True)]

    def blocks(make: Callable[[Workload, str, int], Block]) -> tuple[Block, ...]:
        made = [make(w, p, i) for i, (w, p) in enumerate(zip(workloads, prefixes, strict=True))]
        titles = [each.name if several else "" for each in workloads]
        return tuple(_titled(block, title) for block, title in zip(made, titles, strict=True))

    searched = any(each.trials for each in workloads)
    panels = [
        Panel("verdict", "Verdict", "tests", (_verdict_block(workloads, verdicts),)),
        Panel("ledger", "Cost", "describes", blocks(lambda w, p, i: ledger_block(w, p))),
        Panel("arms", "Arms", "tests", blocks(lambda w, p, i: arms_block(w, p))),
        Panel("pairs", "Pairs", "tests", blocks(lambda w, p, i: pairs_block(w, pairs[i], p))),
    ]
    if searched:
        rates = blocks(lambda w, p, i: learning_rate_block(w, p, names))
        panels += [
            Panel("tuning", "Tuning", "describes", blocks(lambda w, p, i: tuning_block(w, p))),
            Panel("learning_rate", "Sensitivity to the learning rate", "describes", rates),
        ]
    targets = blocks(lambda w, p, i: targets_block(w, p))
    panels.append(Panel("target", "Steps and time to a target", "tests", targets))
    if several:
        across = (workloads_block(workloads),)
        panels.append(Panel("workloads", "Across workloads", "tests", across))
    curves = blocks(lambda w, p, i: curves_block(w, p))
    panels.append(Panel("curves", "Learning curves", "describes", curves))
    if searched:
        axes = blocks(lambda w, p, i: axes_block(w, p, names))
        panels.append(Panel("axes", "Search spaces", "describes", axes))
    methods = blocks(lambda w, p, i: methods_block(w, pairs[i], p))
    panels += [
        Panel("trials", "Runs", "describes", ()),
        Panel("methods", "Methods", "describes", methods),
    ]
    tables = [trials_of(w, p, names, folder) for w, p in zip(workloads, prefixes, strict=True)]
    return Report(
        title=joined([each.name for each in workloads]),
        verdict=tuple(verdicts),
        arms=tuple(dict.fromkeys(arm for each in workloads for arm in each.arms)),
        panels=tuple(panels),
        trials=tuple(table for table in tables if table is not None),
        made=made,
    )


def _prefixes(names: Sequence[str]) -> list[str]:
    """Returns what the names of files of each workload begin with, all different."""
    stems = ["".join(c if c.isascii() and c.isalnum() else "_" for c in name) for name in names]
    folded = [stem.casefold() for stem in stems]
    return [
        f"w{index}_{stem}_" if folded.count(stem.casefold()) > 1 or stem[0] == "_" else f"{stem}_"
        for index, stem in enumerate(stems, 1)
    ]


def _titled(block: Block, title: str) -> Block:
    return Block(title, block.text, block.warnings, block.figures, block.tables)


def _verdict_block(workloads: Sequence[Workload], verdicts: Sequence[str]) -> Block:
    """Returns the verdicts, with what limits them."""
    warnings = []
    for each in workloads:
        name = f"{each.name}: " if len(workloads) > 1 else ""
        warnings += [f"{name}{sentence}" for sentence in each.missing]
        if each.goal.report_on == each.goal.select_on and each.trials:
            warnings.append(
                f"{name}The values are those of the {each.goal.select_on} split, on which the"
                " winners were selected as well, because no run has another."
            )
    goals = {(each.goal.metric, each.goal.better) for each in workloads}
    splits = {each.goal.report_on for each in workloads}
    if len(goals) > 1:
        listed = joined([f"{each.name} {each.goal.metric}" for each in workloads])
        warnings.append(
            f"The sweeps have different goals ({listed}): each is judged by its own, and only times"
            " to targets are compared across them."
        )
    if len(splits) > 1:
        listed = joined([f"{each.name} {each.goal.report_on}" for each in workloads])
        warnings.append(f"The sweeps report on different splits ({listed}).")
    return Block(text=tuple(verdicts), warnings=tuple(warnings))


def check_different(workloads: Sequence[Workload]) -> None:
    """Raises UserError if two workloads have the same name."""
    names = [each.name for each in workloads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"Two sweeps have the name {twice[0]!r}: rename the folder of one, or name each once."
        )
