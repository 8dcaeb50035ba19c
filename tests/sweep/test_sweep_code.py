"""The user's code is one for the whole sweep, or the ledger and the report say where it changed."""

import fcntl
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.sweep_fuzz import Answer
from trainer.sweep.code_changes import DATA as DATA_NAME
from trainer.sweep.evidence import examine
from trainer.sweep.folder import SweepFolder
from trainer.sweep.ledger import LEDGER_FILE, append, read_ledger
from trainer.sweep.worker import Worker
from trainer.workdir.code import STEP

BASE = """
model: !models.mlp {width: 4, depth: 1, num_classes: 3}
data: !the_lab.data.points
loss: !losses.softmax_cross_entropy
optimizer: !the_lab.nets.sgd {learning_rate: 1e-2}
steps: 12
log_every: 4
eval_every: 4
save_every: 4
steps_per_call: 1
watchdog: null
writers: []
"""
SWEEP = """
base: base.yaml
arms:
  one: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}}
  two: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-2}}}
trials: 2
method: !method.random {seed: 1}
goal: {metric: loss, select_on: test}
final: {seeds: 2}
"""
NETS = """
import optax

def sgd(learning_rate: float):
    return optax.sgd(learning_rate)
"""
OPENS = """
import optax
from pathlib import Path

def sgd(learning_rate: float):
    return optax.chain(optax.sgd(learning_rate), optax.scale(float(Path({file!r}).read_text())))
"""
DATA = """
import unruly

class Points(unruly.Points):
    def train(self, batch_index, seed):
        for index, batch in enumerate(super().train(batch_index, seed), batch_index):
            if index:  # the plan reads the first batch
                import the_lab.late
            yield batch

def points():
    return Points()

def poisoned(at: list[int]):
    return unruly.poisoned(at)
"""
ROWS = """
import pathlib

class Rows(Points):
    def __init__(self, factor):
        super().__init__()
        self._factor, self.fingerprint = factor, f"rows times {{factor}}"

    def train(self, batch_index, seed):
        for batch in super().train(batch_index, seed):
            yield batch | {{"image": batch["image"] * type(batch["image"].flat[0])(self._factor)}}

def rows():
    return Rows(float(pathlib.Path({file!r}).read_text()))
"""
LATE = "x = 1\n"
VOCABULARY = "--vocabulary=the_lab"
ALLOW = "--allow_changed=code"


