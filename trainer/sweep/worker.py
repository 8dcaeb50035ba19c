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
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import jax

from trainer.checkpoint import UnlikeCheckpoint
from trainer.config import Call, wording
from trainer.data.shards import DataChanged
from trainer.engine.plan import located_fingerprint, make_plan
from trainer.engine.plan_text import render_plan
from trainer.engine.program import Program, load_located
from trainer.engine.vmapped import Vmapped
from trainer.messages import DONE, FAILED, STOPPED, UserError
from trainer.sweep.code_changes import DATA, CodeChanged, changed_hashes, code_or_data, import_code
from trainer.sweep.folder import SweepFolder, WaveClaim
from trainer.sweep.presence import Mode, Presence
from trainer.sweep.programs import most_side_by_side
from trainer.sweep.wave import ConfigFiles, Prepared, Setting, Wave, run_alone
from trainer.sweep.wave_runner import (
    WaveRunner,
    damage_in,
    is_disk_error,
    is_out_of_memory,
    is_takeover,
)
from trainer.train.signals import StopSignals
from trainer.train.warm_start import CannotBegin
from trainer.train.watchdog import SlowLines
from trainer.workdir import code
from trainer.workdir.fingerprint import (
    RunChanged,
    fingerprint_digest,
    make_fingerprint,
    program_conditions,
)
from trainer.writers import Reporter
from trainer.writers.summary import Summary

_KEPT_PROGRAMS = 4  # more than one, because waves of different arms alternate
_PAUSE = 1.0  # seconds between two looks at the folder while others compute the last trials


