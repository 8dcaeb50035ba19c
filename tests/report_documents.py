"""Two reports for tests of what is written: a small one by hand, a large one of random numbers.

The small one has names that each format has to escape, and numbers of which the tests know how they
are written; the large one has all kinds of panels.
"""

import math
from typing import Any

import numpy as np

from trainer.report.document import (
    Axis,
    Block,
    Column,
    Figure,
    Panel,
    Report,
    Series,
    Table,
    Trials,
)


def make_table(name, title, heads, rows, note=""):
    """Returns a table.

    Args:
        name: of the table, as are `title` and `note`.
        title: the caption.
        heads: the columns, with "; " between: "name", "name: title" or "name: title: kind".
        rows: any iterable.
        note: sentences below the table.
    """
    each: Any = [words.split(": ") for words in heads.split("; ")]
    columns = tuple(Column(*(words if len(words) > 1 else 2 * words)) for words in each)
    return Table(name, title, columns, tuple(rows), note)


def make_means(name, title, mean, kind, rows, note=""):
    """Returns a table of arms with their numbers of runs, means and intervals."""
    ends = f"low: 95% low: {kind}; high: 95% high: {kind}"
    return make_table(name, title, f"arm; n: n: integer; mean: {mean}: {kind}; {ends}", rows, note)


def report_of(*tables, panel="arms"):
    """Returns a report of one panel, which has these tables and nothing else."""
    return Report("R", (), (), (Panel(panel, "A panel", "tests", (Block(tables=tables),)),))


# Reports that lack things.

UNUSABLE = make_table(
    "u", "Unusable", "arm; value: value: number", (("a", None), ("b", math.nan), ("a", math.inf))
)


def bare_reports():
    """Returns reports without panels, blocks, rows, finite values or trials that ended well."""
    nothing = Table("t", "Nothing", UNUSABLE.columns, ())
    empty = Figure("f", "F", "D", Axis("x"), Axis("y", log=True), (), UNUSABLE)
    lost = (Series("line", "a", [0.0], [math.nan]), Series("band", "", [0.0], [0.0], [math.inf]))
    figures = (empty, Figure("g", "G", "D", Axis("x"), Axis("y"), lost, UNUSABLE))

    def panel(*blocks):
        return (Panel("p", "P", "tests", blocks),)

    def trials(*rows):
        heads = "trial: trial: code; arm; end; goal: loss: number"
        made = make_table("trials", "Every run", heads, rows)
        return (Trials("w", made, "goal", "min", (), "run {trial}"),)

    failed = trials(("x", "a", "failed", None))
    return [
        Report("", (), (), ()),
        Report("t", ("v",), ("a",), panel()),
        Report("t", ("v",), ("a",), panel(Block())),
        Report("t", (), ("a",), panel(Block(tables=(nothing, UNUSABLE)))),
        Report("t", (), ("a",), (), trials()),
        Report("t", ("v",), ("a",), panel(Block(figures=figures)), trials()),
        Report("t", (), (), (), failed),
        Report("t", (), ("a",), panel(Block(figures=figures)), failed),
        Report("t", (), ("a",), (), trials(("x", "a", "done", math.nan))),
    ]


# The small report.

HOSTILE = r"a_b & 100% #1 $x$ {~^\`"
HOSTILE_ARMS = (HOSTILE, "[sgd]*x* | <b>", "adamw")
COMMAND = "python -m trainer sweep extend out/first --arm adamw --axis learning_rate --high 0.3"


def small_report():
    """Returns a report on two workloads and three arms."""
    each = ("digits", "fashion")
    verdicts = tuple(
        f"On {workload}, {HOSTILE} is better than adamw by 1.1% [0.1%, 2.1%], p = 0.034."
        for workload in each
    )
    warning = f"The best learning rate of adamw is at the edge of its space: run `{COMMAND}`."
    tuning = (Block(w, warnings=(warning,), figures=(_small_tuning(w),)) for w in each)
    panels = (
        Panel("verdict", "Verdict", "tests", (Block(text=(*verdicts, "On the test split.")),)),
        Panel("ledger", "Costs", "describes", (Block(tables=(_small_ledger(),)),)),
        Panel("arms", "Arms", "tests", tuple(Block(w, tables=(_small_means(w),)) for w in each)),
        Panel("pairs", "Pairs", "tests", (Block("digits", tables=(_small_pairs(),)),)),
        Panel("tuning", "Tuning curves", "describes", tuple(tuning)),
        Panel("trials", "Trials", "describes", ()),
    )
    trials, title = tuple(map(_small_trials, each)), f"{HOSTILE} and others"
    return Report(title, verdicts, HOSTILE_ARMS, panels, trials, "By Lockstep 0.1.")


