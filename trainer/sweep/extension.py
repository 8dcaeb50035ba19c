"""Adds to the plan in the folder of a sweep: trials, seeds, arms, final seeds, or a wider space.

What was planned before stays as it is, so that its results stay valid. The new trials become a
revision of plan.json, which also records which results were known when it was written. Start with
`make_extension`.

`derive` derives the plan again from the files that lie beside plan.json: sweep.yaml, or
sweep.N.yaml of revision N, and the configs in arms/ determine which trials there are.
"""

import importlib.metadata
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config import Call, Config, ConfigError, Tree, load
from trainer.config.vocabulary import SWEEP
from trainer.config.wording import listing
from trainer.messages import UserError, printable, table
from trainer.sweep import plan_file
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.code_changes import changed_hashes, note_code
from trainer.sweep.final import FINAL_FILE, ArmSearch
from trainer.sweep.ledger import Ledger, LedgerWriter, known_results, read_ledger, results_in
from trainer.sweep.plan import (
    Plan,
    PlannedArm,
    SharedProgram,
    Trial,
    plan_sweep,
    point_name,
    refuse_unequal,
    seed_of_search,
    trial_entry,
)
from trainer.sweep.presence import Mode
from trainer.sweep.reading import AbsentArm, ArmConfig, Definition, read_sweep
from trainer.sweep.spaces import canonical, encoded
from trainer.sweep.tuned import tuned_line
from trainer.sweep.warning_text import merge_warnings, warning_lines
from trainer.workdir.fingerprint import indented
from trainer.writers.files import replace_file

_Points = dict[int, Mapping[str, Tree]]  # number of a point -> its values


def _key(values: Mapping[str, Tree]) -> str:
    """Returns a text that is equal for equal points, in whichever order the file has the paths."""
    return canonical(dict(sorted(encoded(values).items())))


def write_extension(
    folder: Path,
    definition: Definition,
    plan: Plan,
    locks: Mode = "flock",
    code: Mapping[str, str] | None = None,
    allow_changed: Sequence[str] = (),
) -> tuple[Plan, dict[str, Any]]:
    """Adds a revision to the plan in a folder; returns the plan before, and the revision."""
    # The file of the sweep is written to sweep.N.yaml, where N is the number of the revision.
    # `definition` and `plan` are those of the file with what is new, the plan with its programs;
    # `code` is file -> hash.
    # Raises UserError as `make_extension` does, and if the code was changed, which `allow_changed`
    # may allow by "code", the folder cannot be written, or another process extended the sweep
    # meanwhile.
    folder = folder.absolute()
    plan_file.read_plan(folder)  # before the lock, which would create the folder
    with plan_file.writing(folder, locks):
        stored, ledger = plan_file.read_plan(folder), LedgerWriter(folder)
        changed_hashes(folder, ledger, code or {}, allow_changed)
        revision = make_extension(folder, stored, definition, plan)
        fence = partial(_check_not_extended, folder, stored)
        texts = plan_file.files_of(definition, plan)
        file = folder / f"sweep.{stored.revision + 1}.yaml"
        replace_file(file, texts["sweep.yaml"].encode(), fence)
        for name in revision["arms"]:
            if name not in stored.arms:
                file = f"arms/{name}.yaml"
                replace_file(folder / file, texts[file].encode(), fence)
        plan_file.write_revisions(folder, [*stored.revisions, revision], fence)
        ledger.add_plan(stored.revision + 1, revision["digest"])
        note_code(folder, ledger, code or {}, allow_changed)
    return stored, revision


def _check_not_extended(folder: Path, stored: Plan) -> None:
    """Raises UserError if another process extended the sweep, because it took this one for dead."""
    if plan_file.read_plan(folder).digest != stored.digest:
        raise UserError(
            f"The sweep in {folder} was extended by another process just now. Nothing was added:"
            " start the same command again to add to that."
        )


