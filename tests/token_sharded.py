"""Prints steps and evaluations of a language model on one and on four devices, as JSON."""

import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import token_cases as cases
from tests.engine.test_loss_contract import one_step
from trainer import metrics
from trainer.logits import ChunkedLogits


def steps(devices: int) -> dict[str, object]:
    """Runs a step with microbatches and an evaluation on a mesh of this many devices."""
    program = cases.program(
        mesh={"data": devices},
        microbatches=3,
        train_metrics={"perplexity": metrics.perplexity()},
    )
    kernel, values = one_step(program)
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


if __name__ == "__main__":
    for count in (1, 4):
        print(json.dumps(steps(count)))
