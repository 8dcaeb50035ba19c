"""The command report, on sweeps that were computed, and with the mistakes of its users."""

import csv
import json
import random
import re
import shutil
from pathlib import Path

import pytest

from tests import runs, short
from tests.sweep.test_sweep_plan import BASE, DEEP
from trainer.__main__ import main
from trainer.report import FORMATS
from trainer.report.run_results import read_runs
from trainer.report.sweep_results import read_sweep_results

SWEEP = """base: base.yaml
arms:
  adamw: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}}
  sgd:
    set: {optimizer: !optax.sgd {learning_rate: 0.1}}
    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-2, high: 1.0}}
trials: 3
method: !method.sobol {seed: 0}
goal: {metric: accuracy, mode: max, target: 0.2}
final: {seeds: 4}
"""


# After 20 steps, some units count as collapsed.
LONGER = BASE.replace("steps: 20", "steps: 40") + "log_every: 5\neval_every: 10\n"


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a sweep that is complete."""
    return runs.swept(tmp_path_factory.mktemp("computed"), LONGER, SWEEP)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """Returns the folder of a sweep of which nothing is computed."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    options = [f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={tmp_path / 'sweep'}"]
    assert main(["sweep", *options, "--plan_only"]) == 0
    return tmp_path / "sweep"