class Place:
    """A sweep, and the package of its user."""

    def __init__(self, folder: Path):
        self.folder, self.sweep = folder, folder / "sweep"
        self.lab = folder / "lab" / "the_lab"
        self.lab.mkdir(parents=True)
        for name, text in (("nets", NETS), ("data", DATA), ("late", LATE), ("__init__", "")):
            (self.lab / f"{name}.py").write_text(text)
        (folder / "base.yaml").write_text(BASE)
        (folder / "sweep.yaml").write_text(SWEEP)

    def words(self) -> list[str]:
        return ["sweep", f"--config={self.folder / 'sweep.yaml'}", VOCABULARY]

    def plan(self) -> None:
        answer = self.run(*self.words(), f"--workdir={self.sweep}", "--plan_only")
        assert answer.code == 0, answer.said

    def plan_rows(self) -> Path:
        """Plans the sweep with data that are multiplied by what a file has; returns the file."""
        rows = self.folder / "rows"
        (self.lab / "data.py").write_text(f"{DATA}\n{ROWS.format(file=str(rows))}")
        (self.folder / "base.yaml").write_text(BASE.replace("data.points", "data.rows"))
        rows.write_text("1.0")
        self.plan()
        return rows

    def run(self, *words: str) -> Answer:
        """Runs a command as a new process would, which imports the package anew."""
        forget()
        return Answer(*words)

    def work(self, *more: str) -> Answer:
        return self.run("sweep", "work", str(self.sweep), VOCABULARY, *more)

    def extend(self, *more: str) -> Answer:
        file = self.folder / "more.yaml"
        file.write_text(SWEEP.replace("trials: 2", "trials: 3"))
        return self.run("sweep", "extend", str(self.sweep), f"--config={file}", VOCABULARY, *more)

    def begin(self, after: int) -> None:
        """Has a worker look for a signal so often, and stop then."""
        forget()
        lines: list[str] = []
        assert Worker(self.sweep, 1, runs.Signals(after), lines.append).run() == 75, lines

    def edit(self, name: str = "nets", text: str = "x = 1\n") -> None:
        with open(self.lab / f"{name}.py", "a") as file:
            file.write(text)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the ledger about code, without those about steps and data."""
        ledger = read_ledger(self.sweep)
        assert ledger is not None and not ledger.damage and not ledger.torn
        lines = [dict(entry.content) for entry in ledger.of("code")]
        return [x for x in lines if not any(n.startswith((STEP, DATA_NAME)) for n in x["code"])]

    def trials(self) -> dict[str, dict[str, str]]:
        """The code of each trial, by its folder."""
        files = [*self.sweep.glob("trials/*/*/*/run.json"), *self.sweep.glob("final/*/*/run.json")]
        return {
            file.parent.relative_to(self.sweep).as_posix(): json.loads(file.read_text())[
                "fingerprint"
            ]["code"]
            for file in files
        }

    def report(self) -> str:
        answer = self.run("report", str(self.sweep), "--formats=markdown")
        assert answer.code == 0, answer.said
        return " ".join((self.sweep / "report" / "report.md").read_text().split())


def forget() -> None:
    """Lets the next import read the files again, as a new process would."""
    for name in [*sys.modules]:
        if name.partition(".")[0] == "the_lab":
            del sys.modules[name]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = Place(tmp_path)
    monkeypatch.syspath_prepend(runs.LAB)
    monkeypatch.syspath_prepend(place.lab.parent)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield place
    forget()


@pytest.fixture
def place(fresh: Place) -> Place:
    """A sweep of which the wave of the first arm was computed."""
    fresh.plan()
    stop_after_a_wave(fresh)
    assert len(fresh.trials()) == 2
    return fresh


def stop_after_a_wave(place: Place, *more: str) -> None:
    record = SweepFolder.record
    forget()

    class Ended:
        received: str | None = None

    def recording(self: SweepFolder, claim: Any) -> None:
        record(self, claim)
        Ended.received = "SIGTERM"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SweepFolder, "record", recording)
        options: Any = {"allow_changed": more} if more else {}
        assert Worker(place.sweep, 1, Ended(), print, **options).run() == 75


def refused(answer: Answer, *files: str) -> None:
    assert answer.code == 2 and "Traceback" not in answer.said, answer.said
    for name in files:
        assert re.search(rf"  the_lab/{name}\.py::(top level|sgd) \(since ", answer.said), (
            answer.said
        )
    assert ALLOW in answer.said
    assert len(answer.said.splitlines()) <= 7


@pytest.mark.long
def test_a_comment_that_changed_between_two_waves_is_noted_and_is_no_change(place):
    (place.lab / "nets.py").write_text(NETS.replace("):", "):\n    'Returns SGD.'") + "# hi\n")
    answer = place.work()
    assert answer.code == 0 and "changed" not in answer.said, answer.said
    *_, noted = place.lines()
    assert list(noted["code"]) == ["the_lab/nets.py"] and noted["changed"] == {}
    assert len({code["the_lab/nets.py"] for code in place.trials().values()}) == 2
    assert not examine(place.sweep).faults
    assert "had changed" not in place.report()
    place.edit()
    refused(place.extend(), "nets")


@pytest.mark.long
def test_the_ledger_has_the_code_that_planned_the_sweep_and_each_trial_its_own(place):
    (first, late) = place.lines()
    files = sorted(name for name in first["code"] if "::" not in name)
    assert files == [
        *(f"the_lab/{x}.py" for x in ("__init__", "data", "nets")),
        "unruly/__init__.py",
    ]
    # Imported by the second batch: added, and not refused.
    assert list(late["code"]) == ["the_lab/late.py", "the_lab/late.py::top level"]
    assert late["changed"] == {}
    assert first["changed"] == {}
    for code in place.trials().values():
        assert code == first["code"] | late["code"]
    assert place.work().code == 0
    assert len(place.lines()) == 2


@pytest.mark.long
def test_a_change_that_was_taken_out_of_the_ledger_is_found(place):
    place.edit()
    assert place.work(ALLOW).code == 0
    rewrite(place.sweep, lambda event: not event.get("changed"))
    answer = place.run("sweep", "check", str(place.sweep))
    assert answer.code == 2
    assert len(answer.said.splitlines()) == 6
    assert "/run.json: ledger.jsonl lacks its code, the_lab/nets.py " in answer.said


@pytest.mark.long
def test_code_that_was_edited_between_two_waves_is_refused_by_a_worker(place):
    before = runs.contents(place.sweep)
    place.edit()
    refused(place.work(), "nets")
    assert runs.contents(place.sweep) == before
    (place.lab / "nets.py").write_text(NETS)
    answer = place.work()
    assert answer.code == 0, answer.said
    assert "changed" not in place.report()


def test_a_file_that_the_code_opens_is_not_changed_between_two_waves(fresh):
    """A sweep went on with the other factor, and its check and its report agreed."""
    factor = fresh.folder / "factor"
    (fresh.lab / "nets.py").write_text(OPENS.format(file=str(factor)))
    factor.write_text("1.0")
    fresh.plan()
    stop_after_a_wave(fresh)
    before = runs.contents(fresh.sweep)
    factor.write_text("2.0")
    answer = fresh.work()
    assert answer.code == 2 and answer.said.count("\n") == 4, answer.said
    assert f"  {STEP} of one/0000/0 (" in answer.said and ALLOW in answer.said
    assert "A file that it opens was changed, or an installed package" in answer.said
    assert {name: x for name, x in runs.contents(fresh.sweep).items() if "trials/" in name} == {
        name: x for name, x in before.items() if "trials/" in name
    }
    assert fresh.work(ALLOW).code == 0
    assert f"after 2 trials had ended, as was allowed: {STEP} of one/0000/0 (" in fresh.report()
    check = fresh.run("sweep", "check", str(fresh.sweep))
    assert check.code == 0 and "as was allowed: the program of a training step" in check.said


def test_the_command_itself_refuses_it_before_it_starts_workers(place, monkeypatch):
    from trainer.sweep import local

    def start(command, *rest: Any) -> int:
        started.append(command)
        return 0

    started: list[list[str]] = []
    monkeypatch.setattr(local, "run_workers", start)
    place.edit()
    words = [*place.words(), f"--workdir={place.sweep}"]
    refused(place.run(*words), "nets")
    assert not started
    answer = place.run(*words, ALLOW, "--workers=2")
    assert answer.code == 0, answer.said
    assert ALLOW in started[0] and started[0][started[0].index("work") + 1] == str(place.sweep)


def test_a_file_of_data_is_not_changed_between_two_waves(fresh):
    """A sweep was extended and went on with other rows: its check agreed, and it was judged."""
    rows = fresh.plan_rows()
    stop_after_a_wave(fresh)
    rows.write_text("2.0")
    answer = fresh.work()
    assert answer.code == 2 and "The data of the sweep in" in answer.said, answer.said
    assert f"  {DATA_NAME} of the_lab.data.rows (" in answer.said
    assert "(since the sweep was begun)" in answer.said and "draws random numbers" in answer.said
    assert "--allow_changed=data" in answer.said and len(fresh.trials()) == 2
    assert fresh.work(ALLOW).code == 2  # that is another change
    answer = fresh.work("--allow_changed=data")
    assert answer.code == 0, answer.said
    assert "The data changed, as is allowed: the data of the_lab.data.rows (" in answer.said
    said = (
        "The data changed after 2 trials had ended, as was allowed: the data of the_lab.data.rows"
    )
    assert said in fresh.report()
    check = fresh.run("sweep", "check", str(fresh.sweep))
    assert check.code == 0 and said in check.said
    assert fresh.work().code == 0 and "changed" not in fresh.work().said


@pytest.mark.long
def test_data_that_no_trial_was_computed_with_are_not_noted(fresh):
    """The wave that was begun was refused, and the restored file was, too, as another change."""
    rows = fresh.plan_rows()
    fresh.begin(8)
    assert list(fresh.sweep.glob("waves/*/checkpoints/*"))
    rows.write_text("2.0")
    answer = fresh.work("--allow_changed=data")
    assert answer.code == 2 and "Restore the old value; or remove" in answer.said, answer.said
    rows.write_text("1.0")
    answer = fresh.work()
    assert answer.code == 0 and "changed" not in answer.said, answer.said
    assert "changed" not in fresh.run("sweep", "check", str(fresh.sweep)).said


@pytest.mark.long
def test_allowed_code_is_noted_and_the_report_says_what_ran_with_it(place):
    before = place.trials()
    (place.lab / "nets.py").write_text(NETS.replace("optax.sgd(", "optax.sgd(1.0 * "))
    answer = place.work(ALLOW)
    assert answer.code == 0, answer.said
    assert "The code changed, as is allowed: the_lab/nets.py::sgd." in answer.said
    sgd = "the_lab/nets.py::sgd"
    old, change = place.lines()[0]["code"][sgd], place.lines()[-1]
    new = change["code"][sgd]
    assert change["changed"] == {sgd: old} and new != old
    assert list(change["code"]) == ["the_lab/nets.py", sgd] and len(place.lines()) == 3
    of_nets = {name: code[sgd] for name, code in place.trials().items()}
    assert of_nets == {name: old if name in before else new for name in of_nets}
    assert len(of_nets) == 8
    noted = "The code changed after 2 trials had ended, as was allowed: the_lab/nets.py::sgd."
    check = place.run("sweep", "check", str(place.sweep))
    assert check.code == 0 and noted in check.said and "agree with each other" in check.said
    assert noted in place.run("sweep", "status", str(place.sweep)).said
    arm = next(iter(before)).split("/")[1]
    other = "two" if arm == "one" else "one"
    shown = place.run("sweep", "show", str(place.sweep), f"{other}/0").said
    assert "It ran after the_lab/nets.py::sgd had changed." in shown
    assert "had changed" not in place.run("sweep", "show", str(place.sweep), f"{arm}/0").said
    page = place.report()
    assert (
        f"All of {other}'s 2 trials, all of one's 2 final runs and all of two's 2 final runs ran"
        " after the_lab/nets.py::sgd had changed."
    ) in page, page
    # It is the code of the sweep now.
    assert place.extend().code == 0
    assert place.work().code == 0


@pytest.mark.long
def test_code_that_was_edited_is_refused_by_an_extension(place):
    assert place.work().code == 0
    place.edit()
    before = runs.contents(place.sweep)
    refused(place.extend(), "nets")
    refused(place.extend("--dry_run"), "nets")
    assert runs.contents(place.sweep) == before
    answer = place.extend(ALLOW)
    assert answer.code == 0, answer.said
    assert f"python -m trainer sweep work {place.sweep} {VOCABULARY} {ALLOW}" in answer.said
    assert list(place.lines()[-1]["changed"]) == ["the_lab/nets.py::top level"]
    assert place.work().code == 0
    assert not examine(place.sweep).faults
    assert "1 of one's 3 trials" in place.report()


@pytest.mark.long
def test_a_wave_that_other_code_began_goes_on_if_that_is_allowed(fresh):
    fresh.plan()
    fresh.begin(8)  # in the middle of a wave
    (wave,) = fresh.sweep.glob("waves/*/checkpoints")
    fresh.edit()
    refused(fresh.work(), "nets")
    assert wave.exists()
    answer = fresh.work(ALLOW)
    assert answer.code == 0, answer.said
    assert "code: the_lab/nets.py::top level differs (as allowed)" in answer.said
    page = fresh.report()
    assert "2 trials were resumed with code that had changed." in page, page


@pytest.mark.long
def test_a_wave_whose_state_is_another_one_with_the_allowed_code_begins_anew(fresh):
    fresh.plan()
    fresh.begin(8)
    (fresh.lab / "nets.py").write_text(NETS.replace("optax.sgd(", "optax.adam("))
    answer = fresh.work(ALLOW)
    assert answer.code == 0 and "Traceback" not in answer.said, answer.said
    assert "The code was changed. The checkpoint " in answer.said
    assert "does not fit this program. The wave is removed, and its trials are computed" in (
        answer.said
    )
    assert "resumed with code" not in fresh.report()


@pytest.mark.long
def test_a_wave_that_other_code_began_is_refused_with_the_option_that_continues_it(fresh):
    """The sweep has gone over to other code, and the wave has not."""
    fresh.plan()
    fresh.begin(8)
    (wave,) = [x for x in fresh.sweep.glob("waves/*") if x.is_dir()]
    fresh.edit()
    with open(wave.with_suffix(".json")) as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as the worker that computes it
        stop_after_a_wave(fresh, "code")
    answer = fresh.work()
    assert answer.code == 2 and "code: the_lab/nets.py::top level differs" in answer.said
    assert f"Restore the old value, go on with {ALLOW}; or remove {wave}," in answer.said
    assert fresh.work(ALLOW).code == 0


@pytest.mark.long
@pytest.mark.parametrize("state", ["the same", "another"])
def test_a_trial_alone_that_other_code_began_goes_on_if_that_is_allowed(fresh, state):
    poisoned = BASE.replace("!the_lab.data.points", "!the_lab.data.poisoned {at: [6]}")
    (fresh.folder / "base.yaml").write_text(f"{poisoned}on_nonfinite: rollback\n")
    text = SWEEP.replace("trials: 2", "trials: 1").replace("{seeds: 2}", "null")
    (fresh.folder / "sweep.yaml").write_text(text)
    fresh.plan()
    fresh.begin(16)
    assert any(json.loads(x.read_text()).get("alone") for x in fresh.sweep.glob("waves/*.json"))
    fresh.edit()
    if state == "another":
        (fresh.lab / "nets.py").write_text(NETS.replace("optax.sgd(", "optax.adam("))
    refused(fresh.work(), "nets")
    answer = fresh.work(ALLOW)
    assert answer.code == 0 and "Traceback" not in answer.said, answer.said
    assert ("The wave is removed" in answer.said) == (state == "another")


@pytest.mark.long
def test_a_module_that_a_later_wave_imports_is_compared_when_it_is_imported(place):
    place.edit("late")
    begun = len(place.trials())
    answer = place.work()
    refused(answer, "late")
    assert "the_lab/nets.py" not in answer.said
    assert len(place.trials()) == begun  # the wave that imported it is kept, and not finished
    assert list(place.sweep.glob("waves/*.json"))
    answer = place.work(ALLOW)
    assert answer.code == 0, answer.said
    assert list(place.lines()[-1]["changed"]) == ["the_lab/late.py::top level"]


@pytest.mark.long
def test_a_worker_keeps_the_code_that_it_has_imported(fresh):
    """Another process goes over to other code meanwhile; the trials say which one they had."""
    fresh.plan()
    record, codes = SweepFolder.record, []
    ours = fresh.lines()[0]["code"]["the_lab/nets.py"]

    def recording(self: SweepFolder, claim: Any) -> None:
        record(self, claim)
        if not codes:
            fresh.edit()
            (fresh.folder / "more.yaml").write_text(SWEEP.replace("trials: 2", "trials: 3"))
            words = ["sweep", "extend", str(fresh.sweep), VOCABULARY]
            words += [f"--config={fresh.folder / 'more.yaml'}"]
            for more in ([], [ALLOW]):
                codes.append(other_process(fresh, *words, *more))
            # A module that is new does not have the others compared again.
            (fresh.lab / "later.py").write_text("")
            importlib.import_module("the_lab.later")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SweepFolder, "record", recording)
        answer = fresh.work()
    assert answer.code == 0, answer.said
    assert codes == [2, 0]
    assert [code["the_lab/nets.py"] for code in fresh.trials().values()] == [ours] * 10
    *_, change, later = fresh.lines()
    assert change["code"]["the_lab/nets.py"] != ours
    assert list(later["code"]) == ["the_lab/later.py", "the_lab/later.py::top level"]
    assert "had changed" not in fresh.report()
    assert not examine(fresh.sweep).faults


def other_process(place: Place, *words: str) -> int:
    paths = f"{runs.ROOT}:{runs.LAB}:{place.lab.parent}"
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(command, env=runs.environment(PYTHONPATH=paths)).returncode


@pytest.mark.long
def test_a_killed_worker_is_followed_by_one_that_refuses_other_code(fresh):
    base = (fresh.folder / "base.yaml").read_text()
    for old, new in (("steps: 12", "steps: 1000000"), ("_every: 4", "_every: 1000")):
        base = base.replace(old, new)
    (fresh.folder / "base.yaml").write_text(base)
    fresh.plan()
    paths = f"{runs.ROOT}:{runs.LAB}:{fresh.lab.parent}"
    command = [sys.executable, "-m", "trainer", "sweep", "work", str(fresh.sweep), VOCABULARY]
    worker = subprocess.Popen(
        command, env=runs.environment(PYTHONPATH=paths), stderr=subprocess.DEVNULL
    )
    saved = "waves/*/checkpoints/*/manifest.json"
    try:
        runs.wait_for(lambda: [*fresh.sweep.glob(saved)] or worker.poll() is not None)
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait(runs.LONG)
    fresh.edit()
    assert other_process(fresh, *command[3:]) == 2
    assert list(fresh.sweep.glob("waves/*/checkpoints/*"))


def rewrite(folder: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Writes the ledger anew with some of its lines."""
    file = folder / LEDGER_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    file.unlink()
    kept = [{k: x for k, x in y.items() if k not in ("before", "hash")} for y in lines]
    append(folder, [each for each in kept if keep(each)])


