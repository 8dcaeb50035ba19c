"""The command sweep: plans a sweep, starts its workers, and looks at its folder."""

import argparse
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from trainer.cli import resolving
from trainer.cli.terminal import Redrawn, log, show
from trainer.config.vocabulary import SWEEP
from trainer.config.wording import listing
from trainer.messages import DONE, FAILED, MISTAKE, STOPPED, UserError
from trainer.sweep import local, plan_file, ray, slurm
from trainer.sweep.code_changes import import_code, refuse_changed_code
from trainer.sweep.plan import Plan, plan_sweep
from trainer.sweep.reading import Definition, read_sweep
from trainer.sweep.slurm import SlurmSettings
from trainer.sweep.status import Status, SweepReader, counts, describe_trial, progress_line, render
from trainer.train import runtime

if TYPE_CHECKING:  # it needs jax, which is imported once it is known for which devices
    from trainer.engine.explanation import Elsewhere
    from trainer.sweep.programs import ProgramCost

_REDRAWN, _REPORTED = 1.0, 60.0  # seconds between two tables in a terminal, or between two lines
_MOST_TIMING = 60.0  # seconds for which a sweep waits until it is known how long it takes
_LOOKED = 0.05  # seconds between two looks for a signal
_MOST = 0.05  # the fraction of the time that may be spent on reading the folder


def run(arguments: argparse.Namespace) -> int:
    """Calls the action of the command."""
    # Call it before jax starts its threads, which would get memory arenas of their own.
    runtime.keep_freed_memory()
    match arguments.action:
        case "work":
            return _work(arguments)
        case "extend":
            return _extend(arguments)
        case "check":
            from trainer.sweep.evidence import examine, report_of

            evidence = examine(Path(arguments.folder))
            show("\n".join(report_of(evidence)))
            return MISTAKE if evidence.faults else DONE
        case "status":
            show(_status_of(Path(arguments.folder))[1], end="")
        case "show":
            show(describe_trial(SweepReader(Path(arguments.folder)), arguments.trial), end="")
        case _:
            return _start(arguments)
    return DONE


def _start(arguments: argparse.Namespace) -> int:
    """Plans a sweep, unless its folder has the plan, and computes it in worker processes."""
    elsewhere = _elsewhere(arguments)  # before jax is imported
    from trainer.report.planned_power import power_of_plan, read_pilot
    from trainer.workdir import code

    config = resolving.read_config(arguments, SWEEP)
    definition = read_sweep(config, arguments.vocabulary, resolving.search_paths(arguments))
    plan = plan_sweep(definition)
    settings = launcher_settings(arguments)
    power = power_of_plan(plan, read_pilot(arguments.pilot, plan) if arguments.pilot else None)
    if arguments.check:
        from trainer.sweep.plan_text import render_check
        from trainer.sweep.programs import find_programs

        resolving.ignore_optimizer_warnings()
        plan = find_programs(definition, plan, arguments.vocabulary)
        show(render_check(arguments.files[-1], plan, power), end="")
        return DONE
    if arguments.dry_run:
        return _dry_run(arguments, definition, plan, power, elsewhere)
    name = resolving.folder_name(arguments.files, plan.content_digest)
    folder = Path(arguments.workdir or f"sweeps/{name}").absolute()
    planned = plan_file.check_same(folder, definition, plan)
    if planned:  # each worker would refuse changed code, too
        configs = [arm.config for arm in plan_file.read_plan(folder).arms.values()]
        import_code(configs, arguments.vocabulary)
        refuse_changed_code(folder, code.hashes(arguments.vocabulary), arguments.allow_changed)
    submitted = isinstance(settings, SlurmSettings)
    if arguments.plan_only or submitted:
        if not planned:
            from trainer.sweep import plan_text
            from trainer.sweep.programs import find_programs

            resolving.ignore_optimizer_warnings()
            plan = find_programs(definition, plan, arguments.vocabulary)
            hashes = code.hashes(arguments.vocabulary)
            plan_file.write_plan(folder, definition, plan, arguments.locks, hashes)
            needs = _measured(plan, at_most=_MOST_TIMING) if arguments.timed else []
            show(plan_text.render_sweep_plan(definition, plan, needs, power), end="")
        if submitted:
            words = _worker_words(folder, arguments)
            for line in slurm.submit(folder, words, arguments.workers, settings)[1]:
                log(line)
        return DONE
    if not planned and (exit_code := _plan_in_subprocess(arguments, folder)) != DONE:
        return exit_code
    return _compute(folder, arguments, settings)


def _compute(folder: Path, arguments: argparse.Namespace, settings: ray.RaySettings | None) -> int:
    """Computes trials in workers of a Ray cluster, or of this machine if settings is None."""
    words, count, signals = _worker_words(folder, arguments), arguments.workers, arguments.signals
    with LiveView(folder) as view:
        if settings is not None:
            code = ray.run_tasks(words, folder, count, settings, signals, view.log)
        else:
            command = [sys.executable, *words, "--watched"]
            code = local.run_workers(command, count, signals, view.log)
    try:
        status, text = _status_of(folder)
        show(f"\n{text}", end="")
        if code == DONE and status.without_winner:
            code = FAILED
    except (UserError, OSError) as error:  # must not change the exit code of the sweep
        log(f"The results cannot be shown: {error}")
    if code == STOPPED:
        words = plan_file.work_command(folder, arguments.vocabulary)
        words = [*words, *_allowed_changes(arguments)]
        log(
            "Stopped; the finished trials and the states of the others are saved. Start the same"
            f" command again to go on, or python {join(words)}."
        )
    return code


