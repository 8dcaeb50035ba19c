"""Runs of 20 steps on meshes of simulated devices and on one device, for test_sharded_runs.py.

`python -m tests.sharded_runs` prints one line of JSON a case: {"case": name, ...};
`python -m tests.sharded_runs NAME...` those of some cases. With LAWS=all in the environment, every
optimizer runs on every mesh.
"""

import os

from tests import compiled_programs

if __name__ == "__main__":  # not where the names of the cases are imported
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = compiled_programs.xla_flags(devices=8)

import contextlib
import functools
import json
from functools import partial
from typing import Any

import jax
import numpy as np
import optax

import optim
from experiments.parts.newton import newton
from optim import parts
from tests.runs import is_asked, mesh_name
from trainer import data, losses, models
from trainer.data.tokenizer import ByteTokenizer
from trainer.engine.experiment import Experiment
from trainer.engine.generation import PromptContinuation, Sampling, encode_prompt
from trainer.engine.program import Program

STEPS = 20
MESHES = (
    {"data": 2},
    {"fsdp": 2},
    {"tensor": 2},
    {"data": 2, "fsdp": 2},
    {"data": 2, "tensor": 2},
    {"fsdp": 2, "tensor": 2},
    {"tensor": 4},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
)
OPTIMIZERS = {
    "adamw": partial(optax.adamw, 3e-3),
    "muon": partial(optim.muon, 0.02),
    "soap": partial(optim.soap, 3e-3, precondition_frequency=5),
    "shampoo": partial(optim.shampoo, 3e-3, every=5),
    # Of a GPT without qk-norm, whose logits and inputs of kernels it reads.
    "muonclip": partial(
        optim.chain,
        3e-3,
        [
            partial(newton, every=5),
            partial(parts.momentum),
            partial(parts.polar, scale="match_rms_adamw"),
        ],
        [partial(parts.decay, 0.1), partial(parts.qk_clip, 1.0)],
    ),
}
WIDE = ("soap", "shampoo")
"""The optimizers that run in float64: their roots and bases magnify the rounding of sums, which are
added in another order on a mesh, so that in float32 only a large fault would show."""


def cases() -> list[tuple[str, str, dict[str, int]]]:
    """Returns (model, optimizer, mesh): all optimizers on the last mesh, AdamW on some others."""
    pairs = [("gpt", o) for o in OPTIMIZERS] + [("vit", o) for o in OPTIMIZERS if o != "muonclip"]
    every = [(*both, axes) for both in pairs for axes in MESHES]
    if os.environ.get("LAWS") == "all":
        return every
    some = ({"tensor": 2}, {"fsdp": 2, "tensor": 2}, {"tensor": 4})
    return [
        (m, o, axes)
        for m, o, axes in every
        if axes == MESHES[-1] or ((m, o) == ("gpt", "adamw") and axes in some)
    ]


def texts(examples: int, seed: int) -> dict[str, np.ndarray]:
    """Returns sequences of bytes in which a letter is mostly followed by the next one."""
    draw = np.random.default_rng(seed)
    moves = np.where(draw.uniform(size=(examples, 17)) < 0.8, 1, draw.integers(26, size=(1, 17)))
    letters = 97 + moves.cumsum(1) % 26
    mask = (np.arange(16) < draw.integers(8, 17, examples)[:, None]).astype(np.float32)
    return {
        "tokens": letters[:, :-1].astype(np.int32),
        "label": letters[:, 1:].astype(np.int32),
        "mask": mask,
    }


