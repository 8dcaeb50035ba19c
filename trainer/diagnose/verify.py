"""Checks exact resume on a user's config: single steps against blocks, a kill and a restore.

Each of two runs writes the hashes of its batches and states; the first difference names a leaf.
Start with `verify`.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from trainer import checkpoint, writers
from trainer.engine.contracts import Batch
from trainer.engine.datasets import digest_batch
from trainer.engine.program import Program
from trainer.engine.step import State
from trainer.messages import DONE, STOPPED, UserError
from trainer.train.loop import Observer

FILE = "trace.jsonl"


def trace(workdir: str | Path) -> Observer:
    """Returns what writes the hashes of batches and states, a line a step, to trace.jsonl."""
    # The last line of a block has the hashes of every leaf of the state as well. A resumed run
    # first drops the lines of later steps. Of several processes, process 0 writes, with the hash of
    # its shard of the batch.
    path, first, begun = Path(workdir).absolute() / FILE, jax.process_index() == 0, False

    def write(step: int, batches: Sequence[Batch], state: State) -> None:
        nonlocal begun
        before = step - len(batches)
        if first and not begun:
            writers.truncate_after(path, before)
            begun = True
        # The key of the last step, as `train_step` computes it from the number of that step.
        key = jax.random.fold_in(jax.random.key(state.run_state["seed"]), state.step)
        rows: list[dict[str, Any]] = [
            {"step": before + number, "batch": digest_batch(batch)}
            for number, batch in enumerate(batches, 1)
        ]
        rows[-1]["leaves"] = checkpoint.digests(state) | {"rng": checkpoint.digests(key)[""]}
        if first:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    return write


def read_trace(workdir: str | Path) -> dict[int, dict[str, Any]]:
    """Returns step -> {"batch": hash, "leaves": {path: hash}} from a run's trace.jsonl."""
    # Only the last step of each block has "leaves".
    text = (Path(workdir) / FILE).read_text(encoding="utf-8")
    return {row["step"]: row for row in map(json.loads, text.splitlines())}


class FirstDifference(NamedTuple):
    """The first difference of two runs."""

    step: int  # from 1
    name: str  # the path of a leaf, "batch", or a metric


def first_difference(
    one: Mapping[int, Mapping[str, Any]], two: Mapping[int, Mapping[str, Any]]
) -> FirstDifference | None:
    """Returns the earliest difference of two traces; None if they are equal."""
    # At a step, the batches are compared before the leaves; leaves at the steps at which both
    # traces have them.
    for step in sorted({*one, *two}):
        if step not in one or step not in two:
            return FirstDifference(step, "only one run has this step")
        if one[step]["batch"] != two[step]["batch"]:
            return FirstDifference(step, "batch")
        if "leaves" not in one[step] or "leaves" not in two[step]:
            continue  # inside of a block
        a, b = one[step]["leaves"], two[step]["leaves"]
        for name in dict.fromkeys([*a, *b]):
            if a.get(name) != b.get(name):
                return FirstDifference(step, name)
    return None


def kill_after_checkpoint(workdir: str | Path, step: int, latest: int) -> Observer:
    """Returns what kills the process by SIGKILL after the checkpoint of `step` is committed."""
    # At the end of a block. From the step `latest` on, it waits up to a minute for the commit.
    committed = Path(workdir).absolute() / "checkpoints" / str(step)

    def kill(last: int, batches: Sequence[Batch], state: State) -> None:
        if last <= step:
            return
        give_up = time.monotonic() + 60
        # A small model may finish all of its steps before the save is committed.
        while last >= latest and not committed.is_dir() and time.monotonic() <= give_up:
            time.sleep(0.01)
        if committed.is_dir():
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


_FIELDS = ("params", "model_state", "opt_state", "ema", "run_state", "rng")


