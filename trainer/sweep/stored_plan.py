"""Reads the plan in the folder of a sweep; plan_file.py, which writes it, describes its files."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Literal, NotRequired, TypedDict

from trainer.config import Config, ConfigError, load
from trainer.config.wording import brief, listing
from trainer.messages import UserError
from trainer.sweep.definition import Goal
from trainer.sweep.encoding import Decoder, canonical
from trainer.sweep.plan import Trial
from trainer.sweep.warning_text import Warnings, merge_warnings
from trainer.writers.files import open_regular
from trainer.writers.json_files import as_dataclass, check_json, damaged, read_json

FORMAT = 2
# What the digest of a revision of format 1 covers; `write_revisions` keeps such revisions as they
# are. The digest of a later revision, which names the vocabulary, covers all that it says.
_DIGESTED = (
    "arms",
    "seeds",
    "final_seeds",
    "goal",
    "budgets",
    "checkpoints",
    "vmap",
    "looks",
    "skewed",
    "offsets",
    "trials",
    "known",
    "follows",
)


_ADVICE = "restore it from a copy, or start the sweep in another --workdir."


@dataclass(frozen=True)
class StoredProgram:
    """Trials that share a program; plan.json has it by these names.

    Attributes:
        trials: the names of the trials, in the order of the plan.
        inputs: the config paths of the floats that are inputs of the program, sorted.
        steps: number of updates of each trial.
        batch_size: examples per batch.
        flops: floating-point operations of a step.
        state_bytes: bytes of the state of a trial, on each device.
        warnings: arm -> sentences about what is probably a mistake in its config.
    """

    trials: tuple[str, ...]
    inputs: tuple[str, ...]
    steps: int
    batch_size: int
    flops: int
    state_bytes: int
    warnings: Warnings = field(default_factory=dict)  # plans of earlier versions have none


class _Revision(TypedDict):
    digest: str
    programs: list[StoredProgram]
    reasons: list[str]
    plan: str
    vocabulary: NotRequired[list[str]]


class _Plan(TypedDict):
    format: int
    vocabulary: NotRequired[list[str]]  # of format 1
    revisions: list[_Revision]


@dataclass(frozen=True)
class StoredPlan:
    """The plan of a sweep as its folder has it.

    Attributes:
        arms: name -> the config of the arm, in the order of the report.
        trials: all runs: those of the first revision, then those that later ones added.
        programs: the programs of the trials, in the same order.
        reasons: sentences about what makes more than one program.
        goal: what makes one trial better than another.
        seeds: the seeds of each point of search 0.
        final_seeds: the seeds of the runs of each winner of search 0.
        budgets: "equal", or "unequal" if the file allows it.
        checkpoints: which states the folder of a trial keeps: "none", "final" or "best".
        vmap: how many trials are computed at once by vmap; None for one after another.
        looks, skewed: how the results are judged; see `definition.Sweep`.
        offsets: for each search, what its seeds are larger by than those of search 0, modulo 2^32.
        per_example: whether final runs keep their results on single test examples.
        vocabulary: further packages whose public functions the configs may name.
        revision: the number of the last revision, from 1.
        digest: the SHA-256 of the last revision and, through it, of those before.
        revisions: the revisions as plan.json has them, in order.
    """

    arms: Mapping[str, Config]
    trials: tuple[Trial, ...]
    programs: tuple[StoredProgram, ...]
    reasons: tuple[str, ...]
    goal: Goal
    seeds: tuple[int, ...]
    final_seeds: tuple[int, ...]
    budgets: str
    checkpoints: str
    vmap: int | None
    looks: Literal["planned", "any"]
    skewed: bool
    offsets: tuple[int, ...]
    per_example: bool
    vocabulary: tuple[str, ...]
    revision: int
    digest: str
    revisions: tuple[Mapping[str, Any], ...]

    @property
    def warnings(self) -> dict[str, tuple[str, ...]]:
        """The warnings of all programs: arm -> sentences."""
        return merge_warnings(program.warnings for program in self.programs)

    def keeps_examples(self, trial: Trial) -> bool:
        """Returns whether a trial keeps its results on single test examples.

        Args:
            trial: of the search, or a final one.
        """
        return self.per_example and bool(trial.final)


def read_plan(folder: Path) -> StoredPlan:
    """Reads the plan of a sweep; imports no jax.

    Args:
        folder: the folder of the sweep.

    Raises:
        UserError: the folder has no plan, or its plan is damaged, edited or of another format.
    """
    file = folder / "plan.json"
    try:
        content = read_json(file, dict[str, Any], _ADVICE)
        if "format" in content and content["format"] not in (1, FORMAT):
            raise UserError(
                f"{file} has the format {brief(content['format'])}, and this version of Lockstep"
                f" reads 1 and {FORMAT}: use the version that wrote it, or another --workdir."
            )
        check_json(content, _Plan, file, _ADVICE)
        return _stored(folder, content)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is not the folder of a sweep, because it has no plan.json: name the folder"
            " that was the --workdir of python -m trainer sweep."
        ) from error
    except OSError as error:
        raise UserError(f"{error.filename or file} cannot be read: {error.strerror}.") from error
    except ConfigError as error:
        raise damaged(file, str(error), _ADVICE) from error
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise damaged(file, f"{type(error).__name__}: {error}", _ADVICE) from error


def check_vocabulary(folder: Path, plan: StoredPlan, named: Sequence[str]) -> None:
    """Raises UserError if a plan names packages that the values of `--vocabulary` do not name.

    To import a package is to execute its code, and the folder may come from elsewhere.
    """
    others = [package for package in plan.vocabulary if package not in named]
    if others:
        options = " ".join(f"--vocabulary={quote(package)}" for package in others)
        raise UserError(
            f"{folder / 'plan.json'} names {listing(others)}, whose code this command would"
            f" execute. If that is what you want, add {options} to the command."
        )


def work_command(folder: Path, vocabulary: Sequence[str]) -> list[str]:
    """Returns what follows "python" in the command that computes a sweep as one of its workers."""
    options = [f"--vocabulary={package}" for package in vocabulary]
    return ["-m", "trainer", "sweep", "work", str(folder), *options]


def searches_of(revision: Mapping[str, Any]) -> int:
    """Returns how many searches each arm has in a revision."""
    return len(revision.get("offsets", (0,)))


def digest_of(revision: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a revision, in hexadecimal digits.

    That of an extension covers the revisions before as well, through its entry "follows".
    """
    every = [key for key in revision if key != "digest"]
    covered = every if "vocabulary" in revision else _DIGESTED
    kept = {key: revision[key] for key in covered if key in revision}
    return hashlib.sha256(canonical(kept).encode()).hexdigest()


