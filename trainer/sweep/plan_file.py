"""The plan in the folder of a sweep, which every process of the sweep reads.

    SWEEP/
      sweep.yaml       what the file of the sweep said; its paths are relative to that file
      arms/NAME.yaml   the resolved config of an arm, without the values of trials
      plan.json        the trials and their programs; written last, and then only added to
      ledger.jsonl     what was planned and computed, with hashes; see ledger.py

plan.json is a list of revisions. The first is the plan of the sweep; each later one is an extension
and has its new trials only.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import dump
from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.sweep.code_changes import note_code
from trainer.sweep.differences import differences
from trainer.sweep.encoding import canonical
from trainer.sweep.ledger import Recorder
from trainer.sweep.plan import SweepPlan
from trainer.sweep.presence import Mode, Presence
from trainer.sweep.stored_plan import FORMAT, StoredPlan, StoredProgram, digest_of, read_plan
from trainer.writers.files import open_regular, remove_temporaries, replace_file

# Names that a process of the sweep may have written before plan.json, which is the last.
_OWN_NAMES = ("lock", "held", "workers", "sweep.yaml", "arms", "plan.json")

# programs.py and trainer.workdir import jax, which a process that reads a plan does not need.
if TYPE_CHECKING:
    from trainer.sweep.programs import ProgramGroup, Programs

__all__ = [
    "StoredPlan",
    "StoredProgram",
    "check_same",
    "files_of",
    "first_revision",
    "program_entry",
    "read_plan",
    "write_plan",
    "write_revisions",
    "writing",
]


def write_plan(
    folder: Path,
    plan: SweepPlan,
    programs: "Programs",
    vocabulary: Sequence[str] = (),
    locks: Mode = "flock",
    code: Mapping[str, str] | None = None,
) -> None:
    """Writes the plan of a sweep into its folder; equal plans give equal bytes.

    The folder is created, with permissions 0700, if it does not exist. Nothing is written if it has
    the same plan, as when another process of the sweep wrote it first.

    Args:
        folder: the folder of the sweep.
        plan: the plan.
        programs: its programs.
        vocabulary: further packages whose public functions the configs may name.
        locks: what keeps others from the folder meanwhile; see `Presence`.
        code: the user's code that planned it, file -> hash, for the ledger.

    Raises:
        UserError: the folder has another sweep or other files, or cannot be written.
    """
    folder = folder.absolute()
    check_same(folder, plan)  # before anything is created
    with writing(folder, locks):
        if check_same(folder, plan):
            return
        revision = first_revision(plan, programs, vocabulary)
        (folder / "arms").mkdir(exist_ok=True)
        for name, text in files_of(plan).items():
            replace_file(folder / name, text.encode())
        # Last: a folder with a plan.json is that of a sweep.
        write_revisions(folder, [revision])
        ledger = Recorder(folder)
        ledger.add_plan(1, revision["digest"])
        note_code(folder, ledger, code or {}, [])


def first_revision(
    plan: SweepPlan, programs: "Programs", vocabulary: Sequence[str]
) -> dict[str, Any]:
    """Returns what plan.json has of a plan, before it is extended.

    Args:
        plan: the plan.
        programs: its programs.
        vocabulary: further packages whose public functions the configs may name.

    Returns:
        What `SweepPlan.content` has, and: "programs", "reasons"; "plan", the hash of what the
        sweep's file says; "vocabulary"; "digest", the hash of all this, which the ledger and
        reports have.
    """
    revision = {
        **plan.content(),
        "programs": [
            program_entry(group, [trial.name for trial in group.trials])
            for group in programs.groups
        ],
        "reasons": list(programs.reasons),
        "plan": plan.digest,
        "vocabulary": list(vocabulary),
    }
    return revision | {"digest": digest_of(revision)}


def program_entry(program: "ProgramGroup | StoredProgram", trials: list[str]) -> dict[str, Any]:
    """Returns what plan.json has of a program.

    Args:
        program: the program.
        trials: the names of its trials that a revision adds.
    """
    return {
        "trials": trials,
        "inputs": list(program.inputs),
        "steps": program.steps,
        "batch_size": program.batch_size,
        "flops": program.flops,
        "state_bytes": program.state_bytes,
        "warnings": {arm: list(sentences) for arm, sentences in program.warnings.items()},
    }


def files_of(plan: SweepPlan) -> dict[str, str]:
    """Returns the texts of the files beside plan.json by their paths in the folder.

    Args:
        plan: the plan.
    """
    arms = {f"arms/{arm.name}.yaml": dump(arm.config.root) for arm in plan.definition.arms}
    return {"sweep.yaml": dump(plan.definition.config.root), **arms}


def write_revisions(
    folder: Path,
    revisions: Sequence[Mapping[str, Any]],
    fence: Callable[[], None] | None = None,
) -> None:
    """Replaces plan.json.

    Args:
        folder: the folder of the sweep, which `writing` reserves.
        revisions: all revisions, in order.
        fence: called just before the file is replaced; an exception of it prevents that.
    """
    lines = ",\n".join(map(canonical, revisions))
    text = f'{{"format":{FORMAT},"revisions":[\n{lines}\n]}}\n'
    replace_file(folder / "plan.json", text.encode(), fence)


@contextlib.contextmanager
def writing(folder: Path, locks: Mode = "flock") -> Iterator[None]:
    """Keeps other processes from writing the plan of a folder, and waits while another one does.

    Args:
        folder: the folder of the sweep, absolute; created if it does not exist.
        locks: what keeps them from it; see `Presence`.

    Raises:
        UserError: the folder cannot be written, or its locks are not seen by all machines.
    """
    from trainer.workdir.folder import make

    make(folder)
    try:
        with Presence(folder, locks) as presence, presence.exclusive():
            remove_temporaries(folder)
            yield
    except OSError as error:
        raise UserError(
            f"The folder of the sweep {folder} cannot be written: {error.strerror}. Choose another"
            " --workdir, or free space for this one."
        ) from error


def check_same(folder: Path, plan: SweepPlan) -> bool:
    """Checks that a folder may have a sweep.

    Args:
        folder: the folder; may not exist.
        plan: the plan of the sweep.

    Returns:
        Whether the folder has the plan already: as it stands, or as it was before an extension.

    Raises:
        UserError: the folder has another sweep or other files, or its plan cannot be read.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"The workdir {folder} is a file. Choose another --workdir.")
    if not (folder / "plan.json").exists():
        strangers = _strangers(folder, plan)
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
    if plan.digest in [revision["plan"] for revision in stored.revisions]:
        return True
    from trainer.workdir.changes import indented

    raise UserError(
        f"The workdir {folder} has another sweep. The differences, old -> new:\n"
        + indented(differences(stored, plan))
        + "Choose another --workdir, or add to this sweep with python -m trainer sweep extend"
        f" {folder} --config=FILE."
    )


def _content(file: Path) -> bytes:
    with open_regular(file) as stream:
        return stream.read()


def _strangers(folder: Path, plan: SweepPlan) -> list[str]:
    """Returns the names in a folder that a killed process of the sweep cannot have left there.

    A file of the same name with other content may be the user's own, and is not replaced.
    """
    if not folder.exists():
        return []
    from trainer.workdir.folder import unknown_names

    try:
        strangers = unknown_names(folder, _OWN_NAMES)
        strangers += [
            name
            for name, text in files_of(plan).items()
            if (folder / name).exists() and _content(folder / name) != text.encode()
        ]
    except OSError as error:
        raise UserError(
            f"The workdir {folder} cannot be read: {error.strerror}. Choose another --workdir."
        ) from error
    return strangers
