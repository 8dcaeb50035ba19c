"""`sweep` and `load_sweep`: sweeps, and their trials as a table."""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.configs import Packages, as_vocabulary
from lockstep.processes import run_command
from lockstep.runs import Run
from trainer.config.wording import listing
from trainer.messages import UserError
from trainer.writers.lines import PREFIXES

if TYPE_CHECKING:
    from pandas import DataFrame


class Sweep:
    """A sweep in its folder, finished or not.

    Args:
        folder: of the sweep, also an attribute.
        vocabulary: further packages whose functions its configs name.

    Raises:
        UserError: the folder is not that of a sweep.
    """

    def __init__(self, folder: str | PathLike[str], vocabulary: Packages = ()):
        from trainer.sweep.plan_file import read_plan

        self.folder = Path(folder)
        self._vocabulary = as_vocabulary(vocabulary)
        read_plan(self.folder)

    def trials(self) -> "DataFrame":
        """Returns the runs of the searches as a table with a row for each.

        Returns:
            Its columns are name, arm, search, number, seed, end ("done", "diverged", "failed" or
            "missing"), step, seconds, each hyperparameter by its path, and each metric by its name
            in metrics.jsonl. Values of the test split are left out where a validation split
            selects, because nothing else may.
        """
        workload = self._workload()
        hidden = "" if workload.goal.select_on == "test" else PREFIXES["test"]
        return _frame(workload.trials, hidden)

    def finals(self) -> "DataFrame":
        """Returns the runs of the winners on fresh seeds, as `trials` returns those of the search.

        Values of the test split are part of it.
        """
        return _frame(self._workload().finals, "")

    @property
    def winners(self) -> Mapping[tuple[str, int], int]:
        """Arm and search -> the number of its best point, of which `finals` has further runs."""
        return self._workload().winners

    def status(self) -> str:
        """Returns what the sweep has computed, as `python -m trainer sweep status` prints it."""
        from trainer.sweep.status import SweepReader, render

        reader = SweepReader(self.folder)
        return render(reader.read(), reader.plan, self.folder)

    def run(self, name: str) -> Run:
        """Returns a trial as a run.

        Args:
            name: of the column `name` of `trials` or `finals`, with or without "trials/": arm,
                number and seed, such as "muon/0007/0". With several searches the number has that of
                the search before it, as "muon/2.0007/51340000". Zeros may be left out, and the seed
                if the point has one: the winner of a search is run(f"{arm}/{search}.{number}").

        Raises:
            UserError: there is no such trial, it has not ended, or the point has several seeds.
        """
        from trainer.sweep.status import SweepReader, find_trials

        reader = SweepReader(self.folder)
        found = find_trials(reader, reader.read(), str(name))
        if len(found) > 1:
            names = listing([repr(trial.folder) for trial in found], 4)
            raise UserError(f"{name!r} has several runs, {names}: name one of them.")
        return Run(self.folder / found[0].folder, self._vocabulary)

    def __repr__(self) -> str:
        return self.status().rstrip("\n")

    def _workload(self) -> Any:
        from trainer.report.sweep_results import read_sweep_results

        return read_sweep_results(self.folder)


def _frame(runs: Sequence[Any], hidden: str) -> "DataFrame":
    from pandas import DataFrame

    return DataFrame([_row(run, hidden) for run in runs])


def _row(run: Any, hidden: str) -> dict[str, Any]:
    own = {key: getattr(run, key) for key in ("name", "arm", "search", "number", "seed", "end")}
    row = {**own, "step": run.summary.step, "seconds": run.summary.seconds, **run.values}
    metrics = run.summary.metrics.items()
    return row | {k: x for k, x in metrics if not (hidden and k.startswith(hidden))}


def load_sweep(folder: str | PathLike[str], *, vocabulary: Packages = ()) -> Sweep:
    """Returns the sweep in a folder.

    Args:
        folder: of the sweep, which may not have ended.
        vocabulary: further packages whose public functions its configs name.

    Raises:
        UserError: the folder is not that of a sweep.
    """
    return Sweep(folder, vocabulary)


def sweep(
    file: str | PathLike[str],
    workdir: str | PathLike[str],
    *,
    set: Mapping[str, Any] | None = None,
    workers: int = 1,
    vocabulary: Packages = (),
    allow_changed: Sequence[str] = (),
    quiet: bool = False,
) -> Sweep:
    """Computes a sweep, from where it was stopped if it was begun before.

    It is the command `python -m trainer sweep`, in a process of its own whose output is shown here.

    Args:
        file: the file of the sweep.
        workdir: the folder of the sweep.
        set: path -> value, which override the file of the sweep.
        workers: how many processes compute at once.
        vocabulary: further packages whose public functions the configs may name.
        allow_changed: ["code"] goes on although files of these packages were edited since the sweep
            was planned; the report says so.
        quiet: whether the output is not shown.

    Raises:
        UserError: the file has a mistake, or the folder is that of another sweep.
        Stopped: it was interrupted; the trials that had ended are kept.
        RunFailed: some trials could not be computed.
    """
    from lockstep.configs import tree_of
    from trainer.config.yaml_writer import value_text

    vocabulary = as_vocabulary(vocabulary)
    words = ["sweep", f"--config={fspath(file)}", f"--workdir={fspath(workdir)}"]
    words += [f"--workers={workers}", *(f"--vocabulary={each}" for each in vocabulary)]
    words += [f"--allow_changed={each}" for each in allow_changed]
    words += [f"--set={path}={value_text(tree_of(x))}" for path, x in (set or {}).items()]
    run_command(words, str, quiet)
    return Sweep(workdir, vocabulary)
