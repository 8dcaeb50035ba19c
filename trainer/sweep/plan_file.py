"""The plan in the folder of a sweep: writes it, reads it in every process, and compares plans.

    SWEEP/
      sweep.yaml       what the file of the sweep said; its paths are relative to that file
      arms/NAME.yaml   the resolved config of an arm, without the values of trials
      plan.json        the trials and their programs; written last, and then only added to
      ledger.jsonl     what was planned and computed, with hashes; see ledger.py

plan.json is a list of revisions. The first is the plan of the sweep; each later one is an extension
and has its new trials only. Start with `write_plan` and `read_plan`.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, NotRequired, TypedDict, get_type_hints

from trainer.config import Config, ConfigError, diff, dump, load
from trainer.config.wording import brief, listing
from trainer.messages import UserError, refuse_os_errors
from trainer.sweep.asked import Asks
from trainer.sweep.branch import PlannedBranch
from trainer.sweep.code_changes import note_code
from trainer.sweep.definition import Goal
from trainer.sweep.ladder import PlannedLadder
from trainer.sweep.ledger import LedgerWriter
from trainer.sweep.methods import Cuts
from trainer.sweep.plan import OPTIONAL, Plan, PlannedArm, SharedProgram, Trial, searches_of
from trainer.sweep.points import with_points
from trainer.sweep.presence import Mode, Presence
from trainer.sweep.reading import Definition
from trainer.sweep.spaces import canonical, decoded, encoded
from trainer.writers.files import read_regular, remove_temporaries, replace_file
from trainer.writers.json_files import as_dataclass, as_json, check_json, damaged, read_json

FORMAT = 2
_ADVICE = "restore it from a copy, or start the sweep in another --workdir."
# Attributes of a plan that are entries of its last revision, with their types; others are of all.
_OF_EVERY = ("arms", "trials", "goal", "programs", "reasons", "revisions")
_OF_LAST = {name: kind for name, kind in get_type_hints(Plan).items() if name not in _OF_EVERY}
# Names that a process of the sweep may have written before plan.json, which is the last.
_OWN_NAMES = ("lock", "held", "workers", "sweep.yaml", "arms", "plan.json")


class _Revision(TypedDict):
    seeds: list[int]
    final_seeds: list[int]
    offsets: NotRequired[list[int]]
    digest: str
    programs: list[SharedProgram]
    reasons: list[str]
    plan: str
    vocabulary: list[str]
    linked: NotRequired[dict[str, list[list[str]]]]  # plans of earlier versions have none
    ladder: NotRequired[PlannedLadder]
    branch: NotRequired[PlannedBranch]
    ablated: NotRequired[str]
    segments: NotRequired[int]
    differs: NotRequired[list[str]]


class _PlanFile(TypedDict):
    format: int
    revisions: list[_Revision]


def write_plan(
    folder: Path,
    definition: Definition,
    plan: Plan,
    locks: Mode = "flock",
    code: Mapping[str, str] | None = None,
) -> None:
    """Writes the plan of a sweep into its folder; equal plans give equal bytes."""
    # Creates the folder, with permissions 0700. Writes nothing if another process of the sweep
    # wrote the same plan first. `code` is the user's code that planned it, file -> hash. Raises
    # UserError if the folder has another sweep or other files, or cannot be written.
    folder = folder.absolute()
    check_same(folder, definition, plan)  # before anything is created
    with writing(folder, locks):
        if check_same(folder, definition, plan):
            return
        revision = revision_of(plan)
        (folder / "arms").mkdir(exist_ok=True)
        for name, text in files_of(definition, plan).items():
            replace_file(folder / name, text.encode())
        # Last: a folder with a plan.json is that of a sweep.
        write_revisions(folder, [revision])
        ledger = LedgerWriter(folder)
        ledger.add_plan(1, revision["digest"])
        note_code(folder, ledger, code or {}, [])


def revision_of(plan: Plan, **further: Any) -> dict[str, Any]:
    """Returns a revision with the entries of a plan, and `further` ones."""
    # "linked" are the paths that entries of spaces set together, if there are any; "plan" is the
    # hash of what the sweep's file says; "digest" is the hash of all this, which the ledger and
    # reports have.
    linked = linked_in(plan)
    revision = {
        **plan.content(),
        **({"linked": linked} if linked else {}),
        **further,
        "programs": as_json(plan.programs),
        "reasons": list(plan.reasons),
        "plan": plan.content_digest,
        "vocabulary": list(plan.vocabulary),
    }
    return revision | {"digest": digest_of(revision)}


def linked_in(plan: Plan) -> dict[str, list[list[str]]]:
    """Returns arm -> the paths that one entry of its space sets together, if there are several."""
    return {name: as_json(arm.linked) for name, arm in plan.arms.items() if arm.linked}


def files_of(definition: Definition, plan: Plan) -> dict[str, str]:
    """Returns the texts of the files beside plan.json by their paths in the folder."""
    arms = {f"arms/{name}.yaml": dump(arm.config.root) for name, arm in plan.arms.items()}
    return {"sweep.yaml": dump(definition.config.root), **arms}


def write_revisions(
    folder: Path, revisions: Sequence[Mapping[str, Any]], fence: Callable[[], None] | None = None
) -> None:
    """Replaces plan.json of a folder that `writing` reserves; needs all revisions, in order."""
    # `fence` is called just before the file is replaced; an exception of it prevents that.
    lines = ",\n".join(map(canonical, revisions))
    text = f'{{"format":{FORMAT},"revisions":[\n{lines}\n]}}\n'
    replace_file(folder / "plan.json", text.encode(), fence)


@contextlib.contextmanager
def writing(folder: Path, locks: Mode = "flock") -> Iterator[None]:
    """Keeps other processes from writing the plan of a folder; waits while another one does."""
    # Creates the folder, an absolute path. Raises UserError if it cannot be written, or its locks
    # are not seen by all machines. For `locks` see `Presence`.
    from trainer.workdir.folder import make

    make(folder)
    problem = f"The folder of the sweep {folder} cannot be written"
    advice = "Choose another --workdir, or free space for this one."
    with refuse_os_errors(problem, advice), Presence(folder, locks) as presence:
        with presence.exclusive():
            remove_temporaries(folder)
            yield


def check_same(folder: Path, definition: Definition, plan: Plan) -> bool:
    """Returns whether a folder has a plan already; raises UserError if it may not have it."""
    # It has the plan as it stands, or as it was before an extension. The folder may not exist. It
    # may not have the plan if it has another sweep or other files, or its plan cannot be read.
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The workdir {folder} is a file. Choose another --workdir.")
    if not (folder / "plan.json").exists():
        strangers = _strangers(folder, definition, plan)
        # Another process of the sweep may have written it meanwhile, and its ledger.
        if not (folder / "plan.json").exists():
            if strangers:
                raise UserError(
                    f"The workdir {folder} is not the folder of a sweep: it holds"
                    f" {listing(strangers, 4)}, and no plan.json. Nothing was written there. Name a"
                    " folder that is empty or does not exist, such as"
                    f" --workdir={folder / 'sweep'}."
                )
            return False
    stored = read_plan(folder)
    if plan.content_digest in [revision["plan"] for revision in stored.revisions]:
        return True
    from trainer.workdir.fingerprint import indented

    raise UserError(
        f"The workdir {folder} has another sweep. The differences, old -> new:\n"
        + indented(plan_differences(stored, plan))
        + "Choose another --workdir, or add to this sweep with python -m trainer sweep extend"
        f" {folder} --config=FILE."
    )


def _strangers(folder: Path, definition: Definition, plan: Plan) -> list[str]:
    """Returns the names in a folder that a killed process of the sweep cannot have left there."""
    # A file of the same name with other content may be the user's own, and is not replaced.
    if not folder.exists():
        return []
    from trainer.workdir.folder import unknown_names

    with refuse_os_errors(f"The workdir {folder} cannot be read", "Choose another --workdir."):
        strangers = unknown_names(folder, _OWN_NAMES)
        strangers += [
            name
            for name, text in files_of(definition, plan).items()
            if (folder / name).exists() and read_regular(folder / name) != text.encode()
        ]
    return strangers


def read_plan(folder: Path) -> Plan:
    """Reads the plan of a sweep; imports no jax."""
    # Raises UserError if there is no plan, or it is damaged, edited or of another format.
    file = folder / "plan.json"
    try:
        content = read_json(file, dict[str, Any], _ADVICE)
        if "format" in content and content["format"] != FORMAT:
            raise UserError(
                f"{file} has the format {brief(content['format'])}, and this version of Lockstep"
                f" reads {FORMAT}: use the version that wrote it, or another --workdir."
            )
        check_json(content, _PlanFile, file, _ADVICE)
        return with_points(folder, _stored(folder, content))
    except FileNotFoundError as error:
        what = f"{folder} is not the folder of a sweep, because it has no plan.json"
        what = what if folder.exists() else f"There is no folder {folder}"
        raise UserError(
            f"{what}: name the folder that was the --workdir of python -m trainer sweep."
        ) from error
    except OSError as error:
        raise UserError(f"{error.filename or file} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise damaged(file, str(error), _ADVICE) from error
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}", _ADVICE) from error


def check_vocabulary(folder: Path, plan: Plan, named: Sequence[str]) -> None:
    """Raises UserError if a plan names packages that `--vocabulary` does not name."""
    # To import a package is to execute its code, and the folder may come from elsewhere.
    if others := [package for package in plan.vocabulary if package not in named]:
        options = " ".join(f"--vocabulary={quote(package)}" for package in others)
        raise UserError(
            f"{folder / 'plan.json'} names {listing(others)}, whose code this command would"
            f" execute. If that is what you want, add {options} to the command."
        )


def work_command(folder: Path, vocabulary: Sequence[str]) -> list[str]:
    """Returns what follows "python" in the command that computes a sweep as one of its workers."""
    options = [f"--vocabulary={package}" for package in vocabulary]
    return ["-m", "trainer", "sweep", "work", str(folder), *options]


def _stored(folder: Path, content: Mapping[str, Any]) -> Plan:
    revisions, before = content["revisions"], None
    for number, revision in enumerate(revisions, 1):
        if digest_of(revision) != revision["digest"] or revision.get("follows") != before:
            why = f"the digest of its revision {number} differs"
            raise damaged(folder / "plan.json", why, _ADVICE)
        before = revision["digest"]
    last = revisions[-1]
    arms = {name: _arm(folder, name, last) for name in last["arms"]}
    plan = plan_of(arms, revisions)
    planned = sorted(name for program in plan.programs for name in program.trials)
    if sorted(trial.name for trial in plan.trials) != planned:
        raise ValueError("its programs and its trials differ")
    return plan


def plan_of(arms: Mapping[str, PlannedArm], revisions: Sequence[Mapping[str, Any]]) -> Plan:
    """Returns a plan by its revisions."""
    last: dict[str, Any] = {**OPTIONAL, **revisions[-1]}
    return Plan(
        arms=arms,
        trials=tuple(
            Trial(arm, number, seed, decoded(values), arms[arm].config, search=sum(search))
            for revision in revisions
            for arm, number, seed, values, *search in revision["trials"]
        ),
        programs=tuple(as_dataclass(x, SharedProgram) for of in revisions for x in of["programs"]),
        reasons=tuple(reason for revision in revisions for reason in revision["reasons"]),
        goal=Goal(**last["goal"]),
        **{name: as_dataclass(last[name], kind) for name, kind in _OF_LAST.items()},
        revisions=tuple(revisions),
    )


def _arm(folder: Path, name: str, revision: Mapping[str, Any]) -> PlannedArm:
    file, entry = folder / "arms" / f"{name}.yaml", revision["arms"][name]
    try:
        found = hashlib.sha256(read_regular(file)).hexdigest()
    except FileNotFoundError as error:
        raise UserError(f"{file} is missing: {_ADVICE}") from error
    if found != entry["config"]:
        raise UserError(
            f"{file} was changed after the sweep was planned: restore it, or start a sweep with the"
            " changed config in another --workdir."
        )
    try:
        linked = tuple(map(tuple, revision.get("linked", {}).get(name, ())))
        cuts = as_dataclass(entry["cuts"], Cuts) if "cuts" in entry else None
        asks = as_dataclass(entry["asks"], Asks) if "asks" in entry else None
        return PlannedArm(load([file]), entry["method"], entry["space"], linked, cuts, asks)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # the disk cannot be read any more
            raise error.__cause__ from None
        raise


def digest_of(revision: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a revision, in hexadecimal digits."""
    # That of an extension covers the revisions before as well, through its entry "follows".
    kept = {key: value for key, value in revision.items() if key != "digest"}
    return hashlib.sha256(canonical(kept).encode()).hexdigest()


