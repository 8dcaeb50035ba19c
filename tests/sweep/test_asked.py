"""Searches that choose points by the results of earlier ones: which points, and after kills."""

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import runs
from tests.runs import SWEPT, replaced
from tests.sweep.test_halving import compute, write
from tests.sweep.test_sweep import folders, rows
from tests.sweep.test_sweep_kills import kill_in
from trainer import config
from trainer.__main__ import main
from trainer.report.comparison import read_workloads
from trainer.report.panels.learning_rate import learning_rate_block
from trainer.report.panels.tuning import tuning_block
from trainer.studies.claim import Wanted, verify_claim, write_claim
from trainer.sweep import asked, methods, spaces
from trainer.sweep.evidence import examine
from trainer.sweep.ledger import LedgerWriter
from trainer.sweep.plan_file import read_plan

pytestmark = pytest.mark.usefixtures("lab")

RATE, DECAY = "optimizer.learning_rate", "optimizer.weight_decay"
BASE = replaced("log_every", "3", replaced("eval_every", "4", SWEPT))  # of 12 steps
SPACE = f"""space:
      {RATE}: !space.log_uniform {{low: 1e-4, high: 1.0}}
      {DECAY}: !space.uniform {{low: 0, high: 0.5}}"""
SWEEP = f"""base: base.yaml
arms:
  adamw:
    {SPACE}
  nadamw:
    set: {{optimizer: !optax.nadamw {{learning_rate: 0.1, weight_decay: 0.1}}}}
    {SPACE}
trials: 11
searches: 3
method: !method.tpe {{seed: 5, first: 4, batch: 3}}
goal: {{metric: loss, select_on: test}}
final: {{seeds: 1}}
"""


