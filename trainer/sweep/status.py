"""What a sweep has computed, read from its folder by any process, as text; imports no jax.

`render` describes the sweep, and `describe_trial` one trial with its config and its result.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join, quote

from trainer.config import diff, dump
from trainer.config.wording import known_names, listing
from trainer.messages import UserError, duration, plural, printable, table
from trainer.sweep.code_changes import CodeChange, change_sentences, changes_in, fingerprint_of
from trainer.sweep.final import ArmSearch, mean, rank
from trainer.sweep.folder import SweepFolder
from trainer.sweep.halving import planned_steps, waiting_folder
from trainer.sweep.ledger import read_ledger, refuse_unreadable
from trainer.sweep.plan import Plan, SharedProgram, Trial, point_name
from trainer.sweep.plan_file import work_command
from trainer.sweep.running import WaveStatus, read_waves
from trainer.sweep.warning_text import warning_lines
from trainer.writers.lines import PREFIXES
from trainer.writers.summary import Summary, read_outcome


@dataclass(frozen=True)
class ArmStatus:
    """The runs of an arm, either those of the search or those on final seeds."""

    arm: str
    final: bool  # whether these are the final runs
    runs: int  # how many are planned
    done: int
    running: int  # how many a worker computes now
    diverged: int
    failed: int
    steps: int  # of all runs; where trials are cut, of those that go on
    # those that need not be computed any more; a run that ended early counts with all of its
    # steps. Where trials are cut, those that were computed.
    steps_done: int
    # search -> the number of its best point, of those with all results; of final runs, the
    # winner's. Searches without one are left out.
    best: Mapping[int, int]
    # the mean of the goal over the seeds of those points; None if a run has no value
    value: float | None
    pruned: int = 0
    waiting: int = 0  # how many wait at a cut for the others of their search

    @property
    def points(self) -> list[str]:
        """The names of the best points, of one for each search: "muon/0007"."""
        return [f"{self.arm}/{point_name(search, n)}" for search, n in self.best.items()]


@dataclass(frozen=True)
class Status:
    """What a sweep has computed."""

    # the search of each arm in the order of the plan, then the final runs of each
    arms: tuple[ArmStatus, ...]
    waves: tuple[WaveStatus, ...]  # those that are not finished
    outcomes: Mapping[str, Summary]  # folder of a trial -> its outcome, for those that ended
    # folders of finished trials whose summary.json is missing or damaged
    unreadable: tuple[str, ...]
    damaged: tuple[str, ...]  # sentences about files of waves that are damaged
    # none for an arm of which every point diverged; None before the winners are known
    final: tuple[Trial, ...] | None
    complete: bool  # whether all runs have ended, those on final seeds included
    # until it is complete, if the workers keep their speed; None if no worker has reported it
    seconds: float | None
    # folder of a trial -> the cut at which it waits for the others of its search
    waiting: Mapping[str, int] = field(default_factory=dict)

    @property
    def without_winner(self) -> list[str]:
        """The arms of which every trial diverged or failed; none before all trials have ended."""
        if self.final is None and not self.complete:
            return []
        return [arm.arm for arm in self.arms if not arm.final and not arm.best]


class SweepReader:
    """Reads the folder of a sweep again and again; outcomes are read once."""

    # Raises UserError if the folder is not that of a sweep, or its plan is damaged.

    def __init__(self, path: Path):
        around = (x for x in path.absolute().parents if (x / "plan.json").exists())
        if not (path / "plan.json").exists() and (above := next(around, None)):
            raise UserError(f"{path} is in the folder of a sweep, which is {above}: name that one.")
        self.path = path
        self._outcomes: dict[str, Summary] = {}
        self._folder = SweepFolder(path)
        self._forget()

    def _forget(self) -> None:
        """Drops what depends on the revision of the plan."""
        self._ranked: tuple[int, dict[ArmSearch, dict[int, float]]] = (-1, {})
        self._speeds: dict[int, float] = {}  # steps per second of a worker, by program
        self._waiting: dict[str, int] = {}  # see `Halving.waiting`

    @property
    def plan(self) -> Plan:
        """The plan of the sweep, as of the last `read`."""
        return self._folder.plan

    def read(self) -> Status:
        """Returns what is in the folder now."""
        # Raises UserError if plan.json or final.json is damaged, or the disk cannot be read.
        with refuse_unreadable(self.path):
            return self._read()

    def _read(self) -> Status:
        if self._folder.refresh():
            self._forget()
        # Waves are read before outcomes: trials may finish meanwhile, but none returns to a wave.
        waves, damaged = read_waves(self.path, self._folder.waves())
        found = self._folder.final_trials()
        final = tuple((found or {}).values())
        unreadable = tuple(self._look_for_outcomes((*self.plan.trials, *final)))
        # A worker that was killed may have left a wave of which no trial is to be computed.
        left = {t.folder for t in (*self.plan.trials, *final)} - {*self._outcomes, *unreadable}
        waves = tuple(wave for wave in waves if wave.held or not left.isdisjoint(wave.trials))
        self._waiting = self._folder.halving.waiting()
        outcomes = self._staged(waves) | self._outcomes
        in_wave = {name: wave for wave in waves for name in wave.trials if name not in outcomes}
        arms = [self._arm(name, self.plan.trials, in_wave, outcomes) for name in self.plan.searched]
        for name in dict.fromkeys(trial.arm for trial in final):
            arms.append(self._arm(name, final, in_wave, outcomes))
        status = Status(
            arms=tuple(arms),
            waves=waves,
            outcomes=outcomes,
            unreadable=unreadable,
            damaged=damaged,
            final=None if found is None else final,
            complete=not left and (found is not None or not self.plan.final_seeds),
            seconds=None,
            waiting=self._waiting,
        )
        return replace(status, seconds=self._seconds(status, in_wave))

    def code_changes(self) -> tuple[CodeChange, ...]:
        """Returns the changes of the user's code, from the ledger."""
        # Raises UserError if the disk cannot be read.
        with refuse_unreadable(self.path):
            return tuple(changes_in(read_ledger(self.path)))

    def program_of(self, trial: Trial) -> SharedProgram:
        """Returns the program of a trial."""
        return self.plan.programs[self._folder.program_of(trial)]

    def _look_for_outcomes(self, trials: Sequence[Trial]) -> Iterator[str]:
        """Reads the outcomes that are new; yields finished trials without a readable one."""
        root = str(self.path)
        for trial in trials:
            name = trial.folder
            if name in self._outcomes or not os.path.exists(f"{root}/{name}"):
                continue
            if (outcome := read_outcome(self.path / name)) is None:
                yield name
            else:
                self._outcomes[name] = outcome

    def _staged(self, waves: Sequence[WaveStatus]) -> dict[str, Summary]:
        """Returns the outcomes of trials that ended before the others of their waves."""
        found = {
            name: read_outcome(self.path / "waves" / wave.name / name)
            for wave in waves
            for name in wave.trials
            if name not in self._outcomes
        }
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def _rank(self) -> dict[ArmSearch, dict[int, float]]:
        if self._ranked[0] != len(self._outcomes):
            self._ranked = len(self._outcomes), rank(self.plan, self._outcomes)
        return self._ranked[1]

    def _arm(
        self,
        arm: str,
        trials: Sequence[Trial],
        in_wave: Mapping[str, WaveStatus],
        outcomes: Mapping[str, Summary],
    ) -> ArmStatus:
        of_arm = [trial for trial in trials if trial.arm == arm]
        final = bool(of_arm[0].final)  # the same for all of them
        cut = arm in self.plan.cuts and not final
        ends = [outcomes[t.folder].end for t in of_arm if t.folder in outcomes]
        steps = steps_done = 0
        for trial in of_arm:
            program, outcome = self.program_of(trial), outcomes.get(trial.folder)
            steps += program.updates
            step = self._waiting.get(trial.folder, 0)
            if outcome is not None:
                step = outcome.step if cut else program.steps
            elif (wave := in_wave.get(trial.folder)) is not None:
                step = max(wave.step, step)
            steps_done += program.updates_until(step)
        if cut:
            steps = planned_steps(self.plan, arm, [p for p in self.plan.programs if arm in p.arms])
            steps_done = steps if len(ends) == len(of_arm) else min(steps, steps_done)
        held = {wave.name: wave for t in of_arm if (wave := in_wave.get(t.folder)) and wave.held}
        if final:
            best = {trial.search: trial.number for trial in of_arm}
            found = [outcomes.get(trial.folder) for trial in of_arm]
            values = [None if each is None else each.value(self.plan.goal.row) for each in found]
        else:
            ranked = {key[1]: of for key, of in self._rank().items() if key[0] == arm and of}
            first = {search: next(iter(points.items())) for search, points in ranked.items()}
            finite = {search: of for search, of in first.items() if math.isfinite(of[1])}
            best = {search: number for search, (number, _) in finite.items()}
            values = [value for _, value in finite.values()]
        return ArmStatus(
            arm=arm,
            final=final,
            runs=len(of_arm),
            running=sum(wave.running for wave in held.values()),
            steps=steps,
            steps_done=steps_done,
            best=best,
            value=mean(values),
            **{end: ends.count(end) for end in ("done", "diverged", "failed", "pruned")},
            waiting=sum(t.folder in self._waiting and t.folder not in in_wave for t in of_arm),
        )

    def _seconds(self, status: Status, in_wave: Mapping[str, WaveStatus]) -> float | None:
        """Estimates the time that is left, by FLOPs, because programs differ in their steps."""
        speed = 0.0  # FLOPs per second
        for wave in status.waves:
            if not wave.moving:
                continue
            if wave.rate is not None and wave.running:
                self._speeds[wave.program] = wave.rate * wave.running
            flops = max(1, self.plan.programs[wave.program].flops)
            speed += self._speeds.get(wave.program, 0.0) * flops
        if not speed:
            return None
        left, ended = 0.0, {*status.outcomes, *status.unreadable}
        cut = {arm.arm: arm for arm in status.arms if arm.arm in self.plan.cuts and not arm.final}
        for name, arm in cut.items():
            flops = max(max(1, each.flops) for each in self.plan.programs if name in each.arms)
            left += (arm.steps - arm.steps_done) * flops
        for trial in (*self.plan.trials, *(status.final or ())):
            if trial.folder not in ended and (trial.final or trial.arm not in cut):
                program, wave = self.program_of(trial), in_wave.get(trial.folder)
                step = 0 if wave is None else wave.step
                left += (program.updates - program.updates_until(step)) * max(1, program.flops)
        if status.final is None and self.plan.final_seeds:
            # Of each arm the most that its winner may need.
            most: dict[str, int] = {}
            for program in self.plan.programs:
                flops = program.updates * max(1, program.flops)
                most |= {arm: max(most.get(arm, 0), flops) for arm in program.arms}
            left += len(self.plan.final_seeds) * len(self.plan.offsets) * sum(most.values())
        return left / speed


