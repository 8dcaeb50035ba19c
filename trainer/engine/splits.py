"""The splits that a data set evaluates, and the names of their metrics."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from trainer.writers.lines import PREFIXES

LOOKED_FOR = {"min": "smaller", "max": "larger"}  # mode -> the values that are better


def split_sizes(data: Any) -> dict[str, int | None]:
    """Returns split -> number of examples, validation first; None if the data does not say."""
    # A data set without an attribute `splits` has a test split only.
    splits = getattr(data, "splits", ("test",))
    listed = isinstance(splits, Collection) and not isinstance(splits, str)
    if not listed or not splits or not set(splits) <= set(PREFIXES):
        raise ValueError(
            f"The data set has splits {splits!r}. The attribute must list what evaluate(split) "
            "takes: 'validation', 'test' or both; or be a dict from these names to numbers of "
            "examples. A data set without it is evaluated with evaluate(), as its test split."
        )
    sizes = splits if isinstance(splits, Mapping) else dict.fromkeys(splits)
    # In the order in which the splits are evaluated.
    return {split: sizes[split] for split in PREFIXES if split in sizes}


def best_row(best_metric: str, metrics: Sequence[str], splits: Collection[str]) -> str:
    """Returns the name in metrics.jsonl of the metric that ranks checkpoints; raises ValueError."""
    # "accuracy" means that of the validation split, or of the test split if there is no other;
    # "validation/accuracy" and "eval/accuracy" name the split.
    rows = [PREFIXES[split] + name for split in PREFIXES if split in splits for name in metrics]
    if best_metric in metrics:
        return rows[list(metrics).index(best_metric)]
    if best_metric not in rows:
        raise ValueError(
            f"best_metric is {best_metric!r}, but the metrics are {', '.join(metrics)}; with their "
            f"splits, {', '.join(rows)}."
        )
    return best_metric


def wrong_mode(name: str, mode: str, metrics: Mapping[str, Any]) -> Literal["min", "max"] | None:
    """Returns the mode that a metric wants, if `mode` is the other one, or else None."""
    # `name` has no split. The loss wants "min"; the class of a metric may have `smaller_is_better`.
    smaller = name == "loss" or getattr(metrics.get(name), "smaller_is_better", None)
    wanted = "min" if smaller else "max"
    return None if smaller is None or mode == wanted else wanted


def ranking_warnings(experiment: Any) -> list[str]:
    """Warns if the best checkpoint is probably the worst, or chosen on the test split."""
    # A `best_metric` that names the test split itself is no warning.
    metric, mode, row = experiment.best_metric, experiment.best_mode, experiment.best_row or ""
    found = []
    if row.startswith(PREFIXES["test"]) and row != metric:
        found.append(
            f"best_metric is {metric!r}, and the data set has no validation split: the best "
            f"checkpoint is chosen by {row}, on the test split, where its value is then optimistic."
            f" Hold out a part, such as by data.validation=0.1, or write {row!r} if you mean it."
        )
    if wanted := wrong_mode(row.partition("/")[2], mode, experiment.metrics):
        found.append(
            f"best_metric is {metric!r}, of which {LOOKED_FOR[wanted]} values are better, but "
            f"best_mode is {mode!r}: the worst checkpoint would be kept. Set best_mode to "
            f"{wanted!r}."
        )
    return found
