"""Segments of runs that are computed again: from a kept state, or the first one, to the next.

A segment is reproduced if it has the rows of the run, and ends with the state with which the next
one begins, bit for bit. A run of which all segments are reproduced was computed as it says, because
the first segment begins with the state that config and seed determine. Start with `segments_of` and
`recompute`.

Versions, devices and numbers of cores round otherwise, and training amplifies that: most in the
first steps of a run. By how much is measured on segments that are drawn for that alone, of those
that begin a run and of the others apart; see `Tolerance`.
"""

import contextlib
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import config as configs
from trainer.checkpoint import Checkpoints, CorruptCheckpoint, distances
from trainer.diagnose.compare import OF_CONFIG, Rows, compare_rows
from trainer.diagnose.verify import TrainerProcess
from trainer.engine.program import load_located
from trainer.messages import DONE, FAILED, STOPPED, UserError
from trainer.report.results import Result
from trainer.studies.referee_runs import importing_from
from trainer.sweep.ledger import files_in
from trainer.sweep.per_example_file import example_differences
from trainer.sweep.plan import SEGMENTS
from trainer.sweep.wave import keep_examples
from trainer.train.pending import CLIPPED_FILE
from trainer.train.trained import restore_of
from trainer.workdir.fingerprint import fingerprint_differences
from trainer.writers import iterate_metrics, read_metrics
from trainer.writers.lines import lines_of
from trainer.writers.run_record import read_record
from trainer.writers.summary import Summary, read_summary

ENDS = "end"  # of a run that ended otherwise, with the same rows
STATE = "state: "  # before the name of a part of the state, beside the names of metrics
EXAMPLES = "single test examples, "  # before the name of an array of per_example.npz


@dataclass(frozen=True)
class Segment:
    """A part of a run."""

    run: Result
    start: int = 0  # the step of the state with which it begins; 0 for the first state of the run
    end: int | None = None  # its last step; None for that of the run
    code: Path | None = None  # the folder from which it imports packages; None for as here

    @property
    def name(self) -> str:
        """The folder of the run in that of the sweep, and the steps unless it is the whole run."""
        if not self.start and self.end is None:
            return self.run.name
        last = "the last" if self.end is None else f"{self.end:,}"
        return f"{self.run.name} from step {self.start + 1:,} to {last}"

    @property
    def kept(self) -> Path:
        """The folder of the states that the run keeps."""
        return self.run.folder / SEGMENTS


def kept_by(run: Result) -> list[int]:
    """Returns the steps after which a run kept its state."""
    names = [each.name for each in (run.folder / SEGMENTS).glob("*")]
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def segments_of(run: Result, kept: Sequence[int], code: Path | None = None) -> Iterator[Segment]:
    """Yields the segments between the steps `kept`; if it is empty, the whole run as one."""
    starts = sorted(kept)
    for start, end in zip([0, *starts], [*starts, None], strict=True):
        # A trial that was stopped early may end with the state that it keeps.
        steps = (row["step"] for row in iterate_metrics(run.folder))
        if not start or end is not None or max(steps, default=0) > start:
            yield Segment(run, start, end, code)


@dataclass(frozen=True)
class Recomputed:
    """A segment that was computed again."""

    name: str
    # what differs -> the largest relative difference: metrics by their names, and parts of the
    # last state after `STATE`; infinite if only one side has a value. Of the results on single test
    # examples, after `EXAMPLES`, it is the mean difference. Empty if all are equal, bit for bit.
    apart: Mapping[str, float] = field(default_factory=dict)
    first: str = ""  # where it differs first, such as "train/loss at step 10"; "" if it does not
    differing: tuple[str, ...] = ()  # what the environment of the check has otherwise, as texts
    begins_run: bool = False  # whether it begins with the first state of its run
    # whether code, data or settings are among `differing`, with which something else is computed,
    # and not only rounded otherwise
    other_program: bool = False

    @property
    def same(self) -> bool:
        """Whether all rows, the state at the end and single results are equal, bit for bit."""
        return not self.apart

    @property
    def largest(self) -> float:
        """The largest of `apart`, of metrics and states if they differ; 0 if nothing does."""
        of_rows = [x for name, x in self.apart.items() if not name.startswith(EXAMPLES)]
        return max(of_rows or self.apart.values(), default=0.0)