_SHOWN = 5  # runs that failed or diverged
_LONGEST = 200  # characters of a reason


def counts(status: Status, plan: Plan) -> list[str]:
    """Formats the runs of each arm as a table, and what is left in a line below it."""
    ends = ["runs", "done", "running", "diverged", "failed"]
    ends += ["waiting", "pruned"] if plan.cuts else []
    heads = ("arm", *ends, "steps", plan.goal.metric, "trial")
    rows = [heads, *(_row(arm, ends) for arm in status.arms)]
    return [*table(rows, right=range(1, 4 + len(ends))), progress_line(status)]


def _row(arm: ArmStatus, ends: Sequence[str]) -> tuple[str, ...]:
    best = [name.partition("/")[2] for name in arm.points] or ["-"]
    return (
        f"{arm.arm}, final" if arm.final else arm.arm,
        *(f"{getattr(arm, name):,}" for name in ends),
        f"{100 * arm.steps_done // max(1, arm.steps)}%",
        shown_metric(arm.value),
        best[0] if len(best) == 1 else f"of {plural(len(best), 'search')}",
    )


def progress_line(status: Status) -> str:
    """Returns how many runs have ended, how many are computed, and how long the others take."""
    runs = sum(arm.runs for arm in status.arms)
    ended = sum(arm.done + arm.diverged + arm.failed + arm.pruned for arm in status.arms)
    text = f"{ended:,} of {runs:,} runs"
    if status.complete:
        return f"{text}: the sweep is complete"
    if ended == runs:
        text += ", and the final ones follow"
    for name in ("diverged", "failed", "pruned", "running"):
        if count := sum(getattr(arm, name) for arm in status.arms):
            text += f", {count:,} {name}"
    if status.seconds is not None:
        text += f", ETA {duration(status.seconds)}"
    return text


