"""The panels of what was done: costs, spaces, revisions, hyperparameters, a text for a paper."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trainer.config import Call
from trainer.config.wording import brief
from trainer.messages import joined, plural
from trainer.report.conditions import compared_groups, fingerprint_rows, read_run_config
from trainer.report.document import Block, Cell, Column, Columns, Table
from trainer.report.pairs import Pair
from trainer.report.results import ArmSpace, Result, Revision, Workload, tunings
from trainer.sweep.confounders import arguments
from trainer.sweep.tuned import Tuning, tuned_text

_ROOT = "optimizer"

_ELSEWHERE = (
    "Differences on single test examples gave intervals for other test sets of the same size, by"
    " the variances over runs and over examples, with Satterthwaite's degrees of freedom."
)


def cost_block(workload: Workload) -> Block:
    """Returns the panel of costs, tuned hyperparameters, spaces and revisions."""
    tables = [_costs(workload)]
    tables += [_tuned(workload)] if workload.trials else []
    tables += [_spaces(workload)] if workload.spaces else []
    tables += [_revisions(workload)] if len(workload.revisions) > 1 else []
    return Block(warnings=tuple(_warnings(workload)), tables=tuple(tables))


def _costs(workload: Workload) -> Table:
    trials = {run.name for run in workload.trials}
    purposes = {
        "search": workload.trials,
        "compared": [run for run in workload.finals if run.name not in trials],
        "replaced": workload.replaced,
    }
    runs = {
        (arm, purpose): of_arm
        for purpose, every in purposes.items()
        for arm in workload.arms
        if (of_arm := [run for run in every if run.arm == arm])
    }
    ends = {key: Counter(run.end for run in of_arm) for key, of_arm in runs.items()}
    columns: Columns[tuple[str, str]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("runs", "runs"): lambda r: r[1],
        Column("count", "number", "integer"): lambda r: len(runs[r]),
        Column("done", "done", "integer"): lambda r: ends[r]["done"],
        Column("diverged", "diverged", "integer"): lambda r: ends[r]["diverged"],
        Column("failed", "failed", "integer"): lambda r: ends[r]["failed"],
        Column("pruned", "stopped early", "integer"): lambda r: ends[r]["pruned"] or None,
        Column("missing", "missing", "integer"): lambda r: ends[r]["missing"],
        Column("retried", "retried", "integer"): lambda r: sum(run.retries > 0 for run in runs[r]),
        Column("steps", "steps", "integer"): lambda r: sum(run.updates for run in runs[r]),
        Column("flops", "FLOPs", "number"): lambda r: _sum(
            None if run.flops is None else run.flops * run.updates for run in runs[r]
        ),
        Column("seconds", "training time", "seconds"): lambda r: _sum(
            run.summary.seconds for run in runs[r] if run.end != "missing" or run.updates
        ),
    }
    note = (
        "Steps and FLOPs are those of runs that have ended or wait at a cut; a FLOP count is the"
        " compiler's for a step, evaluations left out. Retried runs were interrupted and resumed."
        " Training time is the sum over runs, without compilation and evaluation."
    )
    return Table.of("ledger", "What was computed", runs, columns, note).compact()


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns a sum, None if a value is not known."""
    found = list(values)
    return None if None in found else math.fsum(x for x in found if x is not None)


def _spaces(workload: Workload) -> Table:
    """Returns what was searched: a row for each axis, and for each revision that added points."""
    rows: list[tuple[Cell, ...]] = []
    searches = workload.searches if workload.searches > 1 else None
    many = len(workload.revisions) > 1
    for arm, last in workload.spaces.items():
        first = [run for run in workload.trials_of(arm) if run.search == 0]
        points, seeds = len({run.number for run in first}), len({run.seed for run in first})
        parts = [(None, points, last)]
        if many:
            parts = [
                (each.number, each.points[arm], each.spaces[arm])
                for each in workload.revisions
                if each.points.get(arm)
            ]
        for revision, count, space in parts:
            for path, text in space.axes.items() or [("–", "–")]:
                rows.append((arm, revision, searches, count, seeds, space.method, path, text))
    columns = (
        *Column.named(arm="text", revision="integer", searches="integer"),
        Column("points", "points of each" if searches and not many else "points", "integer"),
        *Column.named(seeds="integer", method="text", path="code", space="text"),
    )
    note = (
        "Points are those that a revision of the plan added, over all searches of the arm, with the"
        " space which they are from."
    )
    title = "What was searched"
    return Table("spaces", title, columns, tuple(rows), note if many else "").compact()


