"""Challenges: the verdicts of entries, what is against the rules, and the table."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import runs, short
from tests.sweep.test_sweep_plan import BASE
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.studies.challenge import Entry, check_entry, read_challenge
from trainer.studies.challenge_table import history, make_table
from trainer.writers import iterate_metrics

GOAL = "{metric: loss, target: 2.2, rule: earliest_step, sigma: 0.02}"
RULES = f"""baseline: baseline.yaml
title: Digits to a loss of 2.2
goal: {GOAL}
exchange: {{loss: 0.02, steps: 5, error: 0.002}}
free: [model.width]
"""
FAST = "{set: {optimizer: !optax.adamw {learning_rate: 0.01}, steps: 20}}"
FASTER = "{set: {optimizer: !optax.adamw {learning_rate: 0.05}, steps: 15}}"
SLOW = "{set: {optimizer: !optax.adamw {learning_rate: 1e-5}, steps: 20}}"


def _entry(folder: Path, arm: str, text: str = "title: An entry", **changes: str) -> Path:
    """Plans and computes the sweep of an entry; `changes` are other lines of its file."""
    folder.mkdir(parents=True)
    (folder / "entry.yaml").write_text(text)
    lines = {"seeds": "4", "goal": GOAL, "final": "null", "arms": f"{{one: {arm}}}"} | changes
    file = folder / "sweep.yaml"
    base = folder.parent.parent / "baseline.yaml"
    body = "".join(f"{name}: {value}\n" for name, value in lines.items())
    file.write_text(f"base: {base}\n{body}")
    assert runs.sweep(f"--config={file}", f"--workdir={folder / 'sweep'}") == 0
    return folder


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("race")
    (home / "baseline.yaml").write_text(BASE + "log_every: 5\neval_every: 5\n")
    (home / "challenge.yaml").write_text(RULES)
    entries = home / "entries"
    _entry(entries / "0001_slow", SLOW)
    _entry(entries / "0002_fast", FAST, "title: AdamW\nby: A. Person\ndate: 2026-11-23\n")
    _entry(entries / "0003_faster", FASTER, "title: A larger rate")
    return home


@pytest.fixture
def another(race: Path, tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that makes an entry of a challenge without other entries."""
    for name in ("baseline.yaml", "challenge.yaml"):
        shutil.copy(race / name, tmp_path / name)
    return lambda *args, **kwargs: _entry(tmp_path / "entries" / "0001", *args, **kwargs)


def _checked(folder: Path) -> Entry:
    return check_entry(read_challenge(folder.parent.parent), folder)


def _mean(entry: Path, step: int) -> float:
    values = [
        row["validation/loss"]
        for run in sorted((entry / "sweep/trials/one/0000").iterdir())
        for row in iterate_metrics(run, about="validation/loss")
        if row["step"] == step and "validation/loss" in row
    ]
    assert len(values) == 4
    return math.fsum(values) / 4


def test_the_verdict_is_computed_from_the_rows(race):
    entry = _checked(race / "entries/0002_fast")
    assert not entry.offences and entry.reached is not None and entry.steps is not None
    mean = _mean(race / "entries/0002_fast", entry.steps)
    assert entry.reached.mean == pytest.approx(mean, rel=1e-12)
    assert 2 * (2.2 - mean) >= 3.0902 * 0.02
    earlier = [step for step in (5, 10, 15, 20) if step < entry.steps]
    for step in earlier:
        assert 2 * (2.2 - _mean(race / "entries/0002_fast", step)) < 3.0902 * 0.02
    assert {path.split(".")[0] for path in entry.changes} <= {"optimizer", "steps"}
    assert _checked(race / "entries/0001_slow").steps is None


def test_the_command_says_what_an_entry_reaches(race, capsys):
    assert main(["challenge", "check", str(race / "entries/0002_fast")]) == 0
    said = capsys.readouterr().out
    step = _checked(race / "entries/0002_fast").steps
    assert f"It has reached loss 2.2 after {step} steps: the mean of 4 runs is" in said
    assert "nothing was computed again" in said
    assert main(["challenge", "check", str(race / "entries/0001_slow")]) == 1
    assert (
        "It has not been shown to reach loss 2.2: where it is closest, after"
        in capsys.readouterr().out
    )


@pytest.mark.long
def test_the_table_has_records_and_pairs(race, capsys):
    rules = read_challenge(race)
    entries = [check_entry(rules, folder) for folder in rules.entries]
    slow, fast, faster = history(rules, entries)
    assert [row.record for row in (slow, fast, faster)] == [False, True, True]
    assert faster.before is fast.entry and fast.before is None
    assert faster.comparison is not None and fast.entry.reached and faster.entry.reached
    assert fast.entry.steps is not None and faster.entry.steps is not None
    fewer = fast.entry.steps - faster.entry.steps
    spread = 1 / 4 + 1 / 4 + (fewer * 0.002 / 5 / 0.02) ** 2
    better = fast.entry.reached.mean - faster.entry.reached.mean + fewer * 0.02 / 5
    assert faster.comparison.statistic == pytest.approx(better / math.sqrt(spread), rel=1e-9)
    assert main(["challenge", "table", str(race)]) == 0
    assert f"The record is {faster.entry.steps} steps to loss 2.2" in capsys.readouterr().out
    text = (race / "report/report.md").read_text()
    assert "0003_faster" in text and "reached, record" in text and "A. Person" in text
    assert (race / "report/index.html").exists()


