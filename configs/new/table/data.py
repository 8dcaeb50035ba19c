"""A table of yours: rows of a CSV file, of which some belong together."""

import csv
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

LABEL, GROUP = "label", "patient"  # columns; all others are measurements


def rows(file: str, split: str, share: float = 0.25, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the rows of a split as arrays [examples, ...].

    Rows of one group are in one split, because rows of one patient resemble each other: a test
    split that has some of them would test the memory of the model.

    Args:
        file: the CSV file, with a line of names; relative to the folder of the command.
        split: "train" or "test".
        share: the fraction of the groups in the test split.
        seed: which groups these are.
    """
    with open(file, newline="") as lines:
        table = list(csv.DictReader(lines))
    groups = np.random.default_rng(seed).permutation(sorted({row[GROUP] for row in table}))
    tested = set(groups[: round(share * len(groups))])
    is_test = np.array([row[GROUP] in tested for row in table])
    measured = [name for name in table[0] if name not in (LABEL, GROUP)]
    x = np.array([[float(row[name]) for name in measured] for row in table], np.float32)
    x = (x - x[~is_test].mean(axis=0)) / x[~is_test].std(axis=0)  # nothing of the test split
    label = np.array([int(row[LABEL]) for row in table], np.int32)
    chosen = is_test if split == "test" else ~is_test
    return {"x": x[chosen], "label": label[chosen]}


def weighted_cross_entropy(
    rare: Annotated[float, "input"] = 4.0,
) -> Callable[[Any, Any], jax.Array]:
    """Cross-entropy in which an example of the rare class, label 1, counts `rare` times."""

    def loss(outputs: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))  # [batch, classes]
        log_p = jnp.take_along_axis(log_p, batch["label"][:, None], axis=1)[:, 0]
        return -jnp.where(batch["label"] == 1, rare, 1.0) * log_p  # [batch]: not their mean

    return loss