def _tuned(workload: Workload) -> Table:
    """Returns how many hyperparameters each arm tunes, with how many trials for each."""
    searches = workload.searches if workload.searches > 1 else None
    trials = "trials of each search" if searches else "trials"
    columns: Columns[tuple[str, Tuning]] = {
        Column("arm", "arm"): lambda r: r[0],
        Column("hyperparameters", "hyperparameters tuned", "integer"): lambda r: r[1].count,
        Column("searches", "searches", "integer"): lambda _: searches,
        Column("trials", trials, "integer"): lambda r: r[1].trials,
        Column("trials_each", "trials for each hyperparameter", "number"): lambda r: (
            r[1].trials_each
        ),
        Column("paths", "paths", "code"): lambda r: (
            "; ".join(" = ".join(paths) for paths in r[1].hyperparameters) or None
        ),
    }
    note = (
        "A hyperparameter is tuned if it has more than one value within a search. Paths that one"
        " entry of a space sets together, or that are equal in all trials, count once; so does an"
        " entry whose values are whole optimizers, in whatever these differ. An arm that tuned none"
        " is untuned in this sweep. Whether its values were tuned before is not known."
    )
    title = "How many hyperparameters each arm tuned"
    made = Table.of("tuned", title, tunings(workload).items(), columns, note)
    return made.compact(["trials_each"])


def _revisions(workload: Workload) -> Table:
    columns: Columns[Revision] = {
        Column("revision", "revision", "integer"): lambda r: r.number,
        Column("added", "runs added"): lambda r: (
            joined([f"{arm} {count:,}" for arm, count in r.trials.items()]) or "none"
        ),
        Column("changes", "also changed"): lambda r: "; ".join(r.changes) or None,
        Column("known", "results known before", "integer"): lambda r: r.known,
        Column("winners_known", "winners known"): lambda r: (
            None if r.known is None else "yes" if r.winners_known else "no"
        ),
        Column("digest", "hash of the plan", "code"): lambda r: r.digest[:12],
    }
    note = "A revision that was made after results were known may have been chosen because of them."
    title = "Revisions of the plan"
    return Table.of("revisions", title, workload.revisions, columns, note).compact()


def _warnings(workload: Workload) -> Iterator[str]:
    if replaced := list(dict.fromkeys(run.arm for run in workload.replaced)):
        yield (
            f"The winner of {joined(replaced)} changed after it had final runs: results on the"
            " reported split were known when the sweep was extended."
        )
    points = {arm: len({run.number for run in workload.trials_of(arm)}) for arm in workload.arms}
    if workload.trials and len(set(points.values())) > 1:
        listed = joined([f"{arm} {count:,}" for arm, count in points.items()])
        yield f"The arms had different numbers of trials ({listed}): budgets are unequal."
    elif workload.budgets != "equal":
        yield (
            "The file of the sweep allows the arms unequal budgets: compare their steps and their"
            " FLOPs."
        )
    for arm in workload.arms:
        runs = workload.trials_of(arm)
        ended = [run for run in runs if run.end != "missing"]
        failed = [run for run in (*runs, *workload.finals_of(arm)) if run.end == "failed"]
        if ended and len(ended) == len(runs) and all(run.end == "diverged" for run in ended):
            yield f"Every trial of {arm} diverged ({len(ended):,})."
        if failed:
            yield (
                f"{plural(len(failed), 'run')} of {arm} failed, such as {failed[0].name}:"
                f" {failed[0].summary.why or 'no reason was recorded'}"
            )


def methods_block(workload: Workload, pairs: Sequence[Pair]) -> Block:
    """Returns the panel of methods."""
    runs = [run for run in (*workload.trials, *workload.finals) if run.fingerprint]
    text = (_paragraph(workload, pairs, runs),)
    tables = [*filter(None, [hyperparameters_table(workload)])]
    if runs:
        columns = Column.named(name="text", value="code")
        rows, title = tuple(fingerprint_rows(runs)), "Fingerprint of the runs"
        tables.append(Table("fingerprint", title, columns, rows))
    if workload.revisions:
        columns = (Column("what", "what"), Column("sha256", "SHA-256", "code"))
        rows = tuple((f"plan, revision {each.number}", each.digest) for each in workload.revisions)
        tables.append(Table("hashes", "Hashes", columns, rows))
    return Block(text=text, tables=tuple(tables))


