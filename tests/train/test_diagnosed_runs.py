"""Diagnostics in runs: their rows, and that a run has the same bits with and without them."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optim.paths import flatten, unflatten
from tests import runs
from trainer import checkpoint
from trainer.__main__ import main
from trainer.config import load
from trainer.engine.diagnostics import ALL
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program, load_located
from trainer.engine.step import StepMetrics
from trainer.train.loop import Boundaries
from trainer.train.pending import CheckedBlock, ClippedSteps
from trainer.train.rollback import RollbackLog

ASK = "experiment.diagnostics = 'all'\n"
GROUPS = """
experiment.optimizer = @optim.optimizer()
optim.optimizer.groups = {'matrices': @a/optim.group(), 'rest': @b/optim.group()}
a/optim.group.match = '.*kernel'
a/optim.group.optimizer = @optim.muon()
b/optim.group.match = '.*'
b/optim.group.optimizer = @optax.adamw()
optim.muon.learning_rate = 0.02
"""
CLIPPED = """
experiment.optimizer = @optim.optimizer()
optim.optimizer.groups = {'all': @a/optim.group()}
optim.optimizer.clip_norm = 0.9
a/optim.group.match = '.*'
a/optim.group.optimizer = @optax.sgd()
optax.sgd.learning_rate = 0.5
"""
LOGGED = [3, 6, 9, 12, 15, 18, 20]


@pytest.fixture(autouse=True)
def lab(monkeypatch):
    monkeypatch.syspath_prepend(runs.LAB)


def is_diagnostic(name: str) -> bool:
    return name.partition("/")[0] in ALL


def without(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not is_diagnostic(k)} for row in rows]


def diagnosed(rows: list[dict[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if any(map(is_diagnostic, row))]


@pytest.mark.long
def test_a_row_has_the_diagnostics_of_the_update_to_its_step(tmp_path):
    """From the parameters of checkpoints, and a gradient that the trainer does not compute."""
    more = (
        "experiment.diagnostics = ['update_rms', 'weight_rms', 'gradient_cosine', 'rotation']\n"
        "experiment.save_every = 1\nexperiment.keep_latest = 50\nexperiment.ema_decay = None\n"
    )
    workdir, config = tmp_path / "run", runs.write_config(tmp_path, more)
    assert runs.train(config, workdir) == 0
    rows = {row["step"]: row for row in runs.lines(workdir)}
    program = load_located(load([tmp_path / "base.gin", config]), ["unruly"])
    for step in LOGGED:
        batch = next(program.experiment.batches(step - 1))
        trees = [checkpoint.load_params(workdir, each) for each in (step - 1, step)]
        before, after = ({p: np.float64(x) for p, x in flatten(t).items()} for t in trees)

        def loss(params: Any, batch: Any = batch) -> Any:
            logits, _ = program.experiment.model.apply(params, {}, batch, key=None, train=True)
            labels = batch["label"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        given = unflatten(trees[0], {p: jnp.float32(x) for p, x in before.items()})
        grads = flatten(jax.device_get(jax.grad(loss)(given)))
        u, w, g = (
            np.concatenate([np.float64(tree[p]).ravel() for p in before])
            for tree in ({p: after[p] - before[p] for p in before}, before, grads)
        )
        row = {name.partition("/")[0]: x for name, x in rows[step].items() if is_diagnostic(name)}
        assert len(row) == 4
        assert row["weight_rms"] == pytest.approx(np.sqrt(np.mean(w**2)), rel=1e-5)
        assert row["update_rms"] == pytest.approx(np.sqrt(np.mean(u**2)), rel=1e-3)
        cosine = -u @ g / np.linalg.norm(u) / np.linalg.norm(g)
        assert row["gradient_cosine"] == pytest.approx(cosine, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        "",
        GROUPS + "experiment.steps_per_call = 1\n",
        GROUPS + "experiment.steps_per_call = 16\nexperiment.microbatches = 2\n",
        "experiment.precision = 'bfloat16'\nexperiment.on_nonfinite = 'skip'\n",
    ],
    ids=["loop", "dispatch", "groups", "bfloat16"],
)
def test_diagnostics_change_no_bit_of_a_run(tmp_path, more):
    plain, workdir, again = (tmp_path / name for name in ("plain", "run", "again"))
    assert runs.train(runs.write_config(tmp_path, more), plain) == 0
    config = runs.write_config(tmp_path, more + ASK)
    assert runs.train(config, workdir) == 0
    rows = runs.lines(workdir)
    assert diagnosed(rows) == LOGGED and not diagnosed(runs.lines(plain))
    assert without(rows) == runs.lines(plain)
    assert checkpoint.diff_checkpoints(workdir, 20, 20, other=plain) == []
    # A resumed run has the same rows, wherever it was stopped: also just before a logged step.
    for until in (5, 7):
        assert runs.train(config, again, f"--until={until}") == 75
    assert runs.train(config, again) == 0
    assert runs.lines(again) == rows


@pytest.mark.long
def test_a_resumed_run_has_the_noise_scale_of_an_uninterrupted_one(tmp_path):
    more = (
        "experiment.diagnostics = ['noise_scale']\nexperiment.data = @data.digits()\n"
        "data.digits.batch_size = 64\nmodels.mlp.num_classes = 10\n"
    )
    config = runs.write_config(tmp_path, more)
    whole, again = tmp_path / "run", tmp_path / "again"
    assert runs.train(config, whole) == 0
    rows = runs.lines(whole)
    scales = [x for row in rows for name, x in row.items() if name.startswith("noise_scale/")]
    assert len(scales) > 3 and min(scales) > 0
    for until in (7, 12):
        assert runs.train(config, again, f"--until={until}") == 75
    assert runs.train(config, again) == 0
    assert runs.lines(again) == rows


def shares(workdir: Path) -> dict[int, float | None]:
    return {r["step"]: r.get("clipped") for r in runs.lines(workdir) if "grad_norm" in r}


def counted(clipped: list[bool]) -> dict[int, float]:
    """Counts by hand: `clipped` has one entry for each of 20 steps."""
    return {
        end: float(np.mean(clipped[begin:end]))
        for begin, end in zip([0, *LOGGED], LOGGED, strict=False)
    }


@pytest.mark.long
@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("asked", ["'all'", "['clipped']"])
def test_clipped_is_the_share_of_steps_since_the_last_row(tmp_path, steps, asked):
    each, workdir, again = (tmp_path / name for name in ("each", "run", "again"))
    more = CLIPPED + f"experiment.steps_per_call = {steps}\n"
    single = runs.write_config(tmp_path, more + "experiment.log_every = 1\n")
    assert runs.train(single, each) == 0
    norms = [row["grad_norm"] for row in runs.lines(each)]
    expected = counted([norm > np.float32(0.9) for norm in norms])
    assert len(norms) == 20 and any(0 < share < 1 for share in expected.values())

    config = runs.write_config(tmp_path, more + f"experiment.diagnostics = {asked}\n")
    assert runs.train(config, workdir) == 0
    assert shares(workdir) == expected
    # Stopped after rows and between them, also twice between two rows.
    for until in (1, 5, 9, 10, 11):
        assert runs.train(config, again, f"--until={until}") == 75
    assert runs.train(config, again) == 0
    assert runs.lines(again) == runs.lines(workdir)


@pytest.mark.long
def test_the_trials_of_a_sweep_count_as_runs_alone_do_across_cuts(tmp_path):
    """Each has a bound of its own, and waits between two rows for the others, in another wave."""
    optimizer = (
        "!optim.optimizer {clip_norm: 0.9, groups: {all: !optim.group {match: .*, "
        "optimizer: !optax.sgd {learning_rate: 0.5}}}}"
    )
    base = runs.replaced("eval_every", "4", runs.replaced("optimizer", optimizer))
    (tmp_path / "base.yaml").write_text(f"{base}\ndiagnostics: [clipped]\n")
    (tmp_path / "sweep.yaml").write_text(
        "base: base.yaml\n"
        "arms: {sgd: {space: {optimizer.clip_norm: !space.log_uniform {low: 0.4, high: 1.5}}}}\n"
        "trials: 4\n"
        "method: !method.halving {points: !method.random {seed: 1}, cuts: [4, 8], factor: 2}\n"
        "goal: {metric: loss, select_on: test}\n"
    )
    words = (f"--config={tmp_path / 'sweep.yaml'}", "--vocabulary=unruly")
    assert runs.sweep(*words, f"--workdir={tmp_path / 'sweep'}") == 0
    assert main(["sweep", "check", str(tmp_path / "sweep")]) == 0
    found = sorted((tmp_path / "sweep" / "trials").glob("*/*/*"))
    assert sorted(len(shares(trial)) for trial in found) == [1, 1, 2, 4]
    for number, trial in enumerate(found):
        given = [f"--config={trial / 'config.yaml'}", "--vocabulary=unruly"]
        assert main([*given, f"--workdir={tmp_path / f'alone{number}'}"]) == 0
        whole, own = shares(tmp_path / f"alone{number}"), shares(trial)
        assert own == {step: whole[step] for step in own} and None not in own.values()
    assert any(0 < share < 1 for trial in found for share in shares(trial).values() if share)


@pytest.mark.long
def test_a_run_that_lost_its_counts_leaves_the_share_out_of_one_row(tmp_path):
    config = runs.write_config(tmp_path, CLIPPED + "experiment.diagnostics = ['clipped']\n")
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert runs.train(config, whole) == 0
    assert runs.train(config, workdir, "--until=5") == 75
    (workdir / "clipped.json").write_text("damaged")
    assert runs.train(config, workdir) == 0
    assert shares(workdir) == {**shares(whole), 6: None}


@pytest.mark.long
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_steps_that_are_not_finite_are_not_clipped(tmp_path, policy):
    more = (
        f"experiment.on_nonfinite = '{policy}'\nexperiment.data = @unruly.poisoned()\n"
        "unruly.poisoned.at = [4, 7]\nexperiment.diagnostics = ['clipped']\n"
    )
    config = runs.write_config(tmp_path, CLIPPED.replace("0.9", "1e-9") + more)
    workdir, again = tmp_path / "run", tmp_path / "again"
    assert runs.train(config, workdir) == 0
    # Batches count from 0: those of the steps 5 and 8, unless the run goes back and skips them.
    bad = (5, 8) if policy == "skip" else ()
    assert shares(workdir) == counted([step not in bad for step in range(1, 21)])
    for until in (5, 7):
        assert runs.train(config, again, f"--until={until}") == 75
    assert runs.train(config, again) == 0
    assert shares(again) == shares(workdir)


def test_a_skipped_step_of_an_infinite_gradient_is_not_clipped(tmp_path):
    """Its norm is above every bound, and its update is not made."""
    optimizer = SimpleNamespace(clip_norm=1.0)
    fake: Any = SimpleNamespace(
        experiment=SimpleNamespace(diagnostics="all", optimizer=optimizer),
        clip_norm_of_steps=lambda: lambda _: np.float32(1),
    )
    counts = ClippedSteps(fake, tmp_path, lambda *_: None, lambda _: None)
    counts.begin(0)
    norms = (np.float32([[2], [np.inf], [0.5], [1]]),)
    counts.add(CheckedBlock(1, 4, StepMetrics(norms, (("grad_norm",),)), [2], {}))
    assert counts.take() == {"clipped": 0.25} and counts.take() == {}


@pytest.mark.long
def test_a_schedule_of_clip_norm_is_evaluated_at_each_step(tmp_path):
    more = (
        "schedules.piecewise.values = [1e-9, 1e9]\nschedules.piecewise.boundaries = [7]\n"
        "experiment.diagnostics = ['clipped']\n"
    )
    config = runs.write_config(tmp_path, CLIPPED.replace("0.9", "@schedules.piecewise()") + more)
    assert runs.train(config, tmp_path / "run") == 0
    # The schedule counts from 0: its first value is that of the steps 1 to 7.
    assert shares(tmp_path / "run") == counted([step <= 7 for step in range(1, 21)])


@pytest.mark.long
def test_the_logged_norm_is_the_one_that_clip_norm_bounds(tmp_path):
    """At a bound equal to it nothing changes, and at the next smaller number the step does."""
    config = runs.write_config(tmp_path, CLIPPED)
    program = load_located(load([tmp_path / "base.gin", config]), ["unruly"])
    (path,) = [path for path in program.inputs.values if path.endswith("clip_norm")]

    def step(seed: int, bound: float) -> tuple[dict[str, Any], Any]:
        one = program.with_values({**program.inputs.values, path: bound}, seed)
        state, batch = one.init(), next(one.experiment.batches(0))
        assert one.clip_norm_of_steps()(1) == np.float32(bound)
        state, metrics = one.step(state, one.feed.to_devices(batch))
        return jax.device_get(flatten(state.params)), metrics["grad_norm"]

    for seed in range(4):
        free, norm = step(seed, 1e6)
        at, _ = step(seed, float(norm))
        below, _ = step(seed, float(np.nextafter(norm, np.float32(0))))
        assert all(np.array_equal(free[p], at[p]) for p in free)
        assert not all(np.array_equal(free[p], below[p]) for p in free)


@pytest.mark.long
def test_a_hook_gets_the_diagnostics_of_its_step(tmp_path):
    file = tmp_path / "notes"
    more = f"experiment.hooks = [@unruly.note()]\nunruly.note.file = '{file}'\n"
    assert runs.train(runs.write_config(tmp_path, more + ASK), tmp_path / "run") == 0
    rows = {row["step"]: row for row in runs.lines(tmp_path / "run")}
    for step, metrics, _ in map(runs.json.loads, file.read_text().splitlines()):
        names = [name for name in rows[step] if is_diagnostic(name)]
        assert names and all(metrics[name] == rows[step][name] for name in names)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_steps_that_are_not_finite_are_diagnosed_as_they_would_have_been_made(tmp_path, policy):
    """Batch 5 belongs to the logged step 6, batch 7 to a step that is not logged."""
    more = (
        f"experiment.on_nonfinite = '{policy}'\nexperiment.data = @unruly.poisoned()\n"
        "unruly.poisoned.at = [5, 7]\n"
    )
    plain, workdir, again = (tmp_path / name for name in ("plain", "run", "again"))
    assert runs.train(runs.write_config(tmp_path, more), plain) == 0
    config = runs.write_config(tmp_path, more + ASK)
    assert runs.train(config, workdir) == 0
    rows = runs.lines(workdir)
    assert str(without(rows)) == str(runs.lines(plain))  # NaN is not equal to itself
    assert diagnosed(rows) == LOGGED
    (bad,) = [row for row in rows if row["step"] == 6]
    assert np.isnan(float(bad["update_rms/all"])) == (policy == "skip")
    assert runs.train(config, again, "--until=6") == 75
    assert runs.train(config, again) == 0
    assert str(runs.lines(again)) == str(rows)


def program_with(**changes: Any) -> Program:
    given = dict(log_every=5, eval_every=8, save_every=7, steps=22, diagnostics=(), hooks=())
    experiment = SimpleNamespace(**given | changes)
    experiment.evaluates = partial(Experiment.evaluates, experiment)
    fake: Any = SimpleNamespace(experiment=experiment, simulated=False)
    return fake


def test_a_logged_step_is_a_block_of_its_own_only_if_it_is_diagnosed(tmp_path):
    log = RollbackLog(tmp_path, lambda *_: None, lambda _: None)

    def ends(most: int, **changes: Any) -> list[int]:
        boundaries, step, found = Boundaries(program_with(**changes), log), 0, []
        while step < 22:
            step += boundaries.steps_to_next(step, most)
            found.append(step)
        return found

    assert ends(64) == [5, 7, 8, 10, 14, 15, 16, 20, 21, 22]
    asked = {"diagnostics": "all"}
    assert ends(64, **asked) == [4, 5, 7, 8, 9, 10, 14, 15, 16, 19, 20, 21, 22]
    often = {0: 8, 12: 3}  # evaluations after 8, and from 12 on after each third step
    assert ends(64, eval_every=often, diagnostics=(), save_every=22) == [
        5,
        8,
        10,
        12,
        15,
        18,
        20,
        21,
        22,
    ]
    assert ends(64, log_every=1, **asked) == list(range(1, 23))
    assert ends(2, **asked) == [2, 4, 5, 7, 8, 9, 10, 12, 14, 15, 16, 18, 19, 20, 21, 22]


@pytest.mark.long
def test_a_run_of_several_devices_has_the_same_bits_with_diagnostics():
    found = runs.on_four_devices(DEVICES)
    assert found["equal"] and found["diagnosed"] == [2, 4, 5]


DEVICES = """
import json, sys, tempfile
from pathlib import Path
from tests import runs
from tests.train.test_diagnosed_runs import GROUPS, diagnosed, without
from trainer import checkpoint
sys.path.insert(0, str(runs.LAB))
sys.stdout, out = sys.stderr, sys.stdout
more = GROUPS + "experiment.mesh = {'data': 2, 'fsdp': 2}\\nexperiment.steps = 5\\n"
more += "experiment.log_every = 2\\n"
folder = Path(tempfile.mkdtemp())
for name, ask in (("plain", ""), ("run", "experiment.diagnostics = 'all'\\n")):
    assert runs.train(runs.write_config(folder, more + ask), folder / name) == 0
rows = runs.lines(folder / "run")
equal = without(rows) == runs.lines(folder / "plain")
equal &= checkpoint.diff_checkpoints(folder / "run", 5, 5, other=folder / "plain") == []
print(json.dumps({"equal": equal, "diagnosed": diagnosed(rows)}), file=out)
"""
