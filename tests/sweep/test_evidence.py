"""`sweep check`: every result file that was edited is found, and named."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs, short
from tests.sweep.test_sweep import GOAL, sweep, swept, write_sweep
from tests.sweep.test_sweep_kills import kill_in
from trainer.__main__ import main
from trainer.sweep import extension
from trainer.sweep.evidence import examine
from trainer.sweep.ledger import LEDGER_FILE, append, read_ledger
from trainer.writers.summary import Summary

ARMS = f"""base: base.yaml
arms:
  one: {{space: {{optimizer.learning_rate: !space.log_uniform {{low: 1e-3, high: 1e-1}}}}}}
  two: {{space: {{optimizer.learning_rate: !space.log_uniform {{low: 1e-3, high: 1e-2}}}}}}
trials: 2
method: !method.random {{seed: 1}}
goal: {GOAL}
final: {{seeds: 2}}
"""

pytestmark = pytest.mark.usefixtures("lab")


@pytest.fixture(scope="module")
def computed(lab: None, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    file = write_sweep(folder)
    file.write_text(ARMS)
    assert sweep(file, folder / "sweep") == 0
    return folder / "sweep"


def faults(folder: Path, thorough: bool = True) -> dict[str, str]:
    return {fault.file: fault.why for fault in examine(folder, thorough=thorough).faults}


def edit(file: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content, indent=1) + "\n")


def trial_of(folder: Path) -> str:
    return sorted(x.relative_to(folder).as_posix() for x in folder.glob("trials/one/*/0"))[0]


@pytest.mark.long
def test_a_finished_sweep_agrees_with_itself_in_one_line(computed, capsys):
    assert main(["sweep", "check", str(computed)]) == 0
    ledger = read_ledger(computed)
    assert ledger is not None
    assert capsys.readouterr().out == (
        "The 8 results agree with each other, and 49 files with ledger.jsonl, whose last hash is"
        f" {ledger.head}.\n"
    )


@pytest.mark.long
def test_no_result_file_has_a_path_of_the_machine(computed):
    """So that the folder can be published, and a run elsewhere has the same record."""
    files = [x for x in computed.rglob("*") if x.is_file() and "workers" not in x.parts]
    paths = [str(computed).encode(), sys.executable.encode()]
    assert files and not [x for x in files if any(path in x.read_bytes() for path in paths)]


@pytest.mark.long
def test_any_byte_of_any_result_file_that_is_edited_is_found(copied):
    files = [x for x in sorted(copied.rglob("*")) if x.is_file() and x != copied / "lock"]
    assert len(files) == 50 and not faults(copied)
    for file in files:
        content = file.read_bytes()
        for at in {0, len(content) // 3, len(content) // 2, len(content) - 2, len(content) - 1}:
            changed = bytearray(content)
            changed[at] ^= 1
            file.write_bytes(bytes(changed))
            name = file.relative_to(copied).as_posix()
            assert name in faults(copied, thorough=False), (name, at)
        file.write_bytes(content)
    assert not faults(copied)


@pytest.mark.long
def test_the_checkpoint_of_another_run_is_a_fault(tmp_path):
    """`checkpoint check` finds nothing wrong with it, and nor did `sweep check`."""
    folder = swept(tmp_path, more="checkpoints: final", trials=2)
    runs_of = sorted(x.relative_to(folder).as_posix() for x in folder.glob("trials/base/*/0"))
    one, two = (folder / name / "checkpoints" for name in runs_of)
    assert not faults(folder)
    kept = one.rename(tmp_path / "kept")
    shutil.copytree(two, one)
    (step,) = kept.iterdir()
    (manifest,) = (x.relative_to(kept).as_posix() for x in step.rglob("manifest.json"))
    why = "it was changed after its line in ledger.jsonl"
    assert faults(folder) == {f"{runs_of[0]}/checkpoints/{manifest}": why}
    (one / manifest).unlink()
    why = "it is missing, and ledger.jsonl has it"
    assert faults(folder) == {f"{runs_of[0]}/checkpoints/{manifest}": why}
    shutil.rmtree(one)  # to save space
    assert not faults(folder)
    shutil.copytree(two / step.name, one / "11")
    why = "ledger.jsonl does not have it"
    assert faults(folder) == {f"{runs_of[0]}/checkpoints/11/{Path(manifest).name}": why}
    shutil.rmtree(one)
    kept.rename(one)
    assert not faults(folder)


@pytest.mark.long
def test_links_among_the_results_are_faults(copied, tmp_path):
    """What they lead to is read, and by `claim verify` copied, from anywhere on the machine."""
    trial = trial_of(copied)
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("secret")
    (copied / trial / "state").symlink_to(private)
    (copied / trial / "endless").symlink_to("/dev/zero")
    summary = (copied / trial / "summary.json").rename(tmp_path / "summary.json")
    (copied / trial / "summary.json").symlink_to(summary)  # of the same content
    why = "it is a link, and not a file of the sweep"
    assert faults(copied) == {f"{trial}/{x}": why for x in ("state", "endless", "summary.json")}


@pytest.mark.long
def test_a_link_in_the_place_of_all_trials_is_a_fault(copied):
    (copied / "trials").rename(copied / "moved")
    (copied / "trials").symlink_to("moved")
    assert faults(copied) == {"trials": "it is a link, and not a file of the sweep"}


def test_the_files_are_named_and_the_exit_code_is_2(copied, capsys):
    trial = trial_of(copied)
    edit(copied / trial / "summary.json", lambda x: x["metrics"].update({"eval/loss": 0.01}))
    shutil.rmtree(copied / "final" / "two" / "10001")
    assert main(["sweep", "check", str(copied)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "final/two/10001: it is missing, and ledger.jsonl has its files.",
        f"{trial}/summary.json: it was changed after its line in ledger.jsonl.",
        f"{trial}/summary.json: its eval/loss is not that of the rows of metrics.jsonl.",
    ]
    assert re.fullmatch(
        r"final.json: its winner of one in search 0 of revision 1 is point . with .*, and the best"
        r" of the trials is point 0 with 0.01.",
        lines[3],
    )
    assert len(lines) == 4


def first_trial(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(x for x in lines if x["event"] == "trial")


def rewritten(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Writes the ledger anew with other lines, as somebody may who knows how it is hashed."""
    file = folder / LEDGER_FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.unlink()
    append(folder, [{k: x for k, x in y.items() if k not in ("before", "hash")} for y in lines])


