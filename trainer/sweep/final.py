"""The second plan of a sweep: the winner of each arm again, on seeds that no trial used."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar

from trainer.config import Tree
from trainer.config.wording import brief, listing
from trainer.sweep.plan import ArmSearch, Plan, Trial, point_name, searches_of, seed_of_search
from trainer.sweep.spaces import decoded, encoded
from trainer.writers.files import replace_file
from trainer.writers.json_files import damaged, read_json
from trainer.writers.summary import Summary

T = TypeVar("T")

FINAL_FILE = "final.json"
_ADVICE = (
    "it names the winners of the search. Remove it, and they are chosen again from the results."
)


class _Winner(TypedDict):
    number: int
    value: float
    # The encoded values of an arm that a ladder moves, which has no points of its own. `value` is
    # then that of the winner on the highest rung that was searched.
    values: NotRequired[dict[str, Any]]


class _Choice(TypedDict):
    revision: int
    seeds: list[int]
    winners: dict[str, list[_Winner | None]]  # arm -> the winner of each search


@dataclass(frozen=True)
class Choice:
    """The winners of a revision of the plan."""

    revision: int  # its number
    seeds: tuple[int, ...]  # those on which the winners of search 0 run again
    # arm and search -> the number of its best point; None if every point diverged
    winners: Mapping[ArmSearch, int | None]
    # arm and search -> the values of an arm that a ladder moves, whose number is 0
    moved: Mapping[ArmSearch, Mapping[str, Tree]] = field(default_factory=dict)


def rank(plan: Plan, outcomes: Mapping[str, Summary | None]) -> dict[ArmSearch, dict[int, float]]:
    """Returns arm and search -> number of a point -> mean of the goal over seeds, best first."""
    # Points that diverged or failed on any seed have infinity as the worst value, and come last.
    # Points without all of their results are left out. `outcomes` is folder of a trial -> its
    # outcome; None or absent if there is none yet.
    sign = 1 if plan.goal.better == "min" else -1
    found: dict[ArmSearch, dict[int, float]] = {}
    for key, points in plan.points.items():
        means: dict[int, float] = {}
        for number, trials in points.items():
            ended = [x for trial in trials if (x := outcomes.get(trial.folder)) is not None]
            if len(ended) == len(trials):
                values = [outcome.value(plan.goal.row) for outcome in ended]
                seeds = [sign * math.inf if value is None else value for value in values]
                means[number] = math.fsum(seeds) / len(seeds)
        found[key] = dict(sorted(means.items(), key=lambda item: (sign * item[1], item[0])))
    return found


def mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean; None if a value is None or there is none."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def choose_winners(
    folder: Path,
    plan: Plan,
    outcomes: Mapping[str, Summary | None],
    record: Callable[[bytes], None],
) -> None:
    """Writes final.json: the best point of each search of an arm, and the seeds of its runs."""
    # All trials of the plan have results. `record` takes the file's content before it is written.
    file = folder / FINAL_FILE
    choices = [*read_list(file, list[_Choice], _ADVICE), choice_of(plan, outcomes)]
    text = json.dumps(choices, indent=1) + "\n"
    record(text.encode())
    replace_file(file, text.encode())


def choice_of(plan: Plan, outcomes: Mapping[str, Summary | None]) -> dict[str, Any]:
    """Returns what final.json has of a revision of a plan, all of whose trials have results."""
    winners: dict[str, list[_Winner | None]] = {arm: [] for arm in plan.arms}
    for (arm, _), points in sorted(rank(plan, outcomes).items(), key=lambda item: item[0][1]):
        number, value = next(iter(points.items()))
        # A search of which every point diverged has no winner.
        winners[arm].append(_Winner(number=number, value=value) if math.isfinite(value) else None)
    if plan.ladder is not None:
        moved = [arm for arm in plan.arms if plan.ladder.is_moved(arm)]
        for arm, search in itertools.product(moved, range(len(plan.offsets))):
            below = {source: winners[source][search] for source in plan.ladder.sources(arm)}
            won = {source: each for source, each in below.items() if each is not None}
            if len(won) < len(below):  # on a lower rung every point of the search diverged
                winners[arm].append(None)
                continue
            points = [plan.points[x, search][each["number"]][0] for x, each in won.items()]
            *_, last = won.values()  # that on the highest rung that was searched
            values = encoded(plan.ladder.moved(arm, [point.values for point in points]))
            winners[arm].append(_Winner(number=0, value=last["value"], values=values))
    return {"revision": plan.revision, "seeds": list(plan.final_seeds), "winners": winners}


def read_choices(folder: Path, plan: Plan) -> list[Choice]:
    """Reads the winners of each revision, in order; raises DamagedFile."""
    # They are those of the revisions whose trials were complete. Raises if final.json is damaged,
    # or disagrees with the plan.
    file, choices = folder / FINAL_FILE, []
    for each in read_list(file, list[_Choice], _ADVICE):
        number = each["revision"]
        if not 1 <= number <= plan.revision:
            raise damaged(file, f"the plan has no revision {number}", _ADVICE)
        planned = plan.revisions[number - 1]
        if each["seeds"] != planned["final_seeds"]:
            raise damaged(file, f"its seeds are {brief(each['seeds'])}", _ADVICE)
        if set(each["winners"]) != set(planned["arms"]):
            raise damaged(file, f"its arms are {listing(list(each['winners']))}", _ADVICE)
        winners, moved = {}, {}
        for arm, won in each["winners"].items():
            for search, winner in enumerate(won):
                winners[arm, search] = None if winner is None else winner["number"]
                if winner is not None and arm not in plan.searched:
                    moved[arm, search] = decoded(winner.get("values", {}))
                elif winner and winner["number"] not in plan.points.get((arm, search), ()):
                    point = point_name(search, winner["number"])
                    raise damaged(file, f"{arm} has no point {point}", _ADVICE)
        wanted = {(arm, s) for arm in planned["arms"] for s in range(searches_of(planned))}
        if set(winners) != wanted:
            raise damaged(file, "its searches are not those of the plan", _ADVICE)
        choices.append(Choice(number, tuple(each["seeds"]), winners, moved))
    return choices


def trials_until(plan: Plan, revision: int) -> Sequence[Trial]:
    """Returns the trials of a plan up to one of its revisions, by its number; none for 0."""
    return plan.trials[: sum(len(each["trials"]) for each in plan.revisions[:revision])]


def wrong_choices(
    folder: Path, plan: Plan, outcome: Callable[[str], Summary | None]
) -> Iterator[str]:
    """Yields what in final.json differs from the ranking of trials, as parts of sentences."""
    # `outcome` takes the folder of a trial. Raises DamagedFile as `read_choices` does.
    read_choices(folder, plan)
    for each in read_list(folder / FINAL_FILE, list[_Choice], _ADVICE):
        revisions, trials = plan.revisions[: each["revision"]], trials_until(plan, each["revision"])
        outcomes = {trial.folder: outcome(trial.folder) for trial in trials}
        if None in outcomes.values():
            continue  # one was removed, to be computed again
        arms = {arm: plan.arms[arm] for arm in revisions[-1]["arms"]}
        then = replace(plan, arms=arms, trials=trials, revisions=revisions)
        for arm, best in choice_of(then, outcomes)["winners"].items():
            for search, (ours, theirs) in enumerate(zip(best, each["winners"][arm], strict=True)):
                if not is_same_value(ours, theirs):
                    yield (
                        f"its winner of {arm} in search {search} of revision {each['revision']} is"
                        f" {_shown(theirs)}, and the best of the trials is {_shown(ours)}"
                    )


def is_same_value(one: Any, other: Any) -> bool:
    """Returns whether two values are equal, floats up to rounding, those in dicts too."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same_value(one[x], other[x]) for x in one)
    if type(one) is float and type(other) is float and not math.isnan(other):
        return math.isclose(one, other, rel_tol=1e-9)
    return one == other or (one != one and other != other)  # NaN is the same as NaN