def program(model: str, optimizer: str, axes: dict[str, int]) -> Program:
    """Makes a run with most options of a step at once."""
    chosen: dict[str, Any] = {
        "gpt": {
            "model": models.gpt(
                vocab_size=258,
                width=32,
                depth=2,
                num_heads=4,
                num_kv_heads=None if optimizer == "muon" else 4,
                max_length=32,
                activation="swiglu",
                loss_chunk=8,
                z_loss=1e-3,
                dropout=0.1,
                tied=optimizer == "muon",
                qk_norm=optimizer != "muonclip",
            ),
            "data": data.ArrayDataset(
                texts(96, 0), texts(20, 1), batch_size=32, eval_batch_size=16
            ),
            "microbatches": 2,
            "ema_decay": 0.8,
            "on_nonfinite": "skip",
        },
        "vit": {
            "model": models.vit(width=32, depth=2, num_heads=4),
            "data": data.digits(batch_size=32, eval_batch_size=100),
        },
    }[model]
    if optimizer in WIDE:
        chosen["model"] = in_float64(chosen["model"])
    groups = {
        "matrices": optim.group("block.*/kernel", OPTIMIZERS[optimizer]),
        "rest": optim.group(".*", partial(optax.adamw, 3e-3)),
    }
    return Program(
        Experiment(
            loss=losses.softmax_cross_entropy(),
            optimizer=optim.optimizer(groups, clip_norm=1.0),
            steps=STEPS,
            log_every=STEPS,
            eval_every=STEPS,
            save_every=STEPS,
            mesh=axes,
            **chosen,
        )
    )


def in_float64(model: models.Model) -> models.Model:
    """Makes a model draw its parameters in float64, in which it then computes."""

    def init(key: Any, batch: Any) -> Any:
        params, state = model.init(key, batch)
        return jax.tree.map(lambda x: x.astype("float64"), params), state

    return model._replace(init=init)


def run(model: str, optimizer: str, axes: dict[str, int]) -> dict[str, Any]:
    """Trains, evaluates and, for a language model, continues a text."""
    wide = optimizer in WIDE
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        made = program(model, optimizer, axes)
        state, batches = made.init(), made.feed.batches(0)
        before = jax.tree.map(lambda x: x.sharding, state)
        history = []
        for _ in range(STEPS):
            state, metrics = made.step(state, made.feed.to_devices(next(batches)))
            history.append(float(metrics["train/loss"]))  # bounds the steps in flight
        evaluation = made.evaluation.run_splits(state)
    dtypes = {x.dtype.name for x in jax.tree.leaves(state.params)}
    assert dtypes == {"float64" if wide else "float32"}
    kernel = state.params["blocks"]["mlp"]["up"]["kernel"]
    found = {
        "losses": history,
        "params": jax.device_get(state.params),
        "evaluation": evaluation,
        "state": floats(jax.device_get(state.opt_state)),
        "kept": jax.tree.map(lambda x: x.sharding, state) == before,
        "shards": len({str(shard.index) for shard in kernel.addressable_shards}),
        "text": "",
    }
    if model == "gpt":
        tokenizer, language = ByteTokenizer(), made.experiment.model.language
        prompt = encode_prompt(tokenizer, "abcd")
        mesh = made.mesh if made.mesh.size > 1 else None
        sampler = PromptContinuation(
            language, tokenizer, prompt, Sampling(12, temperature=0), mesh=mesh
        )
        params = jax.tree.map(lambda x: x.astype("float32"), state.params)
        found["text"] = sampler.sample(params, state.model_state, seed=0)[0]
    return found


def floats(tree: Any) -> list[Any]:
    """Returns the leaves of floating dtypes, such as moments and factors."""
    return [x for x in jax.tree.leaves(tree) if np.issubdtype(x.dtype, np.floating)]


def distance(a: Any, b: Any) -> float:
    """Returns the largest difference of two trees, relative to the largest value of each array."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)) for x, y in pairs)


def main() -> None:
    """Prints how far each run on a mesh is from the run on one device."""
    alone = functools.cache(lambda model, optimizer: run(model, optimizer, {"data": 1}))
    for model, optimizer, axes in cases():
        name = f"{model} {optimizer} {mesh_name(axes)}"
        if not is_asked(name):
            continue
        one, many = alone(model, optimizer), run(model, optimizer, axes)
        found = {
            "losses": distance(many["losses"], one["losses"]),
            "params": distance(many["params"], one["params"]),
            "state": distance(many["state"], one["state"]),
            "evaluation": distance(many["evaluation"], one["evaluation"]),
            "text": many["text"] == one["text"],
            "learned": one["losses"][0] - one["losses"][-1],
            "shards": many["shards"],
            "kept": many["kept"],
        }
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
