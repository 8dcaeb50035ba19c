"""The referee: what decides about a change, on which seeds, and what it refuses."""

import contextlib
import dataclasses
import hmac
import io
import itertools
import json
import math
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import integrate, stats

from experiments.calibration.referee import PAIRS, Decisions, loops, referee, screened, table
from tests import runs
from trainer.__main__ import main
from trainer.config import load
from trainer.messages import UserError
from trainer.report.statistics.keeps import Levels, e_of_wins, pairs_needed, typical_difference
from trainer.studies import referee_code, referee_runs
from trainer.studies.claim import Wanted, _claim_of, verify_claim
from trainer.studies.claim_subject import read_subject
from trainer.studies.referee import EVENTS, Judge, read_judge
from trainer.sweep.definition import Goal
from trainer.sweep.ledger import LEDGER_FILE, append, read_ledger, sha256
from trainer.sweep.plan_file import read_plan
from trainer.train.signals import StopSignals
from trainer.writers.json_files import as_json

BASE = """model: !models.mlp {width: 8, depth: 1}
data: !data.digits {batch_size: 32, validation: 0.2}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
steps: 12
eval_every: 6
writers: []
"""
RULES = """baseline: base.yaml
goal: {metric: loss, relevant: 0.1}
pairs: 40
most_tries: 10
noise: 4
title: Digits
"""
CHANGE = "optimizer.learning_rate: 0.001 -> 0.02"
GOOD, NONE = "optimizer.learning_rate=0.02", "optimizer.weight_decay=2e-4"


# What decides.


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (8, 0), (0, 8), (7, 3), (30, 12)])
def test_the_e_value_is_the_mixture_over_chances_above_a_half(wins: int, losses: int) -> None:
    def likelihood(p: float) -> float:
        return (2 * p) ** wins * (2 * (1 - p)) ** losses * 2 * stats.beta(0.5, 0.5).pdf(p)

    by_hand, _ = integrate.quad(likelihood, 0.5, 1, limit=200)
    assert e_of_wins(wins, losses) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("chance", [0.5, 0.4, 0.1])
def test_the_expected_e_value_of_what_is_not_better_is_at_most_1(chance: float) -> None:
    for n in (1, 2, 5, 20, 60):
        wins = np.arange(n + 1)
        mean = float(stats.binom(n, chance).pmf(wins) @ e_of_wins(wins, n - wins))
        assert mean == pytest.approx(1.0) if chance == 0.5 else mean < 1
    # Given any pairs before, one more pair does not raise it: it may be looked at after each.
    for wins, losses in itertools.product(range(12), repeat=2):
        more = e_of_wins([wins + 1, wins], [losses, losses + 1])
        assert chance * more[0] + (1 - chance) * more[1] <= e_of_wins(wins, losses) * (1 + 1e-12)


def test_the_power_is_that_of_an_enumeration() -> None:
    levels = Levels(keep=20, discard=5)
    for chance in (0.3, 0.7, 0.9):
        expected = 0.0
        for won in itertools.product((True, False), repeat=9):
            verdict, _, _ = levels.judge(won)
            number = sum(won)
            expected += (verdict == "keep") * chance**number * (1 - chance) ** (9 - number)
        assert levels.power(chance, 9)[-1] == pytest.approx(expected)


def test_the_pairs_that_are_needed_are_those_that_simulation_takes() -> None:
    levels, rng = Levels.of(0.1, 200, 0), np.random.default_rng(0)
    needed = pairs_needed(levels, 1.0)
    assert needed == 46
    kept = [levels.judge(rng.standard_normal(needed) + 1 > 0)[0] == "keep" for _ in range(1500)]
    assert np.mean(kept) == pytest.approx(0.8, abs=0.05)
    assert pairs_needed(levels, 0.05) is None