def _paragraph(workload: Workload, pairs: Sequence[Pair], runs: Sequence[Result]) -> str:
    """Returns the paragraph; each of its sentences is true of this workload."""
    sentences = []
    if arms := [arm for arm in workload.arms if arm in workload.configs]:
        data = _common(workload, arms, "data")
        model = _common(workload, arms, "model")
        sentences.append(f"We compared {joined(arms)} on {data}, with {model}.")
        sentences += filter(None, [compared_groups(workload)])
        planned = [run for run in (*workload.trials, *workload.finals) if run.steps]
        steps = sorted({run.planned for run in planned})
        given = (workload.configs[arm].kwargs.get("data") for arm in arms)
        sizes = [x.kwargs.get("batch_size") if isinstance(x, Call) else None for x in given]
        size = sizes[0] if isinstance(sizes[0], int) and len(set(map(repr, sizes))) == 1 else None
        if steps:
            ended = all(run.end == "done" for run in planned)
            which = "Every run" if ended else "Every run that came to its end"
            sentences.append(
                f"{which} made {joined([f'{n:,}' for n in steps])} steps"
                + (f" with {size} examples a batch." if size else ".")
            )
            words = {"pruned": "stopped early", "diverged": "diverged", "failed": "failed"}
            counts = Counter(run.end for run in planned)
            early = [f"{counts[end]:,} {text}" for end, text in words.items() if counts[end]]
            early += [f"{counts['missing']:,} had not ended"] if counts["missing"] else []
            sentences += [f"Of {len(planned):,} runs, {joined(early)}."] if early else []
    sentences += [*_search(workload), *_final(workload), *_tests(pairs)]
    if versions := _versions(runs):
        sentences.append(f"All runs used {versions}.")
    return " ".join(sentences)


def _common(workload: Workload, arms: Sequence[str], key: str) -> str:
    values = [workload.configs[arm].kwargs.get(key) for arm in arms]
    texts = list(dict.fromkeys("the default" if x is None else brief(x, 1000) for x in values))
    return texts[0] if len(texts) == 1 else f"{joined(texts)} (differing between arms)"


def _search(workload: Workload) -> list[str]:
    if not workload.trials:
        return []
    every = [run for arm in workload.arms for run in workload.trials_of(arm)]
    counts = {arm: workload.points_of_search(arm) for arm in workload.arms}
    seeds = len({run.seed for run in every if run.search == 0})
    methods = list(dict.fromkeys(space.method for space in workload.spaces.values()))
    each = set(counts.values())
    many = (
        f"{plural(each.pop(), 'point')} for each arm"
        if len(each) == 1
        else joined([f"{plural(n, 'point')} for {arm}" for arm, n in counts.items()])
    )
    if workload.searches > 1:
        many += f", in each of {workload.searches} independent searches"
    tuned = tunings(workload)
    if any(each.count for each in tuned.values()):
        sentences = [
            f"Hyperparameters were tuned with {many}, chosen by {joined(methods)}, with"
            f" {plural(seeds, 'seed')} for each.",
            f"How many were tuned: {tuned_text(tuned)}.",
        ]
    else:
        sentences = [
            f"No hyperparameter was tuned: the search had {many}, with {plural(seeds, 'seed')} for"
            " each."
        ]
    if len(workload.revisions) > 1:
        return [*sentences, *_search_by_revision(workload.revisions)]
    if spaces := _axes(workload.spaces):
        sentences.append(f"The search spaces were: {spaces}.")
    return sentences


def _axes(spaces: Mapping[str, ArmSpace]) -> str:
    """Returns the axes of arms, such as "adamw: learning_rate log_uniform 0.001 to 0.1"."""
    return "; ".join(
        f"{arm}: " + ", ".join(f"{path} {text}" for path, text in space.axes.items())
        for arm, space in spaces.items()
        if space.axes
    )


def _search_by_revision(revisions: Sequence[Revision]) -> list[str]:
    """Returns a sentence for each revision: what was known, and its points with their spaces."""
    sentences, before = [], {}
    for each in revisions:
        spaces = {arm: each.spaces[arm] for arm in each.points}
        same = all(before.get(arm) == space for arm, space in spaces.items())
        points = joined([f"{plural(n, 'point')} for {arm}" for arm, n in each.points.items()])
        if not points:
            added = f"no points ({'; '.join(each.changes)})"
        else:
            added = f"{points}, from the {'same spaces' if same else f'spaces: {_axes(spaces)}'}"
        plan = "The first plan had"
        if each.number > 1:
            known = plural(each.known, "run") if each.known else "none"
            chosen = "" if each.winners_known else "not "
            plan = (
                f"Revision {each.number}, made when {known} of the search had a result and the"
                f" winners had {chosen}been chosen, added"
            )
        sentences.append(f"{plan} {added}.")
        before |= spaces
    return sentences


