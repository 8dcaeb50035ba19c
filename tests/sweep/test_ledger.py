"""The ledger of a sweep: what its hashes show, and what a killed worker may leave."""

import hashlib
import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.sweep.test_sweep import folders, rows, sweep, swept, write_sweep
from tests.sweep.test_sweep_kills import kill_in
from trainer.__main__ import main
from trainer.sweep.evidence import examine
from trainer.sweep.ledger import (
    LEDGER_FILE,
    Ledger,
    LedgerWriter,
    append,
    file_digest,
    file_digests,
    read_ledger,
    trial_event,
)
from trainer.sweep.plan_file import read_plan

pytestmark = pytest.mark.usefixtures("lab")


def written(folder: Path, count: int = 4) -> Path:
    for number in range(count):
        append(folder, [{"event": "trial", "trial": f"trials/a/{number:04d}/0", "files": {}}])
    return folder / LEDGER_FILE


def test_each_line_has_the_hash_of_the_line_before_and_its_own(tmp_path):
    file = written(tmp_path)
    before = ""
    for line in file.read_text().splitlines():
        content = json.loads(line)
        own = content.pop("hash")
        assert content["before"] == before
        text = json.dumps(content, separators=(",", ":"))
        assert own == hashlib.sha256(text.encode()).hexdigest()
        before = own
    ledger = read_ledger(tmp_path)
    assert (len(ledger.entries), ledger.damage, ledger.head) == (4, "", before)


def test_any_byte_that_is_changed_is_found(tmp_path):
    file = written(tmp_path, 2)
    content = file.read_bytes()
    for index in range(len(content)):
        for flip in (0x01, 0x20):
            changed = bytearray(content)
            changed[index] ^= flip
            file.write_bytes(bytes(changed))
            ledger = read_ledger(tmp_path)
            assert ledger.damage or ledger.torn, (index, flip)


@pytest.mark.parametrize(
    ("keep", "damage"),
    [
        ([1, 2, 3], "what stood before line 1 was changed or removed"),
        ([0, 2, 3], "what stood before line 2 was changed or removed"),
        ([0, 1, 1, 2, 3], "what stood before line 3 was changed or removed"),
        ([0, 2, 1, 3], "what stood before line 2 was changed or removed"),
        ([0, 1, 2], ""),  # a cut is found by the trials that it lacks, not by the chain
    ],
)
def test_lines_that_are_removed_repeated_or_moved_are_found(tmp_path, keep, damage):
    file = written(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[index] for index in keep))
    ledger = read_ledger(tmp_path)
    assert ledger.damage == damage


def test_a_torn_line_is_replaced_and_nothing_else_is(tmp_path):
    file = written(tmp_path, 3)
    whole = file.read_bytes()
    for cut in range(1, 40):
        file.write_bytes(whole[:-cut])
        ledger = read_ledger(tmp_path)
        assert ledger.torn and len(ledger.entries) == 2
        append(tmp_path, [json.loads(whole.splitlines()[-1]) | {"trial": "again"}])
        assert file.read_bytes().splitlines()[:2] == whole.splitlines()[:2]
        after = read_ledger(tmp_path)
        assert after is not None and not after.torn
        file.write_bytes(whole)
    # A line that was changed is not mended by the next one.
    file.write_bytes(whole.replace(b"trials/a/0001/0", b"trials/a/0009/0"))
    append(tmp_path, [{"event": "final", "files": {}}])
    ledger = read_ledger(tmp_path)
    assert ledger.damage == "line 2 was changed"


def test_digests_are_those_of_sha256sum(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "x").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    (tmp_path / "logs" / "one").mkdir(parents=True)
    (tmp_path / "logs" / "one" / "b").write_bytes(b"")
    assert dict(file_digests(tmp_path)) == {"a": empty, "logs/one/b": empty}


def test_a_sweep_of_an_earlier_version_has_no_ledger(tmp_path):
    assert read_ledger(tmp_path) == Ledger(exists=False)


def events(folder: Path) -> list[tuple[str, str]]:
    ledger = read_ledger(folder)
    assert not ledger.damage and not ledger.torn
    return [(each.event, each.content.get("trial", "")) for each in ledger.entries]


def names(folder: Path) -> list[str]:
    return [trial.relative_to(folder).as_posix() for trial in folders(folder)]