def test_no_more_pairs_are_computed_than_can_matter() -> None:
    levels = Levels(keep=2000, discard=10)
    for wins, losses in itertools.product(range(10), range(5)):
        more = levels.pairs_to_decision(wins, losses, 40)
        before = [levels.judge([True] * wins + [False] * losses)[0]]
        if before != ["undecided"]:
            continue
        for n in range(1, more):
            for won in range(n + 1):
                assert levels.verdict(wins + won, losses + n - won) == "undecided"
        ends = {levels.verdict(wins + more, losses), levels.verdict(wins, losses + more)}
        assert ends != {"undecided"}
    assert levels.pairs_to_decision(0, 9, 12) == 0  # twelve wins would not be enough
    assert Levels(10, 10).pairs_to_decision(4, 0, 1) == 1


def test_the_interval_covers_the_median_also_where_one_stops_when_it_likes() -> None:
    rng, missed = np.random.default_rng(0), 0
    for _ in range(600):
        values = rng.exponential(size=60)  # whose median is log 2
        found = [typical_difference(values[:n]) for n in range(1, 61)]
        missed += any(x is not None and not x[0] <= math.log(2) <= x[1] for x in found)
    assert 0 < missed <= 0.05 * 600
    assert typical_difference([1.0, 2.0, 3.0]) is None
    assert typical_difference([-math.inf] * 9 + [1.0])[0] == -math.inf  # type: ignore[index]


def test_the_simulation_decides_as_the_referee_does() -> None:
    rng = np.random.default_rng(0)
    for keeps in (0, 3, 40):
        levels, decisions = Levels.of(0.1, 200, keeps), Decisions(keeps)
        for chance in (0.3, 0.6, 0.85):
            won = rng.random(PAIRS) < chance
            kept, pairs = decisions.judge(won)
            verdict, wins, losses = levels.judge(won)
            assert kept == (verdict == "keep")
            assert pairs <= wins + losses  # it ends, too, where nothing can keep it any more


def test_false_keeps_are_rare_and_real_ones_are_kept() -> None:
    null, some = loops(referee, 0.0, count=40), loops(screened, 0.1, count=40)
    assert null.any_false <= 0.1 + 2 * math.sqrt(0.09 / 40)
    assert some.false <= 0.1 and some.real > 17


@pytest.mark.long
def test_the_table_of_the_page_is_what_the_simulation_prints() -> None:
    def cells(text: str) -> list[list[str]]:
        lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
        return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]

    page = (runs.ROOT / "docs/referee.md").read_text()
    shown = cells(page.partition("<!-- referee: begin -->")[2].partition("<!-- referee: end")[0])
    found = cells(table(count=60))
    assert [row[:3] for row in shown] == [row[:3] for row in found] and len(shown) == 24
    for (*_, real, false, _, computed), again in zip(shown, found, strict=True):
        assert float(again[3]) == pytest.approx(float(real), abs=1.2)
        assert float(again[4]) == pytest.approx(float(false), abs=0.2 if real == "0.0" else 0.04)
        numbers = [int(each.replace(",", "")) for each in (again[6], computed)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.04)
        if not any(word in " ".join(again[:2]) for word in ("one seed", "p <", "same seeds")):
            assert float(false) <= 0.1


# A referee, in a folder.


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _patch(monkeypatch)


def _patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and computes in this process, where a start of Python would take seconds each time."""

    def run(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*command[3:]])
        return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())

    def work(command: Sequence[str], *_: Any) -> int:
        return main([x for x in command[command.index("trainer") + 1 :] if x != "--watched"])

    process = SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(referee_runs, "subprocess", process)
    monkeypatch.setattr(referee_runs, "local", SimpleNamespace(run_workers=work))


def _begin(folder: Path, rules: str = RULES, base: str = BASE, *words: str) -> Path:
    """Begins a referee; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(base)
    (folder / "referee.yaml").write_text(rules)
    file, judge = folder / "referee.yaml", folder / "judge"
    assert main(["referee", "start", f"--config={file}", f"--workdir={judge}", *words]) == 0
    return judge


def _tried(capsys: Any, judge: Path, *words: str, code: int) -> dict[str, Any]:
    """Tries a change; returns what it prints as JSON."""
    line = runs.printed(capsys, "referee", "try", judge, "--json", *words, code=code)
    return json.loads(line.splitlines()[-1])


