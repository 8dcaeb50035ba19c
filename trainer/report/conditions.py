"""In which respects arms are not alike, beside their optimizers and what they searched."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.config import Call
from trainer.config.wording import listing
from trainer.messages import UserError, joined, plural
from trainer.report.results import ArmSpace, Result, Workload, tunings
from trainer.sweep.confounders import (
    ComparedArm,
    arguments,
    arm_differences,
    differing_arguments,
    named_by,
    unlike_loss,
)
from trainer.sweep.evidence import sentences_about_repeats
from trainer.workdir.code import OUTSIDE

# Entries of a fingerprint that differ on purpose; changed code is found by `changed_code`.
_OF_A_RUN = ("config", "seed", "data_seed", "code")
_ROOT = "optimizer"
_OF_GROUP = re.compile(rf"{_ROOT}\.groups\.([^.]+)\.")
_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


def conditions(workload: Workload) -> list[str]:
    """Returns sentences for the verdict on the respects in which arms are not alike."""
    sentences = []
    if workload.chosen_from:
        sentences.append("The hyperparameters were searched for on lower rungs, and not here.")
    if workload.branch is not None:
        sentences.append(workload.branch.condition(workload.configs))
    sentences += [*filter(None, [compared_groups(workload)]), *_cuts(workload)]
    sentences += _differences(workload)
    for what, seeds in workload.listed_seeds.items():
        sentences.append(f"The {what} were listed by hand: {listing([*map(str, seeds)], 6)}.")
    sentences += sentences_about_repeats(workload.again)
    failed = {r.name for r in (*workload.trials, *workload.failed_below) if r.end == "failed"}
    if twice := [name for name, before in workload.again.items() if before and name in failed]:
        sentences.append(f"Of these, trials failed again, and rank last: {listing(twice, 6)}.")
    return [*sentences, *workload.caveats, *changed_code(workload), *_machines(workload)]


def compared_groups(workload: Workload) -> str:
    """Returns a sentence if the optimizers of some groups only differ or are searched unlike."""
    roots = {arm: workload.configs[arm] for arm in workload.arms if arm in workload.configs}
    found = {arm: dict(arguments(x.kwargs.get("optimizer"), _ROOT)) for arm, x in roots.items()}
    spaces = {arm: workload.spaces.get(arm, ArmSpace()).axes for arm in roots}
    every = dict.fromkeys(path for axes in spaces.values() for path in axes)
    searched = [path for path in every if path.startswith(f"{_ROOT}.")]
    differing = [*differing_arguments(found)]
    differing += [x for x in searched if len({axes.get(x) for axes in spaces.values()}) > 1]
    first: dict[str, str] = next(iter(found.values()), {})
    groups = dict.fromkeys(m[1] for path in first if (m := _OF_GROUP.match(path)))
    compared = [x for x in groups if any(p.startswith(f"{_ROOT}.groups.{x}.") for p in differing)]
    alike = [name for name in groups if name not in compared]
    if not (compared and alike) or not all(map(_OF_GROUP.match, differing)):
        return ""
    texts = []
    for name in alike:
        path = f"{_ROOT}.groups.{name}.{_ROOT}"
        text, rate = f"{name!r} has {first.get(path)}", first.get(f"{path}.learning_rate")
        if any(axis.startswith(f"{path}.") for axis in searched):
            text += ", which is searched alike"
        else:
            text += f" with learning_rate {rate}, not searched" if rate else ", not searched"
        texts.append(text)
    what = f"group{'s' * (len(compared) > 1)} {joined([*map(repr, compared)])}"
    return f"Of the optimizer, the arms differ in the {what} only: in all of them {joined(texts)}."


def _cuts(workload: Workload) -> Iterator[str]:
    """Yields a sentence if trials are stopped early; it says so if arms have unlike rules."""
    if not workload.cut_short:
        return
    texts = {
        arm: workload.cuts[arm].text if arm in workload.cuts else "computed to the end"
        for arm in workload.arms
    }
    slow = "what begins slowly is at a disadvantage"
    if len(set(texts.values())) > 1:
        listed = "; ".join(f"{arm} {text}" for arm, text in texts.items())
        yield f"The searches are cut short by unlike rules ({listed}), and {slow}."
    else:
        (text,) = set(texts.values())
        yield f"Trials are stopped early (each search {text}): {slow}."


def _differences(workload: Workload) -> Iterator[str]:
    """Yields sentences on what the arms with results differ in besides what they compare."""
    configs = {arm: _config_of(workload, arm) for arm in workload.arms if workload.finals_of(arm)}
    if len(configs) < 2:
        return
    tuned, sides = tunings(workload), {}
    for arm, config in configs.items():
        space = workload.spaces.get(arm, ArmSpace())
        points = [run.values for run in workload.trials_of(arm)]
        tree = None if workload.ablated else config
        branched = workload.branch is not None
        sides[arm] = ComparedArm(tree, space.axes, points, tuned.get(arm), branched, space.method)
    found = arm_differences(sides, all(run.end != "missing" for run in workload.trials))
    named = named_by(workload.differs, workload.ablated)
    yield from (text for _, text in found.sentences(named))
    if (kinds := found.unnamed(named)) and workload.revisions:
        yield (
            f"The file does not name these differences ({', '.join(kinds)}), which may explain the"
            " result."
        )


def unlike_losses(workload: Workload) -> str:
    """Returns a sentence on why the losses of arms cannot be compared; "" if they can."""
    if workload.goal.metric != "loss":
        return ""
    trees = {arm: tree for arm in workload.arms if (tree := _config_of(workload, arm)) is not None}
    searched = [
        path
        for arm, space in workload.spaces.items()
        for path in space.axes
        if len({repr(run.values.get(path)) for run in workload.trials_of(arm)}) != 1
    ]
    return found.text if (found := unlike_loss(trees, searched)) else ""


def _config_of(workload: Workload, arm: str) -> Call | None:
    """Returns the config of an arm: that of a run, with defaults, or else that of the plan."""
    runs = [*workload.finals_of(arm), *workload.trials_of(arm)]
    return (read_run_config(runs[0].folder) if runs else None) or workload.configs.get(arm)


def read_run_config(folder: str | Path, *names: str) -> Call | None:
    """Returns the config of a run, with its defaults if they were written; None if it has none."""
    for name in names or ("config_full.yaml", "config.yaml"):
        with contextlib.suppress(UserError, OSError):
            return configs.load([Path(folder) / name]).root
    return None


def _machines(workload: Workload) -> list[str]:
    """Returns a sentence if runs differ in versions, machines or settings, which may matter."""
    seen: dict[str, dict[str, list[str]]] = {}
    for what, run in _kinds(workload):
        for key, value in run.fingerprint.items():
            if key not in _OF_A_RUN:
                values = seen.setdefault(key, {})
                values.setdefault(fingerprint_text(value), []).append(f"{what} of {run.arm}")
    parts = []
    for key, values in seen.items():
        if len(values) > 1:
            listed = []
            for value, runs in values.items():
                short = value[:16] if re.fullmatch("[0-9a-f]{40,}", value) else value  # of a hash
                listed.append(f"{short} ({listing(list(dict.fromkeys(runs)), 4)})")
            name = "uncommitted changes (a hash of them)" if key == "uncommitted" else key
            parts.append(f"{name} {joined(listed)}")
    return [f"The runs were made under different conditions: {'; '.join(parts)}."] if parts else []


def _kinds(workload: Workload) -> Iterator[tuple[str, Result]]:
    """Yields each run once, with what it is: "trials", "final runs" or "runs"."""
    searched = {run.name for run in workload.trials}
    yield from (("trials", run) for run in workload.trials)
    for run in workload.finals:
        if run.name not in searched:
            yield "final runs" if run.name.startswith("final") else "runs", run


def changed_code(workload: Workload) -> Iterator[str]:
    """Yields sentences about the runs that ran after files of the user's code had changed."""
    runs = [(what, run) for what, run in _kinds(workload) if "code" in run.fingerprint]
    totals = Counter((what, run.arm) for what, run in runs)
    same: dict[tuple[str, tuple[str, ...]], list[str]] = {}  # -> the files of one sentence
    for file, hashes in sorted(_versions(workload, [run for _, run in runs]).items()):
        for number, hash in enumerate(hashes[1:], 1):
            after = [run.name for _, run in runs if run.fingerprint["code"].get(file) == hash]
            again = f" for the {number}{_ENDINGS.get(number, 'th')} time" if len(hashes) > 2 else ""
            same.setdefault((again, tuple(after)), []).append(file)
    for (again, after), files in same.items():
        if after:
            who = _counted([each for each in runs if each[1].name in after], totals)
            yield f"{who} ran after {listing(files, 4)} had changed{again}."
    if resumed := [each for each in runs if each[1].code_changed]:
        yield f"{_counted(resumed, totals)} were resumed with code that had changed."


