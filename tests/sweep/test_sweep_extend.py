"""`sweep extend`: revisions of the plan in the folder of a sweep."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from tests import chaos_hosts, chaos_sweep, runs, short
from tests.sweep.test_sweep_plan import GOOD, GROWING, METHOD, RATE, begin, defined, planned
from trainer.__main__ import main
from trainer.config import load
from trainer.config.tree import same
from trainer.config.vocabulary import SWEEP
from trainer.messages import UserError
from trainer.sweep import extension
from trainer.sweep.final import choose_winners
from trainer.sweep.folder import SweepFolder
from trainer.sweep.ledger import append, compared_known
from trainer.sweep.plan import Plan, plan_sweep
from trainer.sweep.plan_file import check_same, read_plan
from trainer.writers.summary import Summary

SWEEP_TEXT = f"""base: base.yaml
arms:
  first: {{space: {{{RATE}}}}}
trials: 4
{METHOD}
goal: {{metric: accuracy, mode: max}}
final: {{seeds: 2}}
"""
WIDER = SWEEP_TEXT.replace("low: 1e-4", "low: 1e-5")
GRID = """base: base.yaml
space:
  optimizer.b1: !space.values {values: [0.8, 0.9]}
  optimizer.b2: !space.values {values: [0.9, 0.99]}