@pytest.fixture(scope="module")
def computed(lab: None, tmp_path_factory) -> Path:
    return swept(tmp_path_factory.mktemp("ledger"), more="checkpoints: final")


@pytest.mark.long
def test_a_sweep_has_a_line_for_its_plan_each_trial_and_the_winners(computed):
    found, every = events(computed), names(computed)
    assert [event for event, _ in found] == [
        "plan",
        "code",
        "environment",
        *["code"] * 2,  # the data, and the program of a training step
        "initial",
        *["trial"] * 3,
        "final",
        *["trial"] * 2,
    ]
    assert sorted(trial for event, trial in found if event == "trial") == sorted(every)
    ledger = read_ledger(computed)
    plan, final = ledger.of("plan")[0].content, ledger.of("final")[0].content
    assert (plan["revision"], plan["digest"]) == (1, read_plan(computed).digest)
    assert sorted(plan["files"]) == ["arms/base.yaml", "plan.json", "sweep.yaml"]
    for path, digest in [*plan["files"].items(), *final["files"].items()]:
        assert file_digest(computed / path) == digest
    for entry in ledger.of("trial"):
        trial = computed / entry.content["trial"]
        kept = {path.name for path in trial.iterdir()} - {"checkpoints"}
        assert set(entry.content["files"]) == kept | {"checkpoints/12/manifest.json"}
        assert entry.content["end"] == "done"
        assert {"metrics.jsonl", "config.yaml", "summary.json", "run.json"} <= kept
        assert all(file_digest(trial / n) == x for n, x in entry.content["files"].items())


@pytest.mark.long
@pytest.mark.parametrize(("phase", "number"), [("ledger", 0), ("discard", 2), ("finish", 5)])
def test_a_worker_that_is_killed_leaves_a_wave_for_which_the_next_one_writes(
    tmp_path, phase, number
):
    workdir = tmp_path / "sweep"
    assert sweep(write_sweep(tmp_path), workdir, "--plan_only") == 0
    kill_in(phase, number, workdir)
    assert list((workdir / "waves").glob("*.json"))
    found = events(workdir)
    begun = [(event, "") for event in ("plan", "code", "environment", "code", "code")]
    begun.append(("initial", "trials/base/0000/0"))
    assert found == begun if phase != "discard" else len(found) == 9
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    trials = [trial for event, trial in events(workdir) if event == "trial"]
    assert sorted(trials) == sorted(names(workdir))


@pytest.mark.long
def test_a_trial_that_is_computed_again_gets_a_line_that_replaces_the_other(copied):
    (first, *_), before = names(copied), events(copied)
    shutil.rmtree(copied / first)
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    assert events(copied) == [*before, ("trial", first)]
    ledger = read_ledger(copied)
    last = ledger.entries[-1].content
    assert last["again"] is True
    assert last["files"] == dict(file_digests(copied / first))


def test_a_trial_that_is_computed_again_within_a_second_is_told_by_its_summary(tmp_path):
    """Their run.json, whose times are to the second, may be equal to the last byte."""
    recorder = LedgerWriter(tmp_path)
    event = {"event": "trial", "trial": "final/a/10001", "files": {"run.json": "1"}}
    for summary in ("2", "2", "3"):
        recorder.add_trials([event | {"files": {"run.json": "1", "summary.json": summary}}])
    ledger = read_ledger(tmp_path)
    assert [each.content.get("again") for each in ledger.entries] == [None, True]


def test_a_worker_reads_what_others_appended(tmp_path):
    ours, theirs = LedgerWriter(tmp_path), LedgerWriter(tmp_path)
    event = {"event": "trial", "trial": "trials/a/0000/0", "files": {"run.json": "1"}}
    ours.add_trials([event])
    theirs.add_trials([event])
    assert len(events(tmp_path)) == 1
    theirs.add_trials([event | {"files": {"run.json": "2"}}])
    ours.add_trials([event | {"files": {"run.json": "2"}}])
    ledger = read_ledger(tmp_path)
    assert [each.content.get("again") for each in ledger.entries] == [None, True]
    (tmp_path / LEDGER_FILE).unlink()
    ours.add_trials([event])
    assert len(events(tmp_path)) == 1