def _versions(workload: Workload, runs: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the hashes of what is in the user's code, in the order in which runs had them."""
    # Files of which all runs have the hashes of functions are left out: comments do not count.
    codes = [run.fingerprint["code"] for run in runs]
    whole = {x for each in codes for x in each if x + OUTSIDE not in each}
    found: dict[str, list[str]] = {}
    for run in sorted(runs, key=lambda run: run.began):
        for file, hash in run.fingerprint["code"].items():
            if file not in whole:
                continue
            # Hashes of the ledger come last: runs with other ones were computed before it began.
            if hash not in (*found.setdefault(file, []), *workload.code.get(file, ())):
                found[file].append(hash)
    return {file: [*hashes, *workload.code.get(file, ())] for file, hashes in found.items()}


def _counted(runs: Sequence[tuple[str, Result]], totals: Mapping[tuple[str, str], int]) -> str:
    """Counts runs of each arm: "12 of muon's 40 trials and all of adamw's 8 final runs"."""
    counts = Counter((what, run.arm) for what, run in runs)
    parts = []
    for (what, arm), count in counts.items():
        total = totals[what, arm]
        shown = "all" if count == total > 1 else f"{count:,}"
        parts.append(f"{shown} of {arm}'s {plural(total, what[:-1])}")
    text = joined(parts)
    return f"{text[:1].upper()}{text[1:]}"


def fingerprint_rows(runs: Sequence[Result]) -> list[tuple[str, str]]:
    """Returns names and values of what the bits of runs depend on; "differs" where they differ."""
    # There must be at least one run, and each must have a fingerprint.
    rows = []
    for key in runs[0].fingerprint:
        if key not in ("config", "seed", "data_seed", "isa"):
            first, *others = {fingerprint_text(run.fingerprint.get(key)) for run in runs}
            rows.append((key, "differs" if others else first))
    return rows


def fingerprint_text(value: Any) -> str:
    """Returns an entry of a fingerprint as a short text."""
    if isinstance(value, Mapping):
        files = {key: each for key, each in value.items() if "::" not in key}
        return ", ".join(f"{key} {str(each)[:12]}" for key, each in files.items()) or "none"
    return "none" if value is None else str(value)
