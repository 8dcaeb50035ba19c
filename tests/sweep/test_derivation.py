"""`sweep check` and `claim verify` derive plan.json again from the file of the sweep beside it."""

import importlib.metadata
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from tests.studies.test_claim import _rewrite_ledger
from tests.sweep import test_ablation, test_ladder
from tests.sweep.test_sweep_plan import BASE, GIN, defined
from tests.sweep.test_sweep_plan_file import TREES, with_one_program, written
from trainer import data
from trainer.__main__ import main
from trainer.studies.claim import Checked, write_claim
from trainer.studies.claim_text import claim_sentences
from trainer.sweep import evidence
from trainer.sweep.extension import derive, write_extension
from trainer.sweep.ledger import read_ledger
from trainer.sweep.plan import plan_sweep
from trainer.sweep.plan_file import digest_of, read_plan, write_revisions

SPACE = "optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}"
SWEEP = f"""base: base.yaml
arms:
  one: {{space: {{{SPACE}}}}}
  two: {{space: {{{SPACE.replace("1e-1", "1e-2")}}}}}
trials: 2
searches: 4
method: !method.sobol {{seed: 0}}
final: {{seeds: 1}}
differs: [space]
"""


def begun(folder: Path, text: str) -> Path:
    """Plans a sweep, and returns its folder."""
    written(folder / "sweep", defined(folder, text))
    return folder / "sweep"


def derived(sweep: Path) -> tuple[list[str], list[str]]:
    return derive(sweep, read_plan(sweep), read_ledger(sweep))


def edit_lines(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the lines of a ledger; those for which `change` returns True are removed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [line for line in lines if change(line) is not True]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))


