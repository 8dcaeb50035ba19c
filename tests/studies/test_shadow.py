"""An optimizer that follows a run, held against numpy along the path of gradient descent."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optim
from optim.paths import flatten
from tests import runs, short
from tests.studies import test_rate_test
from trainer import config as configs
from trainer.__main__ import main
from trainer.checkpoint import load_params
from trainer.engine.program import load_located
from trainer.studies.shadow import (
    Shadow,
    Shadowed,
    _angles,
    _products,
    make_shadow_report,
    notes_on_groups,
    sentences,
    shadow,
    table_of_groups,
)

pytestmark = pytest.mark.usefixtures("lab")

LAB = ["quadratic_lab"]
QUADRATIC = test_rate_test.QUADRATIC.replace("steps: 200", "steps: 60")
MLP = """
model: !models.mlp {width: 16, depth: 1}
data: !data.digits {batch_size: 32}
loss: !losses.softmax_cross_entropy
steps: 24
writers: []
optimizer: !optim.optimizer
  groups:
    kernels: !optim.group {match: .*/kernel, optimizer: !optax.sgd {learning_rate: 0.05}}
    rest: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.05}}
"""


def read(folder: Path, text: str, *sets: str) -> configs.Config:
    """Writes a config, and reads it with settings."""
    (folder / "a.yaml").write_text(text)
    return configs.load([str(folder / "a.yaml")], sets=sets)


def followed(folder: Path, text: str, own: str, other: str, **options: int) -> Shadowed:
    """Returns the updates of two optimizers, given as YAML, along the path of the first."""
    a, b = (read(folder, text, f"optimizer={each}") for each in (own, other))
    return shadow(a, b, vocabulary=LAB, **options)


def all_of(found: Shadowed) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cosines and the ratios of all parameters."""
    angles = found.over(list(found.groups))
    return angles.cosine, angles.ratio