class Worker:
    """Computes waves of a sweep; raises UserError if the folder is not that of a sweep."""

    # `workers` is how many workers share the trials, at least. `locks` is what keeps others from
    # the trials of this process; see `Presence`. `allow_changed` is what may differ from the
    # processes before: "code", "data", both or nothing.

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
        self._setting = Setting(
            self.folder,
            self._vocabulary,
            signals,
            log,
            self._note_code,
            [name for name in allow_changed if name == "code"],  # no run has two kinds of data
            SlowLines(math.inf),  # other workers may keep this machine busy
            Reporter(log),
            ConfigFiles(self._vocabulary),
        )
        self._noted: Mapping[str, str] = {}  # the code of this process that the ledger has
        self._noted_traits: list[Mapping[str, str]] = []
        # Called once: it asks git and reads what is installed.
        self._conditions = cache(lambda: program_conditions(make_fingerprint()))
        self._workers, self._allowed = workers, allow_changed
        self._signals, self._log = signals, log
        self._thrown_away: set[str] = set()  # names of waves whose folders were damaged
        self._prepared: dict[int, Prepared] = {}  # by program, in the order of their last use

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
            fixed = self.folder.plan.fixed
            more = "" if fixed else " `python -m trainer sweep extend` adds trials."
            self._log(f"Every trial in {self.folder.path} has a result.{more}")
            with contextlib.suppress(OSError, UserError), self.folder.presence:
                self.folder.tidy()
            return DONE
        with self.folder.presence:
            import_code([arm.config for arm in self.folder.plan.arms.values()], self._vocabulary)
            self._note_code()  # before it claims a wave
            while not self._signals.received:
                if (claim := self.folder.claim(self._workers, self._fits)) is None:
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
        if new := {name: hash for name, hash in found.items() if name not in self._noted}:
            if changed := self.folder.note_code(new, self._allowed):
                self._log(f"The code changed, as is allowed: {wording.listing(changed)}.")
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

    def _compute(self, claim: WaveClaim) -> int:
        """Computes a wave; returns DONE also for one that is left to others."""
        prepared = self._prepare(claim)
        end = "crashed"  # for whatever is not caught here, such as a signal's exit
        wave = None
        try:
            wave = Wave(self._setting, claim, prepared)
            code = self._compute_in(wave)
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
                more = ", go on with --allow_changed=code" if error.keys == ("code",) else ""
                raise UserError(
                    f"{error.changes}Restore the old value{more}; or remove {claim.path}, and its"
                    " trials are computed from the beginning."
                ) from error
            # A module that was imported during the wave; another run that was removed; or the disk.
            if isinstance(error, CodeChanged | CannotBegin) or is_disk_error(error):
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

    def _is_thrown_away(self, wave: Wave | None, claim: WaveClaim, error: Exception) -> bool:
        """Removes a wave that cannot be resumed, once; returns whether it did."""
        # Its folder is damaged, or changed code that the user allowed does not fit its checkpoint.
        damage = damage_in(claim.path, error)
        if wave is not None and wave.code_changed() and isinstance(error, UnlikeCheckpoint):
            damage = f"The code was changed. {str(error).splitlines()[0].rstrip(':.')}"
        if not damage or claim.path.name in self._thrown_away:
            return False
        self._thrown_away.add(claim.path.name)
        self._log(f"{damage}. The wave is removed, and its trials are computed again.")
        if wave is not None:
            wave.hand_over("failed")
        self.folder.remove(claim)
        return True

    def _compute_in(self, wave: Wave) -> int:
        claim = wave.claim
        try:
            if not wave.unfinished():
                wave.finish({})  # a worker was killed before it moved all trials
                return DONE
            if why := wave.why_given_up():
                return self._divide(wave, why)
            self._note(wave.prepared.traits)  # a wave that was begun otherwise was refused
            self._note_initial(claim.program, wave.prepared)
            count = len(claim.trials)
            what = f"{count} trials" if count > 1 else "1 trial"
            self._log(f"{what} from {claim.trials[0].folder} ({wave.path.name}).")
            return run_alone(wave) if claim.alone else WaveRunner(wave, self._vmap(wave)).run()
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return self._divide(wave, f"It does not fit into memory: {wording.cause(error)}")

    def _note_initial(self, index: int, prepared: Prepared) -> None:
        """Evaluates the first state of a program, once in a sweep, and adds it to the ledger."""
        # A report measures by it what a run gained. Trials that begin with another state have none.
        shared = self.folder.plan.programs[index]
        first = self.folder.plan.example_of(shared)
        if prepared.evaluated or shared.first_step or "warm_start" in first.config.root.kwargs:
            return
        prepared.evaluated = True
        with self.folder.locked_ledger() as ledger:
            arms = ledger.without_initial(shared.arms)
        if not arms:
            return
        until_a_signal = partial(itertools.takewhile, lambda _: not self._signals.received)
        try:
            program = prepared.of_trial(first)
            found = program.evaluation.run_splits(program.init(), until_a_signal)
        except Exception as error:  # the trials meet the same one, and say what it means for them
            if self._signals.received:  # the evaluation was not finished
                return
            self._log(f"The first state of {first.name} has no metrics: {wording.cause(error)}")
            return
        if not self._signals.received:
            finite = {name: float(x) for name, x in found.items() if math.isfinite(x)}
            with self.folder.locked_ledger() as ledger:
                ledger.add_initial(first.folder, arms, finite)

    def _vmap(self, wave: Wave) -> Vmapped | None:
        """Returns what computes the trials of a wave at once, if the file asks for that."""
        width, prepared = self.folder.plan.vmap, wave.prepared
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

    def _divide(self, wave: Wave, why: str) -> int:
        """Splits a wave that cannot be computed; a single trial has failed."""
        claim = wave.claim
        trial, *others = claim.trials
        if others:
            self._log(f"The wave {claim.path.name} of {len(claim.trials)} trials is split. {why}")
            self.folder.limits.halve_width(claim.program, len(claim.trials))
            wave.finish({})
        else:
            self._log(f"{trial.folder} failed. {why}")
            wave.finish({trial: Summary("failed", 0, {}, why, exit=FAILED)})
        return DONE

    # Programs.

    def _prepare(self, claim: WaveClaim) -> Prepared:
        """Builds and compiles the program of a wave, unless it is one of the last ones."""
        if (prepared := self._prepared.pop(claim.program, None)) is not None:
            self._prepared[claim.program] = prepared  # the last one that was used
            return prepared
        if len(self._prepared) == _KEPT_PROGRAMS:
            # Before the next one: a process with many compiled programs runs out of memory maps.
            del self._prepared[next(iter(self._prepared))]
            gc.collect()
            jax.clear_caches()
        first = claim.trials[0]
        program = load_located(first.config, self._vocabulary)
        self._note_code()  # before compiling, which takes time
        plan = make_plan(program, first.config)
        data = located_fingerprint(program, first.config)
        traits = self._traits(claim.program, program, data)
        self._compare(traits)
        start = time.perf_counter()
        program.compile(program.abstract_state())
        self._log(f"Compiled in {time.perf_counter() - start:.1f} s.")
        values = {first.arm: program.inputs.values}
        prepared = Prepared(program, render_plan(plan), data, traits, self._vocabulary, values)
        self._prepared[claim.program] = prepared
        return prepared

    def _traits(self, index: int, program: Program, data: str) -> dict[str, str]:
        """Returns what a program's data are and, if it has code of the user, its training step."""
        # Name -> hash. The name of each has what it depends on otherwise: that of data their
        # arguments; and a step is compared with that of a worker on the same kind of device and
        # versions.
        shared = self.folder.plan.programs[index]
        call = self.folder.plan.example_of(shared).config.root.kwargs.get("data")
        given = call.name if isinstance(call, Call) else "digits"
        traits = {f"{DATA} of {given} ({fingerprint_digest({'data': repr(call)})[:8]})": data}
        if self._vocabulary:
            given = self._conditions(), shared.inputs, shared.steps
            name = f"{code.STEP} of {shared.first} ({fingerprint_digest({'given': given})})"
            traits[name] = program.step_digest
        return traits

    def _compare(self, traits: Mapping[str, str]) -> None:
        """Raises CodeChanged if the ledger has other `_traits`, unless that is allowed."""
        with self.folder.locked_ledger() as ledger:
            changed_hashes(self.folder.path, ledger, traits, self._allowed)

    def _note(self, traits: Mapping[str, str]) -> None:
        """Adds `_traits` to the ledger, once."""
        if traits in self._noted_traits:  # others may use changed data or code by now
            return
        self._noted_traits.append(traits)
        for name, hash in traits.items():
            if self.folder.note_code({name: hash}, self._allowed):
                self._log(f"The {code_or_data(name)} changed, as is allowed: {name}.")

    def _fits(self, index: int) -> int:
        """Returns how many trials of a program fit into memory side by side."""
        # What it needs besides states is known once this worker has compiled it.
        made = self._prepared.get(index)
        need = None if made is None else made.program.temporary_bytes
        return most_side_by_side(self.folder.plan.programs[index].state_bytes, self._workers, need)
