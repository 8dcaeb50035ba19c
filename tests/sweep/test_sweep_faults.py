"""A disk that fails while a worker of a sweep claims, takes over, computes or moves a wave."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import runs, short
from tests.faults import Faults, fail
from tests.sweep.test_sweep import folders, rows, sweep, write_sweep
from trainer.messages import UserError
from trainer.sweep.presence import Mode
from trainer.sweep.worker import Worker

ERRORS = (errno.EIO, errno.EROFS, errno.ENOSPC, errno.ESTALE)
# Every 16th of about 1,000 operations fails: they repeat themselves from trial to trial.
# `make laws` lets every 4th fail.
APART = 4 if os.environ.get("LAWS") == "all" else 16


class Place:
    """The folder of a sweep with its plan, of which workers disturb copies.

    Attributes:
        locks: what keeps others from the trials of a worker.
        seen: the file operations of an undisturbed worker.
        planned: how many of them read the plan, before the worker shows that it is there.
    """

    def __init__(self, folder: Path, locks: Mode):
        self.faults, self.locks = Faults(), locks
        self._folder, self._copies = folder, 0
        code, lines, self.reference = self.disturbed(-1, None)
        assert code == 0, lines
        self.seen, self.results = self.faults.seen, self.rows(self.reference)
        self.planned = next(n for n, each in enumerate(self.seen) if "/workers" in each)

    def rows(self, workdir: Path) -> dict[str, Any]:
        return {str(x.relative_to(workdir)): rows(x) for x in folders(workdir)}

    def disturbed(
        self, number: int, action: Callable[[str | None], None] | None
    ) -> tuple[int, list[str], Path]:
        """Computes a copy; returns the exit code, the lines of the log, and the copy."""
        self._copies += 1
        workdir = self._folder / f"copy{self._copies}"
        shutil.copytree(self._folder / "planned", workdir)
        with self.faults.on(workdir, number, action):
            code, lines = self.work(workdir)
        return code, lines, workdir

    def work(self, workdir: Path) -> tuple[int, list[str]]:
        """Computes what is missing, as `sweep work` does."""
        lines: list[str] = []
        try:
            worker = Worker(workdir, 1, runs.Signals(), lines.append, self.locks)  # type: ignore[arg-type]
            return worker.run(), lines
        except UserError as error:
            return 2, [*lines, f"error: {error}"]


@pytest.fixture(scope="module", params=["flock", pytest.param("heartbeat", marks=pytest.mark.long)])
def place(
    lab: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("faults")
    compiled: dict[int, Any] = {}

    def prepare(worker: Worker, claim: Any, inner: Any = Worker._prepare) -> Any:
        if claim.program in compiled:
            worker._compare(
                compiled[claim.program].traits
            )  # so that all workers use the same files
        else:
            compiled[claim.program] = inner(worker, claim)
        return compiled[claim.program]

    with pytest.MonkeyPatch.context() as patch:
        assert sweep(write_sweep(folder), folder / "planned", "--plan_only") == 0
        patch.setattr(Worker, "_prepare", prepare)  # every copy has the same program
        yield Place(folder, request.param)


def check_fault(place: Place, number: int, code: int) -> None:
    """Lets an operation of a worker fail; a sentence says so, and the next one loses nothing."""
    ended, lines, workdir = place.disturbed(number, fail(code))
    # How many operations there are depends a little on the time that they take.
    about = f"{number}: {place.faults.seen[number : number + 1]} failed: {lines}"
    assert not any("Traceback" in line for line in lines), about
    if ended == 2:  # only while the plan is read for the first time
        assert number < place.planned and "cannot be read" in lines[-1], about
    elif ended == 1:
        assert "Finished trials are kept: start the same command again once" in lines[-1], about
        assert str(workdir) in lines[-1] and "error: [Errno" not in lines[-1], about
    else:
        assert ended == 0, about  # nothing depends on the operation
    assert place.work(workdir)[0] == 0, about
    assert place.rows(workdir) == place.results, about
    shutil.rmtree(workdir)


@pytest.mark.long
def test_an_error_of_the_disk_ends_a_worker_with_a_sentence_and_costs_nothing(place):
    """In the claims of waves above all, where the first 60 operations are."""
    numbers = [*range(0, 60, 5), *range(60, len(place.seen), 60)]
    for index, number in enumerate(numbers):
        check_fault(place, number, ERRORS[index % len(ERRORS)])


@pytest.mark.long
def test_a_full_disk_is_named_where_the_error_of_an_open_file_does_not_name_it(place):
    for name in ("pwrite", "fsync"):
        number = next(n for n, each in enumerate(place.seen) if each.startswith(name))
        check_fault(place, number, errno.ENOSPC)


@short.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
def test_an_error_of_the_disk_in_any_file_operation_of_a_worker_costs_nothing(place, code):
    numbers = range(APART * ERRORS.index(code), len(place.seen), APART * len(ERRORS))
    for number in numbers[:: len(numbers) // short.examples(len(numbers))]:
        check_fault(place, number, code)


@pytest.mark.long
def test_a_worker_whose_wave_is_taken_over_while_it_begins_leaves_the_wave(place):
    """It could be, where one host does not see the locks of another."""
    number = next(n for n, each in enumerate(place.seen) if "open" in each and "run.json." in each)

    def take_over(path: str | None) -> None:
        assert path is not None
        (Path(path).parent / "epoch").write_text("7 another\n")

    code, lines, workdir = place.disturbed(number, take_over)
    assert code == 0, lines
    assert sum("taken over" in line for line in lines) == 1
    assert place.rows(workdir) == place.results