def recompute(
    segment: Segment, vocabulary: Sequence[str], examples: bool = False
) -> tuple[Recomputed, dict[str, Any]]:
    """Computes a segment again in a process of its own; raises UserError if it cannot."""
    # It runs the command that trains, in a folder of its own. With `examples`, a run that ends
    # with the segment is evaluated on single test examples, too. Returns the result, and the
    # fingerprint of the process. The UserError says nothing of the run.
    run, end = segment.run, segment.end
    until = run.summary.step if end is None and run.end == "pruned" else end
    with tempfile.TemporaryDirectory(prefix="lockstep-claim-") as home:
        again, config = Path(home) / "run", (run.folder / "config.yaml").absolute()
        command = [sys.executable, "-m", "trainer", f"--config={config}"]
        command += [f"--vocabulary={each}" for each in vocabulary]
        # No logger of the config, which would use the account of whoever checks.
        command += ["--set=writers=[]", "--allow_changed=writers"]
        command += [f"--until={until}"] if until is not None else []
        if segment.start:
            _begin(segment, again)
        with TrainerProcess(command, again, importing_from(segment.code)) as process:
            process.wait(DONE, STOPPED, FAILED)
            summary = _ended(segment, read_summary(again), until, process)
        record = read_record(again / "run.json")
        fingerprint = {} if record is None else dict(record["fingerprint"])
        apart, first = _compare(segment, again)
        if examples and end is None and summary.end == run.end == "done":
            _keep_examples(again, summary.step, vocabulary)
            found = example_differences(run.folder, again)
            apart |= {f"{EXAMPLES}{name}": size for name, size in found.items()}
            first = first or ", ".join(f"{EXAMPLES}{name}" for name in found)
        wanted = "stopped" if until is not None else run.end
        if summary.end != wanted and not apart:  # all rows are those of a run that ended otherwise
            apart, first = {ENDS: math.inf}, f"as {summary.end!r}, and not as {wanted!r}"
    differing, other_program = process_conditions(run, fingerprint)
    found = Recomputed(segment.name, apart, first, differing, segment.start == 0, other_program)
    return found, fingerprint


def _ended(
    segment: Segment, summary: Summary | None, until: int | None, process: TrainerProcess
) -> Summary:
    """Returns how the process ended; raises UserError if that says nothing of the run."""
    # A run that diverged ends so again; any other error says nothing of the claim.
    if summary is None or summary.end == "failed" != segment.run.end:
        raise UserError(f"{segment.name} could not be computed:\n{process.tail()}")
    if until is None and summary.end != "failed" == segment.run.end:
        raise UserError(
            f"{segment.name} failed where the sweep was computed, and not here, which shows"
            f" nothing of it: {segment.run.folder / 'summary.json'} says why. A further public"
            " number draws others."
        )
    return summary


def _keep_examples(again: Path, step: int, vocabulary: Sequence[str]) -> None:
    """Writes the results on single test examples of the run in a folder, which has ended."""
    program = load_located(configs.load([again / "config.yaml"]), vocabulary)
    state = restore_of(program, again, step)
    keep_examples(program, state, again, fence=lambda: None, log=lambda line: None)


