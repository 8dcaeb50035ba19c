"""configs/epfl_124m.yaml and the arms of experiments/epfl_124m against the benchmark's program.

epfl_figures.npz has what the program of github.com/epfml/llm-optimizer-benchmark, at commit
fdecd5d7dcba228f15b623a96b3346a5281c8734, computed in 20 steps with torch 2.13.0 on a CPU, for each
arm from the same initial values, "start/<name>", which its model had under torch.manual_seed(0), as
float32. Its models/llama.py and optim/ were imported, with these replaced:

- dtypes: `.float()` of models/llama.py by `.double()`, `g.bfloat16()` of optim/muon.py by
  `g.double()`, and its `torch.cuda.current_device()` by "cpu"; torch.set_default_dtype(float64);
- sizes: n_embd 768 by 16, n_head 12 by 2, n_layer 12 by 2, multiple_of 256 by 8, vocab_size 50304
  by 64, sequence_length 512 by 16;
- what the configs list as differences: clip_grad_norm_ by one that divides by the norm alone; in
  the AdamW of DistributedMuon, eps by eps * sqrt(1 - beta2**step); in the warm-up of AdEMAMix's
  beta3, `math.log(beta + eps)` by `math.log(beta)`; AdEMAMix's warm-ups begin a step later below;
- DistributedMuon was told that the embedding is no matrix, as it is with a vocabulary of 50,304.

The optimizers got the arguments of main.py:130-204 with those of scripts/124m, and a learning rate
of 1e-2; OneCycleLR those of main.py:362-373, with 20 steps of which 5 are the warm-up; AdEMAMix's
warm-ups had 20 steps. A step was that of optim/base.py:174-231 with two microbatches of 4
sequences, which are "batches" [step, sequence, token], drawn from a Markov chain. Written were the
loss of each step and the learning rates, and at the end every seventh number of each parameter and
the sum of all, "<arm>/end/<name>".
"""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optim.paths import flatten
from tests.runs import ROOT
from trainer import config as configs
from trainer.config.edit import override
from trainer.config.vocabulary import SWEEP
from trainer.engine.experiment import Experiment, build_experiment
from trainer.sweep.reading import read_sweep

FIGURES = np.load(Path(__file__).with_name("epfl_figures.npz"))
CONFIG = ROOT / "configs" / "epfl_124m.yaml"
ARMS = ROOT / "experiments" / "epfl_124m" / "sweep.yaml"
SIZES = {"vocab_size": 64, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 48}
STARTS = [name.removeprefix("start/") for name in FIGURES.files if name.startswith("start/")]
# Each head's columns as the program has them: a pair of ours is half a head apart, theirs are
# neighbours.
COLUMNS = np.arange(16).reshape(2, 2, 4).swapaxes(1, 2).ravel()


def small(arm: str) -> Experiment:
    """Builds an arm with the sizes of the figures, in float64."""
    arms = {x.name: x.config for x in read_sweep(configs.load([str(ARMS)], language=SWEEP)).arms}
    sets = [f"model.{name}={x}" for name, x in SIZES.items()]
    sets += ["steps=20", "precision=float32", "microbatches=1", "data.vocab_size=64"]
    for group in ("matrices", "rest"):
        rate = f"optimizer.groups.{group}.optimizer.learning_rate"
        sets += [f"{rate}.boundaries=[4, 19]", f"{rate}.values=[1e-4, 1e-2, 1e-4]"]
    if arm == "d_muon":
        sets += ["optimizer.groups.matrices.optimizer.ns_dtype=null"]
    if arm == "ademamix":  # whose warm-ups count from 1 in the program
        lives = [math.log(0.5) / math.log(b) for b in (0.9, 0.999)]
        later = [0.5 ** (1 / (x + (lives[1] - lives[0]) / 20)) for x in lives]
        for group in ("matrices", "rest"):
            at = f"optimizer.groups.{group}.optimizer"
            sets += [f"{at}.alpha.init_value=0.4", f"{at}.alpha.end_value=8.4"]
            sets += [f"{at}.b3.init_value={later[0]!r}", f"{at}.b3.peak_value={later[1]!r}"]
    return build_experiment(override(arms[arm], sets), declared=True)


