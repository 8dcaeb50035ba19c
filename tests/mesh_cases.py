"""Steps, evaluations and samples on one simulated device and on several, for test_meshes.py.

`python -m tests.mesh_cases` prints one line of JSON a case: {"case": name, "one": what one device
finds, "many": what several do}.
"""

import json
import os
import re
from collections.abc import Callable
from functools import partial

from tests import compiled_programs

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = compiled_programs.xla_flags(devices=8)

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from clu import metrics as clu_metrics
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import optim
from optim.paths import flatten
from tests import token_cases
from tests.engine import test_loss_contract as losses
from tests.engine import test_program
from trainer import data, metrics, models
from trainer.data.tokenizer import ByteTokenizer
from trainer.engine.collectives import KINDS
from trainer.engine.generation import PromptContinuation, Sampling, encode_prompt
from trainer.engine.mesh import make_mesh
from trainer.engine.program import Program
from trainer.engine.sharding import ShardingRules, state_shardings
from trainer.logits import ChunkedLogits

UNEVEN = ([8, 8, 7], [23], [3, 5, 15], [22, 1])  # sizes of batches
EXCHANGE = re.compile(rf" ({'|'.join(KINDS)})\(")


def mesh_of(devices: int, tensor: int) -> dict[str, int]:
    """Returns a mesh of so many devices, of which `tensor` at a time hold the same examples."""
    tensor = min(devices, tensor)
    return {"data": devices // tensor, "tensor": tensor}


def masked(devices: int, tensor: int = 1) -> dict[str, Any]:
    """Runs two masked steps with microbatches, and an evaluation."""
    program = losses.program(
        mesh=mesh_of(devices, tensor),
        microbatches=3,
        loss=losses.with_aux,
        optimizer=optax.sgd(0.5),
        train_metrics={"accuracy": metrics.accuracy()},
        data=data.ArrayDataset(losses.TRAIN, losses.TEST, batch_size=None, eval_batch_size=4),
    )
    state, batches = program.init(), program.feed.batches(0)
    for _ in range(2):
        step = program.step(state, program.feed.to_devices(next(batches)))
        state, values = jax.block_until_ready(step)  # bounds the steps in flight
    return {
        "devices": program.mesh.size,
        "loss": float(values["train/loss"]),
        "bits": float(values["train/bits"]),
        "accuracy": float(values["train/accuracy"]),
        "kernel": np.asarray(state.params["kernel"]).tolist(),
        "eval": list(program.evaluation.run_splits(state).values()),
    }


def tokens(devices: int, tensor: int = 1) -> dict[str, Any]:
    """Runs a step of a language model with microbatches, and evaluations."""
    program = token_cases.program(
        mesh=mesh_of(devices, tensor),
        microbatches=3,
        train_metrics={"perplexity": metrics.perplexity()},
    )
    kernel, values = losses.one_step(program)
    state, batches = program.init(), program.experiment.data.evaluate("test")
    examples = program.evaluation.run_examples(state, batches, 100)
    return {
        "devices": program.mesh.size,
        "loss": values["train/loss"],
        "perplexity": values["train/perplexity"],
        "z_loss": values["train/z_loss"],
        "kernel": kernel.tolist(),
        "eval": list(program.evaluation.run_splits(program.init()).values()),
        "operations": operations(devices),
        "examples": {
            "sha256": examples.sha256,
            "loss": examples.values["loss"].tolist(),
            "accuracy": examples.values["accuracy"].tolist(),
            "weights": examples.weights["loss"].tolist(),
        },
    }


def operations(devices: int) -> float:
    """Returns what one device multiplies for the loss and its gradient, in one chunk of 16."""
    mesh = Mesh(jax.devices()[:devices], ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    features = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32, sharding=split)
    labels = jax.ShapeDtypeStruct((16, 32), jnp.int32, sharding=split)
    whole = NamedSharding(mesh, PartitionSpec())
    kernel = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=whole)

    def loss(kernel: jax.Array, features: jax.Array, labels: jax.Array) -> jax.Array:
        logits = ChunkedLogits(features=features, kernel=kernel, chunk=32)
        return logits.cross_entropy(labels)[0].mean()

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(kernel, features, labels).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return float(np.asarray(analysis["flops"]))


