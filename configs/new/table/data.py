"""A table of yours: rows of a CSV file, of which some belong together."""

import csv
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

LABEL = "label"  # the column to predict: texts or numbers, which are numbered in their order
GROUP = "patient"  # the column that says which rows belong together; "" if all are independent
IGNORED = ()  # other columns that are no measurements, such as identifiers


def rows(file: str, split: str, share: float = 0.25, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the rows of a split: "x", float32 [examples, columns], and "label", int32.

    Rows of one group are in one split, because rows of one patient resemble each other: a test
    split that has some of them would test the memory of the model. Columns are standardized by
    the training split. A cell that is missing becomes the mean, and has a 1 in a column of its own.

    Args:
        file: the CSV file, with a line of names; relative to the folder of the command.
        split: "train" or "test".
        share: the fraction of the groups in the test split.
        seed: which groups these are.

    Raises:
        ValueError: a column is not in the file, or a cell is not a number.
    """
    with open(file, newline="") as lines:
        table = list(csv.DictReader(lines))
    for name in (LABEL, *([GROUP] if GROUP else []), *IGNORED):
        if name not in table[0]:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(table[0])}.")
    names = [row[GROUP] for row in table] if GROUP else [str(i) for i in range(len(table))]
    drawn = np.random.default_rng(seed).permutation(sorted(set(names)))
    is_test = np.isin(names, drawn[: round(share * len(drawn))])
    measured = [name for name in table[0] if name not in (LABEL, GROUP, *IGNORED)]
    x = np.array(
        [[_number(row, name, line) for name in measured] for line, row in enumerate(table)]
    )
    mean, deviation = np.nanmean(x[~is_test], axis=0), np.nanstd(x[~is_test], axis=0)
    missing = np.isnan(x)
    x = np.where(missing, 0.0, (x - mean) / np.where(deviation > 0, deviation, 1.0))
    x = np.concatenate([x, missing[:, missing.any(axis=0)]], axis=1).astype(np.float32)
    _, label = np.unique([row[LABEL] for row in table], return_inverse=True)
    chosen = is_test if split == "test" else ~is_test
    return {"x": x[chosen], "label": label[chosen].astype(np.int32)}


def _number(row: dict[str, str], name: str, line: int) -> float:
    try:
        return float(row[name] or "nan")
    except ValueError:
        where = f"line {line + 2}, column {name!r}"
        raise ValueError(f"{where}: {row[name]!r} is no number. Is it in IGNORED?") from None


def weighted_cross_entropy(
    rare: Annotated[float, "input"] = 4.0,
) -> Callable[[Any, Any], jax.Array]:
    """Cross-entropy in which an example of the rare class, label 1, counts `rare` times."""

    def loss(outputs: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))  # [batch, classes]
        log_p = jnp.take_along_axis(log_p, batch["label"][:, None], axis=1)[:, 0]
        return -jnp.where(batch["label"] == 1, rare, 1.0) * log_p  # [batch]: not their mean

    return loss