def descent(folder: Path, rate: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns points and gradients of gradient descent on the quadratic, [steps, 4] in float64."""
    program = load_located(read(folder, QUADRATIC), LAB)
    batch = next(program.feed.batches(0))
    x, y = np.asarray(batch["x"], float), np.asarray(batch["target"], float)
    w = np.asarray(jax.device_get(program.init().params)["kernel"], float)
    points, gradients = [], []
    for _ in range(steps):
        g = 2 / len(x) * x.T @ (x @ w - y)
        points.append(w[:, 0])
        gradients.append(g[:, 0])
        w = w - rate * g
    return np.array(points), np.array(gradients)


def angle(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the cosines of rows."""
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


# Known answers.


@pytest.mark.long
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_twice_the_rate_is_the_same_direction_and_twice_as_long(
    tmp_path: Path, precision: str
) -> None:
    a = read(tmp_path, MLP, f"precision={precision}")
    twice = [f"optimizer.groups.{x}.optimizer.learning_rate=0.1" for x in ("kernels", "rest")]
    found = shadow(a, configs.override(a, twice), every=6)
    assert found.steps == (6, 12, 18, 24) and len(found.groups) == 4
    for paths in [*found.by_group().values(), *([path] for path in found.groups)]:
        angles = found.over(paths)
        assert angles.ratio.tolist() == [2.0] * 4
        np.testing.assert_allclose(angles.cosine, 1, atol=1e-6)
        np.testing.assert_allclose(angles.own_descent, 1, atol=1e-6)
    same = shadow(a, a, steps=5, every=5)
    assert same.over(same.by_group()["all"]).ratio.tolist() == [1.0]


def test_the_angle_of_sign_descent_is_that_of_two_norms_of_the_gradient(tmp_path: Path) -> None:
    signs = "!optax.sign_sgd {learning_rate: 0.5}"
    found = followed(tmp_path, QUADRATIC, "!optax.sgd {learning_rate: 0.01}", signs, every=1)
    _, g = descent(tmp_path, 0.01, 60)
    cosine, ratio = all_of(found)
    one, two = np.linalg.norm(g, 1, axis=1), np.linalg.norm(g, axis=1)
    large = two > 1e-3  # below, float32 rounds the gradient
    assert large.sum() > 40
    np.testing.assert_allclose(cosine[large], (one / (2 * two))[large], rtol=1e-3)
    np.testing.assert_allclose(ratio[large], (0.5 * 2 / (0.01 * two))[large], rtol=1e-3)
    other = found.over(["kernel"]).other_descent
    np.testing.assert_allclose(other[large], cosine[large], rtol=1e-5)


def test_the_state_of_the_other_is_that_of_adam_on_the_gradients_of_the_run(
    tmp_path: Path,
) -> None:
    other = "!optax.adamw {learning_rate: 0.3, b1: 0.8, b2: 0.9, eps: 1e-8, weight_decay: 0.5}"
    found = followed(tmp_path, QUADRATIC, "!optax.sgd {learning_rate: 0.01}", other, every=1)
    points, gradients = descent(tmp_path, 0.01, 60)
    m = v = np.zeros(4)
    updates = []
    for t, (w, g) in enumerate(zip(points, gradients, strict=True), 1):
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        direction = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
        updates.append(-0.3 * (direction + 0.5 * w))
    known = np.array(updates)
    cosine, ratio = all_of(found)
    norms = np.linalg.norm(known, axis=1), 0.01 * np.linalg.norm(gradients, axis=1)
    large = norms[1] > 1e-5
    assert large.sum() > 40 and np.ptp(cosine[large]) > 0.1
    np.testing.assert_allclose(cosine[large], angle(known, -gradients)[large], atol=1e-3)
    np.testing.assert_allclose(ratio[large], (norms[0] / norms[1])[large], rtol=1e-3)


def test_copies_in_float32_are_those_of_the_run() -> None:
    lion = partial(optax.lion, learning_rate=0.5, weight_decay=0.25)
    decay = optim.optimizer({"all": optim.group(".*", lion)}, low_precision="master")
    first, second = ({"w": jnp.full(3, x, jnp.bfloat16)} for x in (1.0, 4.0))
    zero = {"w": jnp.zeros(3, jnp.bfloat16)}
    state = decay.init(first)
    for params, known in ((first, -0.125), (second, -0.5)):
        found, state = decay.follow(zero, state, params)
        np.testing.assert_array_equal(found.updates["w"], np.full(3, known))
        np.testing.assert_array_equal(state.master["w"], np.asarray(params["w"], np.float32))
    assert int(decay.position(state)) == 2


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_small_and_large_updates_have_the_angles_of_their_directions(size: float) -> None:
    random = np.random.default_rng(0)
    vectors = [[random.normal(size=n) for n in (5, 7)] for _ in range(3)]
    scales = size, 1.0, 1 / size
    products = [
        _products(
            *(jnp.asarray(v[i] * x, jnp.float32) for v, x in zip(vectors, scales, strict=True))
        )
        for i in range(2)
    ]
    found = _angles(np.stack(products)[None])
    a, b, g = (np.concatenate(each)[None] for each in vectors)
    for known, value in (
        (angle(a, b), found.cosine),
        (-angle(a, g), found.own_descent),
        (-angle(b, g), found.other_descent),
        (size * np.linalg.norm(a, axis=1), found.own),
    ):
        np.testing.assert_allclose(value, known, rtol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # optax's, of the seed
def test_an_optimizer_of_single_examples_follows_one_of_batches(tmp_path: Path) -> None:
    # Without noise and without clipping, differentially private descent is descent.
    private = "!optax.contrib.dpsgd {learning_rate: 0.02, l2_norm_clip: 1e6, noise_multiplier: 0.0,"
    private += " seed: 0}"
    own = "!optax.sgd {learning_rate: 0.01}"
    for a, b, known in ((own, private, 2.0), (private, own, 0.5)):
        cosine, ratio = all_of(followed(tmp_path, QUADRATIC, a, b, steps=4, every=1))
        np.testing.assert_allclose(cosine, 1, atol=1e-6)
        np.testing.assert_allclose(ratio, known, rtol=1e-5)


# The run.


@short.parametrize(
    ("text", "other"),
    [
        (
            MLP.replace("!optax.sgd", "!optax.adamw"),
            "!optax.contrib.muon {learning_rate: 0.02}",
        ),
        (
            MLP.replace("!optax.sgd", "!optax.lion") + "ema_decay: 0.9\nprecision: bfloat16\n",
            "!optax.adamw {learning_rate: 0.1}",
        ),
        (MLP + "seed: 3\ndata_seed: 5\nmicrobatches: 2\n", "!optax.lion {learning_rate: 0.1}"),
    ],
)
def test_the_run_has_the_bits_of_the_command_that_trains(
    tmp_path: Path, text: str, other: str
) -> None:
    config = read(tmp_path, text)
    run = Shadow(load_located(config, (), 1), config, read(tmp_path, text, f"optimizer={other}"))
    assert len(list(run.rows(24, 5))) == 4
    work = tmp_path / "run"
    assert main([f"--config={tmp_path / 'a.yaml'}", f"--workdir={work}"]) == 0
    same_bits(run, work)


def same_bits(run: Shadow, folder: Path) -> None:
    """Compares the parameters of a run that was followed with those of a checkpoint."""
    ours, theirs = flatten(jax.device_get(run.state.params)), flatten(load_params(folder))
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        assert np.asarray(x).tobytes() == theirs[path].tobytes(), path


@pytest.mark.long
def test_a_warm_start_begins_where_the_command_begins(tmp_path: Path) -> None:
    read(tmp_path, MLP)
    first = tmp_path / "first"
    assert main([f"--config={tmp_path / 'a.yaml'}", f"--workdir={first}"]) == 0
    text = MLP.replace("0.05", "0.01") + f"warm_start: {{from: {first}}}\n"
    config = read(tmp_path, text)
    other = configs.override(config, ["optimizer=!optax.adamw {learning_rate: 0.1}"])
    run = Shadow(load_located(config, (), 1), config, other)
    assert len(list(run.rows(24, 24))) == 1
    assert main([f"--config={tmp_path / 'a.yaml'}", f"--workdir={tmp_path / 'run'}"]) == 0
    same_bits(run, tmp_path / "run")


# What has no angle.

FREEZING = """!optim.optimizer {groups: {kernels: !optim.group {match: .*/kernel, optimizer: %s},
  rest: !optim.group {match: .*, optimizer: %s}}}"""
MOVING = "!optax.sgd {learning_rate: 0.1}"


@pytest.mark.long
def test_what_does_not_move_has_no_angle(tmp_path: Path) -> None:
    own = FREEZING % (MOVING, "!optim.frozen {}")
    other = FREEZING % ("!optim.frozen {}", MOVING)
    found = followed(tmp_path, MLP, own, other, every=6)
    groups = {name: found.over(paths) for name, paths in found.by_group().items()}
    assert list(groups) == ["kernels", "rest", "all"]
    assert all(np.isnan(each.cosine).all() for each in list(groups.values())[:2])
    assert groups["kernels"].ratio.tolist() == [0.0] * 4 and np.isnan(groups["rest"].ratio).all()
    assert groups["all"].cosine.tolist() == [0.0] * 4  # both move, in different coordinates
    told = sentences(found)
    assert told[0].startswith("kernels: no cosine.")
    assert "that of B is 0 at each of 4 recorded steps" in told[0]
    assert "that of A is 0 at each of 4 recorded steps" in told[1]
    assert [line.split()[2] for line in table_of_groups(found)[1:]] == ["–", "–", "0"]
    report = make_shadow_report(found, "title")
    cosines = {row[0]: row[2] for row in report.figures[0].table.rows}
    assert cosines == {"kernels": None, "rest": None, "all": 0.0}

    both = followed(tmp_path, MLP, own, FREEZING % (MOVING, "!optim.frozen {}"), every=6)
    assert both.frozen == ("rest",) and list(both.by_group()) == ["kernels"]
    assert "Neither optimizer updates the groups rest of A." in notes_on_groups(both)


def test_a_warm_up_from_0_has_no_angle_at_its_first_step(tmp_path: Path) -> None:
    warm = "!optax.sgd {learning_rate: !optax.linear_schedule {init_value: 0.0, end_value: 0.1,"
    found = followed(tmp_path, QUADRATIC, warm + " transition_steps: 9}}", MOVING, steps=4, every=1)
    cosine, ratio = all_of(found)
    assert np.isnan(cosine).tolist() == [True, False, False, False] == np.isnan(ratio).tolist()
    assert "that of A is 0 at 1 of 4 recorded steps." in sentences(found)[0]


@pytest.mark.long
def test_the_study_ends_at_a_step_that_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grows = "!optax.sgd {learning_rate: 1e6}"
    ended = followed(tmp_path, QUADRATIC, grows, MOVING, every=1)
    assert 1 <= len(ended.steps) < 10
    at = ended.steps[-1] + 1
    assert sentences(ended)[0] == f"Step {at} of --config is not finite, and the study ends there."
    beyond = followed(tmp_path, QUADRATIC, MOVING.replace("0.1", "0.01"), MOVING, every=1)
    assert beyond.ended == "" and len(beyond.steps) == 60
    file = tmp_path / "a.yaml"
    read(tmp_path, QUADRATIC)
    command = ["shadow", f"--config={file}", "--vocabulary=quadratic_lab", "--every=1"]
    huge = "--shadow_set=optimizer.learning_rate=3e38"
    assert "The update of --shadow is not finite at step 1" in runs.refused(capsys, *command, huge)
    assert (
        main(
            [*command, "--set=optimizer.learning_rate=1e6", "--shadow_set=optimizer.nesterov=true"]
        )
        == 1
    )
    assert "is not finite, and the study ends there." in capsys.readouterr().out


# The command.


@pytest.mark.long
def test_the_command_prints_and_writes_what_was_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["shadow", "--config=configs/muon_vit.gin", "--shadow=configs/adamw_vit.gin"]
    command += ["--set=model.depth=1", "--set=model.width=16", "--set=steps=40", "--steps=12"]
    command += ["--every=4", f"--output={tmp_path / 'out'}", "--formats=csv,png,html"]
    told = runs.printed(capsys, *command)
    assert "3 steps of the first 12 were recorded, of a run of 40." in told
    assert "it does not show how B would train, nor which of the two is better." in told
    assert "matrices: the cosine of the two updates is" in told
    assert [line.split()[0] for line in told.splitlines() if "  " in line][1:] == [
        *("matrices", "rest", "all")
    ]
    rows = (tmp_path / "out/tables/groups.csv").read_text().splitlines()
    assert rows[0] == "group,step,cosine,ratio,norm_a,norm_b,descent_a,descent_b"
    assert [row.split(",")[:2] for row in rows[1:4]] == [["matrices", n] for n in ("4", "8", "12")]
    every = (tmp_path / "out/tables/parameters.csv").read_text().splitlines()
    assert every[0].startswith("parameter,group,step,loss,cosine,ratio,")
    assert any(row.startswith("blocks/attn/out/kernel,matrices,4,") for row in every)
    assert (tmp_path / "out/figures/groups.png").stat().st_size > 10_000
    page = (tmp_path / "out/index.html").read_text()
    assert "it does not show how B would train" in page


SAME = "--shadow=configs/adamw_vit.gin"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Name the other optimizer: --shadow=FILE with its config, or --shadow_set"),
        (["--shadow=configs/adamw_gpt.gin"], "differ in more than the optimizer, so that they"),
        (["--shadow=configs/adamw_wit.gin"], "adamw_wit.gin"),
        ([SAME, "--steps=2000"], "--steps=2000: the config has 1,000 steps. Write --steps=1000"),
        ([SAME, "--steps=5", "--every=6"], "--every=6: it must be at least 1 and at most 5"),
        ([SAME, "--shadow_set=data.batch_size=64"], "--set data.batch_size=64 edits both configs"),
        ([SAME, "--shadow_set=optimizer.clip_nrm=1"], "--shadow_set optimizer.clip_nrm=1: optim"),
        ([SAME, "--gin_bindings=data.digits.batch_size = 64"], "data.batch_size is 64 (--gin_bi"),
        ([SAME, "--gin_bindings=experiment.precision = 'mixed'"], "precision is mixed (--gin_bind"),
        ([SAME, "--gin_bindings=experiment.microbatches = 2"], "microbatches is 2 (--gin_bindings"),
    ],
)
def test_a_mistake_ends_with_a_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shadow", "--config=configs/muon_vit.gin", *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