def verify(
    program: Program,
    *,
    config_options: Sequence[str],
    half: int | None = None,
    workdir: str | None = None,
    log: Callable[[str], None],
) -> tuple[list[str], bool]:
    """Runs a config twice, once with a kill; returns lines, and whether the bits are the same."""
    # Each run is the trainer in its own process. The undisturbed run computes one step at a time;
    # both save and evaluate every `half` steps, which does not change the computation. `half` None
    # is 10, or the steps of a block if these are more; at most half of the run's steps. `workdir`
    # keeps the runs in WORKDIR/whole and WORKDIR/killed; None removes them. Raises UserError if the
    # run is too short, or a process of it failed.
    experiment, rule = program.experiment, program.block_rule
    if experiment.steps < 2:
        raise UserError(
            "verify needs a run of at least 2 steps, to kill it between them, got "
            f"{experiment.steps}."
        )
    if experiment.first_step:
        raise UserError(
            f"verify computes the first steps of a run, and this one continues another run from"
            f" step {experiment.first_step:,}: verify the config of that run, or remove continue"
            " from warm_start."
        )
    half = min(half or max(10, rule.steps), experiment.steps // 2)
    # A larger log_every would only leave out rows: the blocks end at saves anyway.
    every = {"log_every": min(experiment.log_every, half), "save_every": half, "eval_every": half}
    sets = [f"--set={name}={value}" for name, value in every.items()]
    # No logger and no bucket shall have these two runs.
    sets += ["--set=writers=[]", "--set=checkpoints=null"]
    command = [sys.executable, "-m", "trainer", "train", *config_options, *sets, "--trace_blocks"]
    command += [f"--until={2 * half}"]
    if workdir is not None and Path(workdir).exists() and any(Path(workdir).iterdir()):
        raise UserError(f"--workdir={workdir} is not empty; name a new folder, or leave it out.")
    kept: Any = contextlib.nullcontext(workdir)
    if workdir is None:
        kept = tempfile.TemporaryDirectory(prefix="lockstep-verify-")
    with kept as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        log(
            f"Runs {2 * half} single steps; and in blocks of at most {rule.steps} "
            f"({rule.form}): {half} steps, a kill, and {half} more steps."
        )
        # The undisturbed run is computed in parallel, which changes its times but not its bits.
        with TrainerProcess([*command, "--set=steps_per_call=1"], whole) as undisturbed:
            with TrainerProcess([*command, f"--kill_after={half}"], killed) as first:
                first.wait(-signal.SIGKILL)
            with TrainerProcess(command, killed) as second:
                second.wait(STOPPED, DONE)
            undisturbed.wait(STOPPED, DONE)
        if f"Restored step {half:,}." not in second.output:
            raise UserError(f"The second process did not restore step {half}:\n{second.tail()}")
        return _compare(whole, killed, half)


def _compare(whole: Path, killed: Path, half: int) -> tuple[list[str], bool]:
    """Compares traces, metrics and checkpoints of the two runs; returns as `verify` does."""
    traces = read_trace(whole), read_trace(killed)
    found = first_difference(*traces) or _first_metric(whole, killed)
    name = f"{2 * half} single steps, and {half} + kill -9 + restore + {half} in blocks,"
    if found is None and (
        saved := checkpoint.diff_checkpoints(whole, 2 * half, 2 * half, other=killed)
    ):
        found = FirstDifference(2 * half, f"in the checkpoint, {saved[0]}")
    if found is None:
        leaves = list(traces[0][2 * half]["leaves"])
        counts = {field: sum(leaf.split("/")[0] == field for leaf in leaves) for field in _FIELDS}
        counted = ", ".join(f"{field} {count}" for field, count in counts.items() if count)
        rows = len(writers.read_metrics(whole))
        lines = [
            f"Verified: {name} are the same, bit for bit.",
            f"Equal after every block: the leaves ({counted}); at every step: the batch.",
            f"Equal at the end: {rows} rows of metrics, and the checkpoint of step {2 * half}.",
        ]
        return lines, True
    lines = [f"Different: {name} differ first at step {found.step}: {found.name}."]
    if found.name == "batch":
        lines.append(
            "Another batch was returned: train(batch_index, seed) must be a pure function."
        )
    if found.step <= half:
        lines.append(
            "This is before the kill: two runs of the same program have different bits, or steps "
            "in a block have other bits than single steps. `--set steps_per_call=1` shows which."
        )
    else:
        lines.append("All steps before are equal: this one depends on a value that is not saved.")
    return lines, False


def _first_metric(whole: Path, killed: Path) -> FirstDifference | None:
    """Returns the first difference in metrics.jsonl of two runs, except for timings."""
    rows = [{row["step"]: _texts(row) for row in writers.read_metrics(x)} for x in (whole, killed)]
    for step in sorted({*rows[0], *rows[1]}):
        one, two = (side.get(step, {}) for side in rows)
        for name in dict.fromkeys([*one, *two]):
            if one.get(name) != two.get(name):
                return FirstDifference(step, f"metric {name}: {one.get(name)} and {two.get(name)}")
    return None


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Returns name -> text of the value; as texts, two NaNs are equal."""
    return {
        name: "NaN" if isinstance(x, float) and math.isnan(x) else repr(x)
        for name, x in row.items()
        if not name.startswith("perf/")
    }


class TrainerProcess:
    """A context manager of a trainer process, which is killed at the end of the block."""

    def __init__(
        self, command: Sequence[str], workdir: Path, environment: Mapping[str, str] | None = None
    ):
        # `environment` is added to the variables of this process.
        workdir.parent.mkdir(parents=True, exist_ok=True)
        # Not a pipe: nobody reads while the process runs, and a full pipe would block it.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, f"--workdir={workdir}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        self.output = ""

    def wait(self, *expected: int) -> None:
        """Waits for the process; raises UserError if its exit code is not one of those expected."""
        code = self._process.wait()
        self._log.seek(0)
        self.output = self._log.read()
        if code not in expected:
            raise UserError(f"A process of the trainer ended with {code}:\n{self.tail()}")

    def tail(self) -> str:
        """Returns the last lines that the process printed."""
        return "\n".join(self.output.strip().splitlines()[-6:])

    def __enter__(self) -> "TrainerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()