def make_extension(
    folder: Path, stored: Plan, definition: Definition, plan: Plan
) -> dict[str, Any]:
    """Returns the revision with which a file extends the plan in a folder."""
    # A grid or a list of trials adds the points that the arm does not have yet. With other methods,
    # new trial n is the n-th point of the space that the file has now, and earlier trials stay
    # points of the space that it had.
    # A revision is a part of plan.json: all arms, seeds and the goal as they are now; the new
    # trials and their programs; "known", the trials that had ended, and whether winners were
    # chosen; "follows", the digest of the revision before.
    # Raises UserError if the file changes or removes what was planned, or adds nothing, or if
    # winners were chosen and final.json is missing; ConfigError if the arms have unequal budgets.
    if why := stored.fixed or plan.fixed:
        raise UserError(
            f"A sweep with {why}: start another sweep in another --workdir. Nothing in {folder} was"
            " changed."
        )
    added, lines = added_trials(stored, definition, plan)
    if lines:
        raise UserError(
            f"The sweep in {folder} cannot be extended to this file, which changes what was"
            " planned:\n" + indented(lines) + "Put these back and only add to the file, or start"
            " another sweep in another --workdir."
        )
    content, last = plan.content(), stored.revisions[-1]
    if not added and all(content[key] == last[key] for key in ("final_seeds", "goal", "budgets")):
        _refuse_nothing(folder, stored, content)
    programs = _programs(stored, plan, added)
    _check_budgets(stored, definition, programs)
    fresh = replace(
        plan,
        programs=tuple(programs),
        reasons=tuple(line for line in plan.reasons if line not in stored.reasons),
        vocabulary=tuple(dict.fromkeys([*stored.vocabulary, *plan.vocabulary])),
    )
    return plan_file.revision_of(
        fresh,
        trials=[trial_entry(trial) for trial in added],
        known=_known_results(folder, stored.by_name.keys()),
        follows=stored.digest,
    )


def added_trials(stored: Plan, definition: Definition, plan: Plan) -> tuple[list[Trial], list[str]]:
    """Returns the trials that a file adds to a plan, and lines about what it changes."""
    lines, added = _changes(stored, plan), list[Trial]()
    for arm, (search, offset) in itertools.product(definition.arms, enumerate(plan.offsets)):
        key = arm.name, search
        points, lost = _extended_points(arm, search, _points(stored, key), _points(plan, key))
        lines += lost
        seeds = [seed_of_search(seed, offset) for seed in plan.seeds]
        for (number, values), seed in itertools.product(points.items(), seeds):
            trial = Trial(arm.name, number, seed, values, plan.arms[arm.name].config, search=search)
            if trial.name not in stored.by_name:
                added.append(trial)
    return added, list(dict.fromkeys(lines))


def _points(plan: Plan, search: ArmSearch) -> _Points:
    """Returns the points of a search of an arm, sorted by their numbers, which begin with 0."""
    points = plan.points.get(search, {})
    return {number: points[number][0].values for number in sorted(points)}


def _changes(stored: Plan, plan: Plan) -> list[str]:
    """Lists what a file changes that must stay as it is, except for points."""
    lines, content, last = [], plan.content(), stored.revisions[-1]
    for name, arm in stored.arms.items():
        if name in plan.arms:
            lines += plan_file.config_line(name, arm.config, plan.arms[name].config)
            if arm.asks != plan.arms[name].asks:  # its earlier results are of the old ones
                both = last["arms"][name], content["arms"][name]
                texts = plan_file.changed(*both, ("method", "space"))
                lines += [f"{key} of {name}: {text}" for key, text in texts.items()]
        else:
            lines.append(f"arm {name}: present -> (absent)")
    fixed = ["seeds"] if any(arm.asks for arm in stored.arms.values()) else []
    for key, text in plan_file.changed(last, content, ("seeds", "final_seeds")).items():
        if key in fixed or not set(last[key]) <= set(content[key]):
            lines.append(f"{key.replace('_', ' ')}: {text}")
    if plan.offsets[: len(stored.offsets)] != stored.offsets:
        both = ((last["arms"][name], content["arms"].get(name, {})) for name in stored.arms)
        methods = [text for arms in both for text in plan_file.changed(*arms, ("method",)).values()]
        counts = f"searches: {len(stored.offsets)} -> {len(plan.offsets)}"
        lines += [f"method: {text}" for text in dict.fromkeys(methods)] or [counts]
    keys = "checkpoints", "vmap", "looks", "skewed", "segments"
    entries = plan_file.changed(last, content, keys)
    of_goal = plan_file.changed(last["goal"], content["goal"], ("metric", "mode", "select_on"))
    lines += [f"{key}: {text}" for key, text in entries.items()]
    return lines + [f"goal.{key}: {text}" for key, text in of_goal.items()]