def _read(judge: Path) -> Judge:
    signals = StopSignals(False)
    runner = referee_runs.Runner(Goal(), [], 1, signals, print)
    return read_judge(judge, runner)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A referee without tries."""
    folder = tmp_path_factory.mktemp("referee")
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch)
        return _begin(folder)


@pytest.fixture
def judge(begun: Path, tmp_path: Path) -> Path:
    """A copy of a referee without tries."""
    return Path(shutil.copytree(begun, tmp_path / "judge"))


@pytest.fixture(scope="module")
def with_keep(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A referee that has kept a change."""
    folder = Path(shutil.copytree(begun, tmp_path_factory.mktemp("kept") / "judge"))
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch)
        words = ["referee", "try", str(folder), "--set", GOOD, "--note=a larger rate"]
        assert main(words) == 0
    return folder


@pytest.fixture
def kept(with_keep: Path, tmp_path: Path) -> Path:
    """A copy of a referee that has kept a change."""
    return Path(shutil.copytree(with_keep, tmp_path / "judge"))


def test_a_change_is_kept_by_fresh_pairs_and_is_the_next_baseline(kept: Path, capsys) -> None:
    judge = kept
    found = json.loads(runs.printed(capsys, "referee", "status", judge, "--json"))
    assert found["verdict"] == "keep" and found["note"] == "a larger rate"
    wins = found["wins"]
    assert found["losses"] == 0 and found["changes"] == [CHANGE]
    # 10 / (0.1 * 1) tries: the first number of wins in a row whose e-value is 100.
    assert found["e_value_to_keep"] == 100.0 and e_of_wins(wins, 0) >= 100 > e_of_wins(wins - 1, 0)
    assert found["runs"] == 4 + 2 * len(_read(judge).tries[0].seeds)
    text = (judge / "baselines/0001.yaml").read_text()
    assert "learning_rate: 0.02" in text and text == (judge / "tries/0001/config.yaml").read_text()
    # The seeds were drawn when the hash of the config was in the ledger, and are new.
    events = [entry.event for entry in read_ledger(judge, EVENTS).entries]
    assert events[:3] == ["start", "try", "seeds"] and events[-1] == "end"
    seeds = _read(judge).tries[0].seeds
    assert len({*seeds}) == len(seeds) and not {*seeds} & {0, 1, 2, 3}
    assert {*read_plan(judge / "tries/0001/pairs").seeds} == {*seeds}
    secret, line = (judge / "secret").read_bytes(), _read(judge).tries[0].line
    hashes = [hmac.new(secret, f"{line} {n}".encode(), "sha256") for n in range(len(seeds))]
    assert [*seeds] == [int(each.hexdigest()[:8], 16) for each in hashes]
    assert stat.S_IMODE((judge / "secret").stat().st_mode) == 0o600
    # The next try needs less, is laid over what was kept, and is screened on seeds known by now.
    found = _tried(capsys, judge, "--set", NONE, code=3)
    assert (found["decided_by"], found["baseline"], found["e_value_to_keep"]) == ("screen", 1, 50.0)
    assert "learning_rate: 0.02" in (judge / "tries/0002/config.yaml").read_text()
    assert [*read_plan(judge / "tries/0002/screen").seeds] == [*seeds[:4]]
    said = runs.printed(capsys, "referee", "status", judge, "--formats=markdown")
    assert "1 keep of 2 tries; 1 ended before pairs were computed." in said
    assert "a larger rate" in (judge / "report/report.md").read_text()


def test_without_a_screen_pairs_discard_a_change_that_does_nothing(tmp_path, capsys) -> None:
    judge = _begin(tmp_path, RULES + "screen: 0\n")
    found = _tried(capsys, judge, "--set", NONE, code=3)
    assert (found["verdict"], found["decided_by"], found["wins"]) == ("discard", "pairs", 0)
    assert e_of_wins(found["losses"], 0) >= 10 > e_of_wins(found["losses"] - 1, 0)
    low, high = found["typical_improvement"] or (0.0, 0.0)
    assert low <= 0.1 and high >= 0
    assert not (judge / "tries/0001/screen/trials").exists()


