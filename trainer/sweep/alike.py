"""Compares the configs of arms, and says whether they have the same loss."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from trainer.config import Call, Tree
from trainer.config.tree import child_trees, join
from trainer.config.wording import brief
from trainer.messages import joined

# Arguments of a run's root that change none of its results.
WITHOUT_EFFECT = ("log_every", "save_every", "keep_latest", "best_metric", "best_mode")
WITHOUT_EFFECT += ("diagnostics", "hooks", "writers", "watchdog", "steps_per_call")


class UnlikeLoss(NamedTuple):
    """Why the losses of arms cannot be compared."""

    path: str  # the argument that differs
    text: str  # a sentence
    values: Mapping[str, str]  # arm -> the value; empty if the argument is searched


def unlike_loss(trees: Mapping[str, Call], searched: Collection[str]) -> UnlikeLoss | None:
    """Returns why the losses of arms cannot be compared; None if all are one function."""
    # `trees` are the configs of the arms with their defaults; `searched` has the config paths in
    # which the trials of an arm differ.
    of_arms = [list(child_trees(tree.kwargs.get("metrics"))) for tree in trees.values()]
    first = of_arms[0] if of_arms else []
    common = (name for name in first if all(name in each for each in of_arms))
    which = "both" if len(trees) == 2 else "all of them"
    # If they have none in common, it is an example.
    named = f"name a metric that {which} compute, such as {next(common, 'accuracy')}"
    for path in searched:
        if path.split(".")[0] == "loss":
            return UnlikeLoss(
                path,
                f"The loss of a trial depends on {path}, which is searched, so that losses cannot"
                f" be compared: {named}.",
                {},
            )
    found = {arm: dict(arguments(tree.kwargs["loss"], "loss")) for arm, tree in trees.items()}
    for path, values in differing_arguments(found).items():
        return UnlikeLoss(
            path,
            f"The losses of the arms are not the same function ({path} {values_text(values)}), so"
            f" that they cannot be compared: {named}.",
            values,
        )
    return None


def differing_arguments(found: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the arguments in which arms differ: path -> arm -> the value, from `arguments`."""
    # The value is "absent" where the arm has no such argument, and "given" where it has entries
    # below the path. Where two arms call different functions, their arguments are left out.
    paths = dict.fromkeys(path for each in found.values() for path in each)
    different: dict[str, dict[str, str]] = {}
    for path in paths:
        values = {}
        for arm, each in found.items():
            below = any(other.startswith(f"{path}.") for other in each)
            values[arm] = each.get(path, "given" if below else "absent")
        inside = any(path.startswith(f"{parent}.") for parent in different)
        if len(set(values.values())) > 1 and not inside:
            different[path] = values
    return different


def arguments(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path and value of each argument below `path`, and the function of each call."""
    if isinstance(tree, Call):
        yield path, tree.name
    children = child_trees(tree)
    if not children and not isinstance(tree, Call):
        yield path, tree if isinstance(tree, str) else brief(tree)
    for key, value in children.items():
        yield from arguments(value, join(path, key))


def values_text(values: Mapping[str, str]) -> str:
    """Returns values with the arms that have them: "64 (muon) and 128 (adamw, sgd)"."""
    return joined(with_arms(values))


def with_arms(values: Mapping[str, str]) -> list[str]:
    """Returns each different value with the arms that have it: "128 (adamw, sgd)"."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(value, []).append(arm)
    return [f"{value} ({', '.join(of)})" for value, of in arms.items()]