def plan_differences(stored: Plan, plan: Plan) -> list[str]:
    """Lists how a plan differs from that in a folder, one line for each kind of difference."""
    old, new = stored.revisions[-1], plan.content()
    lines = []
    for name in dict.fromkeys([*stored.arms, *plan.arms]):
        if name not in plan.arms or name not in stored.arms:
            there = ("(absent)", "present") if name in plan.arms else ("present", "(absent)")
            lines.append(f"arm {name}: {' -> '.join(there)}")
            continue
        lines += config_line(name, stored.arms[name].config, plan.arms[name].config)
        of_arm = changed(old["arms"][name], new["arms"][name], ("method", "space", "cuts", "asks"))
        lines += [f"{key} of {name}: {text}" for key, text in of_arm.items()]
        numbers = [each.counts.get(name, 0) for each in (stored, plan)]
        if numbers[0] != numbers[1]:
            lines.append(f"trials of {name}: {numbers[0]:,} -> {numbers[1]:,}")
        else:
            lines += first_other(stored.of_arm(name), plan.of_arm(name))
    keys = ("goal", "seeds", "final_seeds", "budgets", "checkpoints", "vmap")
    lines += [f"{key}: {text}" for key, text in changed(old, new, keys).items()]
    return [*lines, *_optional_entries(old, new)]