def test_a_try_that_cannot_be_decided_is_undecided(judge: Path, capsys, monkeypatch) -> None:
    gains = itertools.chain([1.0] * 4, itertools.cycle([1.0, -1.0]))  # first those of the screen
    monkeypatch.setattr(referee_runs.Runner, "gain", lambda *_: next(gains))
    found = _tried(capsys, judge, "--set", NONE, code=4)
    assert found["verdict"] == "undecided" and "cannot decide" in found["why"]
    assert found["next"].startswith("It counts as discarded")


def test_an_interrupted_try_goes_on_with_its_seeds(judge: Path, capsys, monkeypatch) -> None:
    compute = referee_runs.Runner.compute

    def stopped(self: Any, folder: Path, *rest: Any, **more: Any) -> None:
        if folder.name == "pairs":
            raise referee_runs.Interrupted(75)
        compute(self, folder, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(referee_runs.Runner, "compute", stopped)
        assert main(["referee", "try", str(judge), "--set", GOOD]) == 75
    drawn = _read(judge).tries[0].seeds
    assert drawn and "has not ended" in runs.printed(capsys, "referee", "status", judge)
    assert "has not ended" in runs.refused(capsys, "referee", "finish", judge)
    # Another change first ends the one before.
    found = _tried(capsys, judge, "--set", NONE, code=3)
    first, second = _read(judge).tries
    assert first.verdict == "keep" and first.seeds[: len(drawn)] == drawn
    assert found["try"] == second.number == 2 and second.baseline == 1


def test_pairs_count_in_the_order_of_their_seeds(kept: Path, monkeypatch) -> None:
    read = _read(kept)
    each = read.tries[0]
    found = read.runner.runs(kept / "tries/0001/pairs")
    del found["try"][each.seeds[2]]  # has not ended, while later ones have
    monkeypatch.setattr(referee_runs.Runner, "runs", lambda *_: found)
    assert read.pairs(each).seeds == each.seeds[:2]


def test_a_run_that_failed_discards_a_change_and_never_counts_for_it(
    kept: Path, monkeypatch
) -> None:
    read = _read(kept)
    each = read.tries[0]
    found = read.runner.runs(kept / "tries/0001/pairs")
    monkeypatch.setattr(referee_runs.Runner, "runs", lambda *_: found)
    assert read.verdict_of(each)[0] == "keep"

    def fail(arm: str, seed: int) -> None:
        summary = dataclasses.replace(found[arm][seed].summary, end="failed", metrics={})
        found[arm][seed] = dataclasses.replace(found[arm][seed], summary=summary)

    fail("baseline", each.seeds[0])  # would be an infinite gain
    assert read.pairs(each).gains == () and read.verdict_of(each)[0] == "undecided"
    fail("try", each.seeds[-1])
    assert read.verdict_of(each)[0] == "discard"


def test_only_finish_sees_test_data(begun: Path, kept: Path, capsys) -> None:
    judge = kept
    rows = [file.read_text() for file in judge.rglob("metrics.jsonl")]
    assert rows and not any("eval/" in text for text in rows)
    said = runs.printed(capsys, "referee", "finish", judge, "--pairs=3")
    assert "On 3 fresh seeds the mean improvement of the last baseline over the first is" in said
    validation, test = _read(judge).gains()
    assert (validation.row, test.row) == ("validation/loss", "eval/loss")
    assert test.improvement.value == pytest.approx(test.first - test.last) and test.last < 2.3
    losses = {
        arm: [run.value("eval/loss") for run in of.values()]
        for arm, of in _read(judge).runner.runs(judge / "finish").items()
    }
    differences = np.subtract(losses["baseline"], losses["try"])
    interval = stats.ttest_1samp(differences, 0).confidence_interval()
    assert (test.improvement.low, test.improvement.high) == pytest.approx(tuple(interval))
    assert f"in eval/loss: from {test.first:.4g} to {test.last:.4g}." in said
    used = {*range(4), *_read(judge).tries[0].seeds}
    assert not used & {*read_plan(judge / "finish").seeds}
    assert "is finished" in runs.refused(capsys, "referee", "try", judge, "--set", NONE)
    again = runs.printed(capsys, "referee", "finish", judge)
    assert said.splitlines()[-3:] == again.splitlines()[-3:]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("steps=100", "must not change steps, here from 12 to 100"),
        ("seed=7", "must not change seed"),
        ("data.validation=0.3", "must not change data.validation"),
        ("model.width=16", "must not change model.width"),
        ("loss.label_smoothing=0.1", "must not change loss.label_smoothing"),
        ("optimizer.learning_rate=1e-3", "changes nothing"),
        ("optimizer.learning_rat=1e-3", "Did you mean 'learning_rate'?"),
    ],
)
def test_a_try_changes_only_what_it_may(judge: Path, capsys, change: str, told: str) -> None:
    assert told in runs.refused(capsys, "referee", "try", judge, "--set", change)
    assert not _read(judge).tries


