"""Challenges: the verdicts of entries, what is against the rules, and the table."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import runs, short
from tests.sweep.test_sweep_plan import DEEP
from trainer.__main__ import main
from trainer.messages import UserError
from trainer.studies.challenge import Entry, EntryText, Rules, check_entry, read_challenge
from trainer.studies.challenge_table import history, make_table, verdict_on
from trainer.studies.claim import write_claim
from trainer.sweep.target_rule import Reached
from trainer.writers import iterate_metrics

ROOT = Path(__file__).parents[2]
GOAL = "{metric: loss, target: 2.2, rule: earliest_step, sigma: 0.02}"
RULES = f"""baseline: baseline.yaml
title: Digits to a loss of 2.2
goal: {GOAL}
eval_every: 5
seeds: 4
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
    (home / "baseline.yaml").write_text(DEEP + "log_every: 5\neval_every: 5\n")
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
    said = runs.printed(capsys, "challenge", "check", str(race / "entries/0002_fast"))
    step = _checked(race / "entries/0002_fast").steps
    assert f"It has reached loss 2.2 after {step} steps: the mean of 4 runs is" in said
    assert "nothing was computed again" in said
    assert "It has not been shown to reach loss 2.2: where it is closest, after" in runs.printed(
        capsys, "challenge", "check", str(race / "entries/0001_slow"), code=1
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
        ({"seeds": "2"}, "Its sweep planned 2 runs, and the challenge asks for 4"),
        ({"arms": f"{{one: {FAST}, two: {SLOW}}}"}, "An entry has one arm"),
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
def test_an_entry_may_lack_a_group_of_the_baseline(another, tmp_path, capsys):
    adamw = "optimizer: !optax.adamw {learning_rate: 0.01}"
    rest = f"rest: !optim.group {{match: .*, {adamw}}}"
    kernels = f"kernels: !optim.group {{match: .*/kernel, {adamw}}}"
    groups = f"optimizer: !optim.optimizer {{groups: {{{kernels}, {rest}}}}}"
    (tmp_path / "baseline.yaml").write_text(
        DEEP.replace("optimizer: !optax.adamw {learning_rate: 1e-3}", groups)
        + "log_every: 5\neval_every: 5\n"
    )
    entry = another(f"{{set: {{optimizer.groups: {{{rest}}}, steps: 15}}}}")
    assert main(["challenge", "check", str(entry)]) == 0
    said = capsys.readouterr()
    assert "It changes optimizer.groups.kernels" in said.out and "Traceback" not in said.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("interval", "said"), [("1", "1, 2, 3, 4 and 11 others"), ("10", "10 and 15")]
)
def test_an_entry_is_evaluated_after_the_steps_of_the_challenge(another, interval, said):
    """A finer grid is how the baseline's own config was a record, one step earlier."""
    arm = FASTER.replace("steps: 15", f"steps: 15, eval_every: {interval}")
    (offence,) = _checked(another(arm)).offences
    assert offence == (
        f"It was evaluated after steps {said}, and by the eval_every of the challenge these are 5,"
        " 10 and 15."
    )


def _rules(folder: Path, race: Path, *lines: str) -> Rules:
    shutil.copy(race / "baseline.yaml", folder)
    (folder / "challenge.yaml").write_text("\n".join(["baseline: baseline.yaml", *lines]))
    return read_challenge(folder)


@pytest.mark.parametrize(
    ("line", "grid"),
    [
        ("", [*range(5, 100, 5), 100, 101]),  # the baseline's
        ("eval_every: {0: 25, 90%: 5}", [25, 50, 75, 95, 100, 101]),  # from step 91 on
        ("eval_every: 50%", [51, 101]),
    ],
)
def test_the_grid_is_that_of_the_challenge_or_else_of_the_baseline(race, tmp_path, line, grid):
    rules = _rules(tmp_path, race, "goal: {target: 2.2, sigma: 0.02}", line)
    assert rules.grid(101) == grid
    assert rules.rule.rule == "earliest_lasting_step" and rules.challenge.seeds == 8


def _doubt(race: Path, folder: Path, arm: str = FAST, by: str = "B. Person", first: int = 100):
    """Returns the rules and the entries of the race with one that doubts its second."""
    home = shutil.copytree(race, folder / "race")
    text = f"title: Again\nby: {by}\ndoubts: 0002_fast\n"
    seeds = str([*range(first, first + 4)])
    _entry(home / "entries/0004_again", arm, text, seeds=seeds)
    rules = read_challenge(home)
    return rules, [check_entry(rules, each) for each in rules.entries]


