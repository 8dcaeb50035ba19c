"""A worker of a sweep: computes waves until every trial has a result.

Start with `Worker.run`.
"""

import contextlib
import gc
import itertools
import math
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import UnlikeCheckpoint
from trainer.config import wording
from trainer.config.wording import listing
from trainer.data.shard_reader import DataChanged
from trainer.engine.loading import load_located
from trainer.engine.plan import located_fingerprint, make_plan
from trainer.engine.plan_text import render
from trainer.engine.program import Program
from trainer.engine.vmapped import Vmapped
from trainer.messages import DONE, FAILED, STOPPED, UserError
from trainer.protocols import Batch
from trainer.sweep.code_changes import ALLOWED, CodeChanged, import_code
from trainer.sweep.config_files import ConfigFiles
from trainer.sweep.faults import (
    damage_in,
    is_disk_error,
    is_out_of_memory,
    is_takeover,
)
from trainer.sweep.folder import Claim, SweepFolder
from trainer.sweep.plan import Trial
from trainer.sweep.presence import Mode, Presence
from trainer.sweep.programs import is_number, most_side_by_side
from trainer.sweep.wave import Wave, run_alone
from trainer.sweep.wave_runner import WaveRunner
from trainer.train.signals import StopSignals
from trainer.train.warm_start import CannotBegin
from trainer.train.watchdog import SlowLines
from trainer.workdir import code
from trainer.workdir.changes import RunChanged
from trainer.writers import Reporter
from trainer.writers.summary import Summary

_KEPT_PROGRAMS = 4  # more than one, because waves of different arms alternate
_PAUSE = 1.0  # seconds between two looks at the folder while others compute the last trials


@dataclass
class _Prepared:
    """A compiled program, and the values of its inputs in each arm."""

    program: Program
    plan: str
    data_fingerprint: str
    values: dict[str, Mapping[str, float]]
    evaluated: bool = False  # whether the ledger has the metrics of its first state, if any
    vmapped: Vmapped | None = None
    difference: float = 0.0