def test_a_change_that_costs_too_much_or_does_not_fit_is_discarded(tmp_path, capsys) -> None:
    judge = _begin(tmp_path, RULES + "free: [model.width]\n")
    found = _tried(capsys, judge, "--set", "model.width=64", code=3)
    assert found["decided_by"] == "plan" and found["runs"] == 0
    assert "times the FLOPs" in found["why"] and "allow 1.25 times" in found["why"]
    found = _tried(capsys, judge, "--set", "optimizer.learning_rate=1e30", code=3)
    assert found["decided_by"] == "screen" and "diverged" in found["why"]
    assert "plan" in _tried(capsys, judge, "--set", "ema_decay=1.5", code=3)["decided_by"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("goal: {metric: loss}", "goal needs relevant"),
        ("goal: {metric: loss, relevant: 0.1, select_on: test}", "decides on the validation split"),
        ("error: 1.5", "error is 1.5"),
        ("screen: 9", "screen 9"),
        ("free: [steps]", "free has steps"),
        ("free: [model.widht]", "which the baseline does not have"),
        ("pairs: 9\ngoal: {metric: loss, relevant: 1e-3}", "pairs is 9, which cannot decide"),
    ],
)
def test_rules_that_cannot_hold_are_refused(tmp_path, capsys, line: str, told: str) -> None:
    keys = {each.partition(":")[0] for each in line.splitlines()}
    kept = [x for x in RULES.splitlines() if x.partition(":")[0] not in keys]
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "referee.yaml"
    file.write_text("\n".join([*kept, line]))
    words = [f"--config={file}", f"--workdir={tmp_path / 'judge'}"]
    assert told in runs.refused(capsys, "referee", "start", *words)
    assert not (tmp_path / "judge" / LEDGER_FILE).exists()


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def _worse(judge: Path) -> None:
    for file in judge.glob("tries/0001/pairs/trials/try/0000/*/metrics.jsonl"):
        text = file.read_text()
        file.write_text(text.replace('"validation/loss": ', '"validation/loss": 9'))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda judge: _edit(judge / LEDGER_FILE, '"keep"', '"discard"'), "was changed"),
        (lambda judge: _edit(judge / "referee.yaml", "0.1", "0.01"), "was changed since"),
        (lambda judge: _edit(judge / "baselines/0001.yaml", "0.02", "0.03"), "was changed"),
        (_worse, "were changed after they were written"),
    ],
)
def test_what_was_edited_is_found(
    kept: Path, capsys, edit: Callable[[Path], None], told: str
) -> None:
    edit(kept)
    assert told in runs.refused(capsys, "referee", "status", kept)
    assert told in runs.refused(capsys, "referee", "finish", kept)


def test_seeds_are_drawn_from_the_secret_of_the_start_only(judge: Path, capsys) -> None:
    (judge / "secret").write_text("0" * 64)
    assert "secret was changed" in runs.refused(capsys, "referee", "try", judge, "--set", GOOD)
    (judge / "secret").unlink()
    assert "secret is missing" in runs.refused(capsys, "referee", "try", judge, "--set", GOOD)


def test_the_tries_are_as_many_as_the_rules_say(tmp_path, capsys) -> None:
    judge = _begin(tmp_path, RULES.replace("most_tries: 10", "most_tries: 1"))
    _tried(capsys, judge, "--set", NONE, code=3)  # by the screen, which does not count
    _tried(capsys, judge, "--set", GOOD, code=0)
    told = runs.refused(capsys, "referee", "try", judge, "--set", NONE)
    assert "has decided 1 try" in told