def empty_report():
    """Returns a report in which nothing could be computed."""
    block = Block(warnings=("All diverged.",), tables=(_accuracies("arms", ()),))
    panels = (Panel("arms", "Arms", "tests", (block,)),)
    return Report("Nothing", ("Not decided: all trials diverged.",), (), panels)


def _accuracies(name, rows, note=""):
    return make_means(name, "Test accuracy", "mean test accuracy", "share", rows, note)


def _small_means(workload):
    rows = (
        (HOSTILE_ARMS[0], 8, 0.97123, 0.96912, 0.97334),
        (HOSTILE_ARMS[1], 1, 0.95, None, None),
        (HOSTILE_ARMS[2], 8, 0.96011, 0.95, 0.97022),
    )
    return _accuracies(f"arms_{workload}", rows, "Student's t, 95%.")


def _small_pairs():
    heads = (
        "pair; difference: difference: number; difference_low: 95% low: number;"
        " difference_high: 95% high: number; p_holm: p (Holm): p; better: P(A > B): share;"
        " better_low: low: share; better_high: high: share"
    )
    rows = (
        (f"{HOSTILE} - {HOSTILE_ARMS[1]}", 0.0112, 0.0012, 0.0212, 3e-7, 0.9, 0.6, 0.97),
        ("ϵ β₁ – 中文", -0.0112, -0.0212, -0.0012, 0.034, 0.5, 0.2, 0.8),
        ("adamw - none", None, None, None, None, None, None, None),
    )
    return make_table("pairs", "Differences", heads, rows)


def _small_ledger():
    heads = (
        "arm; trials: trials: integer; flops: FLOPs: integer; seconds: seconds: seconds;"
        " rate: learning rate: number; loss: worst loss: number; space: search space;"
        " folder: folder: code"
    )
    space = "learning_rate: log_uniform(1e-05, 1); weight_decay: choice(0, 0.1, 0.2, 0.5)"
    large = 123_456_789_012_345
    rows = (
        (HOSTILE_ARMS[0], 64, large, 4321.5, 3e-5, math.inf, space, "../trials/a b/c|d"),
        (HOSTILE_ARMS[1], 1024, 3, 12.0, 0.1, math.nan, "", "../trials/`x`/__y__"),
        (HOSTILE_ARMS[2], 0, None, None, None, -math.inf, "learning_rate: 0.1", None),
    )
    return make_table("ledger", "What each arm cost", heads, rows)


def _small_tuning(workload):
    rows = ((arm, k, 0.9 + k / 100) for arm in HOSTILE_ARMS for k in range(1, 5))
    series = tuple(
        Series("line", arm, (1.0, 2.0, 3.0, 4.0), (0.91, 0.92, math.nan, 0.94 - 0.01 * index))
        for index, arm in enumerate(HOSTILE_ARMS)
    )
    name, title = f"tuning_{workload}", "Best of k trials"
    numbers = make_table(f"{name}_numbers", title, "arm; k: k: integer; best: best: number", rows)
    said = "Three lines rise from 0.91; ]( that of <b> is the lowest."
    return Figure(name, title, said, Axis("k trials"), Axis("best accuracy"), series, numbers)


def _small_trials(workload):
    heads = (
        "trial; arm; end; accuracy: validation accuracy: share;"
        " learning_rate: learning_rate: number; folder: folder: code"
    )
    ends = [("diverged", None), *(("done", 0.5 + 0.01 * index) for index in range(1, 9))]
    rows = (
        (f"{index:02}", arm, *end, 10.0**-index, f"../trials/{arm}/{index:02}")
        for arm in HOSTILE_ARMS
        for index, end in enumerate(ends)
    )
    command = "python -m trainer --config={folder}/config.yaml --workdir=again"
    made = make_table(f"trials_{workload}", "Trials", heads, rows)
    return Trials(workload, made, "accuracy", "max", ("learning_rate",), command)


# The large report.