def _extended_points(
    arm: ArmConfig, search: int, old: _Points, new: _Points
) -> tuple[_Points, list[str]]:
    """Returns the points of a search with those that a file adds, and lines about removed ones."""
    line = f"trials of {arm.name}: {len(old):,} -> {len(new):,}"
    if len(new) < len(old):
        return {}, [line]
    if 0 < len(old) < len(new) and not arm.method.grows:
        why = f"the first {len(old):,} points of {arm.method.text} change"
        return {}, [f"{line} ({why}: raise searches instead)"]
    if arm.method.seed is not None:
        return new | old, []
    keys, theirs = ({_key(values) for values in points.values()} for points in (old, new))
    if lost := [number for number, values in old.items() if _key(values) not in theirs]:
        more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
        name = f"{arm.name}/{point_name(search, lost[0])}"
        values = plan_file.shown_part(encoded(old[lost[0]]))
        return {}, [f"trial {name} ({values}){more}: present -> (absent)"]
    fresh = [values for values in new.values() if _key(values) not in keys]
    return old | dict(enumerate(fresh, len(old))), []


def _refuse_nothing(folder: Path, stored: Plan, content: Mapping[str, Any]) -> None:
    last = stored.revisions[-1]["arms"]
    arms = content["arms"].items()
    spaces = [name for name, arm in arms if plan_file.changed(last[name], arm, ("method", "space"))]
    text = f"The file adds nothing to the sweep in {folder}, which is at revision {stored.revision}"
    if spaces:
        raise UserError(
            f"{text}: the space or the method of {listing(spaces)} changed, but earlier trials"
            " stay as they are, and there are no new ones. Raise trials as well."
        )
    raise UserError(f"{text}. Raise trials, seeds or final, or add an arm.")


def _programs(stored: Plan, plan: Plan, added: Sequence[Trial]) -> list[SharedProgram]:
    """Groups new trials by their programs, in the order of the trials."""
    # A program does not depend on the seed: a point has one program for all seeds.
    of_file: dict[tuple[str, str], SharedProgram] = {}
    for program in plan.programs:
        for trial in map(plan.by_name.__getitem__, program.trials):
            of_file[trial.arm, _key(trial.values)] = program
    of_name = {name: program for program in stored.programs for name in program.trials}
    found: dict[int, tuple[SharedProgram, list[str]]] = {}
    for trial in added:
        program = of_file.get((trial.arm, _key(trial.values)))
        if program is None:  # the point is of a space that the file no longer has
            seed = seed_of_search(stored.seeds[0], stored.offsets[trial.search])
            program = of_name[replace(trial, seed=seed).name]
        found.setdefault(id(program), (program, []))[1].append(trial.name)
    return [replace(program, trials=tuple(names)) for program, names in found.values()]


def _check_budgets(stored: Plan, definition: Definition, added: Sequence[SharedProgram]) -> None:
    """Checks that arms have equal budgets with the trials of all revisions."""
    arms = [arm.name for arm in definition.arms]
    budgets = {what: dict.fromkeys(arms, 0) for what in ("trials", "steps", "examples")}
    for program in (*stored.programs, *added):
        for arm, count in program.counts.items():
            budgets["trials"][arm] += count
            budgets["steps"][arm] += count * program.updates
            budgets["examples"][arm] += count * program.updates * program.batch_size
    for what, counts in budgets.items():
        refuse_unequal(definition, what, counts)


def _known_results(folder: Path, names: Set[str]) -> dict[str, Any]:
    """Returns which of some trials have ended, and whether the winners were chosen."""
    # The ledger also has results that were removed, and the folders also results that it lacks.
    # Raises UserError if winners were chosen and final.json, which names them, is missing.
    ledger, chosen = read_ledger(folder), (folder / FINAL_FILE).exists()
    known = known_results(ledger.entries, results_in(folder))
    if known.final and not chosen:
        raise UserError(
            f"The winners of the sweep in {folder} were chosen, and {FINAL_FILE}, which names them,"
            f" is missing. Put it back, or start `python -m trainer sweep work {folder}`, which"
            " chooses them again from the results; then extend the sweep. Nothing was changed."
        )
    return {"finished": sorted(known.finished & names), "final": chosen}


