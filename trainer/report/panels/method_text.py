"""The panel of methods: a paragraph for a paper, hyperparameters, and what results depend on."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from trainer.config import Call
from trainer.config.wording import brief
from trainer.messages import joined, plural
from trainer.report.columns import columns_of, named_columns
from trainer.report.conditions import fingerprint_rows, read_config
from trainer.report.document import Block, Column, Table
from trainer.report.pairs import Pair
from trainer.report.results import Result, Revision, Space, Workload
from trainer.report.spaces import tunings
from trainer.sweep.confounders import arguments
from trainer.sweep.tuned import tuned_text

_ROOT = "optimizer"

_ELSEWHERE = (
    "Differences on single test examples gave intervals for other test sets of the same size, by"
    " the variances over runs and over examples, with Satterthwaite's degrees of freedom."
)


def methods_block(workload: Workload, pairs: Sequence[Pair], prefix: str) -> Block:
    """Returns the panel of methods."""
    runs = [run for run in (*workload.trials, *workload.finals) if run.fingerprint]
    text = (_paragraph(workload, pairs, runs),)
    hyperparameters = hyperparameters_table(workload, prefix)
    tables = [] if hyperparameters is None else [hyperparameters]
    if runs:
        columns = named_columns(name="text", value="code")
        rows, title = tuple(fingerprint_rows(runs)), "Fingerprint of the runs"
        tables.append(Table(f"{prefix}fingerprint", title, columns, rows))
    if workload.revisions:
        columns = (Column("what", "what"), Column("sha256", "SHA-256", "code"))
        rows = tuple((f"plan, revision {each.number}", each.digest) for each in workload.revisions)
        tables.append(Table(f"{prefix}hashes", "Hashes", columns, rows))
    return Block(text=text, tables=tuple(tables))


def _paragraph(workload: Workload, pairs: Sequence[Pair], runs: Sequence[Result]) -> str:
    """Returns the paragraph; each of its sentences is true of this workload."""
    sentences = []
    arms = [arm for arm in workload.arms if arm in workload.configs]
    if arms:
        data = _common(workload, arms, "data")
        model = _common(workload, arms, "model")
        sentences.append(f"We compared {joined(arms)} on {data}, with {model}.")
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
            sentences += _early(planned)
    sentences += [*_search(workload), *_final(workload), *_tests(pairs)]
    if versions := _versions(runs):
        sentences.append(f"All runs used {versions}.")
    return " ".join(sentences)


def _early(runs: Sequence[Result]) -> list[str]:
    """Returns a sentence on how many runs made fewer steps than planned; empty if none did."""
    words = {"pruned": "stopped early", "diverged": "diverged", "failed": "failed"}
    counts = Counter(run.end for run in runs)
    told = [f"{counts[end]:,} {text}" for end, text in words.items() if counts[end]]
    told += [f"{counts['missing']:,} had not ended"] if counts["missing"] else []
    return [f"Of {len(runs):,} runs, {joined(told)}."] if told else []


def _common(workload: Workload, arms: Sequence[str], key: str) -> str:
    values = [workload.configs[arm].kwargs.get(key) for arm in arms]
    texts = list(dict.fromkeys("the default" if x is None else brief(x, 1000) for x in values))
    return texts[0] if len(texts) == 1 else f"{joined(texts)} (differing between arms)"


def _search(workload: Workload) -> list[str]:
    if not workload.trials:
        return []
    first = [run for run in workload.trials if run.search == 0]
    counts = {arm: len({r.number for r in first if r.arm == arm}) for arm in workload.arms}
    seeds = len({run.seed for run in first})
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


def _axes(spaces: Mapping[str, Space]) -> str:
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
    tests = list(dict.fromkeys(pair.test for pair in pairs if pair.test))
    if tests:
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
    return f"{', '.join(parts)}, on {of('devices')}"


def hyperparameters_table(workload: Workload, prefix: str) -> Table | None:
    """Returns the optimizers' arguments of each arm's compared runs; None if none is shown."""
    # There is a row for each argument whose values differ between arms, or for every one if there
    # is a single arm. It is None if no config can be read, or no argument differs.
    arms: dict[str, dict[str, str]] = {}
    ranges = False
    for arm in workload.arms:
        roots = [read_config(run.folder) for run in workload.finals_of(arm)]
        found = [
            dict(arguments(root.kwargs[_ROOT], _ROOT))
            for root in roots
            if root is not None and _ROOT in root.kwargs
        ]
        if found:
            every = dict.fromkeys(path for each in found for path in each)
            of_path = {path: {each.get(path, "–"): None for each in found} for path in every}
            arms[arm] = {path: _cell(list(values)) for path, values in of_path.items()}
            ranges |= any(len(values) > 1 for values in of_path.values())
    paths = dict.fromkeys(path for arguments in arms.values() for path in arguments)
    rows = tuple(
        (path, *values)
        for path in paths
        if len(set(values := [arguments.get(path) for arguments in arms.values()])) > 1
        or len(arms) == 1
    )
    if not rows:
        return None
    columns = (Column("path", "path", "code"), *columns_of(arms, {"path"}))
    note = (
        "Defaults included; – is an argument that the arm's optimizer does not have. What is equal"
        " in all arms is left out: config_full.yaml in the folder of a run has everything."
    )
    if ranges:
        note += (
            " Where the winners of an arm's searches differ, the smallest and the largest of their"
            " values are shown."
        )
    title = "Hyperparameters of the compared runs"
    return Table(f"{prefix}hyperparameters", title, columns, rows, note)


def _cell(values: Sequence[str]) -> str:
    """Returns the only value, the ends of several numbers, or all other values; none is twice."""
    if len(values) == 1:
        return values[0]
    try:
        ordered = sorted(values, key=float)
    except ValueError:
        return " or ".join(values)
    return f"{ordered[0]} to {ordered[-1]}"
