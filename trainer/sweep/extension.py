"""Adds to the plan in the folder of a sweep: trials, seeds, arms, final seeds, or a wider space.

What was planned before stays as it is, so that its results stay valid. The trials that are new
become a revision of plan.json, which also records which results were known when it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.sweep.differences import config_line, shown
from trainer.sweep.encoding import canonical, encoded
from trainer.sweep.methods import Sampled
from trainer.sweep.plan import SweepPlan, Trial, refuse_unequal
from trainer.sweep.plan_file import files_of, program_entry, write_revisions, writing
from trainer.sweep.presence import Mode
from trainer.sweep.programs import Programs
from trainer.sweep.reading import ArmConfig
from trainer.sweep.stored_plan import StoredPlan, digest_of, read_plan
from trainer.workdir.changes import listed
from trainer.writers.files import paths_below, replace_file


@dataclass(frozen=True)
class _Point:
    """A point of an arm: its number, and its values as they are encoded."""

    number: int
    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        return _key(self.values)


def _key(values: Mapping[str, Any]) -> str:
    """Returns a text that is equal for equal points, in whichever order the file has the paths."""
    return canonical(dict(sorted(values.items())))


def write_extension(
    folder: Path,
    plan: SweepPlan,
    programs: Programs,
    vocabulary: Sequence[str] = (),
    locks: Mode = "flock",
) -> tuple[StoredPlan, dict[str, Any]]:
    """Adds a revision to the plan in a folder.

    The file of the sweep is written to sweep.N.yaml, where N is the number of the revision.

    Args:
        folder: the folder of the sweep.
        plan: the plan of the file with what is new.
        programs: its programs.
        vocabulary: further packages whose public functions the configs may name.
        locks: what keeps others from the folder meanwhile; see `Presence`.

    Returns:
        The plan before, and the revision; see `make_extension`.

    Raises:
        UserError: as `make_extension` raises it, or the folder cannot be written, or another
            process extended the sweep meanwhile.
    """
    folder = folder.absolute()
    read_plan(folder)  # before the lock, which would create the folder
    with writing(folder, locks):
        stored = read_plan(folder)
        revision = make_extension(folder, stored, plan, programs)
        fence = partial(_check_not_extended, folder, stored)
        texts, file = files_of(plan), folder / f"sweep.{stored.revision + 1}.yaml"
        replace_file(file, texts["sweep.yaml"].encode(), fence)
        for name in revision["arms"]:
            if name not in stored.arms:
                file = f"arms/{name}.yaml"
                replace_file(folder / file, texts[file].encode(), fence)
        packages = dict.fromkeys([*stored.vocabulary, *vocabulary])
        write_revisions(folder, list(packages), [*stored.revisions, revision], fence)
    return stored, revision


def _check_not_extended(folder: Path, stored: StoredPlan) -> None:
    """Checks that the others have kept out: they do not if they took this process for dead."""
    if read_plan(folder).digest != stored.digest:
        raise UserError(
            f"The sweep in {folder} was extended by another process just now. Nothing was added:"
            " start the same command again to add to that."
        )


def make_extension(
    folder: Path, stored: StoredPlan, plan: SweepPlan, programs: Programs
) -> dict[str, Any]:
    """Returns the revision with which a file extends the plan in a folder.

    A grid or a list of trials adds the points that the arm does not have yet. Of other methods,
    number n is the n-th point of the space that the file has now, and the earlier numbers stay
    points of the space that it had.

    Args:
        folder: the folder of the sweep.
        stored: its plan.
        plan: the plan of the file with what is new.
        programs: its programs.

    Returns:
        What plan.json has of a revision: all arms, seeds and the goal as they are now; the new
        trials and their programs; "known", the trials that have results and whether final.json
        exists; "follows", the digest of the revision before.

    Raises:
        UserError: the file changes or removes what was planned, or adds nothing.
        ConfigError: the arms have unequal budgets with the new trials.
    """
    changed = _changes(stored, plan)
    points: dict[str, list[_Point]] = {}
    for arm in plan.definition.arms:
        old = [t for t in stored.trials if t.arm == arm.name]
        new = plan.of_arm(arm.name)
        points[arm.name], lost = _joined(arm, _points(old), _points(new))
        changed += lost
    if changed:
        raise UserError(
            f"The sweep in {folder} cannot be extended to this file, which changes what was"
            " planned:\n" + listed(changed) + "Put these back and only add to the file, or start"
            " another sweep in another --workdir."
        )
    had = {trial.name for trial in stored.trials}
    added = [
        [arm, point.number, seed, dict(point.values)]
        for arm, of_arm in points.items()
        for point in of_arm
        for seed in plan.seeds
        if _name(arm, point.number, seed) not in had
    ]
    content, last = plan.content(), stored.revisions[-1]
    if not added and all(content[key] == last[key] for key in ("final_seeds", "goal", "budgets")):
        _refuse_nothing(folder, stored, content)
    entries = _programs(stored, plan, programs, added)
    _check_budgets(stored, plan, entries)
    revision = {
        **content,
        "trials": added,
        "known": {"finished": _finished(folder, had), "final": (folder / "final.json").exists()},
        "follows": stored.digest,
        "programs": entries,
        "reasons": [line for line in programs.reasons if line not in stored.reasons],
        "plan": plan.digest,
    }
    return revision | {"digest": digest_of(revision)}


def _name(arm: str, number: int, seed: int) -> str:
    return f"{arm}/{number:04d}/{seed}"


def _points(trials: Sequence[Trial]) -> list[_Point]:
    found = {trial.number: trial for trial in trials}
    return [_Point(number, encoded(found[number].values)) for number in sorted(found)]


def _changes(stored: StoredPlan, plan: SweepPlan) -> list[str]:
    """Lists what a file changes that must stay, except for points."""
    configs = {arm.name: arm.config for arm in plan.definition.arms}
    lines = []
    for name, config in stored.arms.items():
        if name in configs:
            lines += config_line(name, config, configs[name])
        else:
            lines.append(f"arm {name}: present -> (absent)")
    for what, old, new in (
        ("seeds", stored.seeds, plan.seeds),
        ("final seeds", stored.final_seeds, plan.final_seeds),
    ):
        if not set(old) <= set(new):
            lines.append(f"{what}: {shown(list(old))} -> {shown(list(new))}")
    content, last = plan.content(), stored.revisions[-1]
    for key in ("checkpoints", "vmap"):
        if content[key] != last[key]:
            lines.append(f"{key}: {shown(last[key])} -> {shown(content[key])}")
    goal, before = content["goal"], last["goal"]
    for key in ("metric", "mode", "select_on"):
        if goal[key] != before[key]:
            lines.append(f"goal.{key}: {before[key]} -> {goal[key]}")
    return lines


def _joined(
    arm: ArmConfig, old: Sequence[_Point], new: Sequence[_Point]
) -> tuple[list[_Point], list[str]]:
    """Returns the points of an arm with those that a file adds, and lines about removed ones."""
    if len(new) < len(old):
        return [], [f"trials of {arm.name}: {len(old):,} -> {len(new):,}"]
    if isinstance(arm.method, Sampled):
        return [*old, *new[len(old) :]], []
    keys, theirs = {point.key for point in old}, {point.key for point in new}
    lost = [point for point in old if point.key not in theirs]
    if lost:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        name = f"{arm.name}/{lost[0].number:04d}"
        return [], [f"trial {name} ({shown(lost[0].values)}){more}: present -> (absent)"]
    fresh = [point for point in new if point.key not in keys]
    return [*old, *(_Point(n, point.values) for n, point in enumerate(fresh, len(old)))], []


def _refuse_nothing(folder: Path, stored: StoredPlan, content: Mapping[str, Any]) -> None:
    last = stored.revisions[-1]["arms"]
    spaces = [
        name
        for name, arm in content["arms"].items()
        if (arm["method"], arm["space"]) != (last[name]["method"], last[name]["space"])
    ]
    text = f"The file adds nothing to the sweep in {folder}, which is at revision {stored.revision}"
    if spaces:
        raise UserError(
            f"{text}: the space or the method of {listing(spaces)} changed, but earlier trials"
            " stay as they are, and there are no new ones. Raise trials as well."
        )
    raise UserError(f"{text}. Raise trials, seeds or final, or add an arm.")


def _programs(
    stored: StoredPlan, plan: SweepPlan, programs: Programs, added: Sequence[Sequence[Any]]
) -> list[dict[str, Any]]:
    """Groups new trials by their programs, in the order of the trials."""
    # Seeds are no part of a program, so that a point has one.
    of_file = {
        (trial.arm, _key(encoded(trial.values))): group
        for group in programs.groups
        for trial in group.trials
    }
    of_name = {name: program for program in stored.programs for name in program.trials}
    entries: dict[int, dict[str, Any]] = {}
    for arm, number, seed, values in added:
        # A point of a space that the file no longer has is only in the stored plan.
        program = of_file.get((arm, _key(values)))
        program = program or of_name[_name(arm, number, stored.seeds[0])]
        entry = entries.setdefault(id(program), program_entry(program, []))
        entry["trials"].append(_name(arm, number, seed))
    return list(entries.values())


def _check_budgets(
    stored: StoredPlan, plan: SweepPlan, entries: Sequence[Mapping[str, Any]]
) -> None:
    """Checks that arms have equal budgets with the trials of all revisions."""
    arms = [arm.name for arm in plan.definition.arms]
    budgets = {what: dict.fromkeys(arms, 0) for what in ("trials", "steps", "examples")}
    sizes = [(each.trials, each.steps, each.batch_size) for each in stored.programs]
    sizes += [(each["trials"], each["steps"], each["batch_size"]) for each in entries]
    for names, steps, batch_size in sizes:
        for name in names:
            arm = name.partition("/")[0]
            budgets["trials"][arm] += 1
            budgets["steps"][arm] += steps
            budgets["examples"][arm] += steps * batch_size
    for what, counts in budgets.items():
        refuse_unequal(plan.definition, what, counts)


def _finished(folder: Path, names: set[str]) -> list[str]:
    """Returns the names of the trials that have a result, which is their folder."""
    return sorted(names.intersection(x[len("trials/") :] for x in paths_below(folder, "trials", 3)))