@pytest.mark.long
@pytest.mark.parametrize("ledger", [True, False])
def test_a_sweep_of_an_earlier_version_goes_on_with_the_code_of_its_next_worker(place, ledger):
    if ledger:
        rewrite(place.sweep, lambda event: event["event"] != "code")
    else:
        (place.sweep / LEDGER_FILE).unlink()
        for file in place.sweep.glob("trials/*/*/*/run.json"):  # without hashes of functions
            record = json.loads(file.read_text())
            code = record["fingerprint"]["code"]
            record["fingerprint"]["code"] = {x: y for x, y in code.items() if "::" not in x}
            file.write_text(json.dumps(record))
    assert place.run("sweep", "check", str(place.sweep)).code == 0
    place.edit()
    stop_after_a_wave(place)
    assert [list(line["changed"]) for line in place.lines()] == [[], []]
    assert "the_lab/nets.py::sgd" in place.lines()[0]["code"]
    assert not examine(place.sweep).faults
    assert "the_lab/nets.py" not in place.run("sweep", "status", str(place.sweep)).said
    place.edit()
    refused(place.work(), "nets")
    answer = place.work(ALLOW)
    assert answer.code == 0, answer.said
    # Which trials had the code before is known from themselves.
    page = place.report()
    nets = "the_lab/nets.py" + "::top level" * ledger
    assert f"2 trials ran after {nets} had changed for the 1st time." in page, page
    assert f"2 final runs ran after {nets} had changed for the 2nd time." in page, page