def process_conditions(run: Result, fingerprint: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Returns what a process has otherwise than a run, as texts; see `Recomputed`."""
    changes = [
        x for x in fingerprint_differences(run.fingerprint, fingerprint) if x.key not in OF_CONFIG
    ]
    return tuple(map(str, changes)), any(change.kind != "bits" for change in changes)


def _begin(segment: Segment, again: Path) -> None:
    """Makes a folder as a run has left it that was stopped at the start of a segment."""
    start = segment.start
    # Only files that the ledger has, and no links to others of this machine.
    for name in files_in(segment.kept / str(start)):
        copy = again / "checkpoints" / str(start) / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(segment.kept / str(start) / name, copy)
    shutil.copyfile(segment.run.folder / "config.yaml", again / "config.yaml")
    with contextlib.suppress(FileNotFoundError):  # what the next row counts from before the start
        shutil.copyfile(segment.run.folder / CLIPPED_FILE, again / CLIPPED_FILE)
    # Rows up to the start say that its state was evaluated; nothing is computed from them.
    with open(again / "metrics.jsonl", "wb") as file:
        for line, row in lines_of(segment.run.folder / "metrics.jsonl"):
            if row is not None and row["step"] <= start:
                file.write(line)


# The comparison.


def _compare(segment: Segment, again: Path) -> tuple[dict[str, float], str]:
    """Returns `apart` and `first` of a segment and the folder in which it was computed again."""
    start, end = segment.start, segment.end

    def within(rows: Iterable[dict[str, Any]]) -> Rows:
        after = -1 if start == 0 else start
        return [x for x in rows if x["step"] > after and (end is None or x["step"] <= end)]

    theirs = segment.run.folder
    apart, first = row_differences(within(read_metrics(theirs)), within(read_metrics(again)))
    rows = within(iterate_metrics(theirs))
    counts = Counter((row["step"], name) for row in rows for name in row if name != "step")
    if twice := [value for value, count in counts.items() if count > 1]:  # which no run writes
        step, name = min(twice)
        apart, first = apart | {"rows": math.inf}, f"{name} at step {step:,} is there twice"
    if end is not None:
        state = _state_differences(segment.kept, again, end)
        first = first or (f"{next(iter(state))} at step {end:,}" if state else "")
        apart |= state
    return apart, first


def row_differences(theirs: Rows, ours: Rows) -> tuple[dict[str, float], str]:
    """Returns metric -> the largest relative difference of its values, and where the first is."""
    # Only metrics with a difference of bits are in it, and no clocked ones. The difference is
    # infinite if only one side has a row or a value, or if one is not finite.
    apart: dict[str, float] = {}
    first = ""
    one, other = ({row["step"]: row for row in rows} for rows in (theirs, ours))
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other:
            apart["rows"] = math.inf
            first = first or f"only {'the run' if step in one else 'the check'} has step {step:,}"
            continue
        for name in compare_rows([one[step]], [other[step]]).names:
            size = _relative(one[step].get(name), other[step].get(name))
            apart[name] = max(apart.get(name, 0.0), size)
            first = first or f"{name} at step {step:,}"
    return apart, first


def _relative(a: float | None, b: float | None) -> float:
    """Returns the relative difference of two values; infinite if one is none or not finite."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0  # 0.0 and -0.0 differ in bits


def _state_differences(kept: Path, again: Path, step: int) -> dict[str, float]:
    """Returns part of the state -> its relative difference at a step, for parts that differ."""
    if step not in Checkpoints(again / "checkpoints", read_only=True).steps():
        return {f"{STATE}all": math.inf}  # it diverged before
    try:
        found = distances(kept, step, again)
    except CorruptCheckpoint as error:
        raise UserError(f"The state of step {step} in {kept} is damaged: {error}.") from error
    return {f"{STATE}{part}": size for part, size in found.items()}


# The tolerance is so many times the median difference, because honest segments differ among each
# other: those that begin a run of a small GPT by 75 times, from 8e-5 to 6e-3.
FACTOR = 100.0
# It is at least as much for the rounding of a float32, and in any case at most WIDEST: whoever
# forged most of what is measured would else choose it.
_ROUNDING, WIDEST = 2.0**-24, 0.01
FEWEST = 3  # segments of which a median says anything


@dataclass(frozen=True)
class Tolerance:
    """The differences that two environments have in segments of a kind."""

    # It rests on the median, so that less than half of the segments, if they are forged, cannot
    # widen it; and on all metrics and parts of the state together, because the differences of one
    # metric are mostly none or one unit of rounding.

    measured: tuple[Recomputed, ...]  # on which they were measured; none of them is judged
    begins_run: bool = False  # the kind: whether they begin with the first state of a run
    judged: int = 0  # how many of the kind were drawn to be judged
    total: int = 0  # how many of the kind there are

    @property
    def median(self) -> float:
        """That of the largest differences, relative to the values; the lower one of two."""
        return sorted(each.largest for each in self.measured)[(len(self.measured) - 1) // 2]

    @property
    def allowed(self) -> float:
        """How far a metric, or a part of the state, may be apart."""
        return min(FACTOR * max(self.median, _ROUNDING), WIDEST)

    def beyond(self, segment: Recomputed) -> dict[str, float]:
        """Returns what of a segment is further apart than allowed, the furthest first."""
        found = {name: size for name, size in segment.apart.items() if size > self.allowed}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def caught(total: int, forged: int, count: int) -> float:
    """Returns the probability that a draw has at least one of some forged segments.

    It is 1 - C(total - forged, count) / C(total, count).

    Example:
        >>> round(caught(10, 1, 3), 12)
        0.3
    """
    return 1 - math.comb(total - forged, count) / math.comb(total, count)


def caught_by_tolerance(total: int, forged: int, measured: int, judged: int) -> float:
    """Returns the probability that forged segments are found by a tolerance.

    They are if at least one of them was drawn, for the measurement or to be judged, and less than
    half of the measured ones are forged, so that the median is that of an honest segment. Forged
    are `forged` of `total`, by more than the tolerance that honest ones give.

    Example:
        >>> round(caught_by_tolerance(10, 1, 3, 2), 12)
        0.5
    """
    most = (measured - 1) // 2
    few = sum(
        math.comb(forged, n) * math.comb(total - forged, measured - n) for n in range(most + 1)
    )
    missed = math.comb(total - forged, measured + judged) / math.comb(total, measured + judged)
    return few / math.comb(total, measured) - missed