AVERAGE = "!optax.contrib.schedule_free_sgd {learning_rate: 0.1}"
AHEAD = """!optim.optimizer
  groups: {all: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.1}}}
  lookahead: !optim.outer_nesterov {every: 5, learning_rate: 0.7, momentum: 0.9}"""


@pytest.mark.parametrize(
    ("own", "other", "words"),
    [
        (MOVING, AVERAGE, "has copies of the parameters or the length of a searched step, which"),
        (MOVING, "!optax.lbfgs {}", "It cannot follow the parameters of another optimizer"),
        (MOVING, AHEAD, "whose state follows the parameters that it sets itself"),
        (AHEAD, MOVING, "has a lookahead, which moves the parameters beside the updates"),
    ],
)
def test_an_optimizer_that_cannot_be_compared_is_refused(
    tmp_path: Path, own: str, other: str, words: str
) -> None:
    with pytest.raises(configs.ConfigError, match=words) as caught:
        followed(tmp_path, QUADRATIC, own, other)
    assert str(caught.value).startswith(("--set optimizer", str(tmp_path)))


def test_a_part_of_a_config_is_read_after_the_files_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, MLP)
    (tmp_path / "part.yaml").write_text(f"optimizer: {MOVING}\n")
    base, part = tmp_path / "a.yaml", tmp_path / "part.yaml"
    error = " ".join(runs.refused(capsys, "shadow", f"--config={base}", f"--shadow={part}").split())
    assert "--shadow has no model, data, loss and steps. Name a whole config, or the" in error
    both = [f"--shadow={base}", f"--shadow={part}"]
    assert main(["shadow", f"--config={base}", *both, "--set=steps=4", "--every=4"]) == 0
    assert "of 4." in capsys.readouterr().out