@pytest.mark.long
def test_the_ledger_of_an_earlier_sweep_begins_with_what_is_there(copied):
    (copied / LEDGER_FILE).unlink()
    lost = names(copied)[0]
    shutil.rmtree(copied / lost)
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    found = events(copied)
    assert [event for event, _ in found] == [
        *("plan", *["trial"] * 4, "final", "code", "environment", "code", "code", "initial"),
        "trial",
    ]
    assert found[-1] == ("trial", lost)
    ledger = read_ledger(copied)
    assert ledger.entries[0].content["found"] == 4


@pytest.mark.long
def test_a_complete_sweep_of_an_earlier_version_gets_a_ledger_from_the_next_worker(copied):
    (copied / LEDGER_FILE).unlink()
    work = ["sweep", "work", str(copied), "--vocabulary=unruly"]
    assert main(work) == 0
    found = events(copied)
    assert [event for event, _ in found] == ["plan", *["trial"] * 5, "final"]
    assert main(work) == 0
    assert events(copied) == found


def test_an_extension_is_in_the_ledger_before_it_is_computed(tmp_path, capsys):
    file, workdir = write_sweep(tmp_path), tmp_path / "sweep"
    assert sweep(file, workdir, "--plan_only") == 0
    plan = capsys.readouterr().out.splitlines()[-1]  # the hash that a paper would quote
    assert plan == f"plan {read_plan(workdir).digest}"
    file.write_text(file.read_text().replace("trials: 3", "trials: 4"))
    assert main(["sweep", "extend", str(workdir), f"--config={file}", "--vocabulary=unruly"]) == 0
    ledger = read_ledger(workdir)
    assert [plan, f"plan {read_plan(workdir).digest}"] == [
        f"plan {each.content['digest']}" for each in ledger.of("plan")
    ]
    assert [each.content["revision"] for each in ledger.of("plan")] == [1, 2]
    assert ledger.entries[-1].content["digest"] == read_plan(workdir).digest
    assert "sweep.2.yaml" in ledger.entries[-1].content["files"]


def test_the_environment_of_each_run_is_in_the_ledger_once(copied, tmp_path, computed):
    ledger = read_ledger(copied)
    (line,) = ledger.of("environment")
    said = line.content["environment"]
    cores = len(os.sched_getaffinity(0))
    assert (said["jax"], said["cores"]) == (importlib.metadata.version("jax"), str(cores))
    assert not {"config", "seed", "data", "code"} & said.keys()
    assert line.line < ledger.of("trial")[0].line
    assert not examine(copied).faults
    # A ledger that was written anew, by what it says of files: run.json names another device.
    name = names(copied)[0]
    record = json.loads((copied / name / "run.json").read_text())
    record["fingerprint"]["devices"] = "8 x gpu NVIDIA H100"
    (copied / name / "run.json").write_text(json.dumps(record))
    LedgerWriter(copied).add_trials([trial_event(copied / name, name)])
    why = "ledger.jsonl lacks its environment, devices 8 x gpu NVIDIA H100"
    assert [each.why for each in examine(copied).faults] == [why]
    LedgerWriter(copied).add_environment(said | {"devices": "8 x gpu NVIDIA H100"})
    LedgerWriter(copied).add_environment(said)
    assert not examine(copied).faults  # what it cannot show
    assert [x.event for x in read_ledger(copied).entries].count("environment") == 2
    # Ledgers of earlier versions have no such line.
    earlier = Path(shutil.copytree(computed, tmp_path / "earlier"))
    (earlier / LEDGER_FILE).unlink()
    lines = [x.content for x in ledger.entries if x.event != "environment"]
    append(earlier, [{k: x for k, x in y.items() if k not in ("before", "hash")} for y in lines])
    assert not examine(earlier).faults


@pytest.mark.long
def test_the_metrics_before_the_first_step_are_those_of_a_run_that_does_not_move(
    tmp_path, computed
):
    ledger = read_ledger(computed)
    (line,) = ledger.of("initial")
    trial = "trials/base/0000/0"
    assert (line.content["trial"], line.content["arms"]) == (trial, ["base"])
    words = [f"--config={computed / trial / 'config.yaml'}", "--vocabulary=unruly"]
    words += ["--set=optimizer.learning_rate=0.0", f"--workdir={tmp_path / 'still'}"]
    assert main(words) == 0
    *_, last = rows(tmp_path / "still")
    evaluated = {name: x for name, x in last.items() if name.startswith("eval/")}
    assert evaluated and line.content["values"] == pytest.approx(evaluated)