def render(status: Status, plan: Plan, folder: Path, changes: Sequence[CodeChange] = ()) -> str:
    """Formats the status of a sweep: arms, waves, failures and the results of the winners."""
    # Commands to run next name the folder as it is given. The last line ends with a newline.
    heads = ("wave", "runs", "first run", "step", "steps/s", "worker")
    parts = [
        counts(status, plan),
        table([heads, *map(_wave, status.waves)] if status.waves else [], right=(1, 3, 4)),
        list(_bad(status, "failed")),
        list(_bad(status, "diverged")),
        [f"{name} has no summary.json that can be read." for name in status.unreadable[:_SHOWN]],
        list(status.damaged[:_SHOWN]),
        warning_lines(plan.warnings, plan.arms),
        [printable(sentence) for sentence in change_sentences(changes)],
        _winners(status, plan),
        _next(status, plan, folder),
    ]
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts if part)


def _wave(wave: WaveStatus) -> tuple[str, ...]:
    worker = wave.worker or "not known yet"
    if not wave.held:
        worker = f"none; the last was {wave.worker}" if wave.worker else "none"
    elif not wave.moving:
        worker += ", paused or gone"
    rate = "-"
    if wave.rate is not None:
        rate = f"{wave.rate:,.0f}" if wave.rate >= 100 else f"{wave.rate:.3g}"
    return wave.name, f"{len(wave.trials):,}", wave.trials[0], f"{wave.step:,}", rate, worker