def changed(old: Mapping[str, Any], new: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Returns the name and "old -> new" of those of some entries of plan.json that differ."""
    values = {key: [each.get(key, OPTIONAL.get(key)) for each in (old, new)] for key in keys}
    return {key: f"{shown_part(a)} -> {shown_part(b)}" for key, (a, b) in values.items() if a != b}


def _optional_entries(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yields differences in entries that a plan has only where they are not the default."""
    before, after = searches_of(old), searches_of(new)
    if before != after:
        yield f"searches: {before} -> {after}"
    different = changed(old, new, OPTIONAL).items()
    yield from (f"{key}: {text}" for key, text in different if key != "offsets")


def config_line(name: str, old: Config, new: Config) -> list[str]:
    """Returns a line about how the config of an arm differs, or none if it does not."""
    lines = diff(old.root, new.root)
    more = f", and {len(lines) - 1} more" if len(lines) > 1 else ""
    return [f"config of {name}: {lines[0]}{more}"] if lines else []


def first_other(old: Sequence[Trial], new: Sequence[Trial]) -> list[str]:
    """Returns a line about the first trial that differs, or none if all are equal."""
    for a, b in itertools.zip_longest(old, new):
        if a is None or b is None or a.name != b.name:
            sides = (
                f"{x.name} ({shown_part(encoded(x.values))})" if x else "(absent)" for x in (a, b)
            )
            return [f"trial {' -> '.join(sides)}"]
        then, now = encoded(a.values), encoded(b.values)
        # One of which a plan has no values yet does not differ in them.
        if canonical(then) != canonical(now) and not (a.pending or b.pending):
            return [f"values of {a.name}: {shown_part(changed(then, now, then | now))}"]
    return []


def revision_changes(before: Mapping[str, Any], revision: Mapping[str, Any]) -> list[str]:
    """Lists what a revision changed besides adding trials, such as "seeds: 0 -> 0, 1"."""
    # Both are as plan.json has them.
    found = changed(before, revision, ("seeds", "final_seeds", "goal", "budgets"))
    lines = [f"{key.replace('_', ' ')}: {text}" for key, text in found.items()]
    return [*lines, *_optional_entries(before, revision)]


def shown_part(value: Any) -> str:
    """Returns a part of a plan, as JSON has it, as a short text."""
    if isinstance(value, Mapping):
        return listing([f"{key} {shown_part(each)}" for key, each in value.items()], 8) or "(none)"
    if isinstance(value, list):
        return listing([str(each) for each in value], 4) or "(none)"
    return "(none)" if value is None else str(value)
