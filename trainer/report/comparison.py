"""Computes a report from results: its panels, in their order."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.messages import UserError
from trainer.report.document import Block, Panel, Report
from trainer.report.pairs import Pair, compare_arms, standings
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
from trainer.sweep.warning_text import by_sentence


@dataclass(frozen=True)
class _Part:
    """What the panels need of one workload.

    Attributes:
        workload: the results.
        prefix: of the names of its figures and tables.
        title: of its blocks; "" if it is the only workload.
        pairs: the comparisons of its arms.
    """

    workload: Workload
    prefix: str
    title: str
    pairs: Sequence[Pair]

    @property
    def verdict(self) -> str:
        """The verdict in a sentence or two."""
        text = verdict(self.workload, self.pairs)
        return f"{self.title}: {text}" if self.title else text


def make_report(workloads: Sequence[Workload], folder: Path, made: str = "") -> Report:
    """Computes a report.

    Args:
        workloads: what is reported, in the order of the page; at least one, with different names.
        folder: the folder that the report will be in, from which it links to the runs.
        made: how the report was made, such as the command.
    """
    several = len(workloads) > 1
    prefixes = _prefixes([each.name for each in workloads]) if several else [""]
    parts = [
        _Part(each, prefix, each.name if several else "", compare_arms(each))
        for each, prefix in zip(workloads, prefixes, strict=True)
    ]
    names = axes_of(workloads)
    tables = [trials_of(part.workload, part.prefix, names, folder) for part in parts]
    return Report(
        title=joined([each.name for each in workloads]),
        verdict=tuple(part.verdict for part in parts),
        arms=tuple(dict.fromkeys(arm for each in workloads for arm in each.arms)),
        panels=tuple(_panels(parts, names)),
        trials=tuple(table for table in tables if table is not None),
        made=made,
    )


def _panels(parts: Sequence[_Part], names: Mapping[str, str]) -> Iterator[Panel]:
    """Yields the panels in their order; those about a search only if there is one."""

    def blocks(make: Callable[[_Part], Block]) -> tuple[Block, ...]:
        return tuple(replace(make(part), title=part.title) for part in parts)

    workloads = [part.workload for part in parts]
    searched = any(each.trials for each in workloads)
    yield Panel("verdict", "Verdict", "tests", (_verdict_block(parts),))
    costs = blocks(lambda part: ledger_block(part.workload, part.prefix))
    yield Panel("ledger", "Cost", "describes", costs)
    arms = blocks(lambda part: arms_block(part.workload, part.prefix))
    yield Panel("arms", "Arms", "tests", arms)
    pairs = blocks(lambda part: pairs_block(part.workload, part.pairs, part.prefix))
    yield Panel("pairs", "Pairs", "tests", pairs)
    if searched:
        tuning = blocks(lambda part: tuning_block(part.workload, part.prefix))
        yield Panel("tuning", "Tuning", "describes", tuning)
        rates = blocks(lambda part: learning_rate_block(part.workload, part.prefix, names))
        yield Panel("learning_rate", "Sensitivity to the learning rate", "describes", rates)
    targets = blocks(lambda part: targets_block(part.workload, part.prefix))
    yield Panel("target", "Steps and time to a target", "tests", targets)
    if len(parts) > 1:
        yield Panel("workloads", "Across workloads", "tests", (workloads_block(workloads),))
    curves = blocks(lambda part: curves_block(part.workload, part.prefix))
    yield Panel("curves", "Learning curves", "describes", curves)
    if searched:
        axes = blocks(lambda part: axes_block(part.workload, part.prefix, names))
        yield Panel("axes", "Search spaces", "describes", axes)
    yield Panel("trials", "Runs", "describes", ())
    methods = blocks(lambda part: methods_block(part.workload, part.pairs, part.prefix))
    yield Panel("methods", "Methods", "describes", methods)


def _prefixes(names: Sequence[str]) -> list[str]:
    """Returns what the names of files of each workload begin with, all different."""
    stems = ["".join(c if c.isascii() and c.isalnum() else "_" for c in name) for name in names]
    folded = [stem.casefold() for stem in stems]
    return [
        f"w{index}_{stem}_" if folded.count(stem.casefold()) > 1 or stem[0] == "_" else f"{stem}_"
        for index, stem in enumerate(stems, 1)
    ]


def _verdict_block(parts: Sequence[_Part]) -> Block:
    """Returns the verdicts, with what limits them."""
    workloads = [part.workload for part in parts]
    warnings = []
    for part in parts:
        name, goal = f"{part.title}: " if part.title else "", part.workload.goal
        warnings += [f"{name}{sentence}" for sentence in part.workload.missing]
        found = by_sentence(part.workload.warnings, part.workload.arms)
        warnings += [f"{name}The plan of {joined(x)} warns: {text}" for text, x in found.items()]
        if goal.report_on == goal.select_on and part.workload.trials and standings(part.workload):
            warnings.append(
                f"{name}The values are those of the {goal.select_on} split, on which the winners"
                " were selected as well, because no run has another."
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
    return Block(text=tuple(part.verdict for part in parts), warnings=tuple(warnings))


def check_different(workloads: Sequence[Workload]) -> None:
    """Raises UserError if two workloads have the same name."""
    names = [each.name for each in workloads]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(
            f"Two sweeps have the name {twice[0]!r}: rename the folder of one, or name each once."
        )