def report(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    """Runs the command; returns what it printed, on standard error if it failed."""
    # All formats, unless `words` name some.
    if not any(str(word).startswith("--formats") for word in words):
        words = (*words, f"--formats={','.join(FORMATS)}")
    capsys.readouterr()
    assert main(["report", *map(str, words)]) == code
    said = capsys.readouterr()
    if code:
        assert "Traceback" not in said.err and len(said.err.splitlines()) <= 4
    return said.err if code else said.out


def test_the_report_of_a_sweep(computed, capsys):
    said = report(capsys, computed)
    folder = computed / "report"
    assert f"{folder}: index.html, report.md, " in said
    verdict = said.split("\n\n")[0]
    assert "accuracy on the test split" in verdict and "over 4 seeds" in verdict
    markdown = " ".join((folder / "report.md").read_text().replace("**", "").split())
    assert " ".join(verdict.split()) in markdown
    with (folder / "tables" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 + 2 * 4
    for row in rows:
        # A link from the report, and the values that the run itself wrote.
        summary = json.loads((folder / row["folder"] / "summary.json").read_text())
        assert float(row["validation"]) == summary["metrics"]["validation/accuracy"]
        assert float(row["seconds"]) == pytest.approx(summary["perf/seconds"])
        assert (computed / row["trial"]).resolve() == (folder / row["folder"]).resolve()
    with (folder / "tables" / "ledger.csv").open() as file:
        ledger = {(row["arm"], row["runs"]): row for row in csv.DictReader(file)}
    assert ledger["sgd", "search"]["steps"] == str(3 * 40)
    assert float(ledger["sgd", "search"]["seconds"]) > 0
    for name in ("arms", "pairs", "curves_step", "curves_time", "tuning", "learning_rate_1"):
        assert (folder / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_is_a_page_and_markdown_unless_more_is_asked_for(computed, tmp_path, capsys):
    assert main(["report", str(computed), f"--output={tmp_path / 'out'}"]) == 0
    assert f"{tmp_path / 'out'}: index.html and report.md\n" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "out").rglob("*")}
    assert files == {"index.html", "report.md", ".report.json"}
    assert "](figures/" not in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.long
def test_a_report_is_replaced_and_equal_results_give_equal_files(computed, capsys):
    report(capsys, computed)
    folder = computed / "report"
    before = runs.contents(folder)
    report(capsys, computed)
    assert runs.contents(folder) == before


@pytest.mark.long
def test_runs_are_arms_by_config(computed, tmp_path, capsys):
    options = ["--metric=accuracy", "--mode=max", f"--output={tmp_path / 'out'}"]
    runs = [
        shutil.copytree(run, tmp_path / "runs" / run.parent.name / run.name)
        for run in sorted((computed / "final").glob("*/*"))
    ]
    said = report(capsys, *runs, *options)
    assert "over 4 seeds" in said
    with (tmp_path / "out" / "tables" / "arms.csv").open() as file:
        rows = {row["arm"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"adamw", "sgd"} and rows["sgd"]["units"] == "4"


def test_a_run_says_the_same_of_itself_alone_and_in_its_sweep(computed):
    """Such as how busy the machine was."""
    of_sweep = {run.folder: run for run in read_sweep_results(computed).finals}
    alone = read_runs([str(folder) for folder in of_sweep], "accuracy", "max").finals
    assert len(alone) == 8
    for run in alone:
        same = of_sweep[run.folder]
        for name in ("end", "summary", "retries", "load", "began", "at_once"):
            assert getattr(run, name) == getattr(same, name), name


def test_an_unfinished_sweep_says_what_is_missing(planned, capsys):
    said = report(capsys, planned)
    assert said.startswith("Not decided: no run has ended.\n")
    assert "Note: The search is not complete: no result yet of 6 trials of 6" in said
    assert "when the search is complete, each runs again on 4 fresh seeds." in said
    assert (planned / "report" / "index.html").exists()


def p_values(folder: Path, name: str = "report") -> list[str]:
    with (folder / name / "tables" / "pairs.csv").open() as file:
        return [row["p"] for row in csv.DictReader(file) if row.get("p")]


@pytest.mark.long
@short.parametrize("ledger", [True, False])
def test_results_that_were_edited_are_not_judged(computed, tmp_path, capsys, ledger):
    """Halving one number in summary.json turned the verdict around, with its rows beside it."""
    folder = tmp_path / "sweep"
    shutil.copytree(computed, folder, ignore=shutil.ignore_patterns("report"))
    if not ledger:  # as in sweeps of earlier versions
        (folder / "ledger.jsonl").unlink()
    before = report(capsys, folder)
    assert "not judged" not in before and len(p_values(folder)) == 1
    assert ("There is no ledger.jsonl, which would show that no file" in before) != ledger
    name = "final/sgd/10000/summary.json"
    content = json.loads((folder / name).read_text())
    content["metrics"]["eval/accuracy"] /= 2
    (folder / name).write_text(json.dumps(content))
    said = report(capsys, folder)
    why = "changed after its line in ledger.jsonl" if ledger else "not that of the rows of metrics"
    assert said.startswith(
        f"The results are not judged, because files of the sweep disagree: {name} (it"
    )
    assert why in said and f"`python -m trainer sweep check {folder}`" in said
    assert p_values(folder) == []
    shutil.copy(computed / name, folder / name)
    assert report(capsys, folder) == before


@pytest.mark.long
def test_another_winner_and_seeds_taken_out_of_final_json_are_found(computed, tmp_path, capsys):
    folder = tmp_path / "sweep"
    shutil.copytree(computed, folder, ignore=shutil.ignore_patterns("report"))
    file = folder / "final.json"
    content = json.loads(file.read_text())
    best = content[0]["winners"]["sgd"][0]
    best["number"] = (best["number"] + 1) % 3
    file.write_text(json.dumps(content))
    said = report(capsys, folder)
    assert said.startswith("The results are not judged") and "final.json (it was changed" in said
    content[0]["seeds"].pop()
    file.write_text(json.dumps(content))
    assert "final.json is damaged (its seeds are" in report(capsys, folder, code=2)


@pytest.mark.long
def test_runs_of_replaced_winners_are_in_the_ledger(computed, tmp_path, capsys):
    folder = tmp_path / "sweep"
    shutil.copytree(computed, folder, ignore=shutil.ignore_patterns("report"))
    shutil.copytree(folder / "final" / "sgd", folder / "final.1" / "sgd")
    report(capsys, folder)
    with (folder / "report" / "tables" / "ledger.csv").open() as file:
        found = {(row["arm"], row["runs"]): row["count"] for row in csv.DictReader(file)}
    assert found["sgd", "replaced"] == "4" and ("adamw", "replaced") not in found
    page = (folder / "report" / "index.html").read_text()
    assert "changed after it had final runs" in page


@pytest.mark.long
def test_two_sweeps_are_two_workloads(computed, tmp_path, capsys):
    (tmp_path / "base.yaml").write_text(BASE.replace("steps: 20", "steps: 10"))
    (tmp_path / "sweep.yaml").write_text(SWEEP.replace("trials: 3", "trials: 1"))
    options = [f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={tmp_path / 'other'}"]
    assert runs.sweep(*options) == 0
    said = report(capsys, computed, tmp_path / "other", f"--output={tmp_path / 'out'}")
    assert said.count("accuracy on the test split") == 2 and "\nother: " in said
    assert (tmp_path / "out" / "tables" / "workloads_scores.csv").exists()


def test_sweeps_with_runs_in_common_are_refused(computed, tmp_path, capsys):
    """Or else a sweep and its copy, with one run less, count as two."""
    copy = tmp_path / "copy"
    shutil.copytree(computed, copy)
    shutil.rmtree(copy / "trials" / "adamw" / "0000")
    said = report(capsys, computed, copy, code=2)
    assert (
        f"{computed} and {copy} have 13 runs in common, of the same config, seed and data" in said
    )
    assert "such as trials/adamw/0001/0 and trials/adamw/0001/0" in said


def test_runs_of_a_sweep_are_judged_by_its_own_report_only(copied, tmp_path, capsys):
    """Named one by one, they had no other arms, no earlier looks and no ledger."""
    every = sorted((copied / "final").glob("*/*"))
    options = ["--metric=accuracy", "--mode=max", f"--output={tmp_path / 'out'}"]
    said = report(capsys, *every, *options, "--formats=csv")
    why = (
        f"These runs are of the sweep {copied}, and which ones are named may decide who is better:"
        f" `python -m trainer report {copied}` judges by the plan."
    )
    assert said.startswith(f"Not judged. {why} The mean accuracy on the test split: ")
    assert "p = " not in said and not p_values(tmp_path, "out")

    def picked(runs: list[Path]) -> str:
        return read_runs(list(map(str, runs)), "accuracy", "max").picked

    assert picked(every[1:]) == why
    away = [Path(shutil.copytree(x, tmp_path / f"{x.parent.name}_{x.name}")) for x in every]
    (tmp_path / "link").symlink_to(every[0])
    assert picked([tmp_path / "link", *away[1:]]) == why.replace("These", "Some of these")
    shutil.rmtree(every[0])
    assert picked(every[1:]) == why
    assert picked(away) == ""


def extended(folder: Path, text: str) -> None:
    """Extends a sweep to a file; the seeds of its winners are not computed."""
    file = folder.parent / "extended.yaml"
    (folder.parent / "base.yaml").write_text(LONGER)
    file.write_text(text)
    assert main(["sweep", "extend", str(folder), f"--config={file}"]) == 0


@pytest.mark.long
def test_winners_of_the_test_split_are_said_to_be_so(tmp_path, capsys):
    """A verdict said that no run had another split, where the file had chosen this one."""
    (tmp_path / "base.yaml").write_text(LONGER)
    text = SWEEP.replace("target: 0.2", "select_on: test").replace("s: 3", "s: 2")
    (tmp_path / "sweep.yaml").write_text(text)
    file = f"--config={tmp_path / 'sweep.yaml'}"
    said = runs.printed(capsys, "sweep", file, "--check")
    assert "warning (adamw, sgd): The goal has select_on: test, so that values of winners" in said
    assert runs.sweep(file, f"--workdir={tmp_path / 'sweep'}") == 0
    found = report(capsys, tmp_path / "sweep", "--formats=markdown")
    assert "because the file says `select_on: test`, although runs have a validation split" in found


def test_trials_of_an_extension_do_not_count_before_their_results(copied, capsys):
    """A verdict said "best of 64 trials" of 3 that had run, and judged what 3 trials may not."""
    before = report(capsys, copied, "--formats=markdown").split("\n")[0]
    assert read_sweep_results(copied).points_of_search("adamw") == 3
    extended(copied, SWEEP.replace("trials: 3", "trials: 64"))
    first, *notes = report(capsys, copied, "--formats=markdown").split("\nNote: ")
    assert first == before and notes[1].startswith("The sweep was extended. Until the new trials")
    assert read_sweep_results(copied).points_of_search("adamw") == 3
    methods = " ".join((copied / "report" / "report.md").read_text().split())
    assert "with 3 points for each arm" in methods and "every arm 1 with 3 trials" in methods


@pytest.mark.long
def test_the_trials_of_an_extension_do_not_count_without_final_runs_either(tmp_path, capsys):
    text = SWEEP.replace("final: {seeds: 4}", "final: null").replace("trials: 3", "trials: 2")
    folder = runs.swept(tmp_path, LONGER, text)
    winners = read_sweep_results(folder).winners
    extended(folder, text.replace("trials: 2", "trials: 4"))
    (done,) = (folder / "trials/adamw/0001").iterdir()
    shutil.copytree(done, folder / "trials/adamw/0002" / done.name)  # one of the new ones
    found = read_sweep_results(folder)
    assert {found.points_of_search(arm) for arm in found.arms} == {2}
    assert found.winners == winners and len(found.later) == 4
    assert "the winners are those of before" in report(capsys, folder, "--formats=markdown")


def test_what_a_verdict_means_is_not_chosen_after_the_results(copied, capsys):
    """A later `relevant` made arms equivalent, and a later `differs` hid a warning."""
    before = report(capsys, copied, "--formats=csv").split("\n\n")[0]
    assert "The file does not name these differences (weight_decay)" in before
    later = SWEEP.replace("target: 0.2", "target: 0.2, relevant: 0.9")
    extended(copied, f"{later}differs: [weight_decay]\n")
    assert report(capsys, copied, "--formats=csv").split("\nNote: ")[0] == (
        f"{before} After results were known, the file changed goal.relevant from (none) to 0.9 and"
        " differs from (none) to weight_decay, which does not count."
    )


@pytest.mark.long
def test_what_a_verdict_means_may_be_chosen_before_the_results(planned, capsys):
    later = SWEEP.replace("target: 0.2", "target: 0.2, relevant: 0.9").replace("s: 3", "s: 4")
    (planned.parent / "base.yaml").write_text(BASE)
    (planned.parent / "sweep.yaml").write_text(f"{later}differs: [weight_decay]\n")
    file = f"--config={planned.parent / 'sweep.yaml'}"
    assert main(["sweep", "extend", str(planned), file]) == 0
    found = read_sweep_results(planned)
    assert (found.goal.relevant, found.differs) == (0.9, ("weight_decay",)) and not found.caveats


@short.parametrize("removed", ["ledger.jsonl", "final final.json ledger.jsonl"])
def test_an_extension_after_a_ledger_that_was_removed_is_a_later_look(copied, capsys, removed):
    """The ledger that it begins says nothing of what was known, and a fresh t test needs that."""
    for name in removed.split():
        shutil.rmtree(copied / name) if name == "final" else (copied / name).unlink()
    extended(copied, SWEEP.replace("seeds: 4", "seeds: 8"))
    said = capsys.readouterr().out
    assert "power: the results are judged again at 8 final seeds" in said
    found = read_sweep_results(copied)
    assert [each.compared_known for each in found.revisions] == [False, True]
    count = len(list(copied.glob("trials/*/*/*"))) + len(list(copied.glob("final/*/*")))
    why = (
        f"ledger.jsonl began at revision 2 of the plan, when there were {count} results, and says"
        " nothing of what was before it."
    )
    assert found.caveats == (why,)
    assert main(["sweep", "check", str(copied)]) == 0 and why in capsys.readouterr().out
    (copied / "ledger.jsonl").unlink()
    assert [each.compared_known for each in read_sweep_results(copied).revisions] == [False, True]


@pytest.mark.long
def test_seeds_that_the_file_lists_are_named(planned, tmp_path, capsys):
    assert "listed by hand" not in report(capsys, planned)
    (tmp_path / "base.yaml").write_text(DEEP)
    for given, words in (
        ("final: {seeds: [3, 8, 11, 14]}", "The final seeds were listed by hand: 3, 8, 11, 14."),
        ("seeds: [4, 2]\nfinal: {seeds: 4}", "The seeds were listed by hand: 4, 2."),
        ("seeds: [4, 5]\nfinal: {seeds: 4}", ""),  # as two that are counted from another one
    ):
        (tmp_path / "sweep.yaml").write_text(SWEEP.replace("final: {seeds: 4}", given))
        folder = tmp_path / f"sweep_{len(given)}_{bool(words)}"
        assert runs.sweep(f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={folder}") == 0
        said = report(capsys, folder)
        assert (words or "p = ") in said and ("listed by hand" in said) == bool(words)


def test_a_folder_that_is_neither_a_sweep_nor_a_run(tmp_path, capsys):
    said = report(capsys, tmp_path, code=2)
    assert "is not the folder of a run or of a sweep" in said
    assert not (tmp_path / "report").exists()


@pytest.mark.long
def test_a_folder_with_runs_is_these_runs(computed, tmp_path, capsys):
    for run in (computed / "final").glob("*/*"):
        shutil.copytree(run, tmp_path / "runs" / f"{run.parent.name}_{run.name}")
    said = report(capsys, tmp_path / "runs", f"--output={tmp_path / 'out'}")
    assert "loss on the test split" in said and "over 4 seeds" in said


def test_folders_that_cannot_be_reported(computed, capsys):
    assert "There is no folder nowhere" in report(capsys, "nowhere", code=2)
    said = report(capsys, computed / "trials", code=2)
    assert f"is in the folder of a sweep, which is {computed}" in said


@pytest.mark.parametrize("option", ["--target=abc", "--formats=docx", "--metrics=loss"])
def test_options_that_do_not_exist(computed, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(computed), option])
    said = capsys.readouterr().err
    assert any(word in said for word in ("is not a number", "there are html", "mean --metric"))


def test_sweeps_and_runs_together_are_refused(computed, capsys):
    run = next((computed / "final").glob("*/*"))
    assert "is not the folder of a sweep, and" in report(capsys, computed, run, code=2)


@pytest.mark.long
def test_another_metric_of_a_sweep_is_a_second_outcome(computed, tmp_path, capsys):
    said = report(capsys, computed, "--metric=loss", "--mode=min", f"--output={tmp_path / 'out'}")
    assert "loss on the test split" in said and "second outcome" in said.lower()
    said = report(capsys, computed, "--metric=los", "--mode=min", code=2)
    assert "No run of the sweep" in said and "Did you mean 'loss'?" in said


def test_a_metric_that_no_run_has(computed, capsys):
    run = next((computed / "final").glob("*/*"))
    said = report(capsys, run, "--metric=perplexity", "--mode=min", code=2)
    assert "No run has the metric 'perplexity'" in said and "accuracy and loss" in said
    assert "--mode is missing" in report(capsys, run, "--metric=accuracy", code=2)
    said = report(capsys, run, "--metric=accurcy", code=2)  # the metric first: its mode is no help
    assert "No run has the metric 'accurcy'" in said and "there are accuracy and loss" in said


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run that has ended."""
    home = tmp_path_factory.mktemp("alone")
    (home / "base.yaml").write_text(BASE + "writers: []\nlog_every: 5\neval_every: 10\n")
    assert trained(home / "run", home / "base.yaml") == 0
    return home / "run"


def trained(run: Path, config: Path, *words: str) -> int:
    return main(["train", f"--config={config}", f"--workdir={run}", *words])


def edit_a_digit(file: Path, draw: random.Random) -> None:
    """Replaces one digit of a file, and not the first one of a number, which may be a zero."""
    text = file.read_text()
    at = draw.choice([x.end() - 1 for x in re.finditer(r"\d\d", text)])
    file.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


FILES = ("summary.json", "metrics.jsonl", "config.yaml", "config_full.yaml", "run.json")


@short.parametrize("name", FILES)
def test_a_run_whose_files_were_edited_is_not_judged(alone, name, tmp_path, capsys):
    assert read_runs([str(alone)]).faults == ()
    draw = random.Random(0)
    for number in range(12):
        copy = shutil.copytree(alone, tmp_path / str(number))
        if name == "run.json":
            record = json.loads((copy / name).read_text())
            edits = {
                "seed": 7,
                "jax": "0.1",
                "devices": "8 x gpu",
                "cpu": "",
                "data": "",
                "cores": 3,
            }
            record["fingerprint"] |= [draw.choice([*edits.items()])]
            (copy / name).write_text(json.dumps(record))
        else:
            edit_a_digit(copy / name, draw)
        (fault,) = read_runs([str(copy)]).faults
        assert fault == f"{copy / name} (it is not as the run left it)"
    said = report(capsys, copy, f"--output={tmp_path / 'out'}")
    assert "not judged, because files of the runs disagree: " in said and f"/{name} (it is" in said
    assert "sweep check" not in said


def test_the_summary_of_a_run_of_an_earlier_version_is_compared_with_its_rows(alone, tmp_path):
    """Its run.json has the hash of metrics.jsonl at most."""
    copy = shutil.copytree(alone, tmp_path / "run")
    record = json.loads((copy / "run.json").read_text())
    del record["lineage"][-1]["results"]["files"]
    (copy / "run.json").write_text(json.dumps(record))
    assert read_runs([str(copy)]).faults == ()
    summary = json.loads((copy / "summary.json").read_text())
    summary["metrics"]["validation/loss"] -= 0.1
    (copy / "summary.json").write_text(json.dumps(summary))
    (fault,) = read_runs([str(copy)]).faults
    assert fault == f"{copy / 'summary.json'} (its validation/loss is not that of metrics.jsonl)"
    del record["lineage"][-1]["results"]
    (copy / "run.json").write_text(json.dumps(record))
    assert read_runs([str(copy)]).faults == (fault,)


@pytest.mark.long
def test_a_run_that_goes_on_after_it_has_ended_is_no_fault(alone, tmp_path):
    copy = shutil.copytree(alone, tmp_path / "run")
    words = ["--set=steps=30", "--allow_changed=config"]
    assert trained(copy, alone.parent / "base.yaml", *words, "--until=25") == 75
    assert read_runs([str(copy)]).faults == ()
    assert trained(copy, alone.parent / "base.yaml", *words) == 0
    assert read_runs([str(copy)]).faults == ()


def test_a_batch_size_that_is_none_is_no_traceback(computed, tmp_path, capsys):
    run = shutil.copytree(next((computed / "final").glob("*/*")), tmp_path / "copy")
    for name in ("config.yaml", "config_full.yaml"):
        text = (run / name).read_text()
        assert text.count("batch_size: 32") == 1
        (run / name).write_text(text.replace("batch_size: 32", "batch_size: {a: 1}"))
    report(capsys, run, f"--output={tmp_path / 'out'}")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "40 steps" in text and "examples a batch" not in text


def test_a_run_that_was_copied_is_not_two_runs(computed, tmp_path, capsys):
    run = next((computed / "final").glob("*/*"))
    shutil.copytree(run, tmp_path / "copy")
    assert "they are one run" in report(capsys, run, tmp_path / "copy", code=2)


def test_two_sweeps_with_the_same_name(computed, tmp_path, capsys):
    shutil.copytree(computed, tmp_path / "sweep")
    said = report(capsys, computed, tmp_path / "sweep", code=2)
    assert "Two sweeps have the name 'sweep'" in said


def test_a_folder_with_other_files_is_not_replaced(computed, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    report(capsys, computed, f"--output={tmp_path}", code=2)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