ARMS = ("muon", "adamw", "sgd", "soap", "schedule_free_adamw")
WORKLOADS = ("digits", "fashion_mnist")
REPEAT = "python -m trainer --config=/data/sweeps/digits/{trial}/config.yaml"


def best_of_k(values, better="min"):
    """Returns the mean best over all subsets of k values, by the sum of the definition."""
    worst_first = sorted(values, reverse=better == "min")
    n = len(values)
    means = []
    for k in range(1, n + 1):
        weights = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(1, n + 1)]
        means.append(sum(w * v for w, v in zip(weights, worst_first, strict=True) if w))
    return means


def large_report(trials=256, rows=100, arms=ARMS, workloads=WORKLOADS):
    """Returns a report.

    Args:
        trials: how many runs the search of a workload has.
        rows: points of a learning curve.
        arms: names.
        workloads: names.
    """
    random = np.random.default_rng(0)
    made = [_Workload(name, trials, rows, arms, random, len(workloads) > 1) for name in workloads]

    def panel(name, title, kind, block):
        return Panel(name, title, kind, tuple(map(block, made)))

    return Report(
        title=f"{', '.join(arms)} on {' and '.join(workloads)}",
        verdict=tuple(each.verdict() for each in made),
        arms=tuple(arms),
        panels=(
            panel("verdict", "Verdict", "tests", _Workload.verdict_block),
            panel("ledger", "Ledger", "describes", _Workload.ledger),
            panel("arms", "Arms", "tests", _Workload.arms_block),
            panel("pairs", "Pairs", "tests", _Workload.pairs),
            panel("tuning", "Tuning curves", "describes", _Workload.tuning),
            panel("rate", "Sensitivity to the learning rate", "describes", _Workload.rate),
            panel("curves", "Learning curves", "describes", _Workload.curves),
            panel("axes", "Axes of the search space", "describes", _Workload.axes),
            Panel("trials", "Trials", "describes", ()),
            Panel("methods", "Methods", "describes", (_methods(),)),
        ),
        trials=tuple(each.trials() for each in made),
        made="Made by `python -m trainer report sweeps/digits` with Lockstep 0.1.0.",
    )


def _methods():
    text = (
        "We compared five optimizers at equal tuning budgets. Each arm was given 51 points of a"
        " scrambled Sobol sequence in its own space; the best by the loss on the validation split"
        " was trained again on eight fresh seeds, and these runs are compared on the test split"
        " with two-sided paired t tests at the 5% level, corrected by Holm's method."
    )
    plan = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    rows = (("plan, revision 1", plan),)
    return Block(
        text=(text,),
        tables=(make_table("hashes", "Fingerprints", "what; sha256: SHA-256: code", rows),),
    )


