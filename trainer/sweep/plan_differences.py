"""Says how a plan differs from the one in the folder of a sweep."""

from collections.abc import Iterator, Mapping, Sequence
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
        for key in ("method", "space"):
            a, b = old["arms"][name][key], new["arms"][name][key]
            if a != b:
                lines.append(f"{key} of {name}: {shown(a)} -> {shown(b)}")
        lines += _trials_line(name, stored.of_arm(name), plan.of_arm(name))
    for key in ("goal", "seeds", "final_seeds", "budgets", "checkpoints", "vmap"):
        if old[key] != new[key]:
            lines.append(f"{key}: {shown(old[key])} -> {shown(new[key])}")
    return [*lines, *_optional_entries(old, new)]


def _optional_entries(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yields differences in entries that a plan has only where they are not the default."""
    before, after = searches_of(old), searches_of(new)
    if before != after:
        yield f"searches: {before} -> {after}"
    for key, usual in OPTIONAL.items():
        before, after = old.get(key, usual), new.get(key, usual)
        if before != after and key != "offsets":
            yield f"{key}: {shown(before)} -> {shown(after)}"


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
    return [
        f"{key.replace('_', ' ')}: {shown(before[key])} -> {shown(revision[key])}"
        for key in ("seeds", "final_seeds", "goal", "budgets")
        if revision[key] != before[key]
    ] + list(_optional_entries(before, revision))


def shown(value: Any) -> str:
    """Returns a part of a plan, as JSON has it, as a short text."""
    if isinstance(value, Mapping):
        return listing([f"{key} {shown(each)}" for key, each in value.items()], 4) or "(none)"
    if isinstance(value, list):
        return listing([str(each) for each in value], 4) or "(none)"
    return "(none)" if value is None else str(value)
