"""Counts the hyperparameters that each arm of a sweep tunes, and the trials for each of them."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import Call, Config, Tree
from trainer.messages import joined, plural

Linked = Sequence[Sequence[str]]  # the paths that one entry of a space sets, for several entries


@dataclass(frozen=True)
class Tuning:
    """How an arm is tuned."""

    # for each one that is tuned, the config paths that have its values
    hyperparameters: tuple[tuple[str, ...], ...]
    trials: int  # of each search, without repetitions for other seeds
    searches: int  # how many

    @property
    def count(self) -> int:
        """The number of hyperparameters."""
        return len(self.hyperparameters)

    @property
    def trials_each(self) -> float | None:
        """The number of trials for each hyperparameter; None if none is tuned."""
        return self.trials / self.count if self.count else None

    @property
    def text(self) -> str:
        """The numbers, such as "3 with 8 trials (2.67 for each)"."""
        if self.trials_each is None:
            return "none"
        trials = plural(self.trials, "trial") + (" of each search" if self.searches > 1 else "")
        return f"{self.count} with {trials} ({self.trials_each:.3g} for each)"


def tuning_of(
    points: Mapping[tuple[int, int | None], Mapping[str, Tree]],
    config: Call | None = None,
    linked: Iterable[Linked] = (),
) -> Tuning:
    """Returns how an arm is tuned by its points.

    A path is tuned if it takes more than one value within a search. Paths that one entry of the
    space sets, `linked` for each revision that added points, count once, and so do paths that are
    equal in every point. `points` are those of all revisions, by search and number; `config` has
    the values of paths that an earlier revision did not search, if it is known.

    Example:
        >>> points = {(0, n): {"a.rate": n, "b.rate": 2 * n, "decay": 0.1} for n in (0, 1)}
        >>> tuning_of(points, linked=[[["a.rate", "b.rate"]]]).text
        '1 with 2 trials (2 for each)'
    """
    paths = dict.fromkeys(path for values in points.values() for path in values)
    entries = [{path: n for n, each in enumerate(one) for path in each} for one in linked]
    columns: dict[Any, Any] = {}  # an entry of the space -> its values
    together: dict[Any, list[str]] = {}  # values -> the paths that have them
    for path in paths:
        # What the path has in each point, as values that can be compared.
        start = _comparable(config and _value(config, path))
        column = {
            place: _comparable(values[path]) if path in values else start
            for place, values in points.items()
        }
        first: dict[int, Any] = {}  # search -> its first value; others make the path a tuned one
        if any(first.setdefault(search, x) != x for (search, _), x in column.items()):
            # Linked paths are those that are linked in every revision.
            own = tuple(each.get(path, path) for each in entries) or (path,)
            key = columns.setdefault(own, tuple(column.items()))
            together.setdefault(key, []).append(path)
    numbers = {number for search, number in points if search == 0}
    searches = {search for search, _ in points}
    return Tuning(tuple(map(tuple, together.values())), len(numbers), len(searches))


def linked_of(revisions: Iterable[Mapping[str, Any]], arm: str) -> list[Linked]:
    """Returns what an entry of an arm's space sets, for each revision that added points to it."""
    # The revisions are those of a plan, as plan.json has them.
    found, seen = [], set()
    for revision in revisions:
        points = {(sum(x), number) for name, number, _, _, *x in revision["trials"] if name == arm}
        if points - seen:  # not only further seeds
            found.append(revision.get("linked", {}).get(arm, ()))
        seen |= points
    return found


def _value(config: Call, path: str) -> Any:
    """Returns the value of a config at a path; None if it has none."""
    with contextlib.suppress(KeyError):
        return Config(config, {}).at(path)


def _comparable(value: Any) -> Any:
    # 1 and 1.0 are equal, and True is not a number.
    return value if type(value) in (int, float) else repr(value)


def tuned_text(tunings: Mapping[str, Tuning]) -> str:
    """Returns what each arm tunes, such as "adamw 3 with 8 trials (2.67 for each) and sgd none"."""
    # There must be at least one arm.
    texts = {arm: each.text for arm, each in tunings.items()}
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return f"every arm {next(iter(texts.values()))}"
    return joined([f"{arm} {text}" for arm, text in texts.items()])


def tuned_line(tunings: Mapping[str, Tuning]) -> str:
    """Returns a line for the plan; for `tunings`, see `tuned_text`."""
    return f"hyperparameters that are tuned: {tuned_text(tunings)}"


def unequally_tuned(tunings: Mapping[str, Tuning], past: bool) -> list[str]:
    """Returns sentences about arms that tune different numbers of hyperparameters; or none."""
    # `past` is whether the trials have ended.
    tuned = {arm: each for arm, each in tunings.items() if each.count}
    untuned = [arm for arm in tunings if arm not in tuned]
    lines = []
    if len({each.count for each in tuned.values()}) > 1:
        text = (
            f"The arms {'tuned' if past else 'tune'} different numbers of hyperparameters:"
            f" {tuned_text(tuned)}"
        )
        if len({each.trials for each in tuned.values()}) == 1:
            text += "; the same number of trials is fewer for each where more are tuned"
        lines.append(f"{text}.")
    if tuned and untuned:
        verb = "tuned" if past else "tunes" if len(untuned) == 1 else "tune"
        they = "it is an untuned baseline" if len(untuned) == 1 else "they are untuned baselines"
        lines.append(f"{joined(untuned)} {verb} no hyperparameter: in this sweep {they}.")
    return lines
