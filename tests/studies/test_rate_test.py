"""The range test of a learning rate, held against gradient descent on a quadratic in numpy."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import runs
from trainer import config as configs
from trainer.__main__ import main
from trainer.config import ConfigError
from trainer.config.vocabulary import SWEEP
from trainer.engine.program import load_located
from trainer.studies.rate_test import (
    RangeTest,
    Rates,
    diverged_at,
    local_line,
    rate_of_group,
    rate_sentences,
    rate_test,
    space,
    yaml,
)
from trainer.writers.summary import read_summary

pytestmark = pytest.mark.usefixtures("lab")

QUADRATIC = """
model: !quadratic_lab.model
data: !quadratic_lab.points
loss: !losses.squared_error
optimizer: !optax.sgd {learning_rate: 0.01}
steps: 200
writers: []
"""
PATH = "optimizer.learning_rate"


@pytest.fixture
def quadratic(tmp_path: Path) -> configs.Config:
    (tmp_path / "quadratic.yaml").write_text(QUADRATIC)
    return configs.load([str(tmp_path / "quadratic.yaml")])


def descend(x: np.ndarray, y: np.ndarray, w: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Returns the losses before each step of gradient descent, in float64."""
    losses = []
    for rate in rates:
        wrong = x @ w - y
        losses.append(np.mean(wrong**2))
        w = w - rate * 2 / len(x) * x.T @ wrong
    return np.array(losses)


def test_a_quadratic_diverges_after_the_rate_that_theory_knows(
    quadratic: configs.Config,
    compilations: Callable[[], AbstractContextManager[list[str]]],
) -> None:
    rates = Rates(PATH, 1e-5, 1.0, 200)
    with compilations() as names:
        tested = rate_test(quadratic, rates, seeds=2, vocabulary=["quadratic_lab"])
    # One program for four runs: rates are inputs of it.
    assert names.count("jit(packed_step)") + names.count("jit(loop_on_device)") == 1, names
    program = load_located(quadratic, ["quadratic_lab"])
    batch = next(program.feed.batches(0))
    x, y = np.asarray(batch["x"], float), np.asarray(batch["target"], float)
    stable = 2 / np.linalg.eigvalsh(2 / len(x) * x.T @ x)[-1]
    for index, seed in enumerate(tested.seeds):
        first = np.asarray(jax.device_get(program.init(seed).params)["kernel"], float)
        end = tested.ends[index]
        assert end is not None
        known = descend(x, y, first, rates.values)
        # Until the loss is so small that rounding in float32 is what grows.
        large = int(np.argmax(known < 0.01))
        assert large > 120
        np.testing.assert_allclose(tested.losses[index, :large], known[:large], rtol=1e-3)
        steady = descend(x, y, first, np.full(200, 1e-5))
        np.testing.assert_allclose(tested.steady[index, :end], steady[:end], rtol=1e-4)
        # Above 2 / L the error grows again, from what little of it is left.
        assert 1 < rates.values[end] / stable < 6
    found = space(tested)
    assert found is not None and found[0] < 0.5 * stable < stable < found[1]