@pytest.mark.long
def test_an_entry_cannot_change_the_model_by_one_default(another):
    arm = FAST.replace("{set: {", "{set: {model.activation: tanh, ")
    offences = _checked(another(arm)).offences
    assert len(offences) == 1 and offences[0].startswith("It changes model.activation from ")


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("data.batch_size: 64", "data.batch_size"),
        ("precision: bfloat16", "precision"),
        ("loss: !losses.softmax_cross_entropy {label_smoothing: 0.1}", "loss.label_smoothing"),
    ],
)
def test_an_entry_cannot_change_what_is_compared(another, setting, path):
    offences = _checked(another(FAST.replace("{set: {", f"{{set: {{{setting}, "))).offences
    assert any(f"It changes {path} from" in each for each in offences)


@pytest.mark.long
def test_an_entry_may_change_what_the_challenge_frees(another):
    entry = _checked(another(FAST.replace("{set: {", "{set: {model.width: 16, ")))
    assert not entry.offences and "model.width" in entry.changes


@pytest.mark.long
def test_an_entry_applies_the_model_once_a_step(another):
    sam = (
        "!optax.contrib.sam {optimizer: !optax.sgd {learning_rate: 0.1}, adv_optimizer:"
        " !optax.sgd {learning_rate: 0.01}, opaque_mode: true}"
    )
    entry = _checked(another(f"{{set: {{optimizer: {sam}}}}}"))
    assert entry.offences and "A step of it applies the model" in entry.offences[0]


@short.parametrize(
    ("changes", "why"),
    [
        ({"goal": GOAL.replace("0.02", "0.01")}, "has sigma 0.01, and that of the challenge"),
        ({"goal": GOAL.replace("2.2", "2.25")}, "has target 2.25, and that of the challenge"),
        ({"goal": "{metric: loss}"}, "has rule None"),
        ({"seeds": "[0, 1, 5, 6]"}, "Its seeds are 0, 1, 5 and 6, and must be counted from 0"),
        ({"seeds": "[7, 8]"}, "must be counted from 0"),
        ({"arms": f"{{one: {FAST}, two: {FAST}}}"}, "An entry has one arm"),
        (
            {
                "arms": "{one: {space: {optimizer.learning_rate: !space.values {values: [0.01,"
                " 0.02]}}}}"
            },
            "An entry is one configuration",
        ),
    ],
)
def test_an_entry_whose_sweep_asks_something_else(another, changes, why):
    assert any(why in each for each in _checked(another(FAST, **changes)).offences)


def test_rows_that_were_edited_are_found(race, another, tmp_path):
    folder = tmp_path / "entries/0009"
    shutil.copytree(race / "entries/0001_slow", folder)
    for file in (folder / "sweep/trials/one/0000").glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            row |= {"validation/loss": 1.0} if "validation/loss" in row else {}
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = _checked(folder)
    assert entry.steps is None and "files of the sweep disagree" in entry.offences[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("arm", "verdict"),
    [(FAST, "It confirms 0002_fast"), (SLOW.replace("1e-5", "0.0"), "It refutes 0002_fast")],
)
def test_an_entry_may_doubt_an_older_one(race, tmp_path, arm, verdict):
    shutil.copytree(race, tmp_path / "race")
    text = "title: Again\ndoubts: 0002_fast\n"
    _entry(tmp_path / "race/entries/0004_doubt", arm, text)
    rules = read_challenge(tmp_path / "race")
    entries = [check_entry(rules, folder) for folder in rules.entries]
    row = history(rules, entries)[-1]
    assert not row.record and row.doubts.startswith(verdict), row.doubts
    report = make_table(rules, entries)
    assert any(verdict in text for text in report.panels[0].blocks[0].text)


@pytest.mark.long
def test_sigma_is_that_of_one_configuration(race, another, capsys, tmp_path):
    assert main(["challenge", "sigma", str(race / "entries/0002_fast/sweep")]) == 2
    assert "at least 20 runs, got 4" in capsys.readouterr().err
    folder = another(FAST, seeds="20")
    capsys.readouterr()
    assert main(["challenge", "sigma", str(folder / "sweep")]) == 0
    assert "the upper 90% bound from the last validation/loss of 20 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda text: text.replace(", rule: earliest_step, sigma: 0.02", ""), "needs a rule"),
        (lambda text: text.replace("model.width", "model.widht"), "'model.widht'"),
        (lambda text: text.replace("loss: 0.02", "loss: -0.02"), "exchange is a loss above 0"),
        (lambda text: text + "targt: 1\n", "targt"),
        (lambda text: text.replace("baseline.yaml", "basline.yaml"), "basline.yaml"),
    ],
)
def test_rules_that_cannot_be(race, tmp_path, edit, why):
    shutil.copy(race / "baseline.yaml", tmp_path)
    (tmp_path / "challenge.yaml").write_text(edit(RULES))
    with pytest.raises(UserError, match=why):
        read_challenge(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "needs a title"), ("title: X\ntitel: Y\n", "'titel'"), ("title: [", "entry.yaml")],
)
def test_an_entry_needs_its_text(race, tmp_path, capsys, text, why):
    folder = shutil.copytree(race, tmp_path / "race") / "entries/0002_fast"
    (folder / "entry.yaml").write_text(text)
    capsys.readouterr()
    assert main(["challenge", "check", str(folder)]) == 2
    said = capsys.readouterr().err
    assert why in said and "Traceback" not in said


def test_folders_that_are_no_challenge(race, tmp_path, capsys):
    assert main(["challenge", "table", str(tmp_path)]) == 2
    assert "has no challenge.yaml" in capsys.readouterr().err
    shutil.copy(race / "baseline.yaml", tmp_path)
    (tmp_path / "challenge.yaml").write_text(RULES)
    assert main(["challenge", "table", str(tmp_path)]) == 2
    assert "has no entries" in capsys.readouterr().err
    (tmp_path / "entries/0001").mkdir(parents=True)
    assert main(["challenge", "check", str(tmp_path / "entries/0001")]) == 2
    assert "has no entry.yaml" in capsys.readouterr().err