"""


def begun(folder: Path, text: str, *sets: str) -> tuple[Path, Plan]:
    """Plans a sweep, and writes its plan into a folder."""
    begin(folder / "runs", folder, text, *sets)
    return folder / "runs", read_plan(folder / "runs")


def extend(
    folder: Path, text: str, *sets: str, options: tuple[str, ...] = ()
) -> tuple[int, Plan, Plan]:
    """Extends the sweep in `runs` by the command; returns what is then stored, and the new file."""
    plan = planned(folder, text, *sets)
    settings = [f"--set={each}" for each in sets]
    command = ["sweep", "extend", str(folder / "runs"), f"--config={folder / 'sweep.yaml'}"]
    code = main([*command, *settings, *options])
    return code, read_plan(folder / "runs"), plan


def check_kept(old: Plan, new: Plan) -> None:
    """Checks that nothing of the old plan changed."""
    assert new.revisions[:-1] == old.revisions
    assert new.programs[: len(old.programs)] == old.programs
    assert new.trials[: len(old.trials)] == old.trials
    for ours, theirs in zip(old.trials, new.trials, strict=False):
        assert ours.config.root == theirs.config.root
    named = [trial.name for trial in new.trials]
    assert len(set(named)) == len(named)
    assert sorted(named) == sorted(name for each in new.programs for name in each.trials)


def added(old: Plan, new: Plan) -> list[str]:
    check_kept(old, new)
    return [trial.name for trial in new.trials[len(old.trials) :]]


@short.parametrize("method", GROWING)
def test_more_trials_continue_the_sequence(folder, method):
    text = SWEEP_TEXT.replace("method.random", f"method.{method}")
    _, old = begun(folder, text)
    code, new, plan = extend(folder, text, "trials=7")
    assert code == 0 and new.revision == 2
    assert added(old, new) == [f"first/{number:04d}/0" for number in (4, 5, 6)]
    for ours, theirs in zip(new.trials, plan.trials, strict=True):
        assert ours.name == theirs.name and same(dict(ours.values), dict(theirs.values))
    per_revision = [[trial.name for trial in old.trials], added(old, new)]
    assert [list(each.trials) for each in new.programs] == per_revision
    stored = [[each["trials"] for each in revision["programs"]] for revision in new.revisions]
    assert stored == [[names] for names in per_revision]
    theirs, ours = old.programs[0], new.programs[1]
    same_facts = "inputs", "steps", "batch_size", "flops", "state_bytes"
    assert all(getattr(ours, name) == getattr(theirs, name) for name in same_facts)


@pytest.mark.long
def test_what_does_not_grow_gets_no_trials_but_searches_arms_and_seeds(folder, capsys):
    # Eight points of a Latin hypercube and the last eight of sixteen are no Latin hypercube.
    text = SWEEP_TEXT.replace("method.random", "method.latin_hypercube")
    for before in (text, SWEEP_TEXT):
        sweep, old = begun(folder, before)
        code, new, _ = extend(folder, text, "trials=8")
        assert (code, new.revision) == (2, 1)
        said = " ".join(capsys.readouterr().err.split())
        assert (
            "trials of first: 4 -> 8 (the first 4 points of latin_hypercube, seed 0 change: raise"
            " searches instead)" in said
        )
        shutil.rmtree(sweep)
    _, old = begun(folder, text)
    arm = "arms.second={space: {optimizer.b2: !space.uniform {low: 0.5, high: 0.9}}}"
    code, new, plan = extend(folder, text, "searches=3", "seeds=2", arm)
    assert code == 0 and len(added(old, new)) == 2 * 3 * 2 * 4 - 4
    assert {(t.name, *t.values.items()) for t in new.trials} == {
        (t.name, *t.values.items()) for t in plan.trials
    }


def test_more_seeds_are_new_trials_of_every_point(folder):
    _, old = begun(folder, SWEEP_TEXT)
    _, new, _ = extend(folder, SWEEP_TEXT, "seeds=3")
    assert added(old, new) == [f"first/{n:04d}/{seed}" for n in range(4) for seed in (1, 2)]
    assert new.seeds == (0, 1, 2) and new.final_seeds == old.final_seeds
    rates = {t.number: t.values["optimizer.learning_rate"] for t in old.trials}
    assert all(t.values["optimizer.learning_rate"] == rates[t.number] for t in new.trials)


def test_new_arms_get_all_seeds_and_a_config_of_their_own(folder):
    sweep, old = begun(folder, SWEEP_TEXT, "seeds=2")
    space = "{optimizer.b2: !space.uniform {low: 0.5, high: 0.9}}"
    arm = f"arms.second={{set: {{model.width: 4}}, space: {space}}}"
    _, new, plan = extend(folder, SWEEP_TEXT, "seeds=2", arm)
    definition = defined(folder, SWEEP_TEXT, "seeds=2", arm)
    assert added(old, new) == [f"second/{n:04d}/{seed}" for n in range(4) for seed in range(2)]
    assert list(new.arms) == ["first", "second"]
    assert load([sweep / "arms/second.yaml"]).root == plan.arms["second"].config.root
    assert new.reasons == (
        "The arms 'first' and 'second' have different programs: they differ in model.width.",
    )
    assert load([sweep / "sweep.2.yaml"], language=SWEEP).root == definition.config.root
    assert load([sweep / "sweep.yaml"], language=SWEEP).root != definition.config.root


@pytest.mark.long
def test_a_wider_space_keeps_the_earlier_points_and_draws_the_new_ones(folder):
    _, old = begun(folder, SWEEP_TEXT)
    _, new, plan = extend(folder, WIDER, "trials=6", "seeds=2")
    points = {trial.number: trial.values["optimizer.learning_rate"] for trial in new.trials}
    before = {trial.number: trial.values["optimizer.learning_rate"] for trial in old.trials}
    drawn = {trial.number: trial.values["optimizer.learning_rate"] for trial in plan.trials}
    assert points == before | {n: drawn[n] for n in (4, 5)} and drawn[0] != before[0]
    assert set(added(old, new)) == {
        *(f"first/{n:04d}/1" for n in range(4)),
        *(f"first/{n:04d}/{seed}" for n in (4, 5) for seed in (0, 1)),
    }
    spaces = [each["arms"]["first"]["space"] for each in new.revisions]
    assert [space["optimizer.learning_rate"] for space in spaces] == [
        "log_uniform 0.0001 to 0.1",
        "log_uniform 1e-05 to 0.1",
    ]
    # A third file with the same space continues it.
    _, newest, plan = extend(folder, WIDER, "trials=8", "seeds=2")
    check_kept(new, newest)
    last = {t.number: t.values for t in newest.trials[len(new.trials) :]}
    assert list(last) == [6, 7]
    assert all(last[n] == plan.trials[2 * n].values for n in last)


@pytest.mark.long
def test_a_grid_adds_the_points_that_it_does_not_have(folder, capsys):
    _, old = begun(folder, GRID)
    _, new, _ = extend(folder, GRID.replace("[0.8, 0.9]", "[0.7, 0.8, 0.9]"))
    assert added(old, new) == ["base/0004/0", "base/0005/0"]
    assert [[*trial.values.values()] for trial in new.trials[4:]] == [[0.7, 0.9], [0.7, 0.99]]
    # In another order of the paths these are the same points.
    lines = GRID.replace("[0.8, 0.9]", "[0.7, 0.8, 0.9]").splitlines()
    text = "\n".join([*lines[:2], lines[3], lines[2], ""])
    assert extend(folder, text)[0] == 2
    assert "which is at revision 2. Raise trials, seeds or final" in capsys.readouterr().err


@pytest.mark.long
def test_final_seeds_and_the_target_can_be_added_alone(folder):
    _, old = begun(folder, SWEEP_TEXT)
    code, new, _ = extend(folder, SWEEP_TEXT, "final.seeds=5", "goal.target=0.9")
    assert code == 0 and added(old, new) == []
    assert new.final_seeds == tuple(range(10_000, 10_005))
    assert (new.goal.target, new.revision, new.digest != old.digest) == (0.9, 2, True)


def test_a_revision_says_what_was_known(folder):
    sweep, old = begun(folder, SWEEP_TEXT)
    for name in ("first/0002/0", "first/0000/0", "second/0000/0", "first/0001"):
        (sweep / "trials" / name).mkdir(parents=True)
    _, new, _ = extend(folder, SWEEP_TEXT, "trials=5")
    assert new.revisions[1]["known"] == {
        "finished": ["first/0000/0", "first/0002/0"],
        "final": False,
    }
    (sweep / "final.json").write_text("[]")
    _, new, _ = extend(folder, SWEEP_TEXT, "trials=6")
    assert new.revisions[2]["known"]["final"] is True
    assert [each.get("follows") for each in new.revisions] == [
        None,
        *(each["digest"] for each in new.revisions[:2]),
    ]


@short.parametrize("seen", ["a run of a winner", "a line about winners", "a line about a run"])
def test_winners_that_were_chosen_are_known_without_final_json(folder, capsys, seen):
    # Who removes final.json after a verdict would get a second one as if it were the first.
    sweep, old = begun(folder, SWEEP_TEXT)
    if seen == "a run of a winner":
        (sweep / "final/first/10000").mkdir(parents=True)
    elif seen == "a line about winners":
        append(sweep, [{"event": "final", "files": {"final.json": "0" * 64}}])
    else:
        append(sweep, [{"event": "trial", "trial": "final/first/10000", "files": {}}])
    code, new, _ = extend(folder, SWEEP_TEXT, "final.seeds=4")
    assert (code, new.revision) == (2, 1)
    said = capsys.readouterr().err
    assert "final.json, which names them, is missing" in said and f"sweep work {sweep}" in said
    (sweep / "final.json").write_text("[]")
    code, new, _ = extend(folder, SWEEP_TEXT, "final.seeds=4")
    assert (code, new.revisions[1]["known"]) == (0, {"finished": [], "final": True})


def test_a_result_that_was_removed_is_known(folder):
    sweep, _ = begun(folder, SWEEP_TEXT)
    append(sweep, [{"event": "trial", "trial": "trials/first/0001/0", "files": {}}])
    _, new, _ = extend(folder, SWEEP_TEXT, "trials=5")
    assert new.revisions[1]["known"]["finished"] == ["first/0001/0"]


@pytest.mark.parametrize(
    ("points", "finals", "finished", "tested", "known"),
    [
        (1, [], True, False, True),  # the trials are what is compared
        (1, [], False, False, False),
        (4, [], True, False, False),  # those by which points were selected are not judged
        (4, [], True, True, True),
        (4, [10_000], True, True, False),
    ],
)
def test_trials_that_are_compared_themselves_are_known(points, finals, finished, tested, known):
    trials = [["first", n, seed, {}] for n in range(points) for seed in range(3)]
    first = {"trials": trials, "final_seeds": finals}
    said = {"finished": ["first/0000/0"] if finished else [], "final": False}
    second = {"trials": [], "final_seeds": finals, "known": said}
    assert compared_known([first, second], True, tested) is known
    # Where the ledger began late, others may have been removed before.
    assert compared_known([first, second], False, tested)
    assert not compared_known([first], False, tested)


@pytest.mark.parametrize(
    ("finished", "searches", "known"),
    [
        (["first/0003/0", "second/2.0000/9"], 5, True),
        (["first/0003/0", "second/2.0000/9"], 3, False),  # nothing to add to what was seen
        (["first/0003/0", "first/2.0000/9"], 5, False),  # one arm tells of no difference
        ([], 5, False),
    ],
)
def test_searches_are_added_with_knowledge_after_trials_of_two_arms(finished, searches, known):
    first = {"trials": [], "final_seeds": [10_000], "offsets": [0, 9, 18]}
    said = {"finished": finished, "final": False}
    second = {"trials": [], "final_seeds": [10_000], "offsets": [*range(searches)], "known": said}
    assert compared_known([first, second], in_order=True) is known


def test_the_files_of_all_revisions_pass_as_the_same_sweep(folder):
    sweep, _ = begun(folder, SWEEP_TEXT)
    assert extend(folder, WIDER, "trials=5")[0] == 0
    for text, count in ((SWEEP_TEXT, 4), (WIDER, 5)):
        definition = defined(folder, text, f"trials={count}")
        assert check_same(sweep, definition, plan_sweep(definition))
    definition = defined(folder, WIDER, "trials=6")
    with pytest.raises(UserError, match="trials of first: 5 -> 6"):
        check_same(sweep, definition, plan_sweep(definition))


@pytest.mark.long
def test_runs_of_a_new_winner_come_before_those_that_were_left_of_another_arm(folder, monkeypatch):
    """They divided by zero: the other arm has no run among those of new winners."""
    other = f"  second: {{set: {{optimizer.b1: 0.8}}, space: {{{RATE}}}}}"
    text = SWEEP_TEXT.replace("trials", f"{other}\ntrials")
    sweep, old = begun(folder, text)

    def choose(plan: Plan, best: dict[str, int]) -> None:
        outcomes: dict[str, Summary | None] = {
            trial.folder: Summary("done", 100, {plan.goal.row: best[trial.arm] == trial.number})
            for trial in plan.trials
        }
        choose_winners(sweep, plan, outcomes, lambda content: None)

    choose(old, {"first": 3, "second": 0})
    code, new, _ = extend(folder, text, "trials=5")
    choose(new, {"first": 4, "second": 0})
    reader = SweepFolder(sweep)
    searched = {trial.folder for trial in new.trials}
    monkeypatch.setattr(reader, "finished", lambda: searched)
    claim = reader.claim(1, lambda _: 8)
    assert code == 0 and claim is not None
    assert [trial.folder for trial in claim.trials] == [
        f"final.2/first/{seed}" for seed in new.final_seeds
    ]
    reader.remove(claim)


def test_a_dry_run_prints_what_would_be_added_and_writes_nothing(folder, capsys):
    sweep, old = begun(folder, SWEEP_TEXT)
    before = sorted((path, path.stat().st_mtime_ns) for path in sweep.rglob("*"))
    code, same_plan, _ = extend(folder, WIDER, "trials=6", options=("--dry_run",))
    out = capsys.readouterr().out
    assert (code, same_plan.revision) == (0, 1)
    assert sorted((path, path.stat().st_mtime_ns) for path in sweep.rglob("*")) == before
    flops = 40 * old.programs[0].flops
    assert out.startswith(f"revision 2 of the sweep in {sweep}\n")
    assert f"2 new runs: 40 steps, {flops:.3g} FLOPs\n" in out
    assert "first       6    2  random, seed 0\n" in out
    assert "space of first: " in out and "1e-05 to 0.1, from trial 0004 on\n" in out
    assert "known before: the results of 0 of 4 runs; the winners were not chosen\n" in out
    out, _, last = out.removesuffix("\n").rpartition("\n")
    assert last == "Nothing was written: the same command without --dry_run adds it."
    digest = out.splitlines()[-1].removeprefix("plan ")
    assert extend(folder, WIDER, "trials=6")[1].digest == digest
    assert capsys.readouterr().out.startswith(f"{out}\nWorkers of this sweep")


def test_an_extension_ends_with_the_command_that_computes_it(folder, capsys):
    sweep, _ = begun(folder, SWEEP_TEXT)
    assert extend(folder, SWEEP_TEXT, "trials=5")[0] == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"to start one: python -m trainer sweep work {sweep}")


REFUSED = {
    "nothing": (SWEEP_TEXT, [], "at revision 1. Raise trials, seeds or final, or add an arm."),
    "a space alone": (WIDER, [], "the space or the method of first changed, but earlier trials"),
    "a config": (SWEEP_TEXT, ["set={steps: 30}"], "config of first: steps: 20 -> 30"),
    "an arm": (SWEEP_TEXT.replace("first:", "second:"), [], "arm first: present -> (absent)"),
    "fewer trials": (SWEEP_TEXT, ["trials=3"], "trials of first: 4 -> 3"),
    "a seed": (SWEEP_TEXT, ["seeds=[1, 2]"], "  seeds: 0 -> 1, 2"),
    "a final seed": (SWEEP_TEXT, ["final=null"], "final seeds: 10000, 10001 -> (none)"),
    "the metric": (SWEEP_TEXT, ["goal={metric: loss}"], "goal.metric: accuracy -> loss"),
    "checkpoints": (SWEEP_TEXT, ["checkpoints=final"], "checkpoints: none -> final"),
    "the mode": (SWEEP_TEXT, ["goal.mode=min"], "goal.mode: max -> min"),
    "another grid": (
        SWEEP_TEXT.replace(METHOD, "").replace("high: 1e-1", "high: 1e-1, points: 4"),
        [],
        "present -> (absent)",
    ),
    "unequal budgets": (
        SWEEP_TEXT,
        ["arms.second={trials: 5, space: {optimizer.b2: !space.uniform {low: 0.1, high: 0.2}}}"],
        "The arms have different numbers of trials (first 4, second 5).",
    ),
}


@pytest.mark.long
def test_an_extension_that_is_repeated_after_its_commit_is_done(folder, capsys, monkeypatch):
    sweep, _ = begun(folder, SWEEP_TEXT)

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(extension.LedgerWriter, "add_plan", failing)  # after plan.json was replaced
        code, new, _ = extend(folder, SWEEP_TEXT, "trials=7")
    said = capsys.readouterr().err
    assert code == 1 and "Input/output error" in said and "Traceback" not in said
    assert new.revision == 2
    before = (sweep / "plan.json").read_bytes()
    for options in ((), ("--dry_run",)):
        code, _, _ = extend(folder, SWEEP_TEXT, "trials=7", options=options)
        assert code == 0 and "is already revision 2" in capsys.readouterr().out
    assert (sweep / "plan.json").read_bytes() == before
    # The plan of the first revision is none of this one.
    assert extend(folder, SWEEP_TEXT)[0] == 2
    assert "trials of first: 7 -> 4" in capsys.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_plan_or_adds_nothing_is_refused(folder, capsys, name):
    text, sets, part = REFUSED[name]
    sweep, _ = begun(folder, SWEEP_TEXT)
    before = (sweep / "plan.json").read_bytes()
    (folder / "sweep.yaml").write_text(text)
    options = [f"--config={folder / 'sweep.yaml'}", *(f"--set={each}" for each in sets)]
    err = runs.refused(capsys, "sweep", "extend", str(sweep), *options)
    assert part in err and len(err.splitlines()) <= 7, err
    assert (sweep / "plan.json").read_bytes() == before


@pytest.mark.long
def test_budgets_count_the_trials_of_all_revisions(folder, capsys):
    text = SWEEP_TEXT.replace(RATE, "steps: !space.integers {low: 20, high: 29}")
    sweep, old = begun(folder, text, "trials=2")
    # The arms of this file are equal, but the first has trained two trials of another space.
    text = text.replace("low: 20, high: 29", "low: 30, high: 39")
    text = text.replace("trials: 4", "  second: ANOTHER\ntrials: 3")
    first = next(line for line in text.splitlines() if "first:" in line).partition(": ")[2]
    text = text.replace("ANOTHER", first)
    plan = planned(folder, text)
    steps = [trial.values["steps"] for trial in plan.of_arm("second")]
    kept = sum(trial.values["steps"] for trial in old.trials) + steps[2]
    code, new, _ = extend(folder, text, "differs=[nothing]")
    assert code == 2 and new.revision == 1
    counts = f"(first {kept}, second {sum(steps)})"
    assert f"The arms have different numbers of steps {counts}." in capsys.readouterr().err
    code, new, _ = extend(folder, text, "budgets=unequal", "differs=[nothing]")
    assert (code, new.budgets, len(new.trials)) == (0, "unequal", 6)


def test_the_sweep_and_its_folder_are_asked_for(folder, capsys):
    assert main(["sweep", "--dry_run"]) == 2
    assert "The config of a sweep is missing: name it with" in capsys.readouterr().err
    (folder / "sweep.yaml").write_text(GOOD)
    assert main(["sweep", "extend", str(folder), f"--config={folder / 'sweep.yaml'}"]) == 2
    assert "is not the folder of a sweep, because it has no plan.json" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == ["base.gin", "base.yaml", "sweep.yaml"]
    for words, part in (
        (
            ["sweep", "--set=trials=2", "extend", "x"],
            "--set is given before extend: write it after",
        ),
        (["sweep", "extend", "x", "--confg=y"], "Did you mean --config?"),
        (
            ["sweep", "extent", "x"],
            "there is no action 'extent'. Did you mean 'extend'? There are: work,",
        ),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and part in capsys.readouterr().err


@pytest.mark.long
def test_an_extension_that_was_taken_for_dead_undoes_none_that_was_made_meanwhile(
    folder, monkeypatch, capsys
):
    """Without locks, a process that was stopped for long does not keep others out."""
    runs, old = begun(folder, SWEEP_TEXT)
    heartbeat = ("--locks=heartbeat",)

    def stopped(*arguments, inner=extension.make_extension):
        with monkeypatch.context() as patch:
            patch.setattr(extension, "make_extension", inner)
            for file in [runs / "held", *(runs / "workers").iterdir()]:
                file.unlink()  # by those who take it for dead
            assert extend(folder, SWEEP_TEXT, "seeds=2", options=heartbeat)[0] == 0
        return inner(*arguments)

    monkeypatch.setattr(extension, "make_extension", stopped)
    capsys.readouterr()
    code, stored, _ = extend(folder, SWEEP_TEXT, "trials=6", options=heartbeat)
    assert code == 2 and "extended by another process" in capsys.readouterr().err
    assert stored.revision == 2 and stored.seeds != old.seeds
    assert "seeds: 2" in (runs / "sweep.2.yaml").read_text()
    monkeypatch.undo()
    code, stored, _ = extend(folder, SWEEP_TEXT, "trials=6", "seeds=2", options=heartbeat)
    assert code == 0 and stored.revision == 3


def test_an_edited_or_missing_revision_is_refused(folder):
    sweep, _ = begun(folder, SWEEP_TEXT)
    for count in (5, 6):
        extend(folder, SWEEP_TEXT, f"trials={count}")
    file = sweep / "plan.json"
    text = file.read_text()
    content = json.loads(text)
    content["revisions"][1]["known"]["finished"].append("first/0000/0")
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="the digest of its revision 2 differs"):
        read_plan(sweep)
    content = json.loads(text)
    del content["revisions"][1]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="the digest of its revision 2 differs"):
        read_plan(sweep)


@pytest.mark.long
def test_the_sweep_that_is_extended_while_two_hosts_compute_it_can_be_extended(
    tmp_path, lab, capsys
):
    sweep = chaos_sweep.planned(tmp_path, chaos_hosts.SWEEP)
    (tmp_path / "wider.yaml").write_text(chaos_hosts.WIDER)
    options = [f"--config={tmp_path / 'wider.yaml'}", "--vocabulary=unruly", "--dry_run"]
    assert main(["sweep", "extend", str(sweep), *options]) == 0, capsys.readouterr().err