def _shown(winner: _Winner | None) -> str:
    if winner is None:
        return "none"
    if "values" in winner:
        return f"moved to {', '.join(f'{path} {x}' for path, x in winner['values'].items())}"
    return f"point {winner['number']} with {winner['value']:.6g}"


def final_trials(folder: Path, plan: Plan) -> list[Trial] | None:
    """Returns the final trials; None before the winners of the plan's revision are chosen."""
    # They are ordered by arm, search and seed. Raises DamagedFile as `read_choices` does.
    choices = read_choices(folder, plan)
    chosen = [n for n, each in enumerate(choices) if each.revision == plan.revision]
    return trials_of_choice(plan, choices[: chosen[0] + 1]) if chosen else None


def trials_of_choice(plan: Plan, choices: Sequence[Choice]) -> list[Trial]:
    """Returns the final trials of the last one of some choices."""
    # They are in `final/`. If a search had another winner before an extension of the sweep, those
    # of its new winner are in `final.N/`, where N is the number of the revision.
    trials = []
    for (arm, search), number in choices[-1].winners.items():
        if number is None:
            continue
        won = [each.winners.get((arm, search)) for each in choices]
        since = won.index(number)
        before = any(other not in (None, number) for other in won[:since])
        name = f"final.{choices[since].revision}" if before else "final"
        if (values := choices[-1].moved.get((arm, search))) is None:
            trial = plan.points[arm, search][number][0]
        else:
            trial = Trial(arm, 0, 0, values, plan.arms[arm].config, search=search)
        trials += [
            replace(trial, seed=seed_of_search(seed, plan.offsets[search]), final=name)
            for seed in choices[-1].seeds
        ]
    return trials


def read_list(file: Path, kind: type[list[T]], advice: str) -> list[T]:
    """Reads a file of choices; none before the first one. Raises DamagedFile."""
    try:
        return read_json(file, kind, advice)
    except FileNotFoundError:
        return []
