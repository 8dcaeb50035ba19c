"""A worker of a sweep: computes waves until every trial has a result."""

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from trainer.checkpoint import CheckpointError
from trainer.engine.loading import load_located
from trainer.engine.plan import located_fingerprint, make_plan
from trainer.engine.plan_text import render
from trainer.engine.program import Program
from trainer.engine.vmapped import Vmapped
from trainer.messages import DONE, FAILED, STOPPED
from trainer.sweep.alone import run_alone
from trainer.sweep.checks import is_number
from trainer.sweep.config_files import ConfigFiles
from trainer.sweep.folder import Claim, SweepFolder
from trainer.sweep.lockstep import Lockstep
from trainer.sweep.needs import most_side_by_side
from trainer.sweep.outcome import Outcome
from trainer.sweep.plan import Trial
from trainer.sweep.wave import Wave
from trainer.train.rows import MetricsError
from trainer.train.signals import StopSignals
from trainer.workdir import WorkdirTakenOver

_KEPT_PROGRAMS = 4  # waves of several arms take turns
_PAUSE = 1.0  # seconds between two looks at the folder while others compute the last trials


@dataclass
class _Prepared:
    """A compiled program, and the values of its inputs in each arm."""

    program: Program
    plan: str
    data_fingerprint: str
    values: dict[str, Mapping[str, float]]
    vmapped: Vmapped | None = None
    difference: float = 0.0


class Worker:
    """Computes waves of a sweep.

    Args:
        path: the folder of the sweep, with its plan.
        workers: how many workers share the trials, at least.
        signals: reports when to stop.
        log: takes a line for the user.

    Raises:
        UserError: the folder is not that of a sweep.
    """

    def __init__(self, path: Path, workers: int, signals: StopSignals, log: Callable[[str], None]):
        self.folder = SweepFolder(path)
        self._vocabulary = self.folder.plan.vocabulary
        self._config_files = ConfigFiles(self._vocabulary)
        self._workers = workers
        self._signals = signals
        self._log = log
        self._prepared: dict[int, _Prepared] = {}  # the one used last is the last

    def run(self) -> int:
        """Computes waves until every trial has a result, or a signal.

        Returns:
            DONE: every trial has a result. STOPPED: a signal came, and the wave was saved. FAILED:
            the disk cannot be read or written.
        """
        if self.folder.is_complete():
            self._log(
                f"Every trial in {self.folder.path} has a result. `python -m trainer sweep extend`"
                " adds trials."
            )
            return DONE
        while not self._signals.received:
            claim = self.folder.claim(self._workers, self._fits)
            if claim is None:
                if self.folder.is_complete():
                    return DONE
                time.sleep(_PAUSE)  # others compute the last trials, or a worker may die
                continue
            code = self._compute(claim)
            if code in (STOPPED, FAILED):
                return code
        return STOPPED

    def _compute(self, claim: Claim) -> int:
        """Computes a wave; returns DONE also for one that is left to others."""
        try:
            prepared = self._prepare(claim)
            wave = Wave(
                self.folder,
                claim,
                plan=prepared.plan,
                vocabulary=self._vocabulary,
                data=prepared.program.experiment.data,
                data_fingerprint=prepared.data_fingerprint,
                config_files=self._config_files,
                log=self._log,
            )
        except BaseException:
            claim.release()
            raise
        end = "crashed"  # for whatever is not caught here, such as a signal's exit
        try:
            code = self._compute_in(wave, claim, prepared)
            end = "stopped" if code == STOPPED else "failed"
            return code
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                self._log(traceback.format_exc())  # it is tried again, then split
                return DONE
            return self._divide(wave, claim, f"It does not fit into memory: {error}")
        except WorkdirTakenOver as error:
            self._log(str(error))
            return DONE
        except (OSError, MetricsError, CheckpointError) as error:
            end = "failed"
            self._log(
                f"error: {error}. Finished trials are kept: start the same command again once"
                f" {self.folder.path} can be read and written."
            )
            return FAILED
        except Exception:  # of a compiled program, perhaps: the wave is tried again, then split
            self._log(traceback.format_exc())
            return DONE
        finally:
            if wave.workdir.lock.held:
                wave.leave(end)

    def _compute_in(self, wave: Wave, claim: Claim, prepared: _Prepared) -> int:
        if not wave.unfinished():
            wave.finish({})  # a worker was killed before it moved all trials
            return DONE
        if wave.kills_its_worker():
            return self._divide(wave, claim, "It killed its worker again and again.")
        count = len(claim.trials)
        what = f"{count} trials" if count > 1 else "1 trial"
        self._log(f"{what} from {claim.trials[0].folder} ({wave.path.name}).")
        if claim.alone:
            (trial,) = claim.trials
            program = self._program_of(prepared, trial)
            return run_alone(wave, program, self._signals, self._log, self._vocabulary)
        lockstep = Lockstep(
            prepared.program,
            partial(self._program_of, prepared),
            wave,
            self.folder,
            self._signals,
            self._log,
            self._vocabulary,
            self._vmap(prepared, wave),
        )
        return lockstep.run()

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
            self.folder.limits.split(claim.program, len(claim.trials))
            wave.finish({})
        else:
            trial = next(iter(claim.trials))
            self._log(f"{trial.folder} failed. {why}")
            wave.finish({trial: Outcome("failed", 0, {}, why, exit=FAILED)})
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
        return prepared.program.with_values(values, trial.seed, data_seed)

    def _fits(self, index: int) -> int:
        """Returns how many trials of a program fit into memory side by side."""
        return most_side_by_side(self.folder.plan.programs[index].state_bytes, self._workers)
