"""Derives the plan of a sweep again from the files that lie beside plan.json.

sweep.yaml, or sweep.N.yaml of revision N, and the configs in arms/ determine which trials there
are. Start with `derive`.
"""

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config import ConfigError, load
from trainer.config.vocabulary import SWEEP
from trainer.config.wording import listing
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.extension import added_trials
from trainer.sweep.ledger import Ledger
from trainer.sweep.plan import Plan, plan_sweep
from trainer.sweep.plan_file import changed, first_other, linked_in, plan_differences, plan_of
from trainer.sweep.reading import AbsentArm, Definition, read_sweep

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
            stored = plan_of(arms, plan.revisions[:number], plan.vocabulary)
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
    lines = first_other(stored.trials, made.trials)
    lines += plan_differences(stored, _compared(made, revision))
    new, keys = made.content() | {"linked": linked_in(made)}, {"offsets", *revision}
    found = changed(revision, new, sorted({"offsets", "linked"} & keys))
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
    if "linked" not in stored.revisions[-1] and linked_in(made):
        yield "plan.json does not say which paths move together, as those of version 0.2 do not."
