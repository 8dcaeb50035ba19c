"""Says how a plan differs from the one in the folder of a sweep."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainer.config import Config, diff
from trainer.config.wording import listing
from trainer.sweep.encoding import encoded
from trainer.sweep.plan import OPTIONAL, Plan, Trial, searches_of


def differences(stored: Plan, plan: Plan) -> list[str]:
    """Lists how a plan differs from that in a folder, one line for each kind of difference."""
    old, new = stored.revisions[-1], plan.content()
    lines = []
    for name in dict.fromkeys([*stored.arms, *plan.arms]):
        if name not in plan.arms or name not in stored.arms:
            there = ("(absent)", "present") if name in plan.arms else ("present", "(absent)")
            lines.append(f"arm {name}: {' -> '.join(there)}")
            continue
        lines += config_line(name, stored.arms[name].config, plan.arms[name].config)
        of_arm = changed(old["arms"][name], new["arms"][name], ("method", "space"))
        lines += [f"{key} of {name}: {text}" for key, text in of_arm.items()]
        lines += _trials_line(name, stored.of_arm(name), plan.of_arm(name))
    keys = ("goal", "seeds", "final_seeds", "budgets", "checkpoints", "vmap")
    lines += [f"{key}: {text}" for key, text in changed(old, new, keys).items()]
    return [*lines, *_optional_entries(old, new)]


def changed(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Returns the name and "old -> new" of those of some entries of plan.json that differ."""
    values = {key: [each.get(key, OPTIONAL.get(key)) for each in (old, new)] for key in keys}
    return {key: f"{shown(a)} -> {shown(b)}" for key, (a, b) in values.items() if a != b}


def _optional_entries(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yields differences in entries that a plan has only where they are not the default."""
    before, after = searches_of(old), searches_of(new)
    if before != after:
        yield f"searches: {before} -> {after}"
    different = changed(old, new, OPTIONAL).items()
    yield from (f"{key}: {text}" for key, text in different if key != "offsets")


def config_line(name: str, old: Config, new: Config) -> list[str]:
    """Returns a line about how the config of an arm differs, or none if it does not."""
    changed = diff(old.root, new.root)
    more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
    return [f"config of {name}: {changed[0]}{more}"] if changed else []


def _trials_line(name: str, old: Sequence[Trial], new: Sequence[Trial]) -> list[str]:
    numbers = [len({t.number for t in trials if not t.search}) for trials in (old, new)]
    if numbers[0] != numbers[1]:
        return [f"trials of {name}: {numbers[0]:,} -> {numbers[1]:,}"]
    theirs = {trial.name: encoded(trial.values) for trial in new}
    for trial in old:
        values = encoded(trial.values)
        other = theirs.get(trial.name, values)
        if list(values.items()) != list(other.items()):
            return [f"values of {trial.name}: {shown(values)} -> {shown(other)}"]
    return []


def revision_changes(before: Mapping[str, Any], revision: Mapping[str, Any]) -> list[str]:
    """Lists what a revision changed besides adding trials, such as "seeds: 0 -> 0, 1"."""
    # Both are as plan.json has them.
    found = changed(before, revision, ("seeds", "final_seeds", "goal", "budgets"))
    lines = [f"{key.replace('_', ' ')}: {text}" for key, text in found.items()]
    return [*lines, *_optional_entries(before, revision)]


def shown(value: Any) -> str:
    """Returns a part of a plan, as JSON has it, as a short text."""
    if isinstance(value, Mapping):
        return listing([f"{key} {shown(each)}" for key, each in value.items()], 4) or "(none)"
    if isinstance(value, list):
        return listing([str(each) for each in value], 4) or "(none)"
    return "(none)" if value is None else str(value)
