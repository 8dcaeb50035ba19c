"""configs/race_124m.gin at a small width against the program of modded-nanogpt's optimizer track.

track_figures.npz has what records/track_3_optimization/train_gpt_simple.py of
github.com/KellerJordan/modded-nanogpt, at commit f411b3d346aa52d3504324ca93c230fd84c6c07f, computed
in 20 steps with torch 2.13.0 on a CPU. In its text these were replaced:

- devices: `torch.device("cuda", int(os.environ["LOCAL_RANK"]))` by `torch.device("cpu")`,
  `torch.cuda.set_device(device)`, `@torch.compile`, `model.compile(dynamic=False)` and two
  `device="cuda", ` by nothing, `backend="nccl", device_id=device` by `backend="gloo"`,
  `{torch.cuda.get_device_name(device)}` by a name, `pin_memory=True` and `fused=True` by False;
- dtypes: two `.bfloat16()`, `).float()` and `.cuda()` by `.double()`, three `torch.float32` by
  `torch.float64`;
- sizes: seq_len 1024 by 16, head_dim 128 by 16, vocab_size 50304 by 48, num_layers 12 by 2,
  model_dim 768 by 32, val_tokens by 256, batch_size by 8 * 16, mbs by 4, train_steps by 20, and the
  intervals of evaluations, 125 and 25, by 5 and 1;
- what is recorded: `train_loader = ` was preceded by a call that rounds the parameters to float32
  and writes those that are neither 0 nor gains as "start/<name>"; `set_hparams(step)` was followed
  by one that writes inputs and targets, `batches`; the `print0` of a validation loss was preceded
  by one that writes step and loss, `evaluated`; and at the end, in place of
  `dist.destroy_process_group()`, every seventh number of each parameter and the sum of all were
  written as "end/<name>".

It ran as `python train.py` under torch.manual_seed(0) and torch.set_num_threads(1), with RANK=0 and
WORLD_SIZE=1, in a folder with the arrays "tokens/<shard>" of the file, drawn from a Markov chain,
in data/fineweb10B/fineweb_<shard>.bin of llm.c's layout.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optim.paths import flatten
from tests.runs import ROOT
from trainer import checkpoint
from trainer import config as configs
from trainer.__main__ import main
from trainer.config.edit import override
from trainer.engine.experiment import Experiment, build_experiment
from trainer.writers import iterate_metrics

FIGURES = np.load(Path(__file__).with_name("track_figures.npz"))
CONFIG = ROOT / "configs" / "race_124m.gin"
TOKENS = 8 * 16  # of a step
SIZES = {
    "model": {"vocab_size": 48, "width": 32, "depth": 2, "num_heads": 2},
    "data": {"vocab_size": 48, "length": 16, "batch_size": 8}
    | {"eval_batch_size": 4, "eval_tokens": 256},
}
STEPS = ["steps=20", "eval_every={0: 5, 90%: 1}", "microbatches=2"]
OPTIMIZERS = "optimizer.groups.{}.optimizer"
FLOAT64 = {  # what the config has in bfloat16
    "model.embed_dtype": "null",
    "optimizer.groups.matrices.optimizer.ns_dtype": "null",
    "optimizer.groups.embedding.optimizer.before.0.state_dtype": "null",
}
ADAMS = ("embedding.optimizer.before.0", "head.optimizer", "vectors.optimizer")


def written(folder: Path) -> list[str]:
    """Writes the shards, and returns the settings that name them."""
    for name in FIGURES.files:
        if name.startswith("tokens/"):
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, len(FIGURES[name])
            path = folder / f"{name.removeprefix('tokens/')}.bin"
            path.write_bytes(header.tobytes() + FIGURES[name].astype("<u2").tobytes())
    return [f"data.train={folder}/train_*.bin", f"data.validation={folder}/val_*.bin"]


def small(folder: Path, *more: str) -> Experiment:
    """Builds the config with the sizes of the figures."""
    sizes = [f"{part}.{name}={x}" for part, given in SIZES.items() for name, x in given.items()]
    config = configs.load([str(CONFIG)])
    return build_experiment(override(config, [*STEPS, *sizes, *written(folder), *more]))


def in_float64(folder: Path, tokens: float = TOKENS, *more: str) -> Experiment:
    """Builds it in float64; the eps of the optimizers are those of a sum over these tokens."""
    sets = [f"{path}={value}" for path, value in FLOAT64.items()]
    sets += [f"optimizer.groups.{name}.eps={1e-10 / tokens!r}" for name in ADAMS]
    sets += [f"optimizer.groups.matrices.optimizer.eps={1e-7 / tokens!r}"]
    return small(folder, "precision=float32", *sets, *more)


def leaf(params: Any, name: str) -> Any:
    """Returns a parameter of ours by its name in the program, [outputs, inputs] as there."""
    at = name.split(".")
    if at[0] != "blocks":
        of = {"embed": ["embed", "embedding"], "norm1": ["embed", "norm", "scale"]}
        of |= {"norm2": ["norm", "scale"], "proj": ["head", {"weight": "kernel"}.get(at[1], at[1])]}
        found = functools.reduce(lambda x, key: x[key], of[at[0]], params)
        return found.T if at[0] == "proj" else found
    blocks, index = params["blocks"], int(at[1])
    if at[2].startswith("norm"):
        return blocks[{"norm1": "attn_norm", "norm2": "mlp_norm"}[at[2]]]["scale"][index]
    kind = {"weight": "kernel", "bias": "bias"}[at[4]]
    if at[3] in ("q", "k", "v"):
        return blocks["attn"]["qkv"][kind][index]["qkv".index(at[3])].T
    ours = {"attn": {"proj": "out"}, "mlp": {"fc": "up", "proj": "down"}}[at[2]][at[3]]
    return blocks[at[2]][ours][kind][index].T


def first(experiment: Experiment) -> Any:
    """Returns the parameters from which the program started, in float64."""
    batch = next(experiment.batches(0))
    shapes, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), batch)
    params = jax.tree.map(lambda x: np.zeros(x.shape), shapes)
    for path, x in flatten(params).items():
        if path.endswith("scale"):
            x[...] = 1
    for name in FIGURES.files:
        if name.startswith("start/"):
            leaf(params, name.removeprefix("start/"))[...] = FIGURES[name]  # a view
    return jax.tree.map(jnp.asarray, params)


def trained(experiment: Experiment) -> tuple[list[Any], Any]:
    """Trains for 20 steps; returns the validation loss of each evaluation, and the parameters."""
    model, loss, optimizer = experiment.model, experiment.loss, experiment.optimizer

    def losses(params: Any, batch: Any, train: bool) -> Any:
        return loss(model.apply(params, {}, batch, key=None, train=train)[0], batch)

    def mean(params: Any, batch: Any) -> Any:
        return losses(params, batch, train=True).mean()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        return optimizer.update(flatten(jax.grad(mean)(params, batch)), state, params)

    evaluate, seen = jax.jit(functools.partial(losses, train=False)), []
    validation = list(experiment.data.evaluate("validation"))

    def record(number: int) -> None:
        values = [float(evaluate(params, batch).sum()) for batch in validation]
        assert all(batch["mask"].all() for batch in validation)
        seen.append([number, sum(values) / 256])

    params = first(experiment)
    state, batches = optimizer.init(params), experiment.batches(0)
    record(0)
    for number, (inputs, targets) in enumerate(FIGURES["batches"], 1):
        batch = next(batches)
        assert set(batch) == {"tokens", "label"}
        np.testing.assert_array_equal(batch["tokens"], inputs)
        np.testing.assert_array_equal(batch["label"], targets)
        params, state = step(params, state, batch)
        if experiment.evaluates(number):
            record(number)
    return seen, params


def largest_difference(params: Any) -> float:
    found = 0.0
    names = [name for name in FIGURES.files if name.startswith("end/")]
    assert len(names) == 33  # all of the program
    for name in names:
        x = np.asarray(leaf(params, name.removeprefix("end/"))).ravel()
        assert x.dtype == np.float64
        found = max(found, float(np.abs(np.append(x[::7], x.sum()) - FIGURES[name]).max()))
    return found


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("model.loss_chunk=24",)], ids=["at once", "in chunks"])
def test_the_config_computes_what_the_program_of_the_track_does(tmp_path: Path, more: Any):
    with jax.enable_x64(True):
        seen, params = trained(in_float64(tmp_path, TOKENS, *more))
        np.testing.assert_allclose(seen, FIGURES["evaluated"], rtol=0, atol=1e-12)
        assert largest_difference(params) < 1e-12
        start = first(in_float64(tmp_path))
        for path, x in flatten(params).items():
            assert np.abs(np.asarray(x) - flatten(start)[path]).max() > 1e-2, path


@pytest.mark.long
def test_a_mean_needs_the_eps_divided_by_the_tokens(tmp_path: Path):
    with jax.enable_x64(True):
        _, params = trained(in_float64(tmp_path, tokens=1))
        assert largest_difference(params) > 1e-4


def test_the_config_has_the_parameters_of_the_program():
    experiment = build_experiment(configs.load([str(CONFIG)]), declared=True)
    batch = {"tokens": np.zeros((1, 8), np.int32)}
    params, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), batch)
    sizes = {path: x.size for path, x in flatten(params).items()}
    vocabulary, width = 50_304, 768
    kernels, biases, gains = 12 * width**2, (4 + 4 + 1) * width, 2 * width
    layers = 12 * (kernels + biases + gains)
    assert sum(sizes.values()) == 2 * vocabulary * width + vocabulary + layers + 2 * width
    assert experiment.data.batch_size * experiment.data.tokens_per_example == 524_288
    steps = [step for step in range(1, 3_251) if experiment.evaluates(step)]
    assert steps == [*range(125, 2_925, 125), *range(2_925, 3_251, 25)]  # 90% are 2,925 steps


@pytest.mark.long
def test_a_run_of_the_config_keeps_the_embedding_and_its_averages_in_bfloat16(tmp_path: Path):
    sizes = [f"{part}.{name}={x}" for part, given in SIZES.items() for name, x in given.items()]
    sets = [*STEPS, *sizes, *written(tmp_path), "steps=6", "eval_every={0: 4, 90%: 1}"]
    sets += ["writers=[]", "log_every=1"]
    options = [f"--config={CONFIG}", f"--workdir={tmp_path / 'run'}"]
    assert main([*options, *(f"--set={each}" for each in sets)]) == 0
    rows = [*iterate_metrics(tmp_path / "run")]
    losses = {row["step"]: row["validation/loss"] for row in rows if "validation/loss" in row}
    # 90% of 6 steps are 5.
    assert list(losses) == [4, 5, 6] and losses[6] < losses[4] < np.log(48)
    (step,) = (each for each in checkpoint.ls(tmp_path / "run") if each.step == 6)
    parts = checkpoint.load_parts(tmp_path / "run", 6, ["params", "opt_state"])
    narrow = [path for path, x in flatten(parts).items() if x.dtype == "bfloat16"]
    assert len(narrow) == 3 and all("embed" in path for path in narrow)
