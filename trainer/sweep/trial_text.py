"""Finds a trial by its name, and formats its config and its result as plain text."""

import re
from collections.abc import Iterator, Sequence
from shlex import quote

from trainer.config import diff, dump
from trainer.config.wording import known_names, listing
from trainer.messages import UserError, printable
from trainer.sweep.code_changes import fingerprint_of
from trainer.sweep.halving import waiting_folder
from trainer.sweep.plan import Trial, point_name
from trainer.sweep.status import Status, SweepReader, mean, shown_metric


def describe_trial(reader: SweepReader, name: str) -> str:
    """Formats a trial as its resolved config, in YAML, below comments with all else."""
    # `name` is "ARM/NUMBER", "ARM/NUMBER/SEED", "final/ARM" or "final/ARM/SEED", also with
    # "trials/" before it. Without a seed, the config is that of the first one. Saved to a file, the
    # text is the config of a run. Raises UserError if there is no such trial.
    status = reader.read()
    trials = find_trials(reader, status, name)
    first, goal = trials[0], reader.plan.goal
    lines = [f"{trial.folder}: {_state(reader, status, trial)}" for trial in trials]
    outcomes = [status.outcomes.get(trial.folder) for trial in trials]
    if len(outcomes) > 1:
        values = [None if outcome is None else outcome.value(goal.row) for outcome in outcomes]
        lines.append(f"mean of {goal.row}: {shown_metric(mean(values))}")
    elif (outcome := outcomes[0]) is not None:
        lines += [outcome.why] if outcome.why else []
        lines += [f"{metric} {value:.6g}" for metric, value in sorted(outcome.metrics.items())]
    lines += _code(reader, trials)
    if not first.pending:
        lines += ["", f"What differs from the config of {first.arm}:"]
        lines += diff(first.base.root, first.config.root) or ["nothing"]
        lines += ["", *_commands(reader, status, first, name)]
    head = "".join(f"# {printable(line)}".rstrip() + "\n" for line in lines)
    return head if first.pending else f"{head}\n{dump(first.config.root)}"


def find_trials(reader: SweepReader, status: Status, name: str) -> list[Trial]:
    """Returns the trials that a name means; raises UserError if there is no such trial."""
    # Those are the trials of a point, or one of them. For names, see `describe_trial`; "muon/7" is
    # "muon/0007", and "muon/2.7" is "muon/2.0007".
    trials = (*reader.plan.trials, *(status.final or ()))
    known: dict[str, list[Trial]] = {}
    for trial in trials:
        point = f"{trial.final}/{trial.arm}" if trial.final else f"{trial.arm}/{trial.point}"
        for key in (point, f"{point}/{trial.seed}"):
            known.setdefault(key, []).append(trial)
    asked = name.strip("/")
    for each in (asked, asked.removeprefix("trials/")):
        # Names in search 0 have no number of a search.
        padded = re.sub(
            r"(?<=/)(?:0\.)?(\d+\.)?(\d+)", lambda x: (x[1] or "") + x[2].zfill(4), each, count=1
        )
        if found := known.get(each) or known.get(padded):
            return found
    raise UserError(_unknown(reader, asked, trials))


def _unknown(reader: SweepReader, name: str, trials: Sequence[Trial]) -> str:
    """Returns a sentence about a name that is not that of a trial, and what there is."""
    first, *rest = name.removeprefix("trials/").split("/")
    if first == "final" and rest and rest[0] in reader.plan.arms:
        if final := [trial for trial in trials if trial.final and trial.arm == rest[0]]:
            seeds = listing([str(trial.seed) for trial in final])
            return f"There is no final run {name!r}: {rest[0]} has the seeds {seeds}."
        return f"There is no final run {name!r}: {rest[0]} has none yet."
    if first not in reader.plan.arms:
        hint = known_names(rest[0] if first == "final" and rest else first, reader.plan.arms)
        return f"There is no trial {name!r}, because no arm has this name. {hint}"
    of_arm = [trial for trial in trials if trial.arm == first and not trial.final]
    asked = rest[0].partition(".")[0] if rest and "." in rest[0] else ""
    search = next((trial.search for trial in of_arm if str(trial.search) == asked), 0)
    same = [trial for trial in of_arm if trial.search == search]
    numbers = [trial.number for trial in same]
    known = f"{first}/{point_name(search, min(numbers))}"
    known += f" to {first}/{point_name(search, max(numbers))}"
    seeds = listing([str(seed) for seed in dict.fromkeys(trial.seed for trial in same)])
    more = len(reader.plan.offsets)
    others = f" The searches 1 to {more - 1} have names such as {first}/1.0000." if more > 1 else ""
    return f"There is no trial {name!r}: there are {known}, each with the seeds {seeds}.{others}"


def _state(reader: SweepReader, status: Status, trial: Trial) -> str:
    """Returns how a trial ended, or how far it is, and its value of the goal."""
    if (outcome := status.outcomes.get(trial.folder)) is not None:
        text = f"{outcome.end} at step {outcome.step:,}"
        value = outcome.value(reader.plan.goal.row)
        return text if value is None else f"{text}, {reader.plan.goal.row} {shown_metric(value)}"
    for wave in status.waves:
        if trial.folder in wave.trials:
            where = f"step {wave.step:,} of {reader.program_of(trial).steps:,}"
            return f"running at {where}" if wave.held else f"stopped at {where}"
    if trial.folder in status.waiting:
        return f"waiting at the cut of step {status.waiting[trial.folder]:,}"
    return "not chosen before earlier points have ended" if trial.pending else "not computed yet"


def _code(reader: SweepReader, trials: Sequence[Trial]) -> Iterator[str]:
    """Says which trials ran after a change of the user's code, if it changed."""
    changes = reader.code_changes()
    for trial in trials if changes else ():
        code = fingerprint_of(reader.path / trial.folder).get("code", {})
        changed = [
            name for each in changes for name, x in each.files.items() if code.get(name) == x
        ]
        if changed:
            which = "It" if len(trials) == 1 else trial.folder
            yield f"{which} ran after {listing(list(dict.fromkeys(changed)))} had changed."


def _commands(reader: SweepReader, status: Status, trial: Trial, name: str) -> Iterator[str]:
    """Says where the files of a trial are, and how to repeat it as a run of its own."""
    options = "".join(f" --vocabulary={quote(each)}" for each in reader.plan.vocabulary)
    folder = reader.path / trial.folder
    outcome, at = status.outcomes.get(trial.folder), status.waiting.get(trial.folder)
    if outcome is not None and outcome.end == "pruned":
        at = outcome.step
    elif at is not None:
        folder = waiting_folder(reader.path, trial, at)
    if folder.exists():
        yield f"Its files are in {folder}. To repeat it alone:"
        until = "" if at is None else f" --until={at}"
        yield f"python -m trainer --config={quote(str(folder / 'config.yaml'))}{until}{options}"
        return
    show = f"python -m trainer sweep show {quote(str(reader.path))} {quote(name)}"
    yield "It has no folder of its own yet. To compute it alone:"
    yield f"{show} > trial.yaml && python -m trainer --config=trial.yaml{options}"