@pytest.fixture(scope="module")
def computed(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms in three searches of eleven points: four, three, three and one."""
    return runs.swept(tmp_path_factory.mktemp("asked"), BASE, SWEEP, "--vocabulary=unruly")


def batches(sweep: Path, arm: str, search: int) -> list[dict[str, Any]]:
    every = json.loads((sweep / "points.json").read_text())
    return [each for each in every if (each["arm"], each["search"]) == (arm, search)]


def last_loss(trial: Path) -> float:
    return [row["eval/loss"] for row in rows(trial) if "eval/loss" in row][-1]


def values_at(trial: Path) -> tuple[float, float]:
    tree = config.load([trial / "config.yaml"])
    return tree.at(RATE), tree.at(DECAY)


# Which points.


def of_optuna(told: list[tuple[list[float], float]], seed: int, count: int) -> list[list[float]]:
    """Returns what a new sampler of Optuna chooses after some points of two coordinates."""
    optuna = pytest.importorskip("optuna")
    axes = {name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in ("000", "001")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=0, multivariate=True, constant_liar=True
        )
        study = optuna.create_study(direction="minimize", sampler=sampler)
        for at, value in told:
            params = dict(zip(axes, at, strict=True))
            trial = optuna.trial.create_trial(params=params, distributions=axes, value=value)
            study.add_trial(trial)
        found = [study.ask(axes) for _ in range(count)]
    return [[trial.params[name] for name in axes] for trial in found]


def test_the_points_are_those_that_optuna_chooses_by_the_rows_before(computed):
    for arm, search in (("adamw", 0), ("nadamw", 2)):
        seed = read_plan(computed).offsets[search]
        coordinates: list[list[float]] = []
        for batch in batches(computed, arm, search):
            known = len(coordinates)
            name = [f"{search}.{n:04}" if search else f"{n:04}" for n in range(known)]
            told = [last_loss(computed / "trials" / arm / each / str(seed)) for each in name]
            assert batch["first"] == known and batch["told"] == pytest.approx(told, rel=1e-9)
            if known:
                text = hashlib.sha256(f"asked 5 {search} {known}".encode()).digest()
                pairs = list(zip(coordinates, told, strict=True))
                count = len(batch["coordinates"])
                wanted = of_optuna(pairs, int.from_bytes(text[:4], "big"), count)
                assert batch["coordinates"] == wanted
            coordinates += batch["coordinates"]
        assert [len(each["coordinates"]) for each in batches(computed, arm, search)] == [4, 3, 3, 1]
        for number, (u, v) in enumerate(coordinates):
            point = f"{search}.{number:04}" if search else f"{number:04}"
            found = values_at(computed / "trials" / arm / point / str(seed))
            assert found == pytest.approx((1e-4 * 1e4**u, 0.5 * v), rel=1e-6)


def test_the_first_points_are_those_of_sobol_and_equal_in_all_arms(computed):
    plan = read_plan(computed)
    for search in range(3):
        first = [plan.points[arm, search] for arm in ("adamw", "nadamw")]
        for number in range(4):
            assert first[0][number][0].values == first[1][number][0].values
    later = [[plan.points["adamw", search][n][0].values for n in range(4, 11)] for search in (0, 1)]
    assert later[0] != later[1]
    drawn = methods.sobol(seed=5).points({"a": spaces.uniform(0.0, 1.0)}, 4)
    asks = methods.tpe(seed=5, first=4).points({"a": spaces.uniform(0.0, 1.0)}, 11)
    assert asks == drawn


def test_generations_are_those_of_one_strategy_that_goes_on():
    """CMA-ES computed again from the results of all generations, against one object of cmaes."""
    from cmaes import CMA

    asks = asked.Asks("cmaes", 7, 6, 6, ({"a": {}}, {"b": {}}, {"c": {}}))
    whole = CMA(
        mean=np.full(3, 0.5),
        sigma=0.25,
        bounds=np.array([[0.0, 1.0]] * 3),
        seed=7,
        population_size=6,
    )
    told: list[tuple[list[float], float | None]] = []
    for _ in range(5):
        generation = [whole.ask() for _ in range(6)]
        found = asks.coordinates(0, told, 6)
        assert found == [each.tolist() for each in generation]
        results = [float(np.sum((each - 0.3) ** 2)) for each in generation]
        whole.tell(list(zip(generation, results, strict=True)))
        told += zip(found, results, strict=True)
    best = min(value for _, value in told[-6:])  # type: ignore[type-var]
    assert best < min(value for _, value in told[:6])  # type: ignore[type-var]


GRID = {
    "rate": spaces.log_uniform(1e-4, 1.0, points=9),
    "b2": spaces.values([0.9, 0.95, 0.98]),
    "decay": spaces.uniform(0.0, 1.0, points=5),
}


def descend(method: methods.Method, result: Any, trials: int) -> list[list[list[Any]]]:
    """Returns the points of each batch of a search of GRID, as lists of its values."""
    asks = method.asks(GRID, [{key: space} for key, space in GRID.items()])
    assert asks is not None
    told: list[tuple[list[float], float | None]] = []
    found = []
    while len(told) < trials:
        new = asks.coordinates(0, told, asks.batch_at(len(told), trials))
        found.append([[*asks.values(at).values()] for at in new])
        told += zip(new, map(result, found[-1]), strict=True)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_descent_searches_one_line_of_the_grid_after_the_other(seed):
    def result(point: Any) -> float | None:
        rate, b2, decay = point
        # Coupled, so that a second round finds more than the first; a large rate diverges.
        far = abs(np.log10(rate) + 2 + 4 * (decay - 0.5)) + abs(decay - 0.25) + 10 * abs(b2 - 0.95)
        return None if rate > 0.5 else float(far)

    method = methods.coordinate_descent(seed)
    found = descend(method, result, 35)
    assert [len(batch) for batch in found] == [9, 2, 4, 8, 2, 4, 6]
    assert found[0] == [[*each.values()] for each in method.points(GRID, 35)]
    had, grids = [], [list(each.grid or ()) for each in GRID.values()]
    for number, batch in enumerate(found):
        axis = number % 3
        at = lambda x: np.inf if (value := result(x)) is None else value  # noqa: E731
        best = min(had, key=at) if had else batch[0]
        line = [[*best[:axis], value, *best[axis + 1 :]] for value in grids[axis]]
        new = [point for point in line if point not in had][: len(batch)]
        assert batch[: len(new)] == new
        for point in batch:
            assert point not in had and all(x in grid for x, grid in zip(point, grids, strict=True))
            had.append(point)


def test_a_round_finds_the_minimum_of_a_sum_of_functions_of_one_value_each():
    result = lambda x: abs(np.log10(x[0]) + 2.5) + abs(x[1] - 0.98) + (x[2] - 0.75) ** 2  # noqa: E731
    starts = set()
    for search in range(6):
        method = methods.coordinate_descent(3).of_search(search)
        batches = descend(methods.coordinate_descent(search), result, 15)
        assert min(sum(batches, []), key=result) == [pytest.approx(10**-2.5), 0.98, 0.75]
        starts.add(tuple(method.points(GRID, 15)[0].values())[1:])
    assert len(starts) > 1  # searches begin at different places
    center = {"rate": 1e-3, "b2": 0.98, "decay": 0.25}
    first = descend(methods.coordinate_descent(center=center), result, 9)[0]
    assert {tuple(x[1:]) for x in first} == {(0.98, 0.25)} and len({x[0] for x in first}) == 9


DESCENT = SWEEP.replace("{low: 1e-4, high: 1.0}", "{low: 1e-4, high: 1.0, points: 5}").replace(
    "!space.uniform {low: 0, high: 0.5}", "!space.values {values: [0.0, 0.1, 0.5]}"
)
DESCENT = DESCENT.replace("!method.tpe {seed: 5, first: 4, batch: 3}", "!method.coordinate_descent")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("points: 5", "", "A grid needs a number of values for 'optimizer.learning_rate'"),
        ("trials: 11", "trials: 16", "trials is 16, but the grid of the space has 15 points"),
        (
            "descent",
            f"descent {{center: {{{RATE}: 0.3, {DECAY}: 0.1}}}}",
            "needs one of the values of each key of the space: optimizer.learning_rate: [0.0001,",
        ),
        (
            "descent",
            f"descent {{center: {{{RATE}: 0.01}}}}",
            "; optimizer.weight_decay: [0.0, 0.1, 0.5].",
        ),
        (
            "descent",
            f"descent {{center: {{{RATE}: 0.01, {DECAY}: 0.1}}}}",
            "Searches that begin at one center are not independent",
        ),
    ],
)
def test_a_descent_that_cannot_be_is_refused(tmp_path, capsys, old, new, said):
    file = write(tmp_path, DESCENT.replace(old, new), BASE)
    error = runs.refused(capsys, "sweep", f"--config={file}", "--vocabulary=unruly", "--check")
    assert said in error and "sweep.yaml:" in error and "Traceback" not in error


def test_a_sweep_by_descent_goes_on_from_its_best_points(tmp_path, capsys):
    sweep = runs.swept(tmp_path, BASE, DESCENT, "--vocabulary=unruly")
    assert main(["sweep", "check", str(sweep)]) == 0
    seed = read_plan(sweep).offsets[1]
    points = [values_at(sweep / f"trials/nadamw/1.{n:04}/{seed}") for n in range(11)]
    losses = [last_loss(sweep / f"trials/nadamw/1.{n:04}/{seed}") for n in range(11)]
    assert len({*points}) == 11 and len({x for x, _ in points[:5]}) == 5
    assert [len(x["coordinates"]) for x in batches(sweep, "nadamw", 1)] == [5, 2, 4]
    best = min(zip(losses[:5], points, strict=False))[1]
    assert {x for x, _ in points[5:7]} == {best[0]} and points[5][1] != points[6][1]
    assert main(["sweep", "show", str(sweep), "adamw/0007"]) == 0
    assert "coordinate_descent, seed 0" in read_plan(sweep).arms["adamw"].method


@pytest.mark.parametrize("kind", ["tpe", "cmaes"])
def test_a_point_without_a_finite_result_counts_as_worse_than_all_others(kind):
    asks = asked.Asks(kind, 1, 4, 4, ({"a": {}}, {"b": {}}))
    places = asks.coordinates(0, [], 4)
    results = [0.5, None, 0.2, 0.9]
    told = list(zip(places, results, strict=True))
    as_worst = [(at, 1.0 if value is None else value) for at, value in told]
    assert asks.coordinates(0, told, 4) == asks.coordinates(0, as_worst, 4)
    as_best = [(at, 0.1 if value is None else value) for at, value in told]
    assert asks.coordinates(0, told, 4) != asks.coordinates(0, as_best, 4)


@pytest.mark.torch
def test_a_gaussian_process_finds_a_minimum_that_sobol_misses():
    pytest.importorskip("torch")
    result = lambda at: (at[0] - 0.31) ** 2 + 2 * (at[1] - 0.77) ** 2  # noqa: E731
    best, of_sobol = [], []
    for seed in (1, 2, 3):  # one may end near a minimum of its model that is not one
        asks = asked.Asks("gp", seed, 8, 4, ({"a": {}}, {"b": {}}))
        told = [(at, result(at)) for at in asks.coordinates(0, [], 8)]
        for _ in range(4):
            told += [(at, result(at)) for at in asks.coordinates(0, told, 4)]
        best.append(min(value for _, value in told))
        sobol = methods.sobol(seed).points({x: spaces.uniform(0.0, 1.0) for x in "ab"}, 24)
        of_sobol.append(min(result([*each.values()]) for each in sobol))
    # Measured: .0045, .0002 and .0001, beside .020, .034 and .022.
    assert statistics.median(best) < 0.1 * statistics.median(of_sobol)
    assert all(mine < other for mine, other in zip(best, of_sobol, strict=True))


@pytest.mark.long
def test_larger_goals_are_better_where_the_file_says_so(tmp_path):
    text = SWEEP.replace("metric: loss,", "metric: accuracy, mode: max,")
    assert compute(write(tmp_path, text, BASE), tmp_path / "sweep") == 0
    first, second, *_ = batches(tmp_path / "sweep", "adamw", 0)
    seed = int.from_bytes(hashlib.sha256(b"asked 5 0 4").digest()[:4], "big")
    pairs = [(at, -x) for at, x in zip(first["coordinates"], second["told"], strict=True)]
    assert second["coordinates"] == of_optuna(pairs, seed, 3)


# Workers, kills, extensions.


def same(sweep: Path, other: Path) -> None:
    """Asserts that two folders have the same points, trials and rows."""
    key = lambda each: (each["arm"], each["search"], each["first"])  # noqa: E731
    ours, theirs = (json.loads((x / "points.json").read_text()) for x in (sweep, other))
    assert sorted(ours, key=key) == sorted(theirs, key=key)
    ours, theirs = ({x.relative_to(of): rows(x) for x in folders(of)} for of in (sweep, other))
    assert ours == theirs


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 0, 2, 4])
def test_a_worker_that_is_killed_while_it_chooses_changes_nothing(tmp_path, computed, number):
    file, workdir = write(tmp_path, SWEEP, BASE), tmp_path / "sweep"
    options = [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", "--plan_only"]
    assert main(["sweep", *options]) == 0
    kill_in("points", number, workdir)
    assert main(["sweep", "work", str(workdir), "--vocabulary=unruly"]) == 0
    same(workdir, computed)
    assert main(["sweep", "check", str(workdir)]) == 0


@pytest.mark.long
def test_the_points_do_not_depend_on_how_many_workers_compute_them(computed, tmp_path):
    file, workdir = write(tmp_path, SWEEP, BASE), tmp_path / "sweep"
    options = [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", "--plan_only"]
    assert main(["sweep", *options]) == 0
    command = [sys.executable, "-m", "trainer", "sweep", "work", str(workdir)]
    command += ["--vocabulary=unruly", "--workers=2"]
    workers = [
        subprocess.Popen(
            command, cwd=runs.ROOT, env=runs.environment(), stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [worker.communicate()[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    same(workdir, computed)


@pytest.mark.long
def test_an_extended_search_goes_on_as_one_that_had_all_trials_from_the_beginning(
    computed, tmp_path
):
    """Seven trials, then eleven: the second revision begins where a batch ends."""
    file = write(tmp_path, SWEEP.replace("trials: 11", "trials: 7"), BASE)
    assert compute(file, tmp_path / "sweep") == 0
    file.write_text(SWEEP)
    extend = ["sweep", "extend", str(tmp_path / "sweep"), f"--config={file}"]
    assert main([*extend, "--vocabulary=unruly"]) == 0
    assert main(["sweep", "work", str(tmp_path / "sweep"), "--vocabulary=unruly"]) == 0
    trials = lambda of: {x.relative_to(of): rows(x) for x in folders(of) if "trials" in x.parts}  # noqa: E731
    assert trials(tmp_path / "sweep") == trials(computed)
    assert main(["sweep", "check", str(tmp_path / "sweep")]) == 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("low: 1e-4", "low: 1e-5", "space of adamw"),
        ("seed: 5", "seed: 6", "method of adamw"),
        ("searches: 3", "searches: 3\nseeds: 2", "seeds: 0 -> 0, 1"),
    ],
)
def test_an_extension_that_would_make_earlier_results_useless_is_refused(
    copied, tmp_path, capsys, old, new, told
):
    file = write(tmp_path, SWEEP.replace(old, new).replace("trials: 11", "trials: 14"), BASE)
    command = ["sweep", "extend", str(copied), f"--config={file}", "--vocabulary=unruly"]
    assert told in runs.refused(capsys, *command)


def test_trials_that_failed_are_not_computed_again_where_points_were_chosen_by_them(copied, capsys):
    file = copied / "trials" / "adamw" / "0001" / "0" / "summary.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "end": "failed", "why": "A machine broke.", "exit": 1}))
    command = ["sweep", "work", str(copied), "--failed", "--vocabulary=unruly"]
    assert "and later points were chosen without them." in runs.refused(capsys, *command)


# Damage and forgery.


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda x: x[1]["told"].__setitem__(0, 0.001), "the results by which it chose"),
        (lambda x: x[1]["coordinates"][0].__setitem__(0, 0.5), "is not what optuna"),
        (lambda x: x[0]["coordinates"][0].__setitem__(0, 0.5), "is not that of plan.json"),
        (lambda x: x.pop(0), "is not one of the plan"),
        (lambda x: x[1]["coordinates"][0].__setitem__(0, 1.5), "is not one of the plan"),
        (lambda x: x[0].pop("told"), "told"),
    ],
)
def test_edited_points_are_found_also_with_a_line_in_the_ledger(copied, edit, why):
    file = copied / "points.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    LedgerWriter(copied).add_file("points.json", file.read_bytes())
    faults = [fault.why for fault in examine(copied).faults]
    assert any(why in each for each in faults), faults


def test_points_that_are_gone_are_chosen_again(copied, computed):
    (copied / "points.json").unlink()
    shutil.rmtree(copied / "trials" / "adamw" / "0010")
    assert main(["sweep", "work", str(copied), "--vocabulary=unruly"]) == 0
    same(copied, computed)


def test_points_of_another_version_are_said_not_to_be_chosen_again(copied, capsys):
    file = copied / "points.json"
    text = file.read_text()
    assert text.count("optuna 5") == len(json.loads(text))
    file.write_text(text.replace("optuna 5", "optuna 4"))
    LedgerWriter(copied).add_file("points.json", file.read_bytes())
    said = runs.printed(capsys, "sweep", "check", str(copied))
    assert "Points of adamw were not chosen again by their results: optuna 4" in said


@pytest.mark.long
def test_a_claim_about_chosen_points_is_verified(computed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", runs.environment()["PYTHONPATH"])
    file = tmp_path / "claim.json"
    write_claim(computed, file)
    checked = verify_claim(file, computed, "1", Wanted(None, 2), ["unruly"])
    assert checked.verified and len(checked.recomputed) == 2 and checked.underived == ()


# What is refused, and what is said.


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"tpe {seed: 5, first: 4, batch: 3}": "cmaes {batch: 4}"},
            "method.cmaes chooses 4 points at a time, and trials is 11: write a multiple, such as"
            " 12.",
        ),
        (
            {"trials: 11": "trials: 12", "tpe {seed: 5, first: 4, batch: 3}": "cmaes {batch: 4}",
             f"\n      {DECAY}: !space.uniform {{low: 0, high: 0.5}}": ""},
            "method.cmaes needs a space of at least 2 values, and this one has 1",
        ),
        ({"tpe {seed: 5, first: 4, batch: 3}": "cmaes {batch: 3}"}, "at least 4 points"),
        ({"first: 4": "first: 1"}, "first is 1, but at least 2 points are needed"),
        ({"batch: 3": "batch: 0"}, "batch is 0, but must be at least 1"),
        ({"seed: 5": "seed: -1"}, "seed must be between 0 and 2**64 - 1, got -1"),
        (
            {f"{DECAY}: !space.uniform {{low: 0, high: 0.5}}":
             "steps: !space.values {values: [12, 16]}"},
            "steps is not an input of the program",
        ),
        (
            {"!method.tpe {seed: 5, first: 4, batch: 3}":
             "!method.halving {points: !method.tpe {}, cuts: [4]}"},
            "points must be a method that chooses all points before there are results",
        ),
        ({"trials: 11\n": ""}, "needs a number of trials for its method"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_in_a_sentence(tmp_path, capsys, changes, wrong):
    text = SWEEP
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    assert compute(write(tmp_path, text, BASE), tmp_path / "sweep") == 2
    assert wrong in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "sweep" / "plan.json").exists()


def test_a_process_without_torch_says_what_to_install(tmp_path, capsys, monkeypatch):
    find = asked.importlib.util.find_spec
    monkeypatch.setattr(
        asked.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    file = write(tmp_path, SWEEP.replace("tpe", "gp"), BASE)
    assert compute(file, tmp_path / "sweep") == 2
    said = capsys.readouterr().err
    assert "method.gp needs torch, which is not installed: pip install 'lockstep-jax[gp]'" in said


def test_arms_that_are_searched_by_different_methods_are_a_warning(tmp_path, capsys):
    text = SWEEP.replace("  nadamw:\n", "  nadamw:\n    method: !method.sobol {seed: 5}\n")
    options = ["--vocabulary=unruly", f"--workdir={tmp_path / 'sweep'}", "--plan_only"]
    assert main(["sweep", f"--config={write(tmp_path, text, BASE)}", *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The arms search by different methods:" in said and "differs: [space]" in said


def test_the_report_draws_the_best_so_far_and_no_sensitivity(computed):
    (workload,) = read_workloads([str(computed)])
    block = tuning_block(workload)
    assert any("were chosen by the results of earlier ones" in each for each in block.text)
    assert not any("U statistic" in each for each in block.text)
    table = block.figures[0].table
    assert table is not None
    curve = [row[2] for row in table.rows if row[0] == "adamw"]
    offsets = read_plan(computed).offsets
    best = []
    for search, seed in enumerate(offsets):
        of = [f"{search}.{n:04}" if search else f"{n:04}" for n in range(11)]
        values = [last_loss(computed / "trials" / "adamw" / each / str(seed)) for each in of]
        best.append(np.minimum.accumulate(values))
    assert curve == pytest.approx(np.mean(best, axis=0).tolist())
    assert [row[3:] for row in table.rows] == [(None,) * 4] * len(table.rows)
    names = {path: path for path in (RATE, DECAY)}
    sensitivity = learning_rate_block(workload, names).tables[0]
    heads = [column.name for column in sensitivity.columns]
    assert "sensitivity" not in heads or all(
        row[heads.index("sensitivity")] is None for row in sensitivity.rows
    )


def test_an_unfinished_search_is_told_apart_from_one_that_has_ended(tmp_path, capsys):
    """Its later points have no values yet: no command fails on them, and none shows any."""
    file, workdir = write(tmp_path, SWEEP, BASE), tmp_path / "sweep"
    options = [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", "--plan_only"]
    assert main(["sweep", *options]) == 0
    kill_in("points", 1, workdir)
    plan = read_plan(workdir)
    assert sum(trial.pending for trial in plan.trials) == 2 * 3 * 7
    for command, told in (
        (["status", str(workdir)], "12 of 66 runs"),
        (["show", str(workdir), "adamw/2.0007"], "not chosen before earlier points have ended"),
        (["check", str(workdir)], "agree with each other"),
    ):
        assert told in runs.printed(capsys, "sweep", *command)
    assert main(["report", str(workdir), f"--output={tmp_path / 'report'}"]) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    assert "Hyperparameters were tuned with 11 points for each arm" in " ".join(page.split())