def replan(sweep: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the last revision of plan.json, and all hashes that follow."""
    revisions = json.loads((sweep / "plan.json").read_text())["revisions"]
    change(revisions[-1])
    digest = revisions[-1]["digest"] = digest_of(revisions[-1])
    write_revisions(sweep, revisions)
    edit_lines(
        sweep / "ledger.jsonl",
        lambda x: x.update(digest=digest) if x.get("revision") == len(revisions) else None,
    )
    _rewrite_ledger(sweep)


def edit_file(sweep: Path, old: str, new: str, name: str = "sweep.yaml") -> None:
    """Changes the file of a sweep, and all hashes that follow."""
    text = (sweep / name).read_text()
    assert old in text
    (sweep / name).write_text(text.replace(old, new))
    _rewrite_ledger(sweep)


# What an honest sweep has.

HALVED = SWEEP.replace(
    "!method.sobol {seed: 0}", "!method.halving {points: !method.sobol {}, cuts: [9]}"
)
LISTED = """base: base.yaml
method: !method.explicit
  trials:
    - [{data_seed: 1}, {data_seed: 2}]
    - [{data_seed: 3}, {data_seed: 4}]
    - [{data_seed: 5}, {data_seed: 6}]
"""
UNIFORM = "!space.uniform {low: 0, high: 0.5}"
BOTH = f"!space.zip {{spaces: {{optimizer.b1: {UNIFORM}, optimizer.b2: {UNIFORM}}}}}"
LINKED = SWEEP.replace(SPACE, f"both: {BOTH}")
HONEST = {
    "searches": SWEEP,
    "latin hypercube": SWEEP.replace("sobol", "latin_hypercube"),
    "halving": HALVED,
    "listed": LISTED,
    "linked": LINKED,
    "ladder": test_ladder.SWEEP,
    "seeds": SWEEP.replace("final: {seeds: 1}", "seeds: [7, 3]\nfinal: {seeds: [11]}"),
}


@pytest.mark.parametrize("name", HONEST)
def test_the_plan_of_a_sweep_is_that_of_its_file(folder, name):
    assert derived(begun(folder, HONEST[name])) == ([], [])


def test_the_plan_of_an_ablation_is_that_of_its_file(folder):
    (folder / "base.yaml").write_text(re.sub("optimizer:.*\n", "", BASE) + test_ablation.GROUPS)
    assert derived(begun(folder, test_ablation.SWEEP)) == ([], [])


# What somebody changed, with all hashes.


def seeds_moved(revision: dict[str, Any]) -> None:
    revision["trials"] = [[x[0], x[1], x[2] + 1, *x[3:]] for x in revision["trials"]]
    for program in revision["programs"]:
        names = [x.rpartition("/") for x in program["trials"]]
        program["trials"] = [f"{point}/{int(seed) + 1}" for point, _, seed in names]


def without_a_trial(revision: dict[str, Any]) -> None:
    *_, lost = revision["trials"]
    revision["trials"] = [x for x in revision["trials"] if x is not lost]
    for program in revision["programs"]:
        program["trials"].pop()


def without_an_arm(revision: dict[str, Any]) -> None:
    del revision["arms"]["two"]
    revision["trials"] = [x for x in revision["trials"] if x[0] != "two"]
    for program in revision["programs"]:
        program["trials"] = [x for x in program["trials"] if not x.startswith("two/")]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a value": (
        lambda x: x["trials"][3][3].update({"optimizer.learning_rate": 0.05}),
        r"values of one/1.0001/\d+: optimizer.learning_rate 0.05 -> 0.0\d+",
    ),
    "the type of a value": (
        lambda x: x["trials"][3][3].update({"optimizer.learning_rate": True}),
        r"values of one/1.0001/\d+: optimizer.learning_rate True -> 0.0\d+",
    ),
    "seeds": (
        seeds_moved,
        r"trial one/0000/1 \((optimizer.learning_rate \S+)\) -> one/0000/0 \(\1\)",
    ),
    "a trial less": (
        without_a_trial,
        r"trial \(absent\) -> two/3.0001/\d+ \(optimizer.learning_rate 0.00\d+\)",
    ),
    "an arm less": (without_an_arm, r"arm two: \(absent\) -> present"),
    "a value more": (
        lambda x: x["trials"][3][3].update({"optimizer.b1": 0.5}),
        r"values of one/1.0001/\d+: optimizer.b1 0.5 -> \(none\)",
    ),
    "final seeds": (lambda x: x.update(final_seeds=[12000]), "final_seeds: 12000 -> 10000"),
    "offsets": (lambda x: x["offsets"].reverse(), r"offsets: \d+, \d+, \d+, 0 -> 0, "),
    "the space": (
        lambda x: x["arms"]["one"]["space"].update({"optimizer.learning_rate": "uniform 0 to 1"}),
        "space of one: optimizer.learning_rate uniform 0 to 1 -> optimizer.learning_rate"
        " log_uniform 0.001 to 0.1",
    ),
    "the method": (
        lambda x: x["arms"]["two"].update(method="random, seed 0"),
        "method of two: random, seed 0 -> sobol, seed 0",
    ),
    "the goal": (lambda x: x["goal"].update(relevant=0.1), "goal: .* relevant 0.1 -> metric loss"),
    "linked paths": (lambda x: x.update(linked={"one": [["a", "b"]]}), "linked: one .* -> "),
    "named differences": (lambda x: x.update(differs=["tuned"]), "differs: tuned -> space"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_that_its_file_does_not_give_is_refused(folder, capsys, name):
    change, part = CHANGES[name]
    sweep = begun(folder, SWEEP)
    replan(sweep, change)
    assert main(["sweep", "check", str(sweep)]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    said = "plan.json: it is not the plan that sweep.yaml gives; plan.json -> sweep.yaml: "
    assert line.startswith(said) and re.search(part, line), line
    end = (
        ". One of the two was changed after the sweep was planned: restore both from a copy, or ask"
        " for those by which it was planned."
    )
    assert line.endswith(end), line


def test_other_cuts_are_refused(folder):
    sweep = begun(folder, HALVED)
    replan(sweep, lambda x: x["arms"]["one"]["cuts"].update(factor=2))
    (line,), _ = derived(sweep)
    assert "cuts of one: steps 9, factor 2 -> steps 9, factor 3" in line


@pytest.mark.parametrize("text", ["high: 0.2", "method.halton"])
def test_a_changed_file_is_refused(folder, text):
    sweep = begun(folder, SWEEP)
    edit_file(sweep, "high: 0.1" if "high" in text else "method.sobol", text)
    (line,), _ = derived(sweep)
    assert "values of one/0000/0: optimizer.learning_rate " in line


def extended(sweep: Path, text: str) -> None:
    definition = defined(sweep.parent, text)
    write_extension(sweep, definition, with_one_program(plan_sweep(definition)))


def test_a_revision_is_derived_from_its_own_file(folder):
    sweep = begun(folder, SWEEP)
    extended(sweep, SWEEP.replace("trials: 2", "trials: 4").replace("high: 1e-2", "high: 3e-2"))
    extended(sweep, SWEEP.replace("trials: 2", "trials: 4").replace("searches: 4", "searches: 5"))
    assert read_plan(sweep).revision == 3 and derived(sweep) == ([], [])
    kept = shutil.copytree(sweep, folder / "kept")
    edit_file(sweep, "high: 0.03", "high: 0.02", "sweep.2.yaml")
    (line,), _ = derived(sweep)
    assert "the plan that sweep.2.yaml gives" in line
    assert "space of two: optimizer.learning_rate log_uniform 0.001 to 0.03 -> " in line
    assert "values of two/0002/0: optimizer.learning_rate " in line
    replan(kept, lambda x: x["trials"][0][3].update({"optimizer.learning_rate": 0.05}))
    (line,), _ = derived(kept)
    assert "the plan that sweep.3.yaml gives" in line and "values of one/4.0000/" in line


# What cannot be derived, or only in part.


def test_what_is_not_derived_is_said(folder, capsys):
    sweep = begun(folder, SWEEP)
    (sweep / "sweep.yaml").rename(folder / "kept.yaml")
    edit_lines(sweep / "ledger.jsonl", lambda x: x.get("files", {}).pop("sweep.yaml", None))
    _rewrite_ledger(sweep)
    assert main(["sweep", "check", str(sweep)]) == 0
    said = "Nothing shows that plan.json is the plan that sweep.yaml gives, because it could not be"
    assert said in capsys.readouterr().out
    (folder / "kept.yaml").rename(sweep / "sweep.yaml")
    edit_file(sweep, "method.sobol", "mine.sobol")
    text = runs.printed(capsys, "sweep", "check", str(sweep))
    assert said in text and "There is no function 'mine.sobol'" in text


def test_no_function_but_those_of_spaces_and_methods_is_called(folder, monkeypatch):
    """The folder may come from elsewhere, and data sets read files."""
    sweep = begun(folder, SWEEP)
    monkeypatch.setattr(data, "digits", lambda **arguments: pytest.fail("It was called."))
    edit_file(sweep, "!method.sobol\n  seed: 0", "!data.digits {batch_size: 32}")
    wrong, (sentence,) = derived(sweep)
    assert wrong == [] and "There is no function 'data.digits'" in sentence


def test_a_selector_of_gin_sets_what_the_plan_says(folder):
    sweep = begun(folder, GIN)
    said = "What optax.adamw.learning_rate of sweep.yaml sets was taken from plan.json, because"
    wrong, (sentence,) = derived(sweep)
    assert wrong == [] and sentence.startswith(said)
    replan(sweep, lambda x: x["arms"]["base"]["space"].popitem())
    (line,), _ = derived(sweep)
    assert "space of base: " in line
    replan(sweep, lambda x: x["trials"][0][3].update(steps=3))
    (line,), _ = derived(sweep)
    assert "values of base/0000/0: " in line


def test_plans_of_earlier_versions_do_not_say_which_paths_move_together(folder):
    sweep = begun(folder, LINKED)
    replan(sweep, lambda x: x.pop("linked"))
    said = "plan.json does not say which paths move together, as those of version 0.2 do not."
    assert derived(sweep) == ([], [said])


def test_the_order_of_arguments_in_a_space_is_no_difference(folder):
    said = "The texts of values that are calls in sweep.yaml were taken from plan.json."
    assert derived(begun(folder, TREES)) == ([], [said])


@pytest.mark.parametrize("known", ["", "1.0.0", ["1.0.0"]])
def test_another_scipy_is_named(folder, known):
    sweep = begun(folder, SWEEP)
    (line,) = [x for x in read_ledger(sweep).entries if x.event == "plan"]
    here = importlib.metadata.version("scipy")
    assert line.content["scipy"] == here
    edit_lines(sweep / "ledger.jsonl", lambda x: x.update(scipy=known) if "scipy" in x else None)
    assert derived(sweep) == ([], [])
    edit_file(sweep, "seed: 0", "seed: 1")
    (line,), _ = derived(sweep)
    planned = f"with scipy {known}" if known else "with a scipy that no ledger names"
    assert line.endswith(
        f"It was planned {planned}, and {here} here may draw other points: check it with that"
    )
    edit_file(sweep, "method.sobol", "method.random")
    (line,), _ = derived(sweep)
    assert "scipy" not in line


# The whole attack.


def leave_out(sweep: Path, search: int) -> None:
    """Removes a search of all arms with its results, and numbers those after it anew."""

    def renamed(name: str) -> str:
        """Returns the new name of a trial; "" if it is left out."""
        arm, number, rest = re.fullmatch(r"((?:trials/)?\w+/)(?:(\d+)\.)?(\d+/\d+)", name).groups()
        if int(number or 0) == search:
            return ""
        return f"{arm}{int(number) - 1}.{rest}" if int(number or 0) > search else name

    plan = read_plan(sweep)
    for arm in plan.arms:
        shutil.rmtree(sweep / "final" / arm / str(plan.final_seeds[0] + plan.offsets[search]))
    for trial in plan.trials:
        if new := renamed(trial.folder):
            (sweep / new).parent.mkdir(exist_ok=True)
            (sweep / trial.folder).rename(sweep / new)
        else:
            shutil.rmtree(sweep / trial.folder)
    for place in (sweep / "trials").glob("*/*"):
        if not any(place.iterdir()):
            place.rmdir()
    final = json.loads((sweep / "final.json").read_text())
    for winners in final[0]["winners"].values():
        del winners[search]
    (sweep / "final.json").write_text(json.dumps(final))

    def change(revision: dict[str, Any]) -> None:
        del revision["offsets"][search]
        trials = [(x[:4], sum(x[4:])) for x in revision["trials"] if sum(x[4:]) != search]
        numbers = [(entry, number - (number > search)) for entry, number in trials]
        revision["trials"] = [[*entry, *([number] if number else [])] for entry, number in numbers]
        for program in revision["programs"]:
            program["trials"] = list(filter(None, map(renamed, program["trials"])))

    def of_trial(line: dict[str, Any]) -> bool:
        name = line.get("trial", "")
        line |= {"trial": renamed(name)} if name.startswith("trials/") else {}
        return "trial" in line and not (sweep / (line["trial"] or "none")).is_dir()

    edit_lines(sweep / "ledger.jsonl", of_trial)
    replan(sweep, change)


@pytest.mark.long
def test_a_search_that_was_left_out_is_found(tmp_path, monkeypatch, capsys):
    """It was verified: the others were numbered anew, with all hashes and a new claim."""
    sweep = runs.swept(tmp_path, BASE + "log_every: 5\neval_every: 10\n", SWEEP)
    claim = tmp_path / "claim.json"
    write_claim(sweep, claim)
    published = shutil.copy(claim, tmp_path / "published.json")
    last = shutil.copytree(sweep, tmp_path / "last" / "sweep")
    leave_out(sweep, 1)
    edit_file(sweep, "searches: 4", "searches: 3")
    verify = ["claim", "verify", str(claim), str(sweep), "--public=1", "--runs=1"]
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "derive", lambda *arguments: ([], ["Nothing is derived."]))
        claim.unlink()
        write_claim(sweep, claim)
        text = runs.printed(capsys, *verify)
        assert "Nothing is derived." in text and "Verified" in text
    text = runs.printed(capsys, *verify, code=1)
    assert "plan.json -> sweep.yaml: trial one/1.0000/" in text and "Verified" not in text
    assert main(["sweep", "check", str(sweep)]) == 2
    # Without its last search, a file gives the plan: only the hash of the other plan shows that.
    leave_out(last, 3)
    edit_file(last, "searches: 4", "searches: 3")
    assert main(["sweep", "check", str(last)]) == 0
    capsys.readouterr()
    assert main(["claim", "verify", str(published), str(last), "--public=1"]) == 1
    assert "The plan of the folder is not that of the claim" in capsys.readouterr().out


def test_a_check_of_a_claim_says_whether_the_plan_was_derived():
    said = "The files agree with the ledger, the plan with the file of the sweep, plan and ledger"
    assert next(claim_sentences(Checked((), 5))).startswith(said)
    first, second, *_ = claim_sentences(Checked((), 5, underived=("It was not derived.",)))
    assert first.startswith("The files agree with the ledger, plan and ledger with the claim")
    assert second == "It was not derived."
