"""The coordinate check: what it measures, how it fits, and what its verdict may say."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import scipy.stats

from tests import runs, short
from trainer import config as configs
from trainer.__main__ import main
from trainer.engine.program import load_located
from trainer.studies.coordinate_check import (
    Found,
    WidthSeries,
    activations,
    changes_passed,
    check,
    fit,
    judge_slopes,
    make_series,
    verdict_on_widths,
)

SMALL = ["data.length=32", "data.batch_size=8", "model.depth=1"]
GPT = ["coordinate_check", "--config=configs/adamw_gpt.gin", *(f"--set={each}" for each in SMALL)]
MUP = [
    "--set=model.base_width=64",
    "--set=optimizer.groups.matrices.width_scaling=2",
    "--scale=optimizer.groups.matrices.width_scaling=1",
]
MLP = """
model: !models.mlp {width: 16, depth: 2}
data: !data.digits {batch_size: 32}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw
  learning_rate: !schedules.warmup_cosine {peak_value: 0.25, warmup_steps: 4}
steps: 20
writers: []
"""


@pytest.fixture
def mlp(tmp_path: Path) -> configs.Config:
    (tmp_path / "mlp.yaml").write_text(MLP)
    return configs.load([str(tmp_path / "mlp.yaml")])


def test_a_slope_and_its_error_are_those_of_least_squares() -> None:
    widths, random = [64, 128, 256, 512], np.random.default_rng(0)
    sizes = np.exp(random.normal(size=(3, 4)))
    one = fit(widths, sizes[:1])
    known = scipy.stats.linregress(np.log(widths), np.log(sizes[0]))
    assert one is not None and one.degrees == 2
    np.testing.assert_allclose([one.value, one.error], [known.slope, known.stderr], rtol=1e-12)
    # With a constant for each seed: the last column of the matrix is the logarithm of the width.
    columns = np.hstack([np.repeat(np.eye(3), 4, 0), np.tile(np.log(widths), 3)[:, None]])
    answer, residual, *_ = np.linalg.lstsq(columns, np.log(sizes).ravel())
    error = np.sqrt(residual[0] / 8 * np.linalg.inv(columns.T @ columns)[-1, -1])
    every = fit(widths, sizes)
    assert every is not None and every.degrees == 8
    np.testing.assert_allclose([every.value, every.error], [answer[-1], error], rtol=1e-10)
    assert fit(widths, np.zeros((1, 4))) is None and fit(widths, np.full((1, 4), np.nan)) is None


def test_activations_are_what_each_module_returns(mlp: configs.Config) -> None:
    program = load_located(mlp)
    params, model_state = jax.device_get(program.init()[1:3])
    batch = next(program.feed.batches(0))
    found = jax.device_get(activations(program, params, model_state, batch))
    x = np.asarray(batch["image"]).reshape(len(batch["image"]), -1)
    embed = x @ params["embed"]["kernel"] + params["embed"]["bias"]
    linear = params["blocks"]["linear"]
    inner = np.maximum(embed, 0) @ linear["kernel"][0] + linear["bias"][0]
    outputs = np.maximum(inner, 0) @ params["head"]["kernel"] + params["head"]["bias"]
    known = {"embed": embed, "blocks/linear": inner[None], "blocks": np.maximum(inner, 0)[None]}
    known |= {"head": outputs, "outputs": outputs}
    assert set(found) == set(known)
    for name, array in known.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.long
def test_schedules_are_replaced_by_their_largest_value_unless_they_are_kept(
    mlp: configs.Config,
) -> None:
    series = make_series(mlp, [8, 16, 32])
    constant = check(series, 1, [1, 3])
    assert constant.constants == {"optimizer.learning_rate": 0.25}
    assert constant.changes["embed"].min() > 0.1
    kept = check(series, 1, [1, 3], keep_schedules=True)
    assert kept.constants == {} and kept.changes["embed"][0].max() == 0  # the warm-up's first step
    assert kept.changes["embed"][1].min() > 0
    # The first step of Adam changes each weight by the rate, so that the input layer's outputs
    # change by the rate times the sum of the signed inputs, at all widths alike.
    slope = fit([8, 16, 32], constant.changes["embed"][0])
    assert slope is not None and abs(slope.value) < 0.15


def test_a_model_of_which_nothing_says_what_its_layers_return_has_outputs_only(
    mlp: configs.Config,
) -> None:
    program = load_located(mlp)
    own = program.experiment
    object.__setattr__(own, "model", own.model._replace(capture=None))
    state, batch = program.init(), next(program.feed.batches(0))
    assert set(activations(program, state.params, state.model_state, batch)) == {"outputs"}


def _found(changes: dict[str, np.ndarray], widths: tuple[int, ...] = (64, 128, 256, 512)) -> Found:
    steps = tuple(range(1, len(next(iter(changes.values()))) + 1))
    seeds = tuple(range(next(iter(changes.values())).shape[1]))
    sizes = {name: np.concatenate([x[:1] * 0 + 1, x]) for name, x in changes.items()}
    none: Any = None
    series = WidthSeries("model.width", dict.fromkeys(widths, none), ())
    return Found(series, seeds, steps, sizes, changes, {}, (), 8)


def simulate(slope: float, noise: float, tails: bool, repeats: int) -> tuple[float, float]:
    """Returns how often something is said to grow, and how often all is said to keep its size.

    Nine modules have the same slope after each of three steps. The noise of log sizes is normal, or
    with `tails` that of t with 3 degrees of freedom, of the same standard deviation.
    """
    random = np.random.default_rng(0)
    widths = np.log([64, 128, 256, 512])
    grows = keeps = 0
    for _ in range(repeats):
        shape = (9, 3, 3, 4)  # modules, steps, seeds, widths
        drawn = random.standard_t(3, shape) / 3**0.5 if tails else random.normal(size=shape)
        sizes = np.exp(slope * widths + noise * drawn)
        found = _found({str(name): x for name, x in enumerate(sizes)})
        grows += any(x.kind == "grows" for x in judge_slopes(found))
        keeps += changes_passed(found)
    return grows / repeats, keeps / repeats


@short.parametrize("tails", [False, True], ids=["normal", "t3"])
def test_the_verdict_is_false_in_fewer_than_one_of_twenty_cases(tails: bool) -> None:
    # At the limit itself, where a false claim is the most probable: 27 claims could be false.
    grows, keeps = simulate(0.25, 0.1, tails, 300)
    assert grows <= 0.05 and keeps == 0
    grows, keeps = simulate(0.0, 0.03, tails, 100)
    assert grows == 0 and keeps >= 0.9
    assert simulate(0.5, 0.1, tails, 100) == (1.0, 0.0)


def test_sentences_name_what_grows_what_shrinks_and_what_is_open() -> None:
    random = np.random.default_rng(0)
    widths = np.array([64.0, 128, 256, 512])
    noise = np.exp(0.01 * random.normal(size=(4, 2, 3, 4)))
    slopes = {"grows": 0.5, "shrinks": -1.0, "keeps": 0.02, "open": 0.25}
    changes = {
        name: widths**slope * each
        for (name, slope), each in zip(slopes.items(), noise, strict=True)
    }
    text = verdict_on_widths(_found(changes))
    assert text[0].startswith("Changes grow with the width in grows (slope 0.50 ± 0.0")
    assert text[1].startswith("Changes shrink with the width in shrinks (slope -1.0")
    assert text[2].startswith("2 slopes of 8 are not decided, in open: the intervals reach across")
    alone = verdict_on_widths(_found({"keeps": changes["keeps"]}))
    assert len(alone) == 1 and alone[0].startswith("No slope of the 2 is beyond ±0.25: the largest")
    changes["keeps"][1, 2, 3] = np.nan
    lost = _found({"keeps": changes["keeps"]})
    assert verdict_on_widths(lost)[0].endswith(
        "not finite, at the width 512 (seed 2)."
    ) and not changes_passed(lost)
    # A change that is negligible against the last one is not judged.
    tiny = {"decays": np.stack([0.1 / widths, widths**0.0])[:, None] * noise[0]}
    assert [(x.step, x.kind) for x in judge_slopes(_found(tiny))] == [(2, "keeps")]


@pytest.mark.long
def test_adam_needs_base_width_and_a_divided_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = [f"--output={tmp_path / 'check'}", "--formats=markdown,csv,png"]
    told = runs.printed(capsys, *GPT, "--widths=32,64,128", "--steps=3", *files, code=1)
    assert "Changes grow with the width in blocks" in told and "outputs (slope" in told
    assert "model.num_heads is 4 at all widths, so that the size of a head is 8, 16 and 32;" in told
    assert "replaced by their largest value: optimizer.groups.matrices" in told
    table = (tmp_path / "check/tables/slopes.csv").read_text().splitlines()
    assert table[0] == "module,start,after_3,ratio,verdict"
    assert any(row.startswith("embed,") and row.endswith(",keeps") for row in table)
    assert (tmp_path / "check/figures/changes_after_3.png").stat().st_size > 10_000
    told = runs.printed(capsys, *GPT, *MUP, "--widths=32,64,128,256", "--steps=3", "--seeds=5")
    assert "optimizer.groups.matrices.width_scaling is 0.5, 1, 2 and 4." in told
    assert "No slope of the" in told


@pytest.mark.long
def test_blocks_grow_with_the_depth_without_base_depth(capsys: pytest.CaptureFixture[str]) -> None:
    # CompleteP (arXiv:2505.01618): what a step changes in each block adds up over the depth.
    sets = ["model.width=64", "model.zero_init=false", "model.embed_norm=true", "data.batch_size=4"]
    command = [*GPT, *(f"--set={each}" for each in sets), "--width_path=model.depth"]
    command += ["--widths=2,4,8,16", "--seeds=5", "--steps=10"]
    assert "Changes grow with the depth in blocks (slope" in runs.printed(capsys, *command, code=1)
    told = runs.printed(capsys, *command, "--set=model.base_depth=2")
    assert "No slope of the" in told and "width" not in told


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--widths=64"], "was given 1 width and 3 seeds"),
        (["--widths=64,128", "--seeds=1"], "needs three widths, or two widths and two seeds"),
        (["--widths=64,66"], "at model.width=66: models.gpt divides its width among its heads"),
        (["--widths=2", "--width_path=model.depth"], "needs three depths, or two depths and two"),
        (["--widths=64,128", "--width_path=model.widht"], "Did you mean 'width'?"),
        (["--widths=64,128", "--width_path=model"], "a call of models.gpt is there, and not a num"),
        (["--widths=64,128", "--width_path=model.rope_base"], "must be an integer of at least 1"),
        (["--widths=64,80", "--scale=model.num_heads=1"], "would be 2.5 at the width 80"),
        (["--widths=64,128", "--scale=model.width=1"], "the width itself, which --widths sets"),
        (
            ["--widths=64,128", "--scale=optimizer.groups.matrices.width_scaling=1"],
            "it has no value (null). Give it that of the config's width, as in --set optimizer",
        ),
        (["--widths=64,128", "--steps=1,900"], "The config has 800 steps"),
        (["--widths=64,128", "--set=warm_start={from: runs/a}"], "each width: remove warm_start."),
    ],
)
def test_a_mistake_ends_with_a_sentence_before_anything_is_trained(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GPT, *options]) == 2
    told = capsys.readouterr()
    assert words in " ".join(told.err.split()) and told.out == ""
    assert "runs of" not in told.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the following arguments are required: --widths"),
        (["--widths=64,64"], "'64,64' has 64 twice"),
        (["--widths=64,x"], "write one such as 64,128"),
        (["--widths=64,128", "--scale=x"], "write them as in model.num_heads=1"),
    ],
)
def test_an_option_that_cannot_be_read_ends_with_a_sentence(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*GPT, *options])
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_the_command_keeps_the_schedules_if_it_is_told_to(
    mlp: configs.Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warm-up begins at a rate of 0, so that the first step changes nothing."""
    command = ["coordinate_check", f"--config={tmp_path / 'mlp.yaml'}", "--widths=8,16,32"]
    main([*command, "--steps=1", "--seeds=1", "--keep_schedules"])
    said = capsys.readouterr().out
    assert "largest value" not in said and "No change has a slope: it is 0" in said


def test_a_model_without_a_width_is_told_what_could_be_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["coordinate_check", "--config=configs/sgd_convnet.gin", "--widths=4,8"]
    told = " ".join(runs.refused(capsys, *command).split())
    assert "models.convnet has no argument `width`. Its integers are model.widths.0" in told