def _elsewhere(arguments: argparse.Namespace) -> "Elsewhere | None":
    """Returns the devices of --target; None for those of this machine."""
    if arguments.target is None:
        return None
    if not arguments.dry_run or arguments.target == "list":
        raise UserError(
            "--target is about devices that are not here, and a sweep is only planned for them:"
            " write --dry_run --target=h100, or another of `python -m trainer explain"
            " --target=list`."
        )
    from trainer.engine.targets import elsewhere_of

    return elsewhere_of(arguments.target)


def _plan_in_subprocess(arguments: argparse.Namespace, folder: Path) -> int:
    """Plans a sweep in another process, and returns the exit code of that process."""
    # Its memory and GPU are then free for the workers.
    options = [f"--workdir={folder}", "--plan_only", f"--locks={arguments.locks}"]
    options += ["--timed"] if arguments.launcher == "local" else []  # Ray's tasks are elsewhere
    options += [f"--pilot={arguments.pilot}"] if arguments.pilot else []
    options = [*resolving.config_options(arguments), *options]
    command = [sys.executable, "-m", "trainer", "sweep", *options]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if arguments.signals.received:
                process.terminate()  # nothing is planned until all is
            time.sleep(_LOOKED)
    if arguments.signals.received:
        return STOPPED
    return FAILED if process.returncode < 0 else process.returncode


def _dry_run(
    arguments: argparse.Namespace,
    definition: Definition,
    plan: Plan,
    power: Sequence[str],
    elsewhere: "Elsewhere | None",
) -> int:
    """Prints a plan with the memory and the time that its programs need, which it measures."""
    from trainer.engine.memory import in_words
    from trainer.sweep import plan_text
    from trainer.sweep.programs import find_programs

    resolving.ignore_optimizer_warnings()
    plan = find_programs(definition, plan, arguments.vocabulary, elsewhere)
    needs = _measured(plan, elsewhere)
    memory = None if elsewhere is None else elsewhere.memory
    show(plan_text.render_sweep_plan(definition, plan, needs, power, memory), end="")
    for program, need in zip(plan.programs, needs, strict=True):
        if memory is not None and memory.limit is not None and need.too_much is not None:
            raise UserError(
                f"The run {program.first} does not fit: it needs {in_words(need.too_much)}, and"
                f" {memory.owner} has {in_words(memory.limit)}. Give its config more microbatches,"
                " a smaller batch, or a mesh with more devices."
            )
    return DONE


def _measured(
    plan: Plan, elsewhere: "Elsewhere | None" = None, at_most: float = math.inf
) -> list["ProgramCost"]:
    """Returns what each program needs; nothing if that is not known after `at_most` seconds."""
    from trainer.sweep.programs import measure

    runtime.use_openblas_threads()
    if elsewhere is None:
        runtime.keep_compiled_programs()  # the sweep then finds them compiled
    needs, start = [], time.perf_counter()
    for number, program in enumerate(plan.programs, 1):
        if time.perf_counter() - start > at_most:
            log("The programs are not all timed, because that takes long; --dry_run times them.")
            return []
        what = "Compiling and timing" if elsewhere is None else "Compiling"
        log(f"{what} program {number:,} of {len(plan.programs):,} ({program.first}).")
        try:
            needs.append(measure(plan, program, elsewhere))
        except Exception as error:
            if at_most == math.inf:
                raise
            # The sweep will tell which of its runs fail, and why.
            log(f"It could not be timed: {error}")
            return []
    return needs


def _work(arguments: argparse.Namespace) -> int:
    """Computes trials of a sweep that was begun, as one of its workers."""
    from trainer.sweep.worker import Worker

    runtime.keep_compiled_programs()
    resolving.ignore_optimizer_warnings()
    folder = Path(arguments.folder).absolute()
    with LiveView(folder, table=False, quiet=arguments.watched) as view:
        worker = Worker(
            folder,
            arguments.workers,
            arguments.signals,
            view.log,
            arguments.locks,
            arguments.allow_changed,
        )
        plan_file.check_vocabulary(folder, worker.folder.plan, arguments.vocabulary)
        if arguments.failed:
            with worker.folder.presence:
                again = worker.folder.forget_failed()
            view.log(f"Computing again: {listing(again, 5)}." if again else "No run has failed.")
        return worker.run()