def render_extension(
    folder: Path,
    stored: Plan,
    revision: Mapping[str, Any],
    power: Sequence[str] = (),
    unlike: Sequence[str] = (),
) -> str:
    """Formats a revision: the new trials, programs and what they cost, and what was known."""
    # `stored` is the plan before the revision; `power` are sentences about the differences that
    # added units find, `unlike` about what the arms differ in. The last line ends with a newline.
    lines = [f"revision {stored.revision + 1} of the sweep in {folder}", ""]
    # All trials of an arm that the revision adds have the same paths: its config is not asked.
    new = PlannedArm(Config(Call("", {}), {}), "", {})
    arms = {name: stored.arms.get(name, new) for name in revision["arms"]}
    after = plan_file.plan_of(arms, (*stored.revisions, revision))
    lines += [*_arms(stored, after), tuned_line(after.tunings), *unlike, ""]
    if programs := after.programs[len(stored.programs) :]:
        rows: list[tuple[str, ...]] = [("new runs", "steps", "batch", "FLOPs a step", "first run")]
        for each in programs:
            numbers = (len(each.trials), each.updates, each.batch_size, each.flops)
            rows.append((*(f"{number:,}" for number in numbers), each.trials[0]))
        lines += table(rows, right=(0, 1, 2, 3))
    lines += revision["reasons"]
    lines += plan_file.revision_changes(stored.revisions[-1], revision)
    steps = sum(each.updates * len(each.trials) for each in programs)
    flops = sum(each.flops * each.updates * len(each.trials) for each in programs)
    lines.append(f"{len(revision['trials']):,} new runs: {steps:,} steps, {flops:.3g} FLOPs")
    known = revision["known"]
    were = "were" if known["final"] else "were not"
    lines += [
        f"known before: the results of {len(known['finished']):,} of {len(stored.trials):,} runs;"
        f" the winners {were} chosen",
        *power,
        *warning_lines(merge_warnings(each.warnings for each in programs), revision["arms"]),
        "",
        f"plan {revision['digest']}",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)


def _arms(stored: Plan, after: Plan) -> list[str]:
    """Returns a table of the points of each arm, and lines about spaces that changed."""
    rows: list[Sequence[str]] = [("arm", "trials", "new", "method")]
    lines = []
    before = stored.revisions[-1]["arms"]
    for name, arm in after.revisions[-1]["arms"].items():
        old, now = ({(t.search, t.number) for t in x.of_arm(name)} for x in (stored, after))
        rows.append((name, f"{len(now):,}", f"{len(now - old):,}", arm["method"]))
        changes = plan_file.changed(before[name], arm, ("method", "space")) if old else {}
        for key, text in changes.items():
            since = max(number for _, number in old) + 1
            lines.append(f"{key} of {name}: {text}, from trial {since:04d} on")
    return [*table(rows, right=(1, 2)), *lines]


_NAMED = 6  # differences at most that a sentence lists


def derive(folder: Path, plan: Plan, ledger: Ledger) -> tuple[list[str], list[str]]:
    """Returns what plan.json has otherwise than its files give, and what was not derived."""
    # The first are parts of sentences, the second sentences. Of what the files name only our own
    # methods and spaces are called, and nothing outside of the folder is read.
    wrong, unknown, stored = list[str](), list[str](), None
    for number, revision in enumerate(plan.revisions, 1):
        file = f"sweep.{number}.yaml" if number > 1 else "sweep.yaml"
        before, scipy = stored, ""
        try:
            arms = {name: arm for name, arm in plan.arms.items() if name in revision["arms"]}
            stored = plan_file.plan_of(arms, plan.revisions[:number])
            definition = _definition(folder / file, stored)
            made, lines = _made(definition, stored, before)
            lines += _differences(stored, made)
            scipy = _other_scipy(definition, number, ledger)
            unknown += _unknown(file, definition, stored, made)
        except AbsentArm as error:
            lines = [f"arm {error}: (absent) -> present"]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
            why = " ".join(f"{kind}{error}".split()).removesuffix(".")
            unknown.append(
                f"Nothing shows that plan.json is the plan that {file} gives, because it could not"
                f" be derived again, which executes no code but Lockstep's: {why}."
            )
            continue
        if lines:
            text = "; ".join(list(dict.fromkeys(lines))[:_NAMED])
            wrong.append(
                f"it is not the plan that {file} gives; plan.json -> {file}: {text}. One of the two"
                " was changed after the sweep was planned: restore both from a copy, or ask for"
                f" those by which it was planned{scipy}"
            )
    return wrong, unknown