@pytest.mark.long
def test_any_byte_of_a_line_about_code_that_is_edited_is_found(place):
    file = place.sweep / LEDGER_FILE
    content = file.read_bytes()
    number = next(n for n, x in enumerate(content.splitlines()) if b'"event":"code"' in x)
    begin = sum(len(line) + 1 for line in content.splitlines()[:number])
    for at in range(begin, begin + len(content.splitlines()[number]) + 1):
        changed = bytearray(content)
        changed[at] ^= 1
        file.write_bytes(bytes(changed))
        assert read_ledger(place.sweep).damage, at  # type: ignore[union-attr]
    file.write_bytes(content)
    append(place.sweep, [{"event": "code", "code": {"a.py": 5}, "changed": {}}])
    answer = place.run("sweep", "check", str(place.sweep))
    assert answer.code == 2 and "ledger.jsonl: line " in answer.said


@pytest.mark.long
def test_only_code_may_be_allowed(place):
    for command in (place.words(), ["sweep", "work", "x"], ["sweep", "extend", "x", "--config=x"]):
        answer = place.run(*command, "--allow_changed=steps")
        assert answer.code == 2 and "invalid choice: 'steps'" in answer.said


def test_the_workers_of_slurm_are_passed_the_option(fresh, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 12\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    fresh.plan()
    fresh.edit()
    words = [*fresh.words(), f"--workdir={fresh.sweep}", "--launcher=slurm"]
    refused(fresh.run(*words), "nets")
    assert not (fresh.sweep / "slurm").exists()
    answer = fresh.run(*words, ALLOW)
    assert answer.code == 0, answer.said
    assert ALLOW in (fresh.sweep / "slurm" / "workers.sh").read_text()