def _bad(status: Status, end: str) -> Iterator[str]:
    """Names the runs that failed or diverged, and why; the first ones of each."""
    found = [(name, outcome) for name, outcome in status.outcomes.items() if outcome.end == end]
    for name, outcome in found[:_SHOWN]:
        # The first sentence; `sweep show` has the others.
        why = outcome.why.partition(". ")[0].rstrip(".")
        yield from table([(f"{name} {end}: {why[:_LONGEST]}.",)])
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN:,} more {end}."


def _winners(status: Status, plan: Plan) -> list[str]:
    """Formats the results of the winners on the final seeds."""
    if status.final is None:
        return []
    splits = dict.fromkeys((plan.goal.select_on, "test"))
    searches, several = range(len(plan.offsets)), len(plan.offsets) > 1
    heads = [f"search {x}" for x in searches] if several else [*map(str, plan.final_seeds)]
    rows: list[Sequence[str]] = [("winner", "split", "mean", *heads)]
    for arm in plan.arms:
        trials = [trial for trial in status.final if trial.arm == arm]
        groups = [[trial] for trial in trials]
        if several:
            groups = [[trial for trial in trials if trial.search == s] for s in searches]
        for split in splits if trials else ():
            name = "" if split != plan.goal.select_on else arm
            if name and not several:
                name += f" {trials[0].point}"
            row = PREFIXES[split] + plan.goal.metric
            outcomes = [[status.outcomes.get(trial.folder) for trial in group] for group in groups]
            cells = [_mean_or_word(group, row) for group in outcomes]
            whole = mean([value for value, _ in cells])
            rows.append((name, split, shown_metric(whole), *(text for _, text in cells)))
    title = f"{plan.goal.metric} of the winners, run again on seeds that no trial used:"
    none = status.without_winner
    lines = [f"{arm} has no winner: every trial diverged or failed." for arm in none]
    return [title, *table(rows, right=range(2, 3 + len(heads))), *lines]


def _mean_or_word(outcomes: Sequence[Summary | None], row: str) -> tuple[float | None, str]:
    """Returns the mean over the seeds of a winner, and the same as text, or why there is none."""
    for outcome in outcomes:
        if outcome is not None and outcome.end != "done":
            return None, outcome.end
        if outcome is None or row not in outcome.metrics:
            return None, "-"
    found = mean([outcome.metrics[row] for outcome in outcomes if outcome is not None])
    return found, shown_metric(found)


def _next(status: Status, plan: Plan, folder: Path) -> list[str]:
    at = quote(str(folder))
    if status.complete:
        # The best trial of the first arm that has one.
        best = next((name for arm in status.arms for name in arm.points), "ARM/NUMBER")
        return [f"python -m trainer report {at}", f"python -m trainer sweep show {at} {best}"]
    if not any(wave.moving for wave in status.waves):
        command = join(work_command(folder, plan.vocabulary))
        return [f"No process computes it now: python {command} goes on."]
    return []


def shown_metric(value: float | None) -> str:
    """Formats a value of a metric; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def best_runs(folder: Path) -> dict[str, list[Path]]:
    """Returns the finished runs of each arm's best point: on final seeds, or else of the search."""
    # The keys are arm and number, such as "muon 0007", or the number of its searches, such as
    # "muon, 5 searches". Raises UserError if the folder is no sweep's, or no point has all results.
    reader = SweepReader(folder)
    status = reader.read()
    found: dict[str, list[Path]] = {}
    ends = {name: outcome.end for name, outcome in status.outcomes.items()}
    for arm in status.arms:  # the final runs come last, and replace those of the search
        trials = status.final or () if arm.final else reader.plan.trials
        best = [t for t in trials if t.arm == arm.arm and arm.best.get(t.search) == t.number]
        if done := [folder / t.folder for t in best if ends.get(t.folder) == "done"]:
            names = [name.replace("/", " ") for name in arm.points]
            several = f"{arm.arm}, {plural(len(names), 'search')}"
            found[names[0] if list(arm.best) == [0] else several] = done
    if not found:
        raise UserError(
            f"No trial of {folder} has a result that can be drawn: `python -m trainer sweep status`"
            " shows what there is."
        )
    return found


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
        own = [str(trial.seed) for trial in trials if trial.final and trial.arm == rest[0]]
        has = f"the seeds {listing(own)}" if own else "none yet"
        return f"There is no final run {name!r}: {rest[0]} has {has}."
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