@pytest.mark.long
def test_a_record_is_provisional_until_somebody_else_confirms_it(race, tmp_path, capsys):
    rules, entries = _doubt(race, tmp_path)
    _, fast, faster, again = history(rules, entries)
    assert fast.record and fast.confirmation.status == "confirmed"
    assert faster.record and faster.confirmation.status == "provisional"
    assert not again.record and again.doubts.startswith("It confirms 0002_fast: after ")
    step = fast.entry.steps
    report = make_table(rules, entries)
    assert report.verdict[1:] == (
        "0003_faster is provisional until 4 seeds that somebody else draws pass at 0.05 after"
        f" {faster.entry.steps} steps.",
        f"The last confirmed record is {step} steps: 0002_fast.",
    )
    block = report.panels[0].blocks[0]
    assert any("Each entry that doubts no other is a try: 3." in text for text in block.text)
    assert any("probability of about 0.003, and confirmed" in text for text in block.text)
    assert [row[1] for row in block.tables[0].rows][1:3] == [
        "reached, record, confirmed",
        "reached, record, provisional",
    ]
    capsys.readouterr()
    assert main(["challenge", "check", str(rules.folder / "entries/0002_fast")]) == 0
    assert f"0004_again: It confirms 0002_fast: after {step} steps" in capsys.readouterr().out
    assert main(["challenge", "check", str(rules.folder / "entries/0004_again")]) == 0
    assert "It confirms 0002_fast: after" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"by": "a. person "}, "its by must name somebody else than 'A. Person'"),
        ({"first": 2}, "must have other seeds: both have 2 and 3"),
        ({"arm": FASTER}, "its config has another optimizer.learning_rate and steps"),
    ],
)
def test_a_confirmation_is_of_the_same_config_by_somebody_else(race, tmp_path, changes, why):
    rules, entries = _doubt(race, tmp_path, **changes)
    assert any(why in each for each in entries[-1].offences), entries[-1].offences
    assert history(rules, entries)[1].confirmation.status == "provisional"


@pytest.mark.parametrize(
    ("scores", "runs", "status"),
    [  # the one-sided 5% point is 1.645, the .1% point 3.090; with added runs it is an e-value
        (1.65, 4, "confirmed"),
        (1.64, 4, "provisional"),
        (1.65, 6, "provisional"),
        (3.2, 6, "confirmed"),
        (-3.08, 4, "provisional"),
        (-3.10, 4, "refuted"),
    ],
)
def test_what_runs_of_somebody_else_show(race, scores, runs, status):
    rules = read_challenge(race)
    mean = 2.2 - scores * 0.02 / math.sqrt(runs)

    def entry(name: str, doubts: str, means: dict[int, float], count: int) -> Entry:
        found = Reached(10, 2.1, count, 0.0, 0.0, 10)
        return Entry(name, EntryText(title="", doubts=doubts), (), found, (), (), means)

    old = entry("a", "", {5: 2.3, 10: 2.1}, 4)
    new = entry("b", "a", {5: 2.3, 10: mean}, runs)
    assert verdict_on(rules, old, new).status == status
    first, _ = history(rules, [old, new])
    assert first.confirmation.status == status and first.record == (status != "refuted")


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
        (lambda text: text.replace("eval_every: 5\n", ""), "each evaluation is a chance to pass"),
        (lambda text: text.replace("eval_every: 5", "eval_every: 0"), "must be at least 1, got 0"),
        (lambda text: text.replace("eval_every: 5", "eval_every: 5 epochs"), "epochs"),
        (lambda text: text.replace("seeds: 4", "seeds: 0"), "plans at least 1 run"),
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
    said = runs.refused(capsys, "challenge", "check", str(folder))
    assert why in said and "Traceback" not in said


def test_folders_that_are_no_challenge(race, tmp_path, capsys):
    assert "has no challenge.yaml" in runs.refused(capsys, "challenge", "table", str(tmp_path))
    shutil.copy(race / "baseline.yaml", tmp_path)
    (tmp_path / "challenge.yaml").write_text(RULES)
    assert "has no entries" in runs.refused(capsys, "challenge", "table", str(tmp_path))
    (tmp_path / "entries/0001").mkdir(parents=True)
    assert main(["challenge", "check", str(tmp_path / "entries/0001")]) == 2
    assert "has no entry.yaml" in capsys.readouterr().err


