"""The published protocols: their sizes, steps and learning rates are those of their sources."""

import math
import re

import jax
import numpy as np
import pytest

from optim.paths import flatten
from tests import runs
from tests.runs import ROOT
from trainer import config as configs
from trainer.config.vocabulary import SWEEP
from trainer.engine.experiment import Experiment, build_experiment
from trainer.sweep.reading import read_sweep

CONFIGS = ROOT / "configs"
# Parameters of the layers' matrices, and of embedding and head: marin/optimizer_sweep/utils_simp.py
# has the first, `expected_params`.
FANTASTIC = {
    "fantastic_130m.gin": (134_217_728, 512, 128, 5_120),
    "fantastic_300m.gin": (301_989_888, 768, 128, 11_520),
    "fantastic_520m.gin": (536_870_912, 1024, 256, 10_240),
    "fantastic_1200m.gin": (1_207_959_552, 1536, 256, 23_040),
}


def built(name: str, *sets: str) -> Experiment:
    read = configs.load([str(CONFIGS / name)], sets=list(sets))
    return build_experiment(read, declared=True)


def sizes(experiment: Experiment) -> dict[str, int]:
    """Returns the number of elements of each parameter."""
    batch = {"tokens": np.zeros((1, 8), np.int32)}
    params, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), batch)
    return {path: x.size for path, x in flatten(params).items()}


def rate(experiment: Experiment, group: str, step: int) -> float:
    return float(experiment.optimizer.schedules(group)["learning_rate"](step))


def test_the_llama_of_the_benchmark_of_epfl_has_its_parameters_and_tokens():
    experiment = built("epfl_124m.yaml")
    found = sizes(experiment)
    vocabulary, width, hidden, layers = 50_304, 768, 2_048, 12
    layer = 4 * width**2 + 3 * width * hidden + 2 * width
    assert sum(found.values()) == vocabulary * width + layers * layer + width
    assert f"{sum(found.values()) / 1e6:.2f}" == "123.59"  # its README
    assert not any("head" in path for path in found)
    step = experiment.data.batch_size * experiment.data.tokens_per_example
    assert step == 4 * 64 * 512 and experiment.steps * step == 16_777_216_000


@pytest.mark.parametrize("name", FANTASTIC)
def test_a_llama_of_the_fantastic_optimizers_has_its_parameters_and_tokens(name):
    layers, width, batch, steps = FANTASTIC[name]
    experiment = built(name)
    found = sizes(experiment)
    matrices = [size for path, size in found.items() if re.fullmatch("block.*/kernel", path)]
    assert sum(matrices) == layers == 32 * (width * 4 * width * 3 + width * width * 4)
    vocabulary, norms = 128_256, (2 * 32 + 1) * width
    assert sum(found.values()) == layers + 2 * vocabulary * width + norms
    assert experiment.steps == steps == layers * 20 // (4_096 * batch)  # create_configs
    assert experiment.data.batch_size == batch and experiment.data.tokens_per_example == 4_096


def test_the_rates_of_the_benchmark_of_epfl_are_those_of_one_cycle():
    experiment = built("epfl_124m.yaml")
    peak, end, top, last = 1e-3, 1e-5, 1_999, 127_999

    def one_cycle(step: int) -> float:  # torch.optim.lr_scheduler.OneCycleLR
        start, stop, share = (end, peak, step / top)
        if step > top:
            start, stop, share = (peak, end, (step - top) / (last - top))
        return stop + (start - stop) / 2 * (1 + math.cos(math.pi * share))

    for step in (0, 1, 1_000, 1_998, 1_999, 2_000, 65_000, 127_000, 127_998, 127_999):
        for group in ("matrices", "rest"):
            assert rate(experiment, group, step) == pytest.approx(one_cycle(step), rel=2e-5), step