def _stored(folder: Path, content: Mapping[str, Any]) -> StoredPlan:
    revisions, last = content["revisions"], content["revisions"][-1]
    before = None
    for number, revision in enumerate(revisions, 1):
        if digest_of(revision) != revision["digest"] or revision.get("follows") != before:
            why = f"the digest of its revision {number} differs"
            raise damaged(folder / "plan.json", why, _ADVICE)
        before = revision["digest"]
    arms = {name: _arm(folder, name, entry["config"]) for name, entry in last["arms"].items()}
    decoder = Decoder()
    trials = tuple(
        Trial(arm, number, seed, decoder.values(values), arms[arm], search=sum(search))
        for revision in revisions
        for arm, number, seed, values, *search in revision["trials"]
    )
    programs = tuple(
        as_dataclass(program, StoredProgram)
        for revision in revisions
        for program in revision["programs"]
    )
    if sorted(trial.name for trial in trials) != sorted(x for p in programs for x in p.trials):
        raise ValueError("its programs and its trials differ")
    return StoredPlan(
        arms=arms,
        trials=trials,
        programs=programs,
        reasons=tuple(reason for revision in revisions for reason in revision["reasons"]),
        goal=Goal(**last["goal"]),
        seeds=tuple(last["seeds"]),
        final_seeds=tuple(last["final_seeds"]),
        budgets=last["budgets"],
        checkpoints=last["checkpoints"],
        vmap=last["vmap"],
        looks=last.get("looks", "planned"),
        skewed=last.get("skewed", False),
        offsets=tuple(last.get("offsets", (0,))),
        per_example=last.get("per_example", True),
        vocabulary=tuple(last["vocabulary"] if "vocabulary" in last else content["vocabulary"]),
        revision=len(revisions),
        digest=last["digest"],
        revisions=tuple(revisions),
    )


def _arm(folder: Path, name: str, sha256: str) -> Config:
    file = folder / "arms" / f"{name}.yaml"
    try:
        with open_regular(file) as stream:
            found = hashlib.sha256(stream.read()).hexdigest()
    except FileNotFoundError as error:
        raise UserError(
            f"{file} is missing: restore it from a copy, or start the sweep in another --workdir."
        ) from error
    if found != sha256:
        raise UserError(
            f"{file} was changed after the sweep was planned: restore it, or start a sweep with the"
            " changed config in another --workdir."
        )
    try:
        return load([file])
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):  # the disk cannot be read any more
            raise error.__cause__ from None
        raise