class _Workload:
    def __init__(self, name, count, rows, arms, random, titled):
        self.name, self.rows, self.arms, self.random = name, rows, arms, random
        self.title = name if titled else ""
        self.of = [arms[i % len(arms)] for i in range(count)]
        self.names = [f"trials/{arm}/{i:05d}" for i, arm in enumerate(self.of)]
        self.rates = 10 ** random.uniform(-4, -0.5, count)
        self.decay = 10 ** random.uniform(-3, 0, count)
        self.warmup = random.integers(0, 500, count).astype(float)
        skill = {arm: 0.22 + 0.03 * i for i, arm in enumerate(arms)}
        far = (np.log10(self.rates) + 2.0) ** 2
        noise = random.normal(0, 0.015, count)
        self.goal = np.array([skill[a] for a in self.of]) + 0.12 * far + noise
        self.diverged = self.rates > 0.2
        self.goal[self.diverged] = np.inf
        self.finals = {a: skill[a] + random.normal(0, 0.012, 8) for a in arms}

    def figure(self, stem, title, said, x, y, series, numbers):
        return Figure(f"{self.name}_{stem}", title, said, x, y, tuple(series), numbers)

    def table(self, stem, title, heads, rows, note=""):
        return make_table(f"{self.name}_{stem}", title, heads, rows, note)

    def verdict(self):
        return (
            f"On {self.name}, {self.arms[0]} reaches a lower test loss than {self.arms[-1]}, the"
            " next best of equally tuned arms: the difference is 0.0312 (95% interval 0.0204 to"
            " 0.0420; p = 0.0003 after Holm's correction; 8 seeds)."
        )

    def verdict_block(self):
        text = "With these differences, 5 seeds would decide at a power of 90%."
        return Block(self.title, (self.verdict(), text))

    def ledger(self):
        heads = (
            "arm; trials: trials: integer; steps: steps: integer; flops: FLOPs: number;"
            " seconds: training time: seconds; diverged: diverged: integer;"
            " failed: failed: integer; space: search space: code"
        )
        rows = []
        for i, arm in enumerate(self.arms, 1):
            mine = [
                diverged for diverged, a in zip(self.diverged, self.of, strict=True) if a == arm
            ]
            costs = (len(mine), 2000 * len(mine), 3.1e13 * i, 731.0 * i, int(sum(mine)), 0)
            rows.append((arm, *costs, "learning_rate: log_uniform 0.0001 to 0.3"))
        return Block(self.title, tables=(self.table("ledger", "Cost", heads, rows),))

    def arms_block(self):
        series, rows = [], []
        for i, (arm, values) in enumerate(self.finals.items()):
            at = [i + 0.12 + 0.03 * j for j in range(len(values))]
            mean, half = float(values.mean()), 2.365 * float(values.std(ddof=1)) / 8**0.5
            names = tuple(f"final/{arm}/{j}" for j in range(8))
            series += [
                Series("points", arm, at, values, trials=names),
                Series("interval", arm, [i], [mean - half], [mean + half]),
                Series("points", arm, [i], [mean], label="mean"),
            ]
            rows.append((arm, 8, mean, mean - half, mean + half))
        title = "Loss on the test split, by arm"
        numbers = make_means(f"{self.name}_arms", title, "mean loss", "number", tuple(rows))
        figure = self.figure(
            "arms",
            "Loss on the test split: every run, the mean and its 95% interval",
            f"One column of points for each of {len(self.arms)} arms; {self.arms[0]} is the best.",
            Axis("arm", labels=tuple(self.arms)),
            Axis("loss, test"),
            series,
            numbers,
        )
        return Block(self.title, figures=(figure,), tables=(numbers,))

    def pairs(self):
        pairs = [(a, b) for i, a in enumerate(self.arms) for b in self.arms[i + 1 :]]
        series, rows = [], []
        for i, (a, b) in enumerate(pairs):
            apart = self.finals[a] - self.finals[b]
            mean, half = float(apart.mean()), 0.84 * float(apart.std())
            series += [
                Series("interval", "", [i], [mean - half], [mean + half]),
                Series("points", "", [i], [mean]),
            ]
            rows.append((a, b, mean, mean - half, mean + half, 0.00003 * 7**i % 1, 0.9))
        heads = (
            "arm; other; difference: difference: number; low: 95% from: number; high: to: number;"
            " p: p, Holm: p; better: P(A > B): share"
        )
        note = "With 8 seeds no sign test can reach a p value below 0.0078."
        numbers = self.table("pairs", "Pairs of arms", heads, rows, note)
        figure = self.figure(
            "pairs",
            "Differences of paired runs with 95% intervals",
            "An interval that does not reach 0 excludes that both arms are equal.",
            Axis("pair", labels=tuple(f"{a} − {b}" for a, b in pairs)),
            Axis("difference of the loss"),
            [Series("rule", "", (), [0.0], label="no difference"), *series],
            numbers,
        )
        return Block(self.title, figures=(figure,), tables=(numbers,))

    def tuning(self):
        bands, lines, rows = [], [], []
        for arm in self.arms:
            mine = [i for i, a in enumerate(self.of) if a == arm]
            if not mine:
                continue
            expected, names = best_of_k(self.goal[mine]), tuple(self.names[i] for i in mine)
            k = list(range(1, len(mine) + 1))
            low, high = [v * 0.93 for v in expected], [v * 1.08 for v in expected]
            bands.append(Series("band", arm, k, low, high, label="95% band"))
            lines.append(
                Series("line", arm, k, expected, label=arm, trials=names, recipe="best_of_k")
            )
            rows += [(arm, i, v) for i, v in zip(k, expected, strict=True)]
        heads = "arm; k: k: integer; expected: expected best: number"
        figure = self.figure(
            "tuning",
            "Best loss of k trials, validation split",
            "The expected best loss of k trials drawn from those of each arm, over k.",
            Axis("trials (k)", log=True),
            Axis("best loss, validation"),
            [*bands, *lines],
            self.table("tuning", "Best of k trials", heads, rows),
        )
        warning = "3 of 51 trials of sgd diverged: its expected best is infinite for k up to 3."
        text = "How good the best of k trials is on average, drawn without replacement."
        return Block(self.title, (text,), (warning,), figures=(figure,))

    def rate(self):
        figure = self._axis("rate", self.rates, "learning rate", True)
        warning = (
            "The best learning rate of muon lies on the upper edge of its space. Widen it:"
            " `python -m trainer sweep extend sweeps/digits --config=wider.yaml`"
        )
        return Block(self.title, (), (warning,), figures=(figure,))

    def _axis(self, stem, values, title, log):
        series, rows = [], []
        for arm in self.arms:
            mine = [i for i, a in enumerate(self.of) if a == arm and not self.diverged[i]]
            names = tuple(self.names[i] for i in mine)
            x, y = [values[i] for i in mine], [self.goal[i] for i in mine]
            series.append(Series("points", arm, x, y, label=arm, trials=names))
            rows += [(n, arm, a, b) for n, a, b in zip(names, x, y, strict=True)]
        heads = f"trial; arm; value: {title}: number; goal: loss: number"
        return self.figure(
            f"axis_{stem}",
            f"Loss by {title}, validation split",
            f"Every trial by its {title}.",
            Axis(title, log=log),
            Axis("loss, validation"),
            series,
            self.table(f"axis_{stem}", f"Trials by {title}", heads, rows),
        )

    def axes(self):
        figures = (
            self._axis("decay", self.decay, "weight_decay", True),
            self._axis("warmup", self.warmup, "warmup_steps", False),
        )
        return Block(self.title, ("Trials that diverged are not drawn.",), figures=figures)

    def curves(self):
        steps = np.linspace(20, 2000, self.rows)
        figures = (
            self._curves("step", steps, "step"),
            self._curves("time", steps * 0.0137, "training time (s)"),
        )
        return Block(self.title, figures=figures)

    def _curves(self, stem, x, title):
        shape = 2.0 * np.exp(-x / x[-1] * 6)
        faint, bands, lines, rows = [], [], [], []
        for name, arm, goal in zip(self.names, self.of, self.goal, strict=True):
            if np.isfinite(goal):
                y = goal + shape + self.random.normal(0, 0.02, len(x)) * (1 + shape)
            else:
                y = 2.3 + (x / x[-1]) ** 4 * 10 ** self.random.uniform(0, 5)
            faint.append(Series("line", arm, x, y, label=name, faint=True, trials=(name,)))
        for arm in self.arms:
            y = self.finals[arm].mean() + shape + self.random.normal(0, 0.004, len(x))
            bands.append(Series("band", arm, x, y - 0.02, y + 0.02, label="95% interval"))
            lines.append(Series("line", arm, x, y, label=f"{arm}, mean of 8 runs"))
            rows += [(arm, a, b) for a, b in zip(x, y, strict=True)]
        heads = f"arm; x: {title}: number; mean: loss: number"
        return self.figure(
            f"curves_{stem}",
            f"Loss by {title}, validation split",
            "The mean loss of each arm's compared runs, with its 95% interval; other trials faint.",
            Axis(title),
            Axis("loss, validation", log=True),
            [*faint, *bands, *lines],
            self.table(f"curves_{stem}", "Means", heads, rows),
        )

    def trials(self):
        heads = (
            "trial: trial: code; arm; seed: seed: integer; end;"
            " validation: loss, validation: number; axis_1: learning_rate: number;"
            " axis_2: weight_decay: number; axis_3: warmup_steps: number; steps: steps: integer;"
            " seconds: training time: seconds; folder: folder: code"
        )
        rows = []
        for i, (name, arm) in enumerate(zip(self.names, self.of, strict=True)):
            end = ("diverged", None) if self.diverged[i] else ("finished", float(self.goal[i]))
            values = (float(each[i]) for each in (self.rates, self.decay, self.warmup))
            rows.append((name, arm, 0, *end, *values, 2000, 14.2 + i / 100, f"../{name}"))
        axes = ("axis_1", "axis_2", "axis_3")
        made = self.table("trials", "Every run", heads, rows)
        return Trials(self.name, made, "validation", "min", axes, REPEAT)