@pytest.mark.long
def test_the_table_of_the_race_is_computed_in_a_fresh_clone(tmp_path, monkeypatch):
    """Of a clone with nothing but what the repository has; the last line is the command."""
    race = "experiments/race_gpt"
    listed = subprocess.run(["git", "ls-files", race], cwd=ROOT, check=True, capture_output=True)
    files = listed.stdout.decode().split()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert main(["challenge", "table", race, "--output=report", "--formats=markdown,png"]) == 0
    made, known = (
        (folder / "report/report.md").read_text().rpartition("\nLockstep ")[0]
        for folder in (tmp_path, ROOT / race)
    )
    assert made == known and "0004_muonh" in made
    for entry in sorted((tmp_path / race / "entries").iterdir()):
        assert main(["sweep", "check", str(entry / "sweep")]) == 0
        claim = tmp_path / f"{entry.name}.json"
        write_claim(entry / "sweep", claim)
        ours, theirs = (
            json.loads(file.read_text()) | {"lockstep": ""}
            for file in (claim, entry / "claim.json")
        )
        assert ours == theirs
    there = (x for x in Path(race).rglob("*") if x.is_file())
    assert sorted(x.as_posix() for x in there) == sorted(files)
    assert sum(Path(name).stat().st_size for name in files) < 1_000_000


def test_the_workflow_of_the_page_checks_the_entries_that_a_branch_adds(race: Path, tmp_path: Path):
    page = (ROOT / "docs/challenges.md").read_text()
    (text,) = re.findall(r"```yaml\n(name: entries\n.*?)```", page, re.DOTALL)
    workflow = yaml.safe_load(text)
    # YAML 1.1 reads the key `on` as true; GitHub does not.
    assert workflow[True] == "pull_request" and workflow["permissions"] == {"contents": "read"}
    (step,) = (x for x in workflow["jobs"]["check"]["steps"] if "BASE" in x.get("env", {}))

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def checked(base: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = runs.environment(BASE=base, PATH=path)
        command = ["bash", "-e", "-c", step["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    git("init", "-q")
    for name in ("baseline.yaml", "challenge.yaml", "entries/0003_faster"):
        copy = shutil.copytree if (race / name).is_dir() else shutil.copy
        (tmp_path / "race/entries").mkdir(parents=True, exist_ok=True)
        copy(race / name, tmp_path / "race" / name)
    git("add", ".")
    git("commit", "-qm", "The race")
    base = git("rev-parse", "HEAD")
    shutil.copytree(race / "entries/0002_fast", tmp_path / "race/entries/0002_fast")
    git("rm", "-rq", "race/entries/0003_faster")
    git("add", ".")
    git("commit", "-qm", "An entry, and one less")
    done = checked(base)
    assert done.returncode == 0 and done.stdout.count("0002_fast: AdamW") == 1, done.stderr
    assert "0003" not in done.stdout + done.stderr
    shutil.copytree(race / "entries/0001_slow", tmp_path / "race/entries/0001_slow")
    git("add", ".")
    git("commit", "-qm", "One that does not reach the target")
    done = checked(base)
    assert done.returncode == 1 and "0001_slow" in done.stdout and "0002_fast" in done.stdout


def test_an_exported_entry_prints_its_log(race: Path, tmp_path: Path, capsys):
    entry, script = race / "entries/0002_fast", tmp_path / "fast.py"
    runs.printed(capsys, "challenge", "export", entry, f"--output={script}")
    assert "exists" in runs.refused(capsys, "challenge", "export", entry, f"--output={script}")
    text = script.read_text()
    head, _, log = text.partition("# The published runs:\n")
    published = [line.removeprefix("# ") for line in log.splitlines()]
    assert len(published) == 4 * 4  # seeds, evaluations
    rows = [x for x in iterate_metrics(entry / "sweep/trials/one/0000/0") if "validation/loss" in x]
    assert published[3] == f"seed 0 step 20 validation/loss {rows[-1]['validation/loss']!r}"
    assert "AdamW" in head and "By A. Person." in head
    short_one = head.replace("SEEDS = [0, 1, 2, 3]", "SEEDS = [2]")
    assert short_one != head
    script.write_text(short_one)
    printed = runs.python(str(script), cwd=tmp_path, JAX_PLATFORMS="cpu")
    # The tests have computed the entry in a process with other numbers of threads.
    for ours, theirs in zip(printed.splitlines(), published[8:12], strict=True):
        (words, value), (of_log, logged) = (x.rsplit(" ", 1) for x in (ours, theirs))
        assert words == of_log and float(value) == pytest.approx(float(logged), rel=1e-5)


def test_an_entry_that_is_not_complete_has_no_script(race: Path, tmp_path: Path, capsys):
    shutil.copytree(race, tmp_path / "race")
    entry = tmp_path / "race/entries/0002_fast"
    shutil.rmtree(entry / "sweep/trials/one/0000/3")
    assert "has not ended" in runs.refused(capsys, "challenge", "export", entry)