def leaf(params: Any, name: str) -> Any:
    """Returns a parameter of ours by its name in the program, a view or a copy in its layout."""
    at = name.removeprefix("transformer.").split(".")
    if at[0] in ("wte", "ln_f"):
        return params["embed"]["embedding"] if at[0] == "wte" else params["norm"]["scale"]
    blocks, index, part = params["blocks"], int(at[1]), ".".join(at[2:-1])
    if part == "attn.c_attn":
        queries, keys, values = blocks["attn"]["qkv"]["kernel"][index]
        return np.concatenate([queries[:, COLUMNS].T, keys[:, COLUMNS].T, values.T])
    if part.startswith("ln"):
        return blocks[{"ln_1": "attn_norm", "ln_2": "mlp_norm"}[part]]["scale"][index]
    ours = {"attn.c_proj": "attn out", "mlp.w1": "mlp gate", "mlp.w2": "mlp up"}
    layer, kernel = (ours | {"mlp.c_proj": "mlp down"})[part].split()
    return blocks[layer][kernel]["kernel"][index].T


def first(experiment: Experiment) -> Any:
    """Returns the parameters from which the program started, in float64."""
    batch = {"tokens": np.zeros((1, 8), np.int32)}
    shapes, _ = jax.eval_shape(experiment.model.init, jax.random.key(0), batch)
    params = jax.tree.map(lambda x: np.zeros(x.shape), shapes)
    for name in STARTS:
        value = FIGURES[f"start/{name}"]
        if "c_attn" in name:
            kernels = params["blocks"]["attn"]["qkv"]["kernel"][int(name.split(".")[2])]
            for kernel, rows, columns in zip(
                kernels, np.split(value, 3), (COLUMNS, COLUMNS, np.arange(16)), strict=True
            ):
                kernel[:, columns] = rows.T
        else:
            leaf(params, name)[...] = value
    return jax.tree.map(jnp.asarray, params)


def trained(experiment: Experiment) -> tuple[list[float], Any]:
    """Trains for 20 steps; returns the loss of each, and the parameters."""
    model, loss, optimizer = experiment.model, experiment.loss, experiment.optimizer

    def mean(params: Any, batch: Any) -> Any:
        return loss(model.apply(params, {}, batch, key=None, train=True)[0], batch).mean()

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(mean)(params, batch)
        return value, *optimizer.update(flatten(gradients), state, params)

    params = first(experiment)
    state, losses = optimizer.init(params), []
    for tokens in FIGURES["batches"].astype(np.int32):
        value, params, state = step(
            params, state, {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}
        )
        losses.append(float(value))
    return losses, params


@pytest.mark.long
@pytest.mark.parametrize(
    ("arm", "tolerance"), [("adamw", 1e-12), ("lion", 1e-12), ("d_muon", 1e-12), ("ademamix", 1e-8)]
)
def test_an_arm_computes_what_the_program_of_the_benchmark_does(arm: str, tolerance: float):
    with jax.enable_x64(True):
        losses, params = trained(small(arm))
        np.testing.assert_allclose(losses, FIGURES[f"{arm}/losses"], rtol=0, atol=tolerance)
        for name in STARTS:
            ours = np.asarray(leaf(jax.tree.map(np.asarray, params), name)).ravel()
            assert ours.dtype == np.float64
            wanted = FIGURES[f"{arm}/end/{name}"]
            found = np.append(ours[::7], ours.sum())
            np.testing.assert_allclose(found, wanted, rtol=0, atol=100 * tolerance, err_msg=name)
            start = FIGURES[f"start/{name}"].ravel()
            assert np.abs(wanted - np.append(start[::7], start.sum())).max() > 1e-3, name