def test_a_folder_of_something_else_is_no_referee(tmp_path, capsys) -> None:
    assert "not the folder of a referee" in runs.refused(capsys, "referee", "status", tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "base.yaml").write_text(BASE)
    rules = tmp_path / "rules" / "referee.yaml"
    rules.parent.mkdir()
    rules.write_text(RULES.replace("base.yaml", "../base.yaml"))
    told = runs.refused(capsys, "referee", "start", f"--config={rules}", f"--workdir={tmp_path}")
    assert "has other files, such as base.yaml" in told


# Its claim.


@pytest.fixture(scope="module")
def with_claim(with_keep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished referee with its claim."""
    folder = Path(shutil.copytree(with_keep, tmp_path_factory.mktemp("claim") / "judge"))
    with pytest.MonkeyPatch.context() as patch:
        _patch(patch)
        assert main(["referee", "finish", str(folder), "--pairs=3"]) == 0
        assert main(["claim", "write", str(folder)]) == 0
    return folder


@pytest.fixture
def claimed(with_claim: Path, tmp_path: Path) -> Path:
    """A copy of a finished referee with its claim."""
    return Path(shutil.copytree(with_claim, tmp_path / "judge"))


def _refuted(judge: Path) -> str:
    """Returns what a check of a claim refutes."""
    checked = verify_claim(judge / "claim.json", judge, "1", Wanted(None, 0))
    assert checked.verified != bool(checked.refuted)
    return " ".join(checked.refuted)


def _again(judge: Path, event: str, **changed: Any) -> None:
    """Writes ledger and claim anew, with something else in the last line of an event."""
    entries = read_ledger(judge, EVENTS).entries
    lines = [{k: entry.content[k] for k in ("event", *EVENTS[entry.event])} for entry in entries]
    last = max(n for n, line in enumerate(lines) if line["event"] == event)
    lines[last] |= changed
    (judge / LEDGER_FILE).unlink()
    append(judge, lines)
    # As somebody would who leaves out the checks of `claim write`.
    claim = _claim_of(judge, read_subject(judge))
    (judge / "claim.json").write_text(json.dumps(as_json(claim)))


def test_a_claim_has_the_runs_of_all_sweeps(claimed: Path) -> None:
    claim = json.loads((claimed / "claim.json").read_text())
    started = {name.partition("/trials/")[0] for name in claim["runs"]}
    assert started == {"noise", "tries/0001/screen", "tries/0001/pairs", "finish"}
    assert len(claim["runs"]) == 4 + 4 + 2 * len(_read(claimed).tries[0].seeds) + 2 * 3
    jsonschema.validate(claim, json.loads((runs.ROOT / "docs/claim.schema.json").read_text()))
    assert _refuted(claimed) == ""


def test_an_unfinished_referee_claims_nothing(kept: Path, capsys) -> None:
    assert "its secret must stay one: finish it first" in runs.refused(
        capsys, "claim", "write", kept
    )


def test_a_referee_that_kept_nothing_can_be_finished(judge: Path, capsys) -> None:
    _tried(capsys, judge, "--set", "optimizer.learning_rate=1e-5", code=3)
    assert "0 keeps of 1 try" in runs.printed(capsys, "referee", "finish", judge)
    runs.printed(capsys, "claim", "write", judge)
    assert _refuted(judge) == ""
    assert "is finished: start another one" in runs.refused(
        capsys, "referee", "try", judge, "--set", GOOD
    )


@pytest.mark.parametrize(
    ("event", "changed", "told"),
    [
        ("seeds", {"seeds": [1, 2, 3, 4, 5, 6, 7, 8]}, "seeds that the secret does not give"),
        ("try", {"note": "another"}, "seeds that the secret does not give"),
        ("finish", {"seeds": [5, 6, 7]}, "seeds that the secret does not give"),
        ("end", {"verdict": "discard"}, "baselines/0001.yaml|says discard of try 1"),
        ("end", {"sweeps": {"tries/0001/pairs": "0" * 64}}, "lacks the line with which it ended"),
        ("end", {"sweeps": {}}, "sweep tries/0001/pairs is missing, or the line"),
        ("finished", {"sweeps": {"elsewhere": "0"}}, "sweep elsewhere is missing, or the line"),
    ],
)
def test_a_ledger_that_was_written_anew_is_refuted(
    claimed: Path, event: str, changed: dict[str, Any], told: str
) -> None:
    _again(claimed, event, **changed)
    assert re.search(told, _refuted(claimed)), _refuted(claimed)


def test_a_try_of_another_config_is_refuted(claimed: Path) -> None:
    # Whoever has the secret can write a ledger with seeds that fit, and then has other runs.
    config = claimed / "tries/0001/config.yaml"
    config.write_text(config.read_text().replace("0.02", "0.03"))
    (claimed / "baselines/0001.yaml").write_bytes(config.read_bytes())
    _again(claimed, "try", config=sha256(config.read_bytes()))
    wrong = _refuted(claimed)
    assert "tries/0001/pairs computes another config than the try has: optimizer." in wrong
    assert "Try 1 does not change optimizer.learning_rate: 0.001 -> 0.02" in wrong


@pytest.mark.long
def test_the_runs_of_a_claim_are_computed_again(claimed: Path, capsys) -> None:
    words = ["claim", "verify", claimed / "claim.json", claimed, "--public=1", "--runs=2"]
    printed = runs.printed(capsys, *words)
    assert printed.count("has the same bits") == 2
    assert "The files of 4 sweeps agree with their ledgers" in printed
    assert "With `claims` in its file" not in printed


# Code of a user's.


LOSSES = """import helper
from trainer import losses


def loss():
    return losses.softmax_cross_entropy(label_smoothing=helper.SMOOTHING)
"""
OPTIMIZERS = """import jax
import optax


def adam(learning_rate=1e-3):
    return optax.adamw(learning_rate)


def broken():
    def refuse(count):
        if count >= 3:
            raise RuntimeError("no more")

    def schedule(count):
        jax.debug.callback(refuse, count)
        return 0.02

    return optax.adamw(schedule)
"""
LAB = BASE.replace("!optax.adamw {learning_rate: 1e-3}", "!mine.optimizers.adam").replace(
    "!losses.softmax_cross_entropy", "!mine.losses.loss"
)


def _make_lab(folder: Path) -> Path:
    """Writes a package with a loss and an optimizer, and a module beside; returns its folder."""
    lab = folder / "mine"
    (lab / "__pycache__").mkdir(parents=True)
    files = {"mine/__init__.py": "", "mine/losses.py": LOSSES, "mine/optimizers.py": OPTIMIZERS}
    files |= {"mine/table.csv": "1", "mine/__pycache__/x.pyc": "", "helper.py": "SMOOTHING = 0.0"}
    for name, text in {**files, "base.yaml": LAB, "referee.yaml": RULES}.items():
        (folder / name).write_text(text)
    return lab


@pytest.mark.long
def test_edited_code_is_tried_against_the_code_of_the_baseline(tmp_path, monkeypatch) -> None:
    lab = _make_lab(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{runs.ROOT}")

    def referee(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "trainer", "referee", *words, "--vocabulary=mine"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=runs.LONG, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code == 2 else done.stdout

    referee("start", "--config=referee.yaml", "--workdir=judge")
    assert "changes nothing" in referee("try", "judge", code=2)
    (lab / "optimizers.py").write_text(OPTIMIZERS.replace("1e-3", "0.02"))
    # A default that is written out is no change, also where no package is imported.
    found = json.loads(referee("try", "judge", "--json", "--set", "model.num_classes=10"))
    # It is better than the same config with the old code, and what both of them import is there.
    assert (found["verdict"], found["changes"]) == ("keep", ["mine/optimizers.py::adam"])
    change = "optimizer=!mine.optimizers.broken"
    found = json.loads(referee("try", "judge", "--json", "--set", change, code=3))
    assert found["decided_by"] == "screen" and "failed" in found["why"]
    (lab / "losses.py").write_text(LOSSES.replace("helper.SMOOTHING", "0.0"))
    assert "must not edit mine/losses.py::" in referee("try", "judge", code=2)
    (lab / "losses.py").write_text(LOSSES)
    (tmp_path / "helper.py").write_text("SMOOTHING = 0.9")
    change = "optimizer.learning_rate=0.001"
    told = referee("try", "judge", "--set", change, code=2)
    assert "helper.py::top level is not as when the baseline ran with it" in told
    (tmp_path / "helper.py").write_text("SMOOTHING = 0.0")
    (lab / "optimizers.py").write_text(OPTIMIZERS)  # as it was: worse than the baseline now
    found = json.loads(referee("try", "judge", "--json", code=3))
    assert (found["decided_by"], found["runs"]) == ("screen", 4)
    assert "the mean improvement" in referee("finish", "judge", "--pairs=3")
    (gain, *_) = _read(tmp_path / "judge").gains()
    assert gain.improvement.value > 0.1
    claim = tmp_path / "judge" / "claim.json"
    runs_of = [sys.executable, "-m", "trainer", "claim"]
    for words in (["write", "judge"], ["verify", claim, "judge", "--public=1", "--runs=4"]):
        options = ["--vocabulary=mine"] if words[0] == "verify" else []
        done = subprocess.run(
            [*runs_of, *words, *options], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has the same bits") == 4
    (copy, *_) = (tmp_path / "judge" / "code").glob("*/mine/losses.py")
    copy.write_text(LOSSES.replace("SMOOTHING", "OTHER"))
    assert "was changed: restore it" in referee("finish", "judge", code=2)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of a user's that this process can import."""
    folder = _make_lab(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [x for x in sys.modules if x.partition(".")[0] in ("mine", "helper")]:
        del sys.modules[name]


def test_code_is_copied_once_without_what_python_writes(lab: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    hash = referee_code.keep(judge, ["mine.losses"])
    copy = referee_code.copy_of(judge, hash)
    assert copy is not None and referee_code.keep(judge, ["mine"]) == hash
    names = ["__init__.py", "losses.py", "optimizers.py", "table.csv"]
    assert [x.name for x in sorted((copy / "mine").iterdir())] == names
    assert referee_code.keep(judge, ["flax"]) == "" and referee_code.copy_of(judge, "") is None
    for file, text, found in [
        ("optimizers.py", OPTIMIZERS.replace("1e-3", "0.02"), ["mine/optimizers.py::adam"]),
        ("optimizers.py", OPTIMIZERS + "# A remark.\n", ["mine/optimizers.py"]),
        ("table.csv", "2", ["mine/table.csv"]),
        ("new.py", "x = 1", ["mine/new.py"]),
    ]:
        shutil.copytree(lab, tmp_path / "kept")
        (lab / file).write_text(text)
        assert referee_code.edits(judge, hash, referee_code.keep(judge, ["mine"])) == found
        shutil.rmtree(lab)
        (tmp_path / "kept").rename(lab)
    (copy / "mine" / "losses.py").unlink()
    with pytest.raises(UserError, match="was changed: restore it"):
        referee_code.copy_of(judge, hash)


def test_a_package_of_many_bytes_is_not_copied(lab: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(referee_code, "_MOST", 100)
    with pytest.raises(UserError, match="move those that are no code out"):
        referee_code.keep(tmp_path, ["mine"])


@pytest.mark.parametrize(
    ("edited", "free", "told"),
    [
        ("mine/optimizers.py::adam", ["optimizer"], ""),
        ("mine/losses.py::loss", ["optimizer"], "mine.losses.loss is defined there, which is loss"),
        ("mine/losses.py::top level", ["optimizer"], "must not edit mine/losses.py::top level"),
        ("mine/losses.py::loss", ["optimizer", "loss"], ""),
        ("mine/other.py", ["optimizer"], ""),
        ("mine/optimizers.py::adam", ["steps"], "mine.optimizers.adam is defined there"),
    ],
)
def test_modules_of_what_a_try_may_not_change_stay(
    lab: Path, tmp_path: Path, edited: str, free: list[str], told: str
) -> None:
    configs = [load([tmp_path / "base.yaml"])]
    with pytest.raises(UserError, match=told) if told else contextlib.nullcontext():
        referee_code.refuse_edits([edited], ["mine"], configs, free)
