"""Formats the status of a sweep as plain text, for the terminal."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import join, quote

from trainer.messages import duration, plural, printable, table
from trainer.sweep.code_changes import CodeChange, sentences
from trainer.sweep.outcome import Outcome
from trainer.sweep.running import WaveStatus
from trainer.sweep.status import ArmStatus, Status, mean
from trainer.sweep.stored_plan import StoredPlan, work_command
from trainer.sweep.warning_text import warning_lines
from trainer.writers.lines import PREFIXES

_SHOWN = 5  # runs that failed or diverged
_LONGEST = 200  # characters of a reason


def counts(status: Status, plan: StoredPlan) -> list[str]:
    """Formats the runs of each arm as a table, and what is left in a line below it.

    Args:
        status: of the sweep.
        plan: its plan.
    """
    head = ("arm", "runs", "done", "running", "diverged", "failed", "steps")
    rows: list[Sequence[str]] = [(*head, plan.goal.metric, "trial")]
    rows += [_row(arm) for arm in status.arms]
    return [*table(rows, right=range(1, 9)), in_a_line(status)]


def _row(arm: ArmStatus) -> tuple[str, ...]:
    return (
        f"{arm.arm}, final" if arm.final else arm.arm,
        *(f"{count:,}" for count in (arm.runs, arm.done, arm.running, arm.diverged, arm.failed)),
        f"{100 * arm.steps_done // max(1, arm.steps)}%",
        shown(arm.value),
        _best(arm),
    )


def _best(arm: ArmStatus) -> str:
    """Names the best point of an arm, or tells how many searches have one."""
    names = [name.partition("/")[2] for name in arm.points]
    if len(names) > 1:
        return f"of {plural(len(names), 'search')}"
    return names[0] if names else "-"


def in_a_line(status: Status) -> str:
    """Returns how many runs have ended, how many are computed, and how long the others take."""
    runs = sum(arm.runs for arm in status.arms)
    ended = sum(arm.done + arm.diverged + arm.failed for arm in status.arms)
    text = f"{ended:,} of {runs:,} runs"
    if status.complete:
        return f"{text}: the sweep is complete"
    if ended == runs:
        text += ", and the final ones follow"
    if diverged := sum(arm.diverged for arm in status.arms):
        text += f", {diverged:,} diverged"
    if failed := sum(arm.failed for arm in status.arms):
        text += f", {failed:,} failed"
    if running := sum(arm.running for arm in status.arms):
        text += f", {running:,} running"
    if status.seconds is not None:
        text += f", ETA {duration(status.seconds)}"
    return text


def render(
    status: Status, plan: StoredPlan, folder: Path, changes: Sequence[CodeChange] = ()
) -> str:
    """Formats the status of a sweep: arms, waves, failures and the results of the winners.

    Args:
        status: of the sweep.
        plan: its plan.
        folder: of the sweep, as the commands that are named take it.
        changes: of the user's code.

    Returns:
        Lines of text; the last ends with a newline.
    """
    parts = [
        counts(status, plan),
        _waves(status),
        list(_bad(status, "failed")),
        list(_bad(status, "diverged")),
        [f"{name} has no summary.json that can be read." for name in status.unreadable[:_SHOWN]],
        list(status.damaged[:_SHOWN]),
        warning_lines(plan.warnings, plan.arms),
        [printable(sentence) for sentence in sentences(changes)],
        _winners(status, plan),
        _next(status, plan, folder),
    ]
    return "\n".join("".join(f"{line}\n" for line in part) for part in parts if part)


def _waves(status: Status) -> list[str]:
    rows: list[Sequence[str]] = [("wave", "runs", "first run", "step", "steps/s", "worker")]
    rows += [_wave(wave) for wave in status.waves]
    return table(rows, right=(1, 3, 4)) if status.waves else []


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


def _winners(status: Status, plan: StoredPlan) -> list[str]:
    """Formats the results of the winners on the final seeds."""
    if status.final is None:
        return []
    splits = dict.fromkeys((plan.goal.select_on, "test"))
    searches = range(len(plan.offsets))
    heads = [str(seed) for seed in plan.final_seeds]
    if len(searches) > 1:
        heads = [f"search {search}" for search in searches]
    rows: list[Sequence[str]] = [("winner", "split", "mean", *heads)]
    for arm in plan.arms:
        trials = [trial for trial in status.final if trial.arm == arm]
        groups = [[trial] for trial in trials]
        if len(searches) > 1:
            groups = [[trial for trial in trials if trial.search == s] for s in searches]
        for split in splits if trials else ():
            name = "" if split != plan.goal.select_on else arm
            if name and len(searches) == 1:
                name += f" {trials[0].point}"
            row = PREFIXES[split] + plan.goal.metric
            found = [
                [_final(status.outcomes.get(trial.folder), row) for trial in group]
                for group in groups
            ]
            means = [_mean_or_word(group) for group in found]
            values = [value if isinstance(value, float) else None for value in means]
            cells = [value if isinstance(value, str) else shown(value) for value in means]
            rows.append((name, split, shown(mean(values)), *cells))
    title = f"{plan.goal.metric} of the winners, run again on seeds that no trial used:"
    won = {trial.arm for trial in status.final}
    none = [
        f"{arm} has no winner: every trial diverged or failed."
        for arm in plan.arms
        if arm not in won
    ]
    return [title, *table(rows, right=range(2, 3 + len(heads))), *none]


def _mean_or_word(values: Sequence[float | str]) -> float | str:
    """Returns the mean over the seeds of a winner, or why there is none."""
    words = [value for value in values if isinstance(value, str)]
    if words or not values:
        return words[0] if words else "-"
    return math.fsum(map(float, values)) / len(values)


def _final(outcome: Outcome | None, row: str) -> float | str:
    if outcome is None:
        return "-"
    if outcome.end != "done":
        return outcome.end
    return outcome.metrics.get(row, "-")


def _next(status: Status, plan: StoredPlan, folder: Path) -> list[str]:
    at = quote(str(folder))
    if status.complete:
        return [
            f"python -m trainer sweep show {at} {_to_show(status)}",
            f"python -m trainer plot {at} --figure=FILE",
        ]
    if not any(wave.moving for wave in status.waves):
        command = join(work_command(folder, plan.vocabulary))
        return [f"No process computes it now: python {command} goes on."]
    return []


def _to_show(status: Status) -> str:
    """Returns the best trial of the first arm that has one, as `sweep show` takes it."""
    return next((name for arm in status.arms for name in arm.points), "ARM/NUMBER")


def shown(value: float | None) -> str:
    """Formats a value of a metric; "-" for None."""
    return "-" if value is None else f"{value:.4g}"
