"""Computes a report from results: its panels, in their order."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from trainer.messages import UserError, joined, plural
from trainer.report.document import Block, Panel, Report
from trainer.report.pairs import Pair, compare_arms, standings
from trainer.report.panels.arms import arms_block, pairs_block
from trainer.report.panels.ladder import ladder_block, speedup_sentences
from trainer.report.panels.learning_rate import learning_rate_block
from trainer.report.panels.methods import cost_block, methods_block
from trainer.report.panels.targets import targets_block, workloads_block
from trainer.report.panels.trials import axes_block, curves_block, trials_of
from trainer.report.panels.tuning import cuts_block, tuning_block
from trainer.report.results import Workload, axes_of
from trainer.report.run_results import read_runs
from trainer.report.sweep_results import on_rungs, read_sweep_results
from trainer.report.verdict import verdict
from trainer.sweep.warning_text import by_sentence
from trainer.writers.lines import PREFIXES


class _WorkloadPart(NamedTuple):
    """What the panels need of one workload."""

    workload: Workload
    prefix: str  # of the names of its figures and tables, which distinguishes workloads
    title: str  # of its blocks; "" if it is the only workload
    pairs: Sequence[Pair]  # the comparisons of its arms


def make_report(workloads: Sequence[Workload], folder: Path, made: str = "") -> Report:
    """Computes a report on workloads of different names, in the order of the page."""
    # `folder` is where the report will be, for links to the runs; `made` how, such as the command.
    several = len(workloads) > 1
    prefixes = _prefixes([each.name for each in workloads]) if several else [""]
    parts = [
        _WorkloadPart(each, prefix, each.name if several else "", compare_arms(each))
        for each, prefix in zip(workloads, prefixes, strict=True)
    ]
    names = axes_of(workloads)
    tables = [trials_of(part.workload, names, folder, part.prefix) for part in parts]
    titles = [f"{part.title}: " if part.title else "" for part in parts]
    verdicts = [verdict(part.workload, part.pairs) for part in parts]
    sentences = (*speedup_sentences(workloads), *map("".join, zip(titles, verdicts, strict=True)))
    title, first = joined([each.name for each in workloads]), workloads[0]
    if first.ladder is not None and first.path is not None:
        title = first.path.absolute().name
    return Report(
        title=title,
        verdict=sentences,
        arms=tuple(dict.fromkeys(arm for each in workloads for arm in each.arms)),
        panels=tuple(_panels(parts, names, sentences)),
        trials=tuple(table for table in tables if table is not None),
        made=made,
    )


def _panels(
    parts: Sequence[_WorkloadPart], names: Mapping[str, str], sentences: tuple[str, ...]
) -> Iterator[Panel]:
    """Yields the panels in their order; those about a search only if there is one."""

    def blocks(make: Callable[..., Block], *more: Mapping[str, str]) -> tuple[Block, ...]:
        return tuple(make(each.workload, *more).named(each.title, each.prefix) for each in parts)

    def blocks_of_pairs(make: Callable[..., Block]) -> tuple[Block, ...]:
        return tuple(make(x.workload, x.pairs).named(x.title, x.prefix) for x in parts)

    workloads = [part.workload for part in parts]
    searched = any(each.trials for each in workloads)
    yield Panel("verdict", "Verdict", "tests", (_verdict_block(parts, sentences),))
    yield Panel("ledger", "Cost", "describes", blocks(cost_block))
    yield Panel("arms", "Arms", "tests", blocks(arms_block))
    yield Panel("pairs", "Pairs", "tests", blocks_of_pairs(pairs_block))
    if searched:
        yield Panel("tuning", "Tuning", "describes", blocks(tuning_block))
        if any(each.cuts for each in workloads):
            yield Panel("cuts", "Trials that were stopped early", "describes", blocks(cuts_block))
        rates = blocks(learning_rate_block, names)
        yield Panel("learning_rate", "Sensitivity to the learning rate", "describes", rates)
    yield Panel("target", "Steps and time to a target", "tests", blocks(targets_block))
    if workloads[0].ladder is not None:
        yield Panel("ladder", "Ladder", "tests", (ladder_block(workloads),))
    elif len(parts) > 1:
        yield Panel("workloads", "Across workloads", "tests", (workloads_block(workloads),))
    yield Panel("curves", "Learning curves", "describes", blocks(curves_block))
    if searched:
        yield Panel("axes", "Search spaces", "describes", blocks(axes_block, names))
    yield Panel("trials", "Runs", "describes", ())
    yield Panel("methods", "Methods", "describes", blocks_of_pairs(methods_block))


def _prefixes(names: Sequence[str]) -> list[str]:
    """Returns how the names of files of each workload begin, all different."""
    stems = ["".join(c if c.isascii() and c.isalnum() else "_" for c in name) for name in names]
    folded = [stem.casefold() for stem in stems]
    return [
        f"w{index}_{stem}_" if folded.count(stem.casefold()) > 1 or stem[0] == "_" else f"{stem}_"
        for index, stem in enumerate(stems, 1)
    ]


def _verdict_block(parts: Sequence[_WorkloadPart], sentences: tuple[str, ...]) -> Block:
    """Returns the sentences of the verdict, and warnings about what limits them."""
    workloads = [part.workload for part in parts]
    warnings = []
    for part in parts:
        name, goal = f"{part.title}: " if part.title else "", part.workload.goal
        warnings += [f"{name}{sentence}" for sentence in part.workload.missing]
        found = by_sentence(part.workload.warnings, part.workload.arms)
        warnings += [f"{name}The plan of {joined(x)} warns: {text}" for text, x in found.items()]
        if goal.report_on == goal.select_on and part.workload.trials and standings(part.workload):
            why, row = "no run has another", PREFIXES["validation"] + goal.metric
            if goal.selected != row and row in part.workload.finals[0].summary.metrics:
                why = "the file says `select_on: test`, although runs have a validation split"
            warnings.append(
                f"{name}The values are those of the {goal.select_on} split, on which the winners"
                f" were selected as well, because {why}."
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
    return Block(text=sentences, warnings=tuple(warnings))


def check_different(workloads: Sequence[Workload]) -> None:
    """Raises UserError if two workloads have the same name, or a run in common."""
    names = [each.name for each in workloads]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"Two sweeps have the name {twice[0]!r}: rename the folder of one, or name each once."
        )
    keys = ("config", "seed", "data_seed", "data")  # what the result of a run depends on
    runs = [
        {
            tuple(str(run.fingerprint.get(key)) for key in keys): run.name
            for run in (*each.trials, *each.finals)
            if run.fingerprint
        }
        for each in workloads
    ]
    for (one, ours), (two, theirs) in itertools.combinations(zip(workloads, runs, strict=True), 2):
        if common := [key for key in ours if key in theirs]:
            raise UserError(
                f"{one.path} and {two.path} have {plural(len(common), 'run')} in common, of the"
                f" same config, seed and data, such as {ours[common[0]]} and"
                f" {theirs[common[0]]}, which one report would count twice: report each alone, or"
                " add to the first one with `python -m trainer sweep extend`."
            )


def read_workloads(
    folders: Sequence[str],
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    target: float | None = None,
) -> list[Workload]:
    """Reads what a report is about: sweeps, each a workload, or single runs as one workload."""
    # Folders are of sweeps; or of runs, or of folders with runs. `metric` None is a sweep's goal,
    # or the loss of runs; `mode` is needed with other metrics than the loss; `target` None is that
    # of a sweep's file. Raises UserError for folders that do not fit.
    folders = list(dict.fromkeys(folders))
    sweeps = [each for each in folders if (Path(each) / "plan.json").exists()]
    better = mode or ("min" if metric in (None, "loss") else None)
    if better is None:
        read_workloads(folders, metric, "min", target)  # finds other mistakes, as in the metric
        raise UserError(
            f"--mode is missing for the metric {metric!r}: write --mode=max if larger values are"
            " better, or else --mode=min."
        )
    if not sweeps:
        return [read_runs(folders, metric or "loss", better, target)]
    if len(sweeps) < len(folders):
        run = next(each for each in folders if each not in sweeps)
        raise UserError(
            f"{run} is not the folder of a sweep, and {sweeps[0]} is: a report is about sweeps or"
            " about runs. Report them apart."
        )
    if mode and not metric:
        raise UserError(
            "--mode goes with --metric, which reports a second outcome: whether small or large"
            " values of a sweep's goal are better is in its file."
        )
    workloads = [read_sweep_results(Path(each), target, metric, better) for each in folders]
    check_different(workloads)
    if (ladders := [each for each in workloads if each.ladder is not None]) and len(workloads) > 1:
        raise UserError(
            f"{ladders[0].path} is a ladder, whose rungs are compared in a report of their own:"
            " report it apart."
        )
    return on_rungs(workloads[0]) if ladders else workloads


def default_folder(folders: Sequence[str]) -> Path:
    """Returns where a report goes: into a single sweep, or into the folder `report` for several."""
    only = Path(folders[0]) if len(set(folders)) == 1 else None
    return only / "report" if only and (only / "plan.json").exists() else Path("report")