def _final(workload: Workload) -> list[str]:
    goal = workload.goal
    ended = Counter((run.arm, run.search) for run in workload.finals if run.end != "missing")
    if not ended:
        return []
    counts = sorted(set(ended.values()))
    many, noun = joined(list(map(str, counts))), "seed" if counts == [1] else "seeds"
    if not workload.trials:
        return [f"Each config was run with {many} {noun}; we report the {goal.words}."]
    best = "smallest" if goal.better == "min" else "largest"
    search = {run.name for run in workload.trials}
    which = "search" if workload.searches > 1 else "arm"
    point = f"point with the {best} {goal.metric} on the {goal.select_on} split"
    if any(run.name in search for run in workload.finals):
        return [
            f"For each {which} we report the {point}, over the {many} {noun} on which it was"
            " selected."
        ]
    return [
        f"For each {which} the {point} was run again with {many} fresh {noun}, on which we report"
        f" the {goal.words}."
    ]


def _tests(pairs: Sequence[Pair]) -> Iterator[str]:
    if tests := list(dict.fromkeys(pair.test for pair in pairs if pair.test)):
        over = f"all {len(pairs)} pairs and all looks" if len(pairs) > 1 else "all looks"
        yield (
            f"Arms were compared by the {joined(tests)}, with a probability of at most 5% that any"
            f" claim is false, over {over} at the results; the intervals of differences hold at the"
            " same time."
        )
    if tests and any(pair.elsewhere and pair.elsewhere.found for pair in pairs):
        yield _ELSEWHERE


def _versions(runs: Sequence[Result]) -> str:
    if not runs:
        return ""

    def of(key: str, length: int | None = None) -> str:
        found = dict.fromkeys(str(run.fingerprint.get(key) or "")[:length] for run in runs)
        return joined([each for each in found if each])

    edited = any(run.fingerprint.get("uncommitted", "none") != "none" for run in runs)
    changes = " with uncommitted changes" if edited else ""
    commits = of("commit", 12)  # unknown if Lockstep is an installed package
    at = f"at commit {commits}{changes}" if commits else ""
    parts = [" ".join(filter(None, ["Lockstep", of("lockstep"), at]))]
    parts += [f"{name} {of(name)}" for name in ("jax", "optax") if name in runs[0].fingerprint]
    return f"{', '.join(parts)}, on {of('devices').replace('cpu cpu', 'cpu')}"


def hyperparameters_table(workload: Workload) -> Table | None:
    """Returns the optimizers' arguments of each arm's compared runs; None if none is shown."""
    # There is a row for each argument whose values differ between arms, or for every one if there
    # is a single arm. It is None if no config can be read, or no argument differs.
    arms: dict[str, dict[str, str]] = {}
    ranges = False
    for arm in workload.arms:
        found = [
            dict(arguments(root.kwargs[_ROOT], _ROOT))
            for root in [read_run_config(run.folder) for run in workload.finals_of(arm)]
            if root is not None and _ROOT in root.kwargs
        ]
        if found:
            every = dict.fromkeys(path for each in found for path in each)
            of_path = {path: {each.get(path, "–"): None for each in found} for path in every}
            arms[arm] = {path: _cell(list(values)) for path, values in of_path.items()}
            ranges |= any(len(values) > 1 for values in of_path.values())
    rows = tuple(
        (path, *values)
        for path in dict.fromkeys(path for arguments in arms.values() for path in arguments)
        if len(set(values := [arguments.get(path) for arguments in arms.values()])) > 1
        or len(arms) == 1
    )
    if not rows:
        return None
    columns = (Column("path", "path", "code"), *Column.titled(arms, {"path"}))
    note = (
        "Defaults included; – is an argument that the arm's optimizer does not have. What is equal"
        " in all arms is left out: config_full.yaml in the folder of a run has everything."
    )
    if ranges:
        note += (
            " Where the winners of an arm's searches differ, the smallest and the largest of their"
            " values are shown."
        )
    return Table("hyperparameters", "Hyperparameters of the compared runs", columns, rows, note)


def _cell(values: Sequence[str]) -> str:
    """Returns the only value, the ends of several numbers, or all other values; none is twice."""
    if len(values) == 1:
        return values[0]
    try:
        ordered = sorted(values, key=float)
    except ValueError:
        return " or ".join(values)
    return f"{ordered[0]} to {ordered[-1]}"