LEDGERS: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "cut": (lambda lines: lines.pop(), "final/.*: ledger.jsonl has no line about it."),
    "without a trial": (
        lambda lines: lines.remove(first_trial(lines)),
        "trials/.*: ledger.jsonl has no line about it",
    ),
    "without the winners": (
        lambda lines: lines.remove(next(x for x in lines if x["event"] == "final")),
        "final.json: ledger.jsonl has no line about it",
    ),
    "a trial twice": (
        lambda lines: lines.append(first_trial(lines)),
        "ledger.jsonl: line 16 has trials/.* for a second time",
    ),
    "of another sweep": (
        lambda lines: lines[0].update(digest="0" * 64),
        "ledger.jsonl: line 1 has a revision 1 of the plan that is not the one of plan.json",
    ),
    "without the plan": (
        lambda lines: lines.pop(0),
        "ledger.jsonl: it has no line about revision 1 of the plan",
    ),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_was_written_anew_is_found_by_what_it_lacks(copied, capsys, name):
    change, said = LEDGERS[name]
    rewritten(copied, change)
    assert main(["sweep", "check", str(copied)]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert re.match(said, line), line


@pytest.mark.parametrize("content", ["[]", "1", '{"event": "trial"}', "\x00", ""])
def test_a_ledger_may_hold_anything(copied, capsys, content):
    (copied / LEDGER_FILE).write_text(f"{content}\n")
    assert main(["sweep", "check", str(copied)]) == 2
    assert "ledger.jsonl: line 1 was changed." in capsys.readouterr().out


def test_a_forged_line_without_content_is_found(copied, capsys):
    append(copied, [{"event": "trial", "trial": 5, "files": {}}])
    assert main(["sweep", "check", str(copied)]) == 2
    assert capsys.readouterr().out == "ledger.jsonl: line 16 was changed.\n"


def test_a_sweep_without_a_ledger_is_checked_against_its_rows(copied, capsys):
    (copied / LEDGER_FILE).unlink()
    assert "There is no ledger.jsonl" in runs.printed(capsys, "sweep", "check", str(copied))
    trial = trial_of(copied)

    def forge(content: Any) -> None:
        content["best"]["eval/loss"]["min"]["value"] /= 2
        content["perf/seconds"] /= 2

    edit(copied / trial / "summary.json", forge)
    name = f"{trial}/summary.json"
    assert faults(copied, thorough=False) == {
        name: "its perf/seconds is not that of the rows of metrics.jsonl, and 1 more"
    }


@pytest.mark.long
def test_a_ledger_that_began_late_says_so(copied, capsys):
    (copied / LEDGER_FILE).unlink()
    shutil.rmtree(copied / trial_of(copied))
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    capsys.readouterr()
    assert main(["sweep", "check", str(copied)]) == 0
    said = (
        "ledger.jsonl began at revision 1 of the plan, when there were 7 results, and says nothing"
    )
    assert said in capsys.readouterr().out


def test_seeds_taken_out_of_final_json_are_found(copied):
    (copied / LEDGER_FILE).unlink()
    edit(copied / "final.json", lambda choices: choices[0]["seeds"].pop())
    assert "its seeds are [10000]" in faults(copied)["final.json"]


def extend(folder: Path) -> int:
    """Adds a final seed to the sweep in a folder; returns the exit code."""
    file = write_sweep(folder.parent)
    file.write_text(ARMS.replace("final: {seeds: 2}", "final: {seeds: 3}"))
    return main(["sweep", "extend", str(folder), f"--config={file}", "--vocabulary=unruly"])


@pytest.mark.long
def test_without_final_json_a_sweep_is_extended_when_its_winners_are_chosen_again(copied, capsys):
    content = (copied / "final.json").read_bytes()
    (copied / "final.json").unlink()
    assert extend(copied) == 2
    assert f"`python -m trainer sweep work {copied}`" in capsys.readouterr().err
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    assert (copied / "final.json").read_bytes() == content
    assert extend(copied) == 0 and not faults(copied)
    (_, second) = json.loads((copied / "plan.json").read_text())["revisions"]
    assert second["known"]["final"] and len(second["known"]["finished"]) == 4


@short.parametrize("hidden", ["winners", "a trial", ""])
def test_a_revision_that_hides_what_was_known_is_found(copied, monkeypatch, hidden):
    def known(folder: Path, names: set[str]) -> dict[str, Any]:
        every = sorted(names)
        return {"finished": every[hidden == "a trial" :], "final": hidden != "winners"}

    monkeypatch.setattr(extension, "_known_results", known)
    assert extend(copied) == 0
    said = {"winners": "winners were chosen", "a trial": "1 more trial ended", "": ""}
    wanted = (
        f"revision 2 does not say that {said[hidden]} before it, and ledger.jsonl does"
        if hidden
        else ""
    )
    assert faults(copied).get("plan.json", "")[: len(wanted)] == wanted
    assert bool(faults(copied)) == bool(hidden)


def test_another_winner_in_final_json_is_found(copied):
    (copied / LEDGER_FILE).unlink()

    def forge(choices: Any) -> None:
        winner = choices[0]["winners"]["two"][0]
        winner["number"] = 1 - winner["number"]

    edit(copied / "final.json", forge)
    assert "its winner of two in search 0 of revision 1 is" in faults(copied)["final.json"]


@pytest.mark.long
def test_a_sweep_agrees_with_itself_at_every_stage(tmp_path):
    """Planned, with a wave that a killed worker left, computed, extended, and computed again."""
    file, folder = write_sweep(tmp_path), tmp_path / "sweep"
    assert sweep(file, folder, "--plan_only") == 0
    assert not faults(folder)
    kill_in("ledger", 0, folder)  # its trials were moved, and are not in the ledger yet
    assert examine(folder).results == 3 and not faults(folder)
    work = ["sweep", "work", str(folder), "--vocabulary=unruly"]
    assert main(work) == 0
    assert not faults(folder)
    file.write_text(file.read_text().replace("trials: 3", "trials: 6"))
    extend = ["sweep", "extend", str(folder), f"--config={file}", "--vocabulary=unruly"]
    assert main(extend) == 0
    assert not faults(folder)
    assert main(work) == 0
    assert not faults(folder)
    assert examine(folder).results >= 8


def test_outcomes_that_are_known_are_not_read_again(copied, monkeypatch):
    from trainer.sweep import evidence

    outcomes = {
        x.relative_to(copied).as_posix(): evidence.read_outcome(x)
        for x in [*copied.glob("trials/*/*/*"), *copied.glob("final/*/*")]
    }
    known: dict[str, Summary] = {name: x for name, x in outcomes.items() if x is not None}
    monkeypatch.setattr(evidence, "read_outcome", lambda trial: pytest.fail(f"{trial} is read"))
    assert not examine(copied, known).faults