class Worker:
    """Computes waves of a sweep; raises UserError if the folder is not that of a sweep."""

    # `workers` is how many workers share the trials, at least. `locks` is what keeps others from
    # the trials of this process; see `Presence`. `allow_changed` is what may differ from the
    # processes before: "code" or nothing.

    def __init__(
        self,
        path: Path,
        workers: int,
        signals: StopSignals,
        log: Callable[[str], None],
        locks: Mode = "flock",
        allow_changed: Sequence[str] = (),
    ):
        self.folder = SweepFolder(path, Presence(path, locks), log)
        self._vocabulary = self.folder.plan.vocabulary
        self._config_files = ConfigFiles(self._vocabulary)
        self._allow_changed = allow_changed
        self._noted: Mapping[str, str] = {}  # the code of this process that the ledger has
        self._workers = workers
        self._signals = signals
        self._log = log
        self._slow_lines = SlowLines(math.inf)  # other workers may keep this machine busy
        self._reporter = Reporter(log)
        self._thrown_away: set[str] = set()  # names of waves whose folders were damaged
        self._prepared: dict[int, _Prepared] = {}  # by program, in the order of their last use

    def run(self) -> int:
        """Computes waves until every trial has a result, or a signal; returns an exit code."""
        # The code is DONE if every trial has a result; STOPPED if a signal came, and the wave was
        # saved; FAILED if the disk cannot be read or written. Raises UserError if the locks of the
        # folder are not seen by all machines, its files are damaged, or code was changed.
        try:
            return self._compute_waves()
        except Exception as error:
            if not is_disk_error(error):
                raise
            self._log(self._describe(error))
            return FAILED

    def _compute_waves(self) -> int:
        if self.folder.is_complete():
            plan, more = self.folder.plan, ""
            if not plan.cuts and plan.ladder is None:
                more = " `python -m trainer sweep extend` adds trials."
            self._log(f"Every trial in {self.folder.path} has a result.{more}")
            with contextlib.suppress(OSError, UserError), self.folder.presence:
                self.folder.tidy()
            return DONE
        with self.folder.presence:
            return self._work()

    def _work(self) -> int:
        import_code([arm.config for arm in self.folder.plan.arms.values()], self._vocabulary)
        self._note_code()  # before it claims a wave
        while not self._signals.received:
            claim = self.folder.claim(self._workers, self._fits)
            if claim is None:
                if self.folder.is_complete():
                    self.folder.tidy()
                    return DONE
                time.sleep(_PAUSE)  # others compute the last trials, or a worker may die
                continue
            with contextlib.closing(claim):
                code = self._compute(claim)
            if code in (STOPPED, FAILED):
                return code
        return STOPPED

    def _note_code(self) -> Mapping[str, str]:
        """Adds what this process has imported of the user's code to the ledger, and returns it."""
        found = code.hashes(self._vocabulary)
        # Other workers may use changed code by now; this process still has what it imported.
        new = {name: hash for name, hash in found.items() if name not in self._noted}
        if new:
            changed = self.folder.note_code(new, self._allow_changed)
            if changed:
                self._log(f"The code was changed, as is allowed: {listing(changed)}.")
            self._noted = found
        return found

    def _describe(self, error: Exception) -> str:
        """Returns sentences about a disk that cannot be read or written."""
        text, where = str(error).rstrip("."), str(self.folder.path)
        if isinstance(error, OSError) and error.strerror:
            # An error of a file that is open does not name it.
            file = Path(os.fsdecode(error.filename or where))
            text = f"{file}: {error.strerror}"
            where = where if file.is_relative_to(where) else str(file)  # a file of a data set
        return (
            f"error: {text}. Finished trials are kept: start the same command again once {where}"
            " can be read and written."
        )

    def _compute(self, claim: Claim) -> int:
        """Computes a wave; returns DONE also for one that is left to others."""
        prepared = self._prepare(claim)
        end = "crashed"  # for whatever is not caught here, such as a signal's exit
        wave = None
        try:
            wave = self._open(claim, prepared)
            code = self._compute_or_divide(wave, claim, prepared)
            end = "stopped" if code == STOPPED else "failed"
            return code
        except DataChanged as error:  # no trial can be computed, and none has failed
            end = "failed"
            self._log(f"error: {error} Finished trials are kept.")
            return FAILED
        except Exception as error:
            if self._is_thrown_away(wave, claim, error):
                return DONE
            if isinstance(error, RunChanged):  # other code or settings than when the wave began
                end = "failed"
                more = f", go on with {ALLOWED}" if error.keys == ("code",) else ""
                raise UserError(
                    f"{error.changes}Restore the old value{more}; or remove {claim.path}, and its"
                    " trials are computed from the beginning."
                ) from error
            # A module that was imported during the wave; another run that was removed.
            if isinstance(error, CodeChanged | CannotBegin):
                end = "failed"
                raise
            if is_disk_error(error):
                end = "failed"
                raise
            if is_takeover(error):
                self._log(str(error))
                time.sleep(_PAUSE)  # the other worker computes the wave now
                return DONE
            if wave is None:
                raise
            # Such as an error while a compiled program runs: the wave is tried again.
            wave.hand_over(end, error=wording.cause(error))
            self._log(traceback.format_exc())
            return DONE
        finally:
            if wave is not None:
                wave.hand_over(end)

    def _is_thrown_away(self, wave: Wave | None, claim: Claim, error: Exception) -> bool:
        """Removes a wave that cannot be resumed, once; returns whether it did."""
        # Its folder is damaged, or the user allowed changed code, which does not fit its
        # checkpoint.
        damage = damage_in(claim.path, error)
        if wave is not None and wave.code_changed() and isinstance(error, UnlikeCheckpoint):
            damage = f"The code was changed. {str(error).splitlines()[0].rstrip(':.')}"
        if not damage or claim.name in self._thrown_away:
            return False
        self._thrown_away.add(claim.name)
        self._log(f"{damage}. The wave is removed, and its trials are computed again.")
        if wave is not None:
            wave.hand_over("failed")
        self.folder.remove(claim)
        return True

    def _open(self, claim: Claim, prepared: _Prepared) -> Wave:
        return Wave(
            self.folder,
            claim,
            plan=prepared.plan,
            vocabulary=self._vocabulary,
            data=prepared.program.experiment.data,
            data_fingerprint=prepared.data_fingerprint,
            code=self._note_code,
            config_files=self._config_files,
            allow_changed=self._allow_changed,
            log=self._log,
            take_over=self.folder.presence.mode == "heartbeat",
        )

    def _compute_or_divide(self, wave: Wave, claim: Claim, prepared: _Prepared) -> int:
        try:
            return self._compute_in(wave, claim, prepared)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return self._divide(wave, claim, f"It does not fit into memory: {wording.cause(error)}")

    def _compute_in(self, wave: Wave, claim: Claim, prepared: _Prepared) -> int:
        if not wave.unfinished():
            wave.finish({})  # a worker was killed before it moved all trials
            return DONE
        if why := wave.why_given_up():
            return self._divide(wave, claim, why)
        self._note_initial(claim.program, prepared)
        count = len(claim.trials)
        what = f"{count} trials" if count > 1 else "1 trial"
        self._log(f"{what} from {claim.trials[0].folder} ({wave.path.name}).")
        if claim.alone:
            (trial,) = claim.trials
            program = self._program_of(prepared, trial)
            return run_alone(
                wave,
                program,
                self._signals,
                self._log,
                self._vocabulary,
                self._slow_lines,
                self.folder.identity_of(trial),
                self.folder.plan.keeps_examples(trial),
            )
        runner = WaveRunner(
            prepared.program,
            partial(self._program_of, prepared),
            wave,
            self.folder,
            self._signals,
            self._log,
            self._slow_lines,
            self._reporter,
            self._vocabulary,
            self._vmap(prepared, wave),
        )
        return runner.run()

    def _note_initial(self, index: int, prepared: _Prepared) -> None:
        """Evaluates the first state of a program, once in a sweep, and adds it to the ledger."""
        # A report measures by it what a run gained. Trials that begin with the state of another run
        # have none.
        shared = self.folder.plan.programs[index]
        first = self.folder.plan.example_of(shared)
        if prepared.evaluated or shared.first_step or "warm_start" in first.config.root.kwargs:
            return
        prepared.evaluated = True
        if not (arms := self.folder.without_initial(shared.arms)):
            return

        def until_a_signal(batches: Iterator[Batch]) -> Iterator[Batch]:
            return itertools.takewhile(lambda batch: not self._signals.received, batches)

        try:
            program = self._program_of(prepared, first)
            found = program.evaluation.run_splits(program.init(), until_a_signal)
        except Exception as error:  # the trials meet the same one, and say what it means for them
            self._log(f"The first state of {first.name} has no metrics: {wording.cause(error)}")
            return
        if not self._signals.received:
            finite = {name: float(x) for name, x in found.items() if math.isfinite(x)}
            self.folder.add_initial(first, arms, finite)

    def _vmap(self, prepared: _Prepared, wave: Wave) -> Vmapped | None:
        """Returns what computes the trials of a wave at once, if the file asks for that."""
        width = self.folder.plan.vmap
        if width is None:
            return None
        if prepared.vmapped is None:
            prepared.vmapped = Vmapped(prepared.program, width)
            prepared.difference = prepared.vmapped.difference()
            self._log(
                f"vmap of {width} trials: in the first steps the loss differs from that of a trial"
                f" alone by {prepared.difference:.1e} of its value at most."
            )
        wave.workdir.record(vmap={"width": width, "difference": prepared.difference})
        return prepared.vmapped

    def _divide(self, wave: Wave, claim: Claim, why: str) -> int:
        """Splits a wave that cannot be computed; a single trial has failed."""
        if len(claim.trials) > 1:
            self._log(f"The wave {claim.name} of {len(claim.trials)} trials is split. {why}")
            self.folder.limits.halve_width(claim.program, len(claim.trials))
            wave.finish({})
        else:
            trial = next(iter(claim.trials))
            self._log(f"{trial.folder} failed. {why}")
            wave.finish({trial: Summary("failed", 0, {}, why, exit=FAILED)})
        return DONE

    # Programs.

    def _prepare(self, claim: Claim) -> _Prepared:
        """Builds and compiles the program of a wave, unless it is one of the last ones."""
        if claim.program in self._prepared:
            prepared = self._prepared[claim.program] = self._prepared.pop(claim.program)
            return prepared
        if len(self._prepared) == _KEPT_PROGRAMS:
            # Before the next one: a process with many compiled programs runs out of memory maps.
            del self._prepared[next(iter(self._prepared))]
            gc.collect()
            jax.clear_caches()
        first = next(iter(claim.trials))
        program = load_located(first.config, self._vocabulary)
        self._note_code()  # before compiling, which takes time
        plan = make_plan(program, first.config)
        data = located_fingerprint(program, first.config)
        start = time.perf_counter()
        program.compile(program.abstract_state())
        self._log(f"Compiled in {time.perf_counter() - start:.1f} s.")
        prepared = _Prepared(program, render(plan), data, {first.arm: program.inputs.values})
        self._prepared[claim.program] = prepared
        return prepared

    def _program_of(self, prepared: _Prepared, trial: Trial) -> Program:
        """Returns the compiled program with the values and seeds of a trial."""
        if trial.arm not in prepared.values:
            # Another arm may have other values where its space has none.
            other = load_located(trial.config, self._vocabulary)
            prepared.values[trial.arm] = other.inputs.values
        own = {path: x for path, x in trial.values.items() if is_number(x)}
        values = {
            path: float(own.get(path, value))  # type: ignore[arg-type]
            for path, value in prepared.values[trial.arm].items()
        }
        data_seed: Any = trial.config.root.kwargs.get("data_seed")
        program = prepared.program.with_values(values, trial.seed, data_seed)
        start: Any = trial.config.root.kwargs.get("warm_start")
        return program if start is None else program.starting_with(start)

    def _fits(self, index: int) -> int:
        """Returns how many trials of a program fit into memory side by side."""
        # What it needs besides states is known once this worker has compiled it.
        made = self._prepared.get(index)
        need = None if made is None else made.program.temporary_bytes
        state_bytes = self.folder.plan.programs[index].state_bytes
        return most_side_by_side(state_bytes, self._workers, need)