def samples(devices: int) -> dict[str, Any]:
    """Samples from parameters that the devices divide, and counts what they exchange."""
    # Wide enough that each device keeps a part of the kernels.
    model = models.gpt(width=128, depth=2, num_heads=4, max_length=64)
    assert model.language is not None
    params, state = model.init(jax.random.key(0), {"tokens": jnp.ones((1, 8), jnp.int32)})
    mesh = make_mesh({"fsdp": devices}) if devices > 1 else None
    if mesh is not None:
        params = jax.device_put(params, state_shardings(ShardingRules(mesh), params, params))
    tokenizer, sampling = ByteTokenizer(), Sampling(16, temperature=0)
    prompt = encode_prompt(tokenizer, "ab")
    made = PromptContinuation(model.language, tokenizer, prompt, sampling, mesh=mesh)
    text = made.sample(params, state, seed=0)[0]
    key = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), 1)))
    program = made._generate.lower(params, state, np.array([prompt], np.int32), key).compile()
    exchanges = [line for line in program.as_text().splitlines() if EXCHANGE.search(line)]
    inside = sum("while/body" in line for line in exchanges)
    return {"text": text, "exchanges": len(exchanges), "in loops": inside}


def wrapped(devices: int) -> dict[str, Any]:
    """Runs steps with a lookahead and a readout on devices that divide the parameters."""
    optimizer = optim.optimizer(
        {"all": optim.group(".*", partial(optax.adamw, 0.05))},
        lookahead=optim.ema_nesterov(0.5, 0.6, start=1, scheduled_by="all"),
        readout=optim.weight_ema(2, start=2, blend=0.6),
    )
    program = Program(test_program.experiment(optimizer=optimizer, mesh={"fsdp": devices}))
    state, batches = program.init(), program.feed.batches(0)
    before = jax.tree.map(lambda x: x.sharding, state)
    for _ in range(6):
        step = program.step(state, program.feed.to_devices(next(batches)))
        state, _ = jax.block_until_ready(step)  # bounds the steps in flight
    assert jax.tree.map(lambda x: x.sharding, state) == before
    own, kernel = state.opt_state, state.params["first"]["kernel"]
    parts = (own.lookahead.weights, own.lookahead.moves, own.readout.average)
    return {
        "shards": len({str(shard.index) for shard in kernel.addressable_shards}),
        "divided alike": [x["first/kernel"].sharding == kernel.sharding for x in parts],
        "kernel": np.asarray(kernel).tolist(),
        "evaluated": np.asarray(program.evaluation.params(state)["first"]["kernel"]).tolist(),
    }


def factors(name: str, devices: int) -> dict[str, Any]:
    """Runs steps of an optimizer whose factors the devices divide as they do the parameters."""
    draw = np.random.default_rng(0)
    images = draw.normal(size=(16, 8, 8, 1)).astype("float32")
    batch = {"image": images, "label": np.arange(16, dtype=np.int32) % 4}
    recipes = {
        "soap": partial(optim.soap, 0.02, precondition_frequency=2),
        "shampoo": partial(optim.shampoo, 0.02, every=2),
    }
    groups = {
        "matrices": optim.group("block.*/kernel", recipes[name]),
        "rest": optim.group(".*", partial(optax.adamw, 0.01)),
    }
    program = Program(
        test_program.experiment(
            model=models.vit(width=16, depth=2, num_heads=2, patch_size=4, num_classes=4),
            data=data.ArrayDataset(batch, batch, batch_size=8),
            optimizer=optim.optimizer(groups),
            metrics={},
            mesh={"data": 2, "fsdp": 2, "tensor": 2} if devices > 1 else {"data": 1},
        )
    )
    state, batches = program.init(), program.feed.batches(0)
    before = jax.tree.map(lambda x: x.sharding, state)
    losses = []
    for _ in range(5):  # one compiled step, which raises for other shardings
        step = program.step(state, program.feed.to_devices(next(batches)))
        state, values = jax.block_until_ready(step)  # bounds the steps in flight
        losses.append(float(values["train/loss"]))
    assert jax.tree.map(lambda x: x.sharding, state) == before
    own = flatten(state.opt_state.groups["matrices"])
    kernels = flatten(state.params)
    return {
        "specs": {
            path: [str(axes) for axes in x.sharding.spec]
            for path, x in own.items()
            if path.endswith("blocks/attn/qkv/kernel")
        },
        "held": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(own)),
        "losses": losses,
        "kernels": {path: np.asarray(x).ravel()[:64].tolist() for path, x in kernels.items()},
    }


