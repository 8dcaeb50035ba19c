"""The file of a sweep and its plan: trials, programs, and what is said about mistakes."""

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.stats import qmc

from tests import runs, short
from tests.config.test_configs import _example
from tests.runs import ROOT, python
from trainer.__main__ import main
from trainer.config import ConfigError, diff, dump, load
from trainer.config.vocabulary import SWEEP
from trainer.engine import memory
from trainer.engine.plan import make_plan as make_run_plan
from trainer.engine.program import load_located
from trainer.sweep import methods, spaces
from trainer.sweep.plan import Plan, plan_sweep
from trainer.sweep.plan_file import write_plan
from trainer.sweep.programs import find_programs, most_side_by_side
from trainer.sweep.reading import Definition, read_sweep

BASE = """
model: !models.mlp {width: 8, depth: 1}
data: !data.digits {batch_size: 32, validation: 0.2}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optax.adamw {learning_rate: 1e-3}
steps: 20
"""

# With a second layer, the loss takes several evaluations to reach the targets of the tests.
DEEP = BASE.replace("depth: 1", "depth: 2")
BASE_GIN = """
experiment:
  model = @models.mlp()
  data = @data.digits()
  loss = @losses.softmax_cross_entropy()
  metrics = {'accuracy': @metrics.accuracy()}
  optimizer = @optim.optimizer()
  steps = 20
models.mlp.width = 8
models.mlp.depth = 1
data.digits.batch_size = 32
data.digits.validation = 0.2
optim.optimizer.groups = {'kernels': @a/optim.group(), 'rest': @b/optim.group()}
optim.group.optimizer = @optax.adamw()
a/optim.group.match = '.*/kernel'
b/optim.group.match = '.*'
optax.adamw.learning_rate = 1e-3
"""

GOOD = """base: base.yaml
space:
  optimizer.learning_rate: !space.log_uniform {low: 1e-4, high: 1e-1}
trials: 4
method: !method.random {seed: 0}
"""
RATE = "optimizer.learning_rate: !space.log_uniform {low: 1e-4, high: 1e-1}"
METHOD = "method: !method.random {seed: 0}"

GIN = """sweep:
  base = 'base.gin'
  space = {'optax.adamw.learning_rate': @space.log_uniform()}
  trials = 4
  method = @method.random()
space.log_uniform.low = 1e-4
space.log_uniform.high = 1e-1
"""


def defined(folder: Path, text: str, *sets: str) -> Definition:
    """Writes the file of a sweep, which is Gin if it begins so, and reads it."""
    file = folder / ("sweep.gin" if text.startswith("sweep:") else "sweep.yaml")
    file.write_text(text)
    return read_sweep(load([file], sets=sets, language=SWEEP))


def planned(folder: Path, text: str, *sets: str) -> Plan:
    """Plans a sweep, without its programs."""
    return plan_sweep(defined(folder, text, *sets))


def with_programs(folder: Path, text: str, *sets: str) -> Plan:
    """Plans a sweep, and finds its programs."""
    definition = defined(folder, text, *sets)
    return find_programs(definition, plan_sweep(definition))


def begin(runs: Path, folder: Path, text: str, *sets: str) -> None:
    """Plans a sweep, and writes its plan with its programs into the folder `runs`."""
    definition = defined(folder, text, *sets)
    write_plan(runs, definition, find_programs(definition, plan_sweep(definition)))


def dry_run(file: Path, capsys: pytest.CaptureFixture, *options: str) -> tuple[int, str, str]:
    code = main(["sweep", f"--config={file}", "--dry_run", *options])
    return code, *capsys.readouterr()


# Spaces and methods.


@pytest.mark.parametrize("u", [0.0, 0.1, 0.5, 0.75, 1 - 2**-53])
def test_the_values_of_intervals_are_those_of_the_distributions_of_scipy(u):
    log = spaces.log_uniform(1e-4, 3e-1)
    assert log.at(u) == pytest.approx(stats.loguniform(1e-4, 3e-1).ppf(u), rel=1e-7)
    assert log.at(u) == pytest.approx(1e-4 * 3e3**u, rel=1e-7)
    assert spaces.uniform(-1.0, 2.0).at(u) == pytest.approx(stats.uniform(-1, 3).ppf(u), abs=1e-7)
    # The smallest integer whose cumulative probability is above u.
    assert spaces.integers(3, 9).at(u) == 3 + math.floor(7 * u)
    assert 1e-4 <= log.at(u) <= 3e-1