@pytest.mark.parametrize("name", FANTASTIC)
def test_the_rates_of_adamw_rise_by_a_line_and_fall_by_a_cosine(name):
    peak, warmup = {"130m": (8e-3, 2_000), "300m": (8e-3, 2_000), "520m": (4e-3, 1_000)}.get(
        name[10:14], (2e-3, 2_000)
    )
    experiment, steps = built(name), FANTASTIC[name][-1]
    for step in (0, 1, 500, warmup - 1, warmup, warmup + 1, steps // 2, steps - 1):
        # Levanter's OptimizerConfig.lr_scheduler with min_lr_ratio 0
        fall = (step - warmup) / (steps - warmup)
        wanted = peak * (step / warmup if step < warmup else (1 + math.cos(math.pi * fall)) / 2)
        assert rate(experiment, "head", step) == pytest.approx(wanted, rel=1e-4, abs=1e-9), step


def test_the_arms_have_the_lengths_and_the_rates_of_the_sweep_of_marin():
    file = ROOT / "experiments" / "fantastic" / "sweep.yaml"
    read = {x.name: x.config for x in read_sweep(configs.load([str(file)], language=SWEEP)).arms}
    for times in (1, 2, 4, 8):
        experiment = build_experiment(read[f"muon@{times}x"], declared=True)
        assert experiment.steps == 134_217_728 * 20 * times // (4_096 * 128)
    assert build_experiment(read["adamw@16x"], declared=True).steps == 81_920
    experiment = build_experiment(read["muon@1x"], declared=True)
    for step in (0, 1, 1_023, 1_024, 2_000, 5_119):
        wanted = 0.016 * min(1, (5_120 - step) / (0.8 * 5_120))
        assert rate(experiment, "matrices", step) == pytest.approx(wanted, rel=1e-5), step
        assert rate(experiment, "rest", step) == pytest.approx(wanted / 5, rel=1e-5), step


@pytest.mark.long
def test_kernels_and_embedding_start_with_the_deviations_of_the_sources():
    def deviations(experiment: Experiment) -> dict[str, float]:
        batch = {"tokens": np.zeros((1, 8), np.int32)}
        params, _ = experiment.model.init(jax.random.key(0), batch)
        return {path: float(np.std(x)) for path, x in flatten(params).items()}

    small = ["model.depth=2", "model.vocab_size=1000"]
    found = deviations(built("epfl_124m.yaml", *small, "data.vocab_size=1000"))
    wanted = {"blocks/attn/qkv/kernel": 0.02, "blocks/mlp/up/kernel": 0.02, "embed/embedding": 0.02}
    wanted |= {"blocks/mlp/gate/kernel": 0.02, "blocks/attn/out/kernel": 0.02 / math.sqrt(4)}
    for path, deviation in wanted.items():
        assert found[path] == pytest.approx(deviation, rel=0.01), path
    for part in ("dclm", "starcoder", "proofpile"):
        small += [f"data.parts.{part}.vocab_size=1000", f"data.parts.{part}.end_of_text=0"]
    found = deviations(built("fantastic_130m.gin", *small))
    wanted = {"blocks/attn/qkv/kernel": 512**-0.5, "head/kernel": 512**-0.5}
    wanted |= {"blocks/mlp/gate/kernel": 512**-0.5, "embed/embedding": 1 / 512}
    for path, deviation in wanted.items():
        assert found[path] == pytest.approx(deviation, rel=0.01), path


@pytest.mark.long
@pytest.mark.parametrize("name", ["epfl_124m.yaml", *FANTASTIC])
def test_a_protocol_is_explained_where_its_data_are_absent(name, capsys):
    shown = runs.printed(capsys, "explain", f"--config={CONFIGS / name}")
    tokens = 16_777_216_000 if "epfl" in name else 20 * FANTASTIC[name][0]
    assert f"{tokens:,} tokens in all" in shown and "whose data are not on this machine" in shown


@pytest.mark.long
@pytest.mark.parametrize(
    ("study", "layout", "trained", "more", "said"),
    [
        ("epfl_124m", ("<u2", 20240520, 1), ["data"], [], "5 arms, 30 runs of 5 programs"),
        (
            "fantastic",
            ("<u4", 20240801, 7),
            [f"data.parts.{part}" for part in ("dclm", "starcoder", "proofpile")],
            ["--set", "ladder.values=[1x, 2x]"],
            "5 arms, 135 runs of 5 programs",
        ),
    ],
    ids=["epfl_124m", "fantastic"],
)
def test_the_searches_of_a_protocol_are_planned(
    study, layout, trained, more, said, tmp_path, capsys
):
    dtype, *first = layout
    # Short sequences are traced in a quarter of the time.
    sets = [
        f"{data}.{x}" for data in trained for x in (f"train: {tmp_path}/train.bin", "length: 512")
    ]
    sets.append(f"{trained[0]}.validation: {tmp_path}/val.bin")
    if len(trained) > 1:
        sets.append("data.repeat: [dclm, starcoder, proofpile]")  # this text is short
    for split in ("train", "val"):
        header = np.zeros(256, "<i4")
        header[:3] = *first, 2**21
        tokens = np.random.default_rng(0).integers(50_000, size=2**21).astype(dtype)
        (tmp_path / f"{split}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    file = ROOT / "experiments" / study / "sweep.yaml"
    options = [f"--config={file}", "--set", f"set={{{', '.join(sets)}}}", *more]
    assert said in runs.printed(capsys, "sweep", "--check", *options)