class Uneven(data.ArrayDataset):
    """Evaluates batches of these sizes, without padding."""

    def __init__(self, train: Any, test: Any, sizes: list[int]):
        super().__init__(train, test, batch_size=None)
        self.test, self.sizes = test, sizes

    def evaluate(self, split: str = "test") -> Any:
        ends = np.cumsum(self.sizes)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            yield {name: x[start:end] for name, x in self.test.items()}


class ManyOutputs:
    """A model whose outputs have many shapes, one of which has as many rows as a padded batch."""

    def init(self, key: Any, batch: Any) -> Any:
        return {"kernel": jnp.asarray(losses.KERNEL)}, {}

    def apply(self, params: Any, state: Any, batch: Any, *, key: Any, train: bool) -> Any:
        logits = batch["x"] @ params["kernel"]
        pooled = logits.mean(1)
        outputs = {
            "logits": logits,
            "flat": logits.reshape(-1, losses.CLASSES),
            "pairs": pooled @ pooled.T,
            "table": jnp.arange(24.0).reshape(8, 3),
            "scale": jnp.float32(2.0),
        }
        return outputs, state


def compare(outputs: Any, batch: Any) -> Any:
    """Compares each example with all others of its batch; the mean of all is an aux value."""
    size = len(batch["x"])
    shapes = {name: x.shape for name, x in outputs.items()}
    assert shapes == {
        "logits": (size, losses.POSITIONS, losses.CLASSES),
        "flat": (size * losses.POSITIONS, losses.CLASSES),
        "pairs": (size, size),
        "table": (8, 3),
        "scale": (),
    }
    flat = outputs["flat"].reshape(outputs["logits"].shape)
    values = jax.nn.logsumexp(outputs["pairs"], axis=1)[:, None] + (flat**3).sum(2)
    return values * outputs["scale"] + outputs["table"].sum(), {"mean": outputs["pairs"].mean()}


@struct.dataclass
class Unmasked(clu_metrics.Metric):
    """Counts examples without a look at the mask, and adds up their outputs."""

    count: Any
    total: Any

    @classmethod
    def empty(cls) -> Any:
        return cls(count=jnp.int32(0), total=jnp.float32(0))

    @classmethod
    def from_model_output(cls, *, outputs: Any, batch: Any, **_: Any) -> Any:
        return cls(count=jnp.int32(len(batch["x"])), total=outputs["logits"].sum())

    def merge(self, other: Any) -> Any:
        return Unmasked(count=self.count + other.count, total=self.total + other.total)

    def compute(self) -> Any:
        return self.count + 0.001 * self.total


def uneven(sizes: list[int], devices: int, tensor: int = 1) -> dict[str, float]:
    """Evaluates batches whose sizes do not divide over the devices."""
    program = losses.program(
        mesh=mesh_of(devices, tensor),
        model=ManyOutputs(),
        data=Uneven(losses.TRAIN, losses.TEST, sizes),
        loss=compare,
        metrics={"unmasked": Unmasked},
    )
    program.evaluation.check(program.abstract_state())
    return program.evaluation.run_splits(program.init())


def uneven_tokens(devices: int) -> dict[str, float]:
    program = token_cases.program(
        mesh={"data": devices}, data=Uneven(token_cases.TRAIN, token_cases.TEST, [8, 3])
    )
    return program.evaluation.run_splits(program.init())


# What is run on one device, and on how many others.
CASES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "masked": (masked, 4),
    "masked, tensor": (partial(masked, tensor=2), 4),
    "tokens": (tokens, 4),
    "tokens, tensor": (partial(tokens, tensor=2), 4),
    "samples": (samples, 4),
    "wrapped": (wrapped, 8),
    "soap": (partial(factors, "soap"), 8),
    "shampoo": (partial(factors, "shampoo"), 8),
    **{f"batches of {sizes}": (partial(uneven, sizes), 8) for sizes in UNEVEN},
    "batches of [3, 5, 15], tensor": (partial(uneven, [3, 5, 15], tensor=2), 8),
    "batches of tokens": (uneven_tokens, 4),
}

if __name__ == "__main__":
    for name, (case, several) in CASES.items():
        print(json.dumps({"case": name, "one": case(1), "many": case(several)}), flush=True)