@pytest.mark.long
def test_the_space_can_be_pasted_into_a_sweep(
    quadratic: configs.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "quadratic.yaml"
    before = file.read_bytes()
    command = ["rate_test", f"--config={file}", "--vocabulary=quadratic_lab", "--low=1e-5"]
    command += ["--high=1", "--seeds=2", f"--output={tmp_path / 'out'}", "--formats=csv,png"]
    told = runs.printed(capsys, *command)
    assert "Steepest descent: at the rate" in told and "Divergence: at" in told
    assert "This is a heuristic (Smith, arXiv:1506.01186)" in told
    pasted = told[told.index("space:") :].splitlines()[:2]
    assert pasted[1].startswith("  optimizer.learning_rate: !space.log_uniform {low: ")
    assert file.read_bytes() == before  # the range is never used silently
    arm = "".join(f"    {line}\n" for line in pasted)
    goal = "{metric: loss, mode: min, select_on: test}"
    text = f"base: {file}\narms:\n  sgd:\n{arm}trials: 4\nmethod: !method.sobol\ngoal: {goal}\n"
    (tmp_path / "sweep.yaml").write_text(text)
    configs.load([str(tmp_path / "sweep.yaml")], language=SWEEP)
    sweep = ["sweep", f"--config={tmp_path / 'sweep.yaml'}", "--check"]
    assert main([*sweep, "--vocabulary=quadratic_lab"]) == 0
    rows = (tmp_path / "out/tables/losses.csv").read_text().splitlines()
    assert rows[0] == "seed,step,rate,rising,stays" and len(rows) > 200
    assert (tmp_path / "out/figures/differences.png").stat().st_size > 10_000


def test_lines_are_those_of_polyfit() -> None:
    values = np.random.default_rng(0).normal(size=50)
    level, slope = local_line(values, 80)  # windows of 4 to each side
    for at in (0, 2, 25, 49):
        near = np.arange(max(0, at - 4), min(50, at + 5))
        known = np.polyfit(near, values[near], 1)
        np.testing.assert_allclose([slope[at], level[at]], [known[0], np.polyval(known, at)])


def of_differences(differences: np.ndarray) -> RangeTest:
    """Returns a test of 100 steps from 1e-4 to 1 with these differences [seeds, steps]."""
    steady = np.full(differences.shape, 2.0)
    losses = steady + differences
    ends = tuple(map(diverged_at, losses, steady))
    seeds = tuple(range(len(losses)))
    return RangeTest(Rates(PATH, 1e-4, 1.0, 100), seeds, losses, steady, ends, PATH)


@pytest.mark.long
def test_noise_is_neither_a_descent_nor_a_divergence() -> None:
    random = np.random.default_rng(0)
    noise = [of_differences(0.05 * random.normal(size=(3, 100))) for _ in range(200)]
    assert sum(any(end is not None for end in each.ends) for each in noise) == 0
    assert sum(each.fell for each in noise) == 0
    # A random walk, as of two runs that chaos drives apart.
    walks = [of_differences(0.005 * random.normal(size=(3, 100)).cumsum(1)) for _ in range(200)]
    assert sum(any(end is not None for end in each.ends) for each in walks) <= 10
    assert not yaml(noise[0]) and "no range is suggested" in rate_sentences(noise[0])[0]
    assert "No run has diverged at 1 (--high)." in rate_sentences(noise[0])


def test_a_descent_is_found_where_it_is() -> None:
    rates = Rates(PATH, 1e-4, 1.0, 100).values
    course = -0.8 / (1 + (0.01 / rates) ** 2)  # steepest at 0.01, a tenth of it at 0.0033
    course[90:] += 2.0
    noise = 0.02 * np.random.default_rng(0).normal(size=(3, 100))
    found = of_differences(course + noise)
    assert found.ends == (90, 90, 90) and found.fell
    assert 0.005 < rates[found.steepest] < 0.02
    assert 0.002 < rates[found.onset] < 0.005
    low, high = space(found) or (0.0, 0.0)
    np.testing.assert_allclose([low, high], [rates[found.onset], 3 * rates[90]], rtol=0.05)


def test_it_begins_with_the_warm_start_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "quadratic.yaml").write_text(QUADRATIC)
    words = [f"--config={tmp_path / 'quadratic.yaml'}", "--vocabulary=quadratic_lab"]
    assert main([*words, "--set=save_every=100", f"--workdir={tmp_path / 'run'}"]) == 0
    rates, given = Rates(PATH, 1e-5, 1e-4, 20), {"seeds": 1, "vocabulary": ["quadratic_lab"]}
    start = f"warm_start: {{from: {tmp_path / 'run'}"
    losses = []
    for more in ("", f"{start}}}\n"):
        (tmp_path / "again.yaml").write_text(f"{QUADRATIC}{more}")
        tested = rate_test(configs.load([str(tmp_path / "again.yaml")]), rates, **given)
        losses.append(float(tested.losses[0, 0]))
    last = read_summary(tmp_path / "run").metrics["eval/loss"]
    assert losses[1] < 0.1 * losses[0] and losses[1] == pytest.approx(last, rel=0.5)
    (tmp_path / "on.yaml").write_text(f"{QUADRATIC}{start}, step: 100, continue: true}}\n")
    with pytest.raises(ConfigError, match="warm_start begins after 100 steps of the optimizer"):
        rate_test(configs.load([str(tmp_path / "on.yaml")]), rates, **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Name one, as in --group=matrices"),
        (["--group=matrixes"], "has no such group. Did you mean 'matrices'?"),
        (["--group=rest", "--rate_path=x"], "both name the learning rate: write one of them"),
        (["--rate_path=optimizer.clip_norm"], "no learning rate is there. The config has optimiz"),
        (["--group=rest", "--low=1", "--high=0.1"], "--low must be above 0 and below --high"),
        (["--group=rest", "--low=0"], "--low must be above 0 and below --high"),
        (["--group=rest", "--steps=10"], "the test needs at least 20 steps"),
        (["--group=rest", "--steps=900"], "the config has 800 steps, and the other groups follow"),
    ],
)
def test_a_mistake_ends_with_a_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rate_test", "--config=configs/adamw_gpt.gin", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_the_rate_of_a_group_is_found_or_it_is_said_why_not(tmp_path: Path) -> None:
    def path(optimizer: str, group: str | None = None) -> str:
        head = "model: !models.mlp\ndata: !data.digits\nloss: !losses.softmax_cross_entropy\n"
        (tmp_path / "mlp.yaml").write_text(f"{head}steps: 50\noptimizer: {optimizer}\n")
        return rate_of_group(configs.load([str(tmp_path / "mlp.yaml")]), group)

    assert path("!optax.adamw {learning_rate: 0.1}") == "optimizer.learning_rate"
    inner = "!optim.cautious {base_optimizer: !optax.adamw {learning_rate: 0.1}}"
    assert path(inner) == "optimizer.base_optimizer.learning_rate"
    with pytest.raises(configs.ConfigError, match=r"has no argument 'learning_rat'"):
        path("!optax.adamw {learning_rat: 0.1}")
    with pytest.raises(ValueError, match=r"--group=a: the config's optimizer has no groups"):
        path("!optax.adamw {learning_rate: 0.1}", "a")
    groups = "!optim.optimizer {groups: {a: !optim.group {match: '.*', optimizer: !optim.frozen}}}"
    with pytest.raises(ValueError, match=r"No argument learning_rate is in the group 'a'"):
        path(groups)