def test_grids_of_intervals_have_equal_distances_and_ratios():
    log = spaces.log_uniform(1e-5, 1e-1, points=5).grid
    assert log == (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
    np.testing.assert_allclose(
        spaces.uniform(0.1, 0.9, points=7).grid, np.linspace(0.1, 0.9, 7), rtol=1e-7
    )
    np.testing.assert_allclose(
        spaces.log_uniform(2e-3, 0.7, points=9).grid, np.geomspace(2e-3, 0.7, 9), rtol=1e-7
    )


def test_a_grid_is_the_product_with_the_last_path_fastest():
    space = {"a": spaces.values([1, 2]), "b": spaces.integers(3, 5), "c": spaces.values(["x", "y"])}
    points = methods.grid().points(space, 12)
    expected = [list(x) for x in itertools.product([1, 2], [3, 4, 5], ["x", "y"])]
    assert [list(point.values()) for point in points] == expected


@pytest.mark.parametrize(("name", "engine"), [("halton", qmc.Halton), ("sobol", qmc.Sobol)])
@pytest.mark.filterwarnings("ignore:The balance properties")
def test_halton_and_sobol_are_those_of_scipy(name, engine):
    space = {"a": spaces.log_uniform(1e-4, 1e-1), "b": spaces.values(["x", "y", "z"])}
    points = getattr(methods, name)(seed=5).points(space, 11)
    expected = engine(2, scramble=True, rng=5).random(11)
    rates = stats.loguniform(1e-4, 1e-1).ppf(expected[:, 0])
    np.testing.assert_allclose([point["a"] for point in points], rates, rtol=1e-7)
    assert [point["b"] for point in points] == ["xyz"[int(3 * u)] for u in expected[:, 1]]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 as Salmon et al. 2011 define it."""
    mask = 2**64 - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (second >> 64) ^ counter[1] ^ key[0],
            second & mask,
            (first >> 64) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_random_points_are_outputs_of_philox():
    # The known answer that the authors publish with their code.
    assert [f"{word:016x}" for word in philox([0] * 4, [0] * 2)] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]
    space = {name: spaces.uniform(0.0, 1.0) for name in "abcdef"}
    for n, point in enumerate(methods.random(seed=7).points(space, 3)):
        words = philox([1, n, 0, 0], [7, 0]) + philox([2, n, 0, 0], [7, 0])
        expected = [(word >> 11) * 2.0**-53 for word in words[:6]]
        np.testing.assert_allclose(list(point.values()), expected, rtol=1e-7)


# The methods whose points are drawn one by one, from a seed and their number.
GROWING = [
    name
    for name in methods.__all__
    if name not in ("explicit", "halving")
    and isinstance(method := getattr(methods, name)(), methods.Sampled)
    and method.grows
]


@pytest.mark.parametrize("method", GROWING)
def test_with_more_trials_the_first_trials_stay_the_same(folder, method):
    text = GOOD.replace("!method.random", f"!method.{method}")
    text = text.replace(RATE, f"{RATE}\n  optimizer.b2: !space.uniform {{low: 0.9, high: 0.99}}")
    longest = planned(folder, text, "trials=37").trials
    for count in (1, 4, 16):
        plan = planned(folder, text, f"trials={count}")
        assert [t.values for t in plan.trials] == [t.values for t in longest[:count]]
    other = planned(folder, text, "trials=4", "method.seed=1").trials
    assert [t.values for t in other] != [t.values for t in longest[:4]]


# How each method is called that needs more than a seed.
CALLED = {
    "explicit": lambda: methods.explicit([{"rate": n} for n in range(16)]),
    "grid": methods.grid,
    "halving": lambda: methods.halving(methods.latin_hypercube(), cuts=[10]),
}


@pytest.mark.parametrize("name", methods.__all__)
def test_a_method_says_whether_its_first_points_stay_with_more_of_them(name):
    method = CALLED.get(name, lambda: getattr(methods, name)(seed=3))()
    space = {"a": spaces.uniform(0.0, 1.0, points=4), "b": spaces.uniform(0.0, 1.0, points=4)}
    space = {} if name == "explicit" else space
    kept = list(method.points(space, 16)[:8]) == list(method.points(space, 8)[:8])
    assert method.grows is kept, f"write grows={kept} for {name} in trainer/sweep/methods.py"
    assert method.kind == ("latin_hypercube" if name == "halving" else name)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize("count", [1, 7, 32])
def test_each_slice_of_each_coordinate_has_one_point_of_a_latin_hypercube(count, seed):
    # McKay, Beckman and Conover 1979: the definition.
    space = {name: spaces.uniform(0.0, 1.0) for name in "abc"}
    points = methods.latin_hypercube(seed).points(space, count)
    for name in space:
        assert sorted(int(point[name] * count) for point in points) == list(range(count))


def test_the_searches_of_a_latin_hypercube_are_independent():
    # If they are, the slices of their first points are those of two fair dice.
    method, space = methods.latin_hypercube(seed=1), {"a": spaces.uniform(0.0, 1.0)}
    slices = [int(4 * method.of_search(n).points(space, 4)[0]["a"]) for n in range(1600)]
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (slices[::2], slices[1::2]), 1)
    assert stats.chisquare(pairs.ravel()).pvalue > 0.01


def test_paths_of_a_zip_move_together(folder):
    text = """base: base.yaml
space:
  both: !space.zip
    spaces:
      optimizer.learning_rate: !space.values {values: [0.1, 0.2, 0.3]}
      optimizer.weight_decay: !space.values {values: [1.0, 2.0, 3.0]}
  optimizer.b2: !space.values {values: [0.9, 0.99]}
"""
    rows = [[*trial.values.values()] for trial in planned(folder, text).trials]
    expected = [[r, w, b] for r, w in [(0.1, 1.0), (0.2, 2.0), (0.3, 3.0)] for b in (0.9, 0.99)]
    assert rows == expected
    equal = text.replace("!space.values {values: [0.1, 0.2, 0.3]}", RATE.partition(": ")[2])
    equal = equal.replace("!space.values {values: [1.0, 2.0, 3.0]}", RATE.partition(": ")[2])
    equal = equal.replace("values: [0.9, 0.99]", "values: [0.9, 0.95, 0.99]")
    for trial in planned(folder, f"{equal}trials: 9\n{METHOD}\n").trials:
        rate, decay, _ = trial.values.values()
        assert rate == decay and 1e-4 <= rate <= 1e-1


# The plan.


def test_trials_are_arms_by_numbers_by_seeds_and_their_configs_are_the_base_with_the_values(folder):
    text = f"""base: base.yaml
set: {{steps: 30}}
arms:
  first: {{space: {{{RATE}}}}}
  second: {{files: sgd.yaml, set: {{model.width: 4}}, space: {{{RATE}}}}}
trials: 3
seeds: 2
{METHOD}
final: {{seeds: 2}}
"""
    (folder / "sgd.yaml").write_text("optimizer: !optax.sgd {learning_rate: 0.1}")
    plan = planned(folder, text)
    order = [(t.arm, t.number, t.seed) for t in plan.trials]
    assert order == list(itertools.product(["first", "second"], range(3), range(2)))
    assert (plan.seeds, plan.final_seeds) == ((0, 1), (10_000, 10_001))
    base = load([folder / "base.yaml"]).root
    trial = plan.trials[3]
    rate = trial.values["optimizer.learning_rate"]
    assert diff(base, trial.config.root) == [
        f"optimizer.learning_rate: 0.001 -> {rate!r}",
        "steps: 20 -> 30",
        "seed: (absent) -> 1",
    ]
    assert trial.values == plan.trials[9].values  # equal spaces and methods: paired
    other = plan.trials[9].config.root
    assert other.kwargs["optimizer"].name == "optax.sgd" and other.kwargs["steps"] == 30
    assert other.kwargs["model"].kwargs["width"] == 4


def test_the_config_of_a_trial_is_a_file_that_loads_again(folder):
    for trial in planned(folder, GOOD).trials:
        (folder / "trial.yaml").write_text(dump(trial.config.root))
        assert load([folder / "trial.yaml"]).root == trial.config.root


def test_seeds_follow_that_of_the_base_and_final_seeds_stay_clear_of_more_seeds(folder):
    (folder / "base.yaml").write_text(f"{BASE}seed: 10\n")
    final = tuple(range(10_010, 10_018))
    plan = planned(folder, GOOD, "seeds=3")
    assert (plan.seeds, plan.final_seeds) == ((10, 11, 12), final)
    plan = planned(folder, GOOD, "seeds=10000", "trials=1")  # the most that can be counted
    assert (plan.seeds[-1], plan.final_seeds) == (10_009, final)
    assert planned(folder, GOOD, "seeds=[10, 3]").final_seeds == final
    with pytest.raises(ConfigError, match="The final runs have seeds of the trials .10017."):
        planned(folder, GOOD, "seeds=[10, 10017]")
    with pytest.raises(ConfigError, match="The seeds reach 4294977302, but"):
        planned(folder, GOOD, "seeds=[4294967295]")
    plan = planned(folder, GOOD, "seeds=[3, 1]", "final=null")
    assert (plan.seeds, plan.final_seeds) == ((3, 1), ())
    assert [trial.seed for trial in plan.trials] == [3, 1] * 4
    plan = planned(folder, GOOD, "final=null")
    assert (plan.seeds, plan.final_seeds) == ((10,), ())


def test_an_explicit_list_is_taken_as_it_is(folder):
    listed = "{optimizer.b1: 0.1, model.width: 4}, {optimizer.b1: 0.2, model.width: 5}"
    plan = planned(folder, f"base: base.yaml\nmethod: !method.explicit {{trials: [{listed}]}}\n")
    assert [[*trial.values.values()] for trial in plan.trials] == [[0.1, 4], [0.2, 5]]


def test_the_hash_depends_on_what_the_files_say_and_on_nothing_else(folder, monkeypatch):
    digest = planned(folder, GOOD).content_digest
    assert planned(folder, GOOD + "# a comment\n").content_digest == digest
    lines = GOOD.splitlines()
    assert planned(folder, "\n".join([*lines[3:], *lines[:3], ""])).content_digest == digest
    assert planned(folder, GOOD, "goal={metric: loss}").content_digest == digest  # the default
    changes = ["trials=5", "seeds=2", "final={seeds: 3}", "goal={target: 0.1}", "method.seed=1"]
    changes += ["set={steps: 30}", "budgets=unequal", "set={model.width: 9}"]
    digests = {planned(folder, GOOD, change).content_digest for change in changes}
    assert len(digests | {digest}) == len(changes) + 1
    # Another process, another order of hashes, another current folder.
    planned(folder, GOOD)
    code = "from trainer.config import load; from trainer.config.vocabulary import SWEEP\n"
    code += "from trainer.sweep.reading import read_sweep\n"
    code += "from trainer.sweep.plan import plan_sweep\n"
    code += "print(plan_sweep(read_sweep(load(['sweep.yaml'], language=SWEEP))).content_digest)"
    assert python("-c", code, cwd=folder, PYTHONHASHSEED="5").strip() == digest


def test_a_selector_sets_what_such_a_binding_of_gin_sets(folder):
    for selector in ("optax.adamw.b2", "adamw.b2", "a/adamw.b2", "b/optax.adamw.learning_rate"):
        text = GIN.replace("optax.adamw.learning_rate'", f"{selector}'")
        trial = planned(folder, text).trials[2]
        value = next(iter(trial.values.values()))
        bound = load([folder / "base.gin"], [f"{selector} = {value!r}"], ["seed=0"])
        assert dump(trial.config.root) == dump(bound.root)
        assert len(trial.values) == (1 if "/" in selector else 2)


ARMS_GIN = """sweep:
  base = 'base.gin'
  set = {'optimizer.groups.rest.optimizer': @optax.lamb()}
  arms = {'sgd': @sgd/arm(), 'muon': @muon/arm(), 'both': @both/arm()}
  trials = 2
  method = @method.random()
sgd/arm:
  set = {'optimizer': @optax.sgd(), 'sgd.momentum': 0.5}
  space = {'optax.sgd.learning_rate': @space.log_uniform()}
muon/arm:
  set = {'optimizer.groups.kernels.optimizer': @optim.muon()}
  space = {'lamb.learning_rate': @space.log_uniform()}
both/arm.space = {'lamb.learning_rate': @space.log_uniform(), 'adamw.b2': @space.log_uniform()}
optim.muon.learning_rate = 0.5
optax.lamb.learning_rate = 0.5
optax.sgd.learning_rate = 0.5
space.log_uniform.low = 1e-4
space.log_uniform.high = 1e-1
"""


def test_a_selector_sees_what_the_arm_and_the_sweep_set(folder):
    definition = defined(folder, ARMS_GIN)
    found = {arm.name: dict(arm.paths) for arm in definition.arms}
    groups = "optimizer.groups.{}.optimizer.{}".format
    assert found == {
        "sgd": {"optax.sgd.learning_rate": ("optimizer.learning_rate",)},
        "muon": {"lamb.learning_rate": (groups("rest", "learning_rate"),)},
        "both": {
            "lamb.learning_rate": (groups("rest", "learning_rate"),),
            "adamw.b2": (groups("kernels", "b2"),),
        },
    }
    assert plan_sweep(definition).of_arm("sgd")[0].config.at("optimizer.momentum") == 0.5


def test_a_selector_of_calls_that_are_replaced_is_refused(folder, capsys):
    file = folder / "sweep.gin"
    file.write_text(ARMS_GIN.replace("'lamb.learning_rate'", "'adamw.learning_rate'", 1))
    code, _, err = dry_run(file, capsys)
    check(code, err, file, 12, "has no path 'adamw.learning_rate'. The calls that it would")


# Programs.


def test_trials_that_differ_in_floats_and_seeds_are_one_program(folder):
    text = GOOD.replace(
        "trials: 4", "  optimizer.b2: !space.values {values: [0.9, 0.99]}\ntrials: 4"
    )
    plan = with_programs(folder, text, "seeds=2", "set={data_seed: 3}")
    assert [len(program.trials) for program in plan.programs] == [8]
    assert plan.reasons == ()
    assert {"optimizer.learning_rate", "optimizer.b2", "optimizer.eps"} <= set(
        plan.programs[0].inputs
    )


STRUCTURE = [
    ("model.width: !space.values {values: [4, 8, 6]}", 3, "model.width, an integer (4, 6, 8)"),
    (
        "data.batch_size: !space.values {values: [16, 32]}",
        2,
        "data.batch_size, an integer (16, 32)",
    ),
    (
        "precision: !space.values {values: [float32, mixed]}",
        2,
        "precision, a string ('float32', 'mixed')",
    ),
    (
        "optimizer.nesterov: !space.values {values: [true, false]}",
        2,
        "optimizer.nesterov, a boolean",
    ),
    ("ema_decay: !space.values {values: [null, 0.9, 0.99]}", 2, "ema_decay"),
    ("ema_decay: !space.values {values: [0.9, null, 0.99]}", 2, "ema_decay"),
    (
        "optimizer: !space.values {values: [!optax.sgd {learning_rate: 0.1}, "
        "!optax.lion {learning_rate: 0.1}]}",
        2,
        "optimizer, a call",
    ),
    ("optimizer.learning_rate: !space.values {values: [1, 0.5]}", 1, ""),
    ("optimizer.b2: !space.values {values: [0.999, 0.9]}", 1, ""),
    ("loss.label_smoothing: !space.values {values: [0.0, 0.1]}", 1, ""),
    (
        "rest: !space.zip {spaces: {optimizer.b1: !space.values {values: [0.8, 0.9]}, "
        "data_seed: !space.values {values: [1, 2]}}}",
        1,
        "",
    ),
]


@short.parametrize(("space", "count", "why"), STRUCTURE, ids=lambda x: str(x).split(":")[0])
def test_what_is_part_of_the_program_makes_more_than_one_and_is_named(folder, space, count, why):
    goal = "goal: {metric: accuracy, mode: max}"  # which a space of the loss does not change
    plan = with_programs(folder, f"base: base.yaml\n{goal}\nspace:\n  {space}\n")
    assert len(plan.programs) == count
    assert sum(len(program.trials) for program in plan.programs) == len(plan.trials)
    assert [why in line for line in plan.reasons] == [True] * (count > 1)
    # The lowered step is the known answer: one text for each program.
    texts = {}
    for index, shared in enumerate(plan.programs):
        for name in shared.trials:
            program = load_located(plan.by_name[name].config)
            texts[program.trace(program.abstract_state()).lower().as_text()] = index
    assert sorted(texts.values()) == list(range(count))


def test_a_float_that_is_not_an_input_is_named_with_the_reason(folder):
    text = "base: base.yaml\nset: {model: !models.convnet {}}\nspace:\n"
    text += "  model.momentum: !space.values {values: [0.8, 0.9]}\n"
    assert with_programs(folder, text).reasons == (
        "The base needs 2 programs because of model.momentum, a float that is not an input of the"
        " program: it belongs to model (0.8, 0.9).",
    )
    text = "base: base.yaml\nspace: {data.validation: !space.values {values: [0.1, 0.2]}}\n"
    assert with_programs(folder, text).reasons == (
        "The base needs 2 programs because of data.validation, a float (0.1, 0.2).",
    )


@pytest.mark.long
def test_arms_that_differ_only_in_whether_they_repeat_a_default_share_a_program(folder):
    text = f"base: base.yaml\narms:\n  a: {{space: {{{RATE}}}}}\n"
    text += f"  b: {{set: {{optimizer.b1: 0.8}}, space: {{{RATE}}}}}\ntrials: 2\n{METHOD}\n"
    plan = with_programs(folder, text)
    assert [program.trials for program in plan.programs] == [
        ("a/0000/0", "a/0001/0", "b/0000/0", "b/0001/0")
    ]
    other = with_programs(folder, text.replace("optimizer.b1: 0.8", "model.width: 9"))
    assert len(other.programs) == 2
    assert other.reasons == (
        "The arms 'a' and 'b' have different programs: they differ in model.width.",
    )


# The command.


@pytest.mark.long
def test_the_examples_of_the_pages_have_one_plan_in_yaml_and_in_gin(tmp_path, capsys, monkeypatch):
    assert main(["new", "run", str(tmp_path / "mlp"), "--on=digits"]) == 0
    for name in ("sweep.yaml", "sweep.gin"):
        (tmp_path / name).write_text(_example(name, "sweeps.md"))
    monkeypatch.chdir(ROOT)  # the base is looked up beside the file of the sweep
    capsys.readouterr()
    printed = {}
    for name in ("sweep.yaml", "sweep.gin"):
        code, printed[name], err = dry_run(tmp_path / name, capsys)
        assert (code, err.count("Compiling and timing program")) == (0, 2)
    last = {name: text.splitlines()[-1] for name, text in printed.items()}
    assert last["sweep.yaml"] == last["sweep.gin"] and last["sweep.yaml"].startswith("plan ")
    assert re.match(r" +runs +steps +FLOPs +time\ntrials +96 ", printed["sweep.yaml"])
    assert "trials: 6 searches of each arm; search 0: seed 0" in printed["sweep.yaml"]
    assert "The arms 'adamw' and 'lion' have different programs" in printed["sweep.yaml"]


def test_a_dry_run_prints_steps_and_flops_of_the_engine_and_writes_nothing(folder, capsys):
    (folder / "sweep.yaml").write_text(GOOD)
    before = sorted(folder.iterdir())
    code, out, _ = dry_run(folder / "sweep.yaml", capsys, "--set", "seeds=3")
    config = load([folder / "base.yaml"])
    flops = make_run_plan(load_located(config), config).flops
    assert code == 0 and f"{flops:,}" in out
    price = [line.split() for line in out.splitlines()[:4]]  # before all else
    assert price[0] == ["runs", "steps", "FLOPs", "time"]
    assert price[1][:4] == ["trials", "12", "240", f"{240 * flops:.3g}"]
    assert price[2][:5] == ["final", "runs", "8", "160", f"{160 * flops:.3g}"]
    assert price[3][:4] == ["together", "20", "400", f"{400 * flops:.3g}"]
    assert "trials: seeds 0 to 2" in out and "again, seeds 10000 to 10007" in out
    assert "the smallest loss of the validation split" in out
    assert sorted(folder.iterdir()) == before


def _planned_to_start(folder: Path, capsys: pytest.CaptureFixture) -> tuple[list[str], str]:
    """Plans as the command that then computes; returns the heading of the price, and messages."""
    (folder / "sweep.yaml").write_text(GOOD)
    where = [f"--config={folder / 'sweep.yaml'}", f"--workdir={folder / 'sweep'}"]
    assert main(["sweep", *where, "--plan_only", "--timed"]) == 0
    assert (folder / "sweep" / "plan.json").exists()
    out, err = capsys.readouterr()
    return out.splitlines()[0].split(), err


def test_the_time_is_said_before_the_first_trial(folder, capsys):
    heading, said = _planned_to_start(folder, capsys)
    assert heading == ["runs", "steps", "FLOPs", "time"]
    assert said == "Compiling and timing program 1 of 1 (base/0000/0).\n"


def test_a_sweep_starts_without_a_time_that_takes_long_to_measure(folder, capsys, monkeypatch):
    monkeypatch.setattr("trainer.cli.sweeps._MOST_TIMING", -1.0)
    heading, said = _planned_to_start(folder, capsys)
    assert heading == ["runs", "steps", "FLOPs"]
    assert said.startswith("The programs are not all timed, because that takes long")


def test_a_program_that_cannot_be_timed_does_not_hold_a_sweep_up(folder, capsys, monkeypatch):
    def advance(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("trainer.engine.program.Program.advance", advance)
    heading, said = _planned_to_start(folder, capsys)
    assert heading == ["runs", "steps", "FLOPs"]
    assert said.endswith("It could not be timed: out of memory\n")
    assert dry_run(folder / "sweep.yaml", capsys)[0] == 1  # which was asked for the time


@pytest.mark.parametrize(
    ("workers", "temporary", "expected"),
    [
        (1, None, 25),  # states and their copies take at most half of the memory
        (2, None, 12),
        (1, 400, 25),  # in the other half
        (1, 800, 10),
        (2, 400, 5),
        (1, 2000, 1),
    ],
)
def test_a_wave_leaves_room_for_what_a_step_needs(monkeypatch, workers, temporary, expected):
    monkeypatch.setattr(memory, "host_memory", lambda: 1000)
    assert most_side_by_side(10, workers, temporary) == expected


def test_a_check_compiles_nothing_and_says_what_it_checked(folder, capsys, monkeypatch):
    monkeypatch.setattr("trainer.engine.program.Program.compile", lambda *_: pytest.fail())
    (folder / "sweep.yaml").write_text(GOOD)
    before = sorted(folder.iterdir())
    assert main(["sweep", f"--config={folder / 'sweep.yaml'}", "--check"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and sorted(folder.iterdir()) == before
    first, checked, unchecked, tuned = out.splitlines()
    assert first.endswith("sweep.yaml: 1 arm, 4 runs of 1 program, and 8 final runs.")
    assert checked.startswith("Checked: ") and "loss of the validation split" in checked
    assert unchecked.startswith("Not checked: whether a step compiles and fits into memory")
    assert tuned == "hyperparameters that are tuned: base 1 with 4 trials (4 for each)"


def test_a_space_of_floats_for_an_integer_names_that_of_integers(folder, capsys):
    text = GOOD.replace(RATE, "model.width: !space.log_uniform {low: 4, high: 9}")
    (folder / "sweep.yaml").write_text(text)
    said = runs.refused(capsys, "sweep", f"--config={folder / 'sweep.yaml'}", "--check")
    assert "takes an integer for 'width', and was given the float" in said
    assert "A space of integers is !space.integers, or !space.values" in said


@pytest.mark.parametrize("option", ["--check", "--dry_run"])
def test_settings_of_slurm_are_checked_before_anything_runs(folder, capsys, option):
    (folder / "sweep.yaml").write_text(GOOD)
    options = [option, "--launcher=slurm", "--slurm", "array=3"]
    assert main(["sweep", f"--config={folder / 'sweep.yaml'}", *options]) == 2
    assert "array cannot be set" in capsys.readouterr().err


@pytest.mark.long
def test_points_that_are_drawn_twice_are_counted(folder, capsys):
    text = GOOD.replace(RATE, "optimizer.b2: !space.integers {low: 0, high: 3}")
    text = text.replace(RATE, "").replace("optimizer.b2", "data_seed")
    (folder / "sweep.yaml").write_text(text)
    values = [trial.values["data_seed"] for trial in planned(folder, text).trials]
    assert len(set(values)) == 3  # seed 0 of the method
    code, out, _ = dry_run(folder / "sweep.yaml", capsys)
    assert code == 0 and "1 of the 4 trials of base repeats an earlier one." in out


def test_selection_on_test_is_said_and_shown(folder, capsys):
    (folder / "sweep.yaml").write_text(GOOD)
    options = ["--set", "set={data.validation: null}", "--set", "goal={select_on: test}"]
    code, out, _ = dry_run(folder / "sweep.yaml", capsys, *options)
    assert code == 0
    assert "loss of the test split: not an independent test of the winners" in out


@pytest.mark.parametrize("suffix", ["yaml", "gin"])
def test_the_other_kind_of_config_is_recognized(folder, capsys, suffix):
    (folder / f"sweep.{suffix}").write_text(GIN if suffix == "gin" else GOOD)
    assert main(["explain", f"--config={folder / f'sweep.{suffix}'}"]) == 2
    assert "It is the config of a sweep" in capsys.readouterr().err.replace("This is", "It is")
    code, _, err = dry_run(folder / f"base.{suffix}", capsys)
    assert code == 2 and "is the config of a run: name it as the base of a sweep" in err


ARMS = GOOD.partition("\n")[2]

# (what is replaced, by what, line of the mistake, part of the message)
MISTAKES = {
    "an empty space": (f"  {RATE}\n", "  {}\n", 3, "space is empty"),
    "no space": (f"space:\n  {RATE}\n", "", 2, "its 4 trials would be equal"),
    "an unknown path": ("optimizer.l", "optimiser.l", 3, "Did you mean 'optimizer'?"),
    "an unknown argument": ("learning_rate", "lerning_rate", 3, "Did you mean 'learning_rate'?"),
    "a selector in YAML": ("optimizer.l", "optax.adamw.l", 3, "need a base in Gin"),
    "low equal to high": ("low: 1e-4", "low: 0.1", 3, "low is 0.1, which is not below high, 0.1."),
    "low above high": ("low: 1e-4", "low: 1.0", 3, "low is 1, which is not below high, 0.1."),
    "a log of 0": ("low: 1e-4", "low: 0", 3, "low is 0, which has no logarithm"),
    "a log below 0": ("low: 1e-4", "low: -1", 3, "low is -1, which has no logarithm"),
    "no trials": ("trials: 4", "trials: 0", 4, "trials is 0, but an arm has at least one"),
    "an unsaid number of trials": ("trials: 4\n", "", 4, "needs a number of trials"),
    "too many trials": ("trials: 4", "trials: 1000000000", 1, "1,000,000,000 runs, but at most"),
    "a missing base": ("base.yaml", "bass.yaml", 1, "The file does not exist. Did you mean"),
    "a base in two languages": ("base.yaml", "[base.yaml, base.gin]", 1, "use files of one format"),
    "a base that does not build": (
        "trials: 4",
        "set: {optimizer.b2: fast}\ntrials: 4",
        4,
        "does not build: optax.adamw takes a float for 'b2', and was given the string 'fast'.",
    ),
    "a metric": ("trials", "goal: {metric: acuracy, mode: max}\ntrials", 4, "mean 'accuracy'?"),
    "a metric with a split": (
        "trials",
        "goal: {metric: validation/accuracy, mode: max}\ntrials",
        4,
        "Write metric: accuracy, without the split",
    ),
    "no mode": ("trials", "goal: {metric: accuracy}\ntrials", 4, "mode is missing"),
    "a key of goal": ("trials", "goal: {metrik: loss}\ntrials", 4, "Did you mean 'metric'?"),
    "no validation split": (
        "trials",
        "set: {data.validation: null}\ntrials",
        1,
        "Write select_on: test in goal",
    ),
    "a method": ("method.random", "method.randon", 5, "Did you mean 'method.random'?"),
    "a method's name": ("!method.random {seed: 0}", "random", 5, "sweep takes a Method"),
    "a space as a method": ("!method.random {seed: 0}", "!arm {}", 5, "method must be a call of"),
    "a function as a method": ("!method", "!partial:method", 5, "call it: @method.random()"),
    "a goal as final": ("trials", "final: !goal {}\ntrials", 4, "final must be a call of"),
    "a value of the wrong type": (
        RATE,
        "model.width: !space.values\n    values:\n"
        + "".join(f"      - {x}\n" for x in (4, 5, 6, "wide")),
        8,
        "models.mlp takes an integer for 'width', and was given the string 'wide'.",
    ),
    "floats for an integer": (
        RATE,
        "model.width: !space.uniform {low: 4, high: 8}",
        3,
        "models.mlp takes an integer for 'width', and was given the float",
    ),
    "a value out of its range": (
        RATE,
        "optimizer.b2: !space.uniform {low: 0.9, high: 1.5}",
        3,
        "b2 of optax.adamw must be in [0, 1)",
    ),
    "values that repeat": (
        RATE,
        "optimizer.b2: !space.values {values: [0.9, 0, 0.0]}",
        3,
        "values has 0.0 twice",
    ),
    "a list as a space": (
        RATE,
        "optimizer.b2: [0.9, 0.99]",
        3,
        "Values to choose from are written !space.values {values: [0.9, 0.99]} in YAML, and as",
    ),
    "a list for a space": (
        RATE,
        "optimizer.b2: !space.values [0.9, 0.99]",
        3,
        "write !space.values {values: [...]}.",
    ),
    "an interval as a space": (
        RATE,
        "optimizer.b2: {low: 0.9, high: 0.99}",
        3,
        "An interval is written !space.log_uniform {low: 1e-4, high: 1e-2}",
    ),
    "a value as a space": (RATE, "optimizer.b2: 0.9", 3, "all trials have is written under set"),
    "a list for a method": (
        METHOD,
        "method: !method.explicit [{optimizer.b2: 0.9}]",
        5,
        "write !method.explicit {trials: [...]}.",
    ),
    "an argument of a run": (
        "trials",
        "metrics: {accuracy: !metrics.accuracy }\ntrials",
        4,
        "sweep has no argument 'metrics'. 'metrics' belongs to a run: write it in the base, or for"
        " all arms below set.",
    ),
    "an argument of a run like one of a sweep": (
        "trials",
        "seed: 3\ntrials",
        4,
        "Did you mean 'seeds'? This config has seed at method.seed. 'seed' belongs to a run: wri",
    ),
    "no values": (RATE, "optimizer.b2: !space.values {values: []}", 3, "values is empty"),
    "two arms of one name": (
        ARMS,
        "arms:\n  a: {trials: 1}\n  a: {trials: 1}\n",
        4,
        "The key 'a' is given twice",
    ),
    "arms in one folder": (ARMS, "arms:\n  a: {}\n  A: {}\n", 3, "differ only in upper and lower"),
    "the longest arm": (ARMS, f"arms:\n  {'a' * 201}: {{}}\n", 3, "a name of 201 characters, aaa"),
    "an arm that is no folder": (ARMS, "arms:\n  a/b: {}\n", 3, "cannot be that of a folder"),
    "a key of an arm": (ARMS, "arms:\n  a: {trails: 1}\n", 3, "Did you mean 'trials'?"),
    "an arm's file": (ARMS, "arms:\n  a: {files: x.yaml}\n", 3, "The arm 'a' cannot be read:"),
    "space and arms": ("trials", "arms: {a: {}}\ntrials", 4, "has arms and space"),
    "unequal trials": (
        ARMS,
        "arms:\n  a: {}\n  b: {space: {optimizer.b2: !space.values {values: [0.9, 0.99]}}}\n",
        3,
        "different numbers of trials (a 1, b 2)",
    ),
    "unequal steps": (
        ARMS,
        "arms:\n  a: {}\n  b: {set: {steps: 30}}\n",
        3,
        "different numbers of steps (a 20, b 30)",
    ),
    "unequal examples": (
        ARMS,
        "arms:\n  a: {}\n  b: {set: {data.batch_size: 16}}\n",
        3,
        "different numbers of examples (a 640, b 320)",
    ),
    "unlike losses": (
        ARMS,
        "arms:\n  a: {}\n  b:\n    set:\n      loss.label_smoothing: 0.1\n",
        6,
        "The losses of the arms are not the same function (loss.label_smoothing 0.0 (a) and 0.1"
        " (b)), so that they cannot be compared: name a metric that both compute, such as"
        " accuracy.",
    ),
    "a searched loss": (
        RATE,
        "loss.label_smoothing: !space.uniform {low: 0.0, high: 0.2}",
        3,
        "The loss of a trial depends on loss.label_smoothing, which is searched, so that losses"
        " cannot be compared: name a metric that",
    ),
    "a grid without points": (METHOD, "", 2, "add points, list them with space.values"),
    "a grid of another size": (
        f"{RATE}\ntrials: 4\n{METHOD}",
        "optimizer.b2: !space.values {values: [0.9, 0.99]}\ntrials: 4",
        4,
        "has 2 trials by its method (grid), and trials is 4",
    ),
    "more trials than points": (
        RATE,
        "optimizer.b2: !space.values {values: [0.9, 0.99]}",
        4,
        "a space of 2 points, so that 4 trials would repeat some",
    ),
    "final seeds used for tuning": (
        "trials: 4",
        "final: {seeds: [7, 0]}\ntrials: 4",
        4,
        "The final runs have seeds of the trials (0)",
    ),
    "a seed in the space": ("optimizer.learning_rate", "seed", 3, "are set by seeds at the root"),
    "equal seeds": ("trials", "seeds: [1, 2, 1]\ntrials", 4, "seeds has 1 twice"),
    "a path inside of another": (
        "trials",
        "  optimizer: !space.values {values: [1]}\ntrials",
        4,
        "both set optimizer.learning_rate",
    ),
    "a path around another": (
        RATE,
        f"optimizer: !space.values {{values: [1]}}\n  {RATE}",
        4,
        "both set optimizer.learning_rate",
    ),
    "a zip of unequal lengths": (
        RATE,
        "x: !space.zip {spaces: {optimizer.b1: !space.values {values: [0.1]}, "
        "optimizer.b2: !space.values {values: [0.1, 0.2]}}}",
        3,
        "different numbers of values (optimizer.b1: 1, optimizer.b2: 2)",
    ),
    "a list of unequal trials": (
        f"space:\n  {RATE}\ntrials: 4\n{METHOD}",
        "method: !method.explicit {trials: [{steps: 1}, {stepz: 2}]}",
        2,
        "set different paths (steps, stepz)",
    ),
    "a space in a list": (METHOD, "method: !method.explicit {trials: [{steps: 1}]}", 2, "no space"),
}


def check(code: int, err: str, file: Path, line: int, part: str) -> None:
    assert code == 2
    assert err.startswith(f"error: {file}:{line}: ") and part in err, err
    assert len(err.splitlines()) <= 3 and "Traceback" not in err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_place_before_anything_runs(folder, capsys, name):
    old, new, line, part = MISTAKES[name]
    assert old in GOOD
    file = folder / "sweep.yaml"
    file.write_text(GOOD.replace(old, new, 1))
    for option in ("--dry_run", "--check"):
        code = main(["sweep", f"--config={file}", option])
        out, err = capsys.readouterr()
        assert out == ""
        check(code, err, file, line, part)


GIN_MISTAKES = {
    "a function": ("optax.adamw.l", "optax.adam.l", 3, "never calls optax.adam"),
    "an argument": ("adamw.learning", "adamw.lerning", 3, "Did you mean 'learning_rate'?"),
    "a scope": ("optax.adamw.l", "c/adamw.l", 3, "adamw is never called in the scope 'c'"),
    "a path": ("optax.adamw.l", "optimizer.groops.l", 3, "Did you mean 'groups'?"),
    "a log of 0": ("low = 1e-4", "low = 0", 6, "low is 0, which has no logarithm"),
    "an arm twice": ("base.gin'", "base.gin'\n  arms = {'a': {}, 'a': {}}", 3, "given twice"),
    "a base in YAML": ("'base.gin'", "['base.gin', 'base.yaml']", 2, "use files of one format"),
    "nothing that reads it": ("space.log_uniform.low", "space.uniform.low", 6, "never calls"),
}


@pytest.mark.parametrize("name", GIN_MISTAKES)
def test_a_mistake_in_gin_is_told_with_its_place(folder, capsys, name):
    old, new, line, part = GIN_MISTAKES[name]
    assert old in GIN
    file = folder / "sweep.gin"
    file.write_text(GIN.replace(old, new, 1))
    code, _, err = dry_run(file, capsys)
    check(code, err, file, line, part)


@pytest.mark.long
def test_arms_with_unlike_losses_are_compared_by_another_metric(folder, capsys):
    (folder / "smooth.yaml").write_text(
        "\nloss: !losses.softmax_cross_entropy {label_smoothing: 0.1}"
    )
    arms = "arms:\n  a: {}\n  b: {files: smooth.yaml}\n"
    file = folder / "sweep.yaml"
    file.write_text(f"base: base.yaml\n{arms}")
    code = main(["sweep", f"--config={file}", "--check"])
    # The place is that in the file of the arm.
    check(code, capsys.readouterr().err, folder / "smooth.yaml", 2, "are not the same function")
    accuracy = "--set=goal={metric: accuracy, mode: max}"
    assert main(["sweep", f"--config={file}", "--check", accuracy]) == 0
    # One function, spelled with its default and without, and searched values that are all equal.
    (folder / "smooth.yaml").write_text(
        "loss: !losses.softmax_cross_entropy {label_smoothing: 0.0}"
    )
    equal = "--set=differs=[nothing]"
    assert main(["sweep", f"--config={file}", "--check", equal]) == 0
    only = "{space: {loss.label_smoothing: !space.values {values: [0.1]}}}"
    file.write_text(f"base: base.yaml\narms:\n  a: {only}\n  b: {only}\n")
    assert main(["sweep", f"--config={file}", "--check", equal]) == 0


@pytest.mark.long
def test_unequal_budgets_that_are_asked_for_are_planned_and_shown(folder, capsys):
    text = "base: base.yaml\nbudgets: unequal\narms:\n  a: {}\n  b: {set: {steps: 30}}\n"
    (folder / "sweep.yaml").write_text(text)
    code, out, _ = dry_run(folder / "sweep.yaml", capsys)
    assert code == 0 and "allows the arms to have unequal budgets" in out


def test_a_name_of_a_sweep_does_not_exist_in_a_run(folder, capsys):
    (folder / "run.yaml").write_text(BASE.replace("1e-3", "!space.uniform {low: 0.1, high: 0.2}"))
    assert main(["config", f"--config={folder / 'run.yaml'}"]) == 2
    assert "There is no function 'space.uniform'." in capsys.readouterr().err