def _extend(arguments: argparse.Namespace) -> int:
    """Adds to a plan what a file has beyond it, and prints that."""
    from trainer.report.planned_power import power_of_extension
    from trainer.sweep.extension import make_extension, render_extension, write_extension
    from trainer.sweep.plan_text import difference_lines
    from trainer.sweep.programs import find_programs
    from trainer.workdir import code

    resolving.ignore_optimizer_warnings()
    folder = Path(arguments.folder).absolute()
    stored = plan_file.read_plan(folder)
    plan_file.check_vocabulary(folder, stored, arguments.vocabulary)
    vocabulary = list(dict.fromkeys([*stored.vocabulary, *arguments.vocabulary]))
    config = resolving.read_config(arguments, SWEEP)
    definition = read_sweep(config, vocabulary, resolving.search_paths(arguments))
    plan = plan_sweep(definition)
    if stored.revision > 1 and stored.revisions[-1].get("plan") == plan.content_digest:
        show(f"The sweep in {folder} is already revision {stored.revision}, which this file makes.")
        return DONE
    plan = find_programs(definition, plan, vocabulary)
    found, allowed = code.hashes(vocabulary), arguments.allow_changed
    if arguments.dry_run:
        refuse_changed_code(folder, found, allowed)
        revision = make_extension(folder, stored, definition, plan)
    else:
        stored, revision = write_extension(
            folder, definition, plan, arguments.locks, found, allowed
        )
    power = power_of_extension(folder, stored, revision)
    show(render_extension(folder, stored, revision, power, difference_lines(plan)), end="")
    if arguments.dry_run:
        show("Nothing was written: the same command without --dry_run adds it.")
    else:
        words = plan_file.work_command(Path(arguments.folder), stored.vocabulary)
        command = join([*words, *_allowed_changes(arguments)])
        show(f"Workers of this sweep compute it; to start one: python {command}")
    return DONE


def _worker_words(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Returns the words of the command of a worker, after that of Python."""
    safe = ["-P"] if os.environ.get("PYTHONSAFEPATH") else []
    words = [*safe, *plan_file.work_command(folder, arguments.vocabulary)]
    words += [f"--workers={arguments.workers}", f"--locks={arguments.locks}"]
    return [*words, *_allowed_changes(arguments)]


def _allowed_changes(arguments: argparse.Namespace) -> list[str]:
    """Returns the options `--allow_changed`, for another process of the sweep."""
    return [f"--allow_changed={name}" for name in dict.fromkeys(arguments.allow_changed)]


def _status_of(folder: Path) -> tuple[Status, str]:
    """Returns what a sweep has computed, and that as text."""
    reader = SweepReader(folder)
    status = reader.read()
    return status, render(status, reader.plan, folder, reader.code_changes())


def launcher_settings(arguments: argparse.Namespace) -> SlurmSettings | ray.RaySettings | None:
    """Returns the settings of Slurm or Ray; None stands for the workers of this machine."""
    # Raises UserError if a setting is wrong or of another launcher, or that is not installed.
    for name in ("slurm", "ray"):
        given, file = getattr(arguments, name), getattr(arguments, f"{name}_file")
        if arguments.launcher != name and (given or file is not None):
            raise UserError(f"--{name} and --{name}_file are read with --launcher={name} only.")
    if arguments.launcher == "slurm":
        return slurm.read_slurm_settings(arguments.slurm_file, arguments.slurm)
    if arguments.launcher == "ray":
        ray.check_installed()
        return ray.read_ray_settings(arguments.ray_file, arguments.ray)
    return None


class LiveView:
    """A context manager that shows the progress of a sweep on stderr, from its own thread."""

    # In a terminal it is a table below the lines of the log, redrawn about once a second; elsewhere
    # a line about once a minute. An error here never ends the sweep.
    # `table` None draws the table in a terminal; `every` is in seconds, and None is 1 or 60;
    # `quiet` shows the lines of the log only.

    def __init__(
        self,
        folder: Path,
        *,
        table: bool | None = None,
        every: float | None = None,
        quiet: bool = False,
    ):
        self._folder = folder
        if table is None:
            stream: Any = sys.stderr  # None if the process was started without it
            table = stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
        self._table = Redrawn(sys.stderr) if table else None
        self._every = every or (_REDRAWN if table else _REPORTED)
        self._quiet = quiet
        self._lines: Sequence[str] = ()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live view", daemon=True)

    def __enter__(self) -> "LiveView":
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stop.set()
        if not self._quiet:
            self._thread.join(5)  # the disk may hang
        self._lines = ()
        if self._table is not None:
            with self._writing:
                self._table.draw(())

    def log(self, line: str) -> None:
        """Prints a line, above the table if there is one."""
        with self._writing:
            if self._table is None:
                log(line)
            else:
                self._table.draw(self._lines, above=line)

    def _watch(self) -> None:
        pause, reader = self._every, None
        try:
            while not self._stop.wait(pause):
                start = time.perf_counter()
                reader = reader or SweepReader(self._folder)
                status = reader.read()
                if self._table is None:
                    self.log(progress_line(status))
                else:
                    lines = ["", *counts(status, reader.plan)]
                    with self._writing:
                        if not self._stop.is_set():
                            self._lines = lines
                            self._table.draw(lines)
                pause = max(self._every, (time.perf_counter() - start) / _MOST)
        except Exception as error:
            self.log(f"The table of the sweep is not shown any more: {error}")
