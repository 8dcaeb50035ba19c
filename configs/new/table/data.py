"""A table of yours: rows of a CSV file, of which some belong together."""

import csv
from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

LABEL = "label"  # the column to predict
CLASSES = ("0", "1")  # its values in the file, texts or numbers: class 0, class 1 and so on
GROUP = "patient"  # the column that says which rows belong together; "" if all are independent
IGNORED = ()  # other columns that are no measurements, such as identifiers
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")  # no value; capitals do not matter


def rows(file: str, split: str, share: float = 0.2, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns the rows of a split: "x", float32 [examples, columns], and "label", int32.

    Rows of one group are in one split, because rows of one patient resemble each other: a test
    split that has some of them would test the memory of the model. Columns are standardized by
    the training split. A cell that is missing becomes the mean, and has a 1 in a column of its own.

    Args:
        file: the CSV file, with a line of names; relative to the folder of the command.
        split: "train", "validation" or "test".
        share: the fraction of the groups in the test split, and in the validation split.
        seed: which groups these are.

    Raises:
        ValueError: a column is not in the file, a label is not one of CLASSES, or a cell is not a
            number.
    """
    table, lines = _read(file)
    names = [row[GROUP] for row in table] if GROUP else [str(i) for i in range(len(table))]
    drawn = np.random.default_rng(seed).permutation(sorted(set(names)))
    size = round(share * len(drawn))
    parts = {"test": drawn[:size], "validation": drawn[size : 2 * size], "train": drawn[2 * size :]}
    trained, chosen = np.isin(names, parts["train"]), np.isin(names, parts[split])
    measured = [name for name in table[0] if name not in (LABEL, GROUP, *IGNORED)]
    pairs = zip(table, lines, strict=True)
    x = np.array([[_number(row[name], name, line) for name in measured] for row, line in pairs])
    if empty := np.flatnonzero(np.isnan(x[trained]).all(axis=0)).tolist():
        raise ValueError(f"{file} has no value of {measured[empty[0]]!r} to train on: see IGNORED.")
    mean, deviation = np.nanmean(x[trained], axis=0), np.nanstd(x[trained], axis=0)
    missing = np.isnan(x)
    x = np.where(missing, 0.0, (x - mean) / np.where(deviation > 0, deviation, 1.0))
    x = np.concatenate([x, missing[:, missing.any(axis=0)]], axis=1).astype(np.float32)
    label = np.array([_class_of(row[LABEL], table, file) for row in table], np.int32)
    return {"x": x[chosen], "label": label[chosen]}


def _read(file: str) -> tuple[list[dict[str, str]], list[str]]:
    """Returns the rows of a file, column -> text, and the place of each, as file:line."""
    table, lines = [], []
    try:
        with open(file, newline="", encoding="utf-8-sig") as opened:  # perhaps of Excel
            reader = csv.DictReader(opened)
            columns = reader.fieldnames or []
            if any("\0" in name for name in columns):
                raise ValueError(f"{file} is not in UTF-8, and seems to be in UTF-16. Convert it.")
            if twice := [each for each, count in Counter(columns).items() if count > 1]:
                raise ValueError(f"{file} has {twice[0]!r} twice in its line of names. Rename one.")
            for row in reader:
                lines.append(f"{file}:{reader.line_num}")
                if None in row or None in row.values():
                    raise ValueError(f"{lines[-1]} has not one cell for each of the columns.")
                table.append(row)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8 ({error}). Convert it.") from None
    for name in (LABEL, *([GROUP] if GROUP else []), *IGNORED):
        if name not in columns:
            raise ValueError(f"{file} has no column {name!r}; it has {', '.join(columns)}.")
    if not table:
        raise ValueError(f"{file} has no rows below its line of names.")
    return table, lines


def _class_of(value: str, table: list[dict[str, str]], file: str) -> int:
    if value not in CLASSES:
        found = Counter(row[LABEL] for row in table).most_common()
        told = ", ".join(f"{each!r} ({count} rows)" for each, count in found)
        raise ValueError(f"CLASSES has no {value!r}. The column {LABEL!r} of {file} has {told}.")
    return CLASSES.index(value)


def _number(text: str, name: str, line: str) -> float:
    if text.strip().lower() in MISSING:
        return float("nan")
    try:
        found = float(text)
    except ValueError:
        raise ValueError(
            f"{line}, column {name!r}: {text!r} is no number. Add the column to IGNORED, write its"
            " texts as numbers, such as a column of 0 and 1 for each, or add the text to MISSING."
        ) from None
    if not np.isfinite(found):
        raise ValueError(
            f"{line}, column {name!r}: {text!r} is not finite. Correct it, or add it to MISSING."
        )
    return found


@dataclass(frozen=True)
class WeightedCrossEntropy:
    """Cross-entropy in which an example of one class counts `weight` times.

    Args:
        label: the number of the class, such as 1 for the second of CLASSES.
        weight: another one needs no compilation, because it is an input of the program.
    """

    label: int
    weight: Annotated[float, "input"]
    class_labels = "label"  # so that the labels are checked and counted

    def __call__(self, outputs: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        log_p = jax.nn.log_softmax(outputs.astype(jnp.float32))  # [batch, classes]
        log_p = jnp.take_along_axis(log_p, batch["label"][:, None], axis=1)[:, 0]
        weights = jnp.where(batch["label"] == self.label, self.weight, 1.0)
        return -weights * log_p  # [batch]: not their mean