def _definition(file: Path, stored: Plan) -> Definition:
    """Reads the file of a revision, with the configs in arms/."""
    planned = {}
    for name, arm in stored.arms.items():
        space = stored.revisions[-1]["arms"][name]["space"]
        first = next((x.values for x in stored.trials if x.arm == name), {})
        planned[name] = arm.config, list({**space, **first})
    return read_sweep(load([file], language=SWEEP), planned=planned)


def _made(definition: Definition, stored: Plan, before: Plan | None) -> tuple[Plan, list[str]]:
    """Makes the plan of a revision; returns lines about what it changes of the one before, too."""
    plan, lines = plan_sweep(definition), list[str]()
    if stored.revision > 1:
        assert before is not None, "its error is the one of this revision"
        added, lines = added_trials(before, definition, plan)
        plan = replace(plan, trials=(*before.trials, *added))
    if definition.sweep.branch is not None:
        start: Any = definition.arms[0].config.root.kwargs["warm_start"]
        branch = PlannedBranch(start["from"], definition.sweep.branch.at, start["sha256"])
        plan = replace(plan, branch=branch)
    return plan, lines


def _differences(stored: Plan, made: Plan) -> list[str]:
    """Lists in what a plan in a folder, up to a revision, differs from the one that was made."""
    revision = stored.revisions[-1]
    lines = plan_file.first_other(stored.trials, made.trials)
    lines += plan_file.plan_differences(stored, _compared(made, revision))
    new, keys = made.content() | {"linked": plan_file.linked_in(made)}, {"offsets", *revision}
    found = plan_file.changed(revision, new, sorted({"offsets", "linked"} & keys))
    return [*lines, *(f"{key}: {text}" for key, text in found.items())]


def _compared(made: Plan, revision: Mapping[str, Any]) -> Plan:
    """Returns a plan with the texts of calls in spaces as plan.json has them."""
    # A file orders the arguments of a call by their names, and the text is as the user wrote them.
    arms = {}
    for name, arm in made.arms.items():
        space = dict(arm.space)
        for path, text in revision["arms"].get(name, {}).get("space", {}).items():
            if all(x.startswith("values ") and "(" in x for x in (text, space.get(path, ""))):
                space[path] = text
        arms[name] = replace(arm, space=space)
    return replace(made, arms=arms)


def _other_scipy(definition: Definition, number: int, ledger: Ledger) -> str:
    """Returns a sentence if another version of scipy may have drawn other points, or ""."""
    if {arm.method.kind for arm in definition.arms} <= {"grid", "explicit", "random", "cmaes"}:
        return ""
    here, lines = importlib.metadata.version("scipy"), ledger.of("plan")
    then = {str(x.content.get("scipy", "")) for x in lines if x.content["revision"] == number}
    if then == {here}:
        return ""
    known = f"with scipy {then.pop()}" if any(then) else "with a scipy that no ledger names"
    return f". It was planned {known}, and {here} here may draw other points: check it with that"


def _unknown(name: str, definition: Definition, stored: Plan, made: Plan) -> Iterator[str]:
    """Yields sentences about what was taken from plan.json as it is."""
    of = stored.revisions[-1]["arms"]
    paths = {key: found for arm in definition.arms for key, found in arm.paths.items()}
    if selectors := [key for key, found in paths.items() if found != (key,)]:
        yield (
            f"What {listing(selectors)} of {name} sets was taken from plan.json, because the files"
            " in Gin of the arms are not in the folder."
        )
    if any(arm.space != of[x]["space"] for x, arm in made.arms.items() if x in of):
        yield f"The texts of values that are calls in {name} were taken from plan.json."
    if made.branch is not None:
        yield (
            f"The run that {name} continues was not read: its folder and its hash are those of the"
            " configs in arms."
        )
    if "linked" not in stored.revisions[-1] and plan_file.linked_in(made):
        yield "plan.json does not say which paths move together, as those of version 0.2 do not."
