"""A report with all kinds of panels, made of random numbers, for tests of what is written of it."""

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

ARMS = ("muon", "adamw", "sgd", "soap", "schedule_free_adamw")
WORKLOADS = ("digits", "fashion_mnist")
COMMAND = "python -m trainer --config=/data/sweeps/digits/{trial}/config.yaml"


def best_of_k(values, better="min"):
    """Returns the mean best over all subsets of k values, by the sum of the definition."""
    from math import comb

    worst_first = sorted(values, reverse=better == "min")
    n = len(values)
    means = []
    for k in range(1, n + 1):
        weights = [comb(i - 1, k - 1) / comb(n, k) for i in range(1, n + 1)]
        means.append(sum(w * v for w, v in zip(weights, worst_first, strict=True) if w))
    return means


def report(trials=256, rows=100, arms=ARMS, workloads=WORKLOADS, seed=0):
    """Returns a report.

    Args:
        trials: how many runs the search of a workload has.
        rows: points of a learning curve.
        arms: names.
        workloads: names.
        seed: of the numbers.
    """
    random = np.random.default_rng(seed)
    made = [_Workload(name, trials, rows, arms, random, len(workloads) > 1) for name in workloads]
    return Report(
        title=f"{', '.join(arms)} on {' and '.join(workloads)}",
        verdict=tuple(each.verdict() for each in made),
        arms=tuple(arms),
        panels=(
            _panel("verdict", "Verdict", "tests", made, _Workload.verdict_block),
            _panel("ledger", "Ledger", "describes", made, _Workload.ledger),
            _panel("arms", "Arms", "tests", made, _Workload.arms_block),
            _panel("pairs", "Pairs", "tests", made, _Workload.pairs),
            _panel("tuning", "Tuning curves", "describes", made, _Workload.tuning),
            _panel("rate", "Sensitivity to the learning rate", "describes", made, _Workload.rate),
            _panel("curves", "Learning curves", "describes", made, _Workload.curves),
            _panel("axes", "Axes of the search space", "describes", made, _Workload.axes),
            _panel("trials", "Trials", "describes", made, None),
            Panel("methods", "Methods", "describes", (_methods(),)),
        ),
        trials=tuple(each.trials() for each in made),
        made="Made by `python -m trainer report sweeps/digits` with Lockstep 0.1.0.",
    )


def _panel(name, title, kind, made, block):
    blocks = tuple(block(each) for each in made) if block else ()
    return Panel(name, title, kind, blocks)


def _methods():
    text = (
        "We compared five optimizers at equal tuning budgets. Each arm was given 51 points of a"
        " scrambled Sobol sequence in its own space; the best by the loss on the validation split"
        " was trained again on eight fresh seeds, and these runs are compared on the test split"
        " with two-sided paired t tests at the 5% level, corrected by Holm's method."
    )
    table = Table(
        "hashes",
        "Fingerprints",
        (Column("what", "what"), Column("sha256", "SHA-256", "code")),
        (("plan, revision 1", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"),),
    )
    return Block(text=(text,), tables=(table,))


class _Workload:
    def __init__(self, name, count, rows, arms, random, titled):
        self.name, self.rows, self.arms, self.random = name, rows, arms, random
        self.title = name if titled else ""
        self.of = [arms[i % len(arms)] for i in range(count)]
        self.names = [f"trials/{arm}/{i:05d}" for i, arm in enumerate(self.of)]
        self.rate_ = 10 ** random.uniform(-4, -0.5, count)
        self.decay = 10 ** random.uniform(-3, 0, count)
        self.warmup = random.integers(0, 500, count).astype(float)
        skill = {arm: 0.22 + 0.03 * i for i, arm in enumerate(arms)}
        far = (np.log10(self.rate_) + 2.0) ** 2
        noise = random.normal(0, 0.015, count)
        self.goal = np.array([skill[a] for a in self.of]) + 0.12 * far + noise
        self.diverged = self.rate_ > 0.2
        self.goal[self.diverged] = np.inf
        self.finals = {a: skill[a] + random.normal(0, 0.012, 8) for a in arms}

    def figure(self, stem, title, said, x, y, series, table):
        return Figure(f"{self.name}_{stem}", title, said, x, y, tuple(series), table)

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
        columns = (
            Column("arm", "arm"),
            Column("trials", "trials", "integer"),
            Column("steps", "steps", "integer"),
            Column("flops", "FLOPs", "number"),
            Column("seconds", "training time", "seconds"),
            Column("diverged", "diverged", "integer"),
            Column("failed", "failed", "integer"),
            Column("space", "search space", "code"),
        )
        rows = tuple(
            (
                arm,
                self.of.count(arm),
                2000 * self.of.count(arm),
                3.1e13 * (1 + i),
                731.0 * (i + 1),
                int(sum(d for d, a in zip(self.diverged, self.of, strict=True) if a == arm)),
                0,
                "learning_rate: log_uniform 0.0001 to 0.3",
            )
            for i, arm in enumerate(self.arms)
        )
        return Block(self.title, tables=(Table(f"{self.name}_ledger", "Cost", columns, rows),))

    def arms_block(self):
        series, rows = [], []
        for i, arm in enumerate(self.arms):
            values = self.finals[arm]
            at = [i + 0.12 + 0.03 * j for j in range(len(values))]
            mean, half = float(values.mean()), 2.365 * float(values.std(ddof=1)) / 8**0.5
            series += [
                Series(
                    "points", arm, at, values, trials=tuple(f"final/{arm}/{j}" for j in range(8))
                ),
                Series("interval", arm, [i], [mean - half], [mean + half]),
                Series("points", arm, [i], [mean], label="mean"),
            ]
            rows.append((arm, 8, mean, mean - half, mean + half))
        columns = (
            Column("arm", "arm"),
            Column("seeds", "seeds", "integer"),
            Column("mean", "mean loss", "number"),
            Column("low", "95% from", "number"),
            Column("high", "to", "number"),
        )
        table = Table(f"{self.name}_arms", "Loss on the test split, by arm", columns, tuple(rows))
        figure = self.figure(
            "arms",
            "Loss on the test split: every run, the mean and its 95% interval",
            f"One column of points for each of {len(self.arms)} arms; {self.arms[0]} is the best.",
            Axis("arm", labels=tuple(self.arms)),
            Axis("loss, test"),
            series,
            table,
        )
        return Block(self.title, figures=(figure,), tables=(table,))

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
        columns = (
            Column("arm", "arm"),
            Column("other", "other"),
            Column("difference", "difference", "number"),
            Column("low", "95% from", "number"),
            Column("high", "to", "number"),
            Column("p", "p, Holm", "p"),
            Column("better", "P(A > B)", "share"),
        )
        note = "With 8 seeds no sign test can reach a p value below 0.0078."
        table = Table(f"{self.name}_pairs", "Pairs of arms", columns, tuple(rows), note)
        figure = self.figure(
            "pairs",
            "Differences of paired runs with 95% intervals",
            "An interval that does not reach 0 excludes that both arms are equal.",
            Axis("pair", labels=tuple(f"{a} − {b}" for a, b in pairs)),
            Axis("difference of the loss"),
            [Series("rule", "", (), [0.0], label="no difference"), *series],
            table,
        )
        return Block(self.title, figures=(figure,), tables=(table,))

    def tuning(self):
        bands, lines, rows = [], [], []
        for arm in self.arms:
            values = [v for v, a in zip(self.goal, self.of, strict=True) if a == arm]
            if not values:
                continue
            expected = best_of_k(values)
            k = list(range(1, len(values) + 1))
            low = [v * 0.93 for v in expected]
            high = [v * 1.08 for v in expected]
            names = tuple(n for n, a in zip(self.names, self.of, strict=True) if a == arm)
            bands.append(Series("band", arm, k, low, high, label="95% band"))
            lines.append(
                Series("line", arm, k, expected, label=arm, trials=names, recipe="best_of_k")
            )
            rows += [(arm, i, v) for i, v in zip(k, expected, strict=True)]
        columns = (
            Column("arm", "arm"),
            Column("k", "k", "integer"),
            Column("expected", "expected best", "number"),
        )
        figure = self.figure(
            "tuning",
            "Best loss of k trials, validation split",
            "The expected best loss of k trials drawn from those of each arm, over k.",
            Axis("trials (k)", log=True),
            Axis("best loss, validation"),
            [*bands, *lines],
            Table(f"{self.name}_tuning", "Best of k trials", columns, tuple(rows)),
        )
        warning = "3 of 51 trials of sgd diverged: its expected best is infinite for k up to 3."
        text = "How good the best of k trials is on average, drawn without replacement."
        return Block(self.title, (text,), (warning,), figures=(figure,))

    def rate(self):
        figure = self._axis("rate", self.rate_, "learning rate", True)
        warning = (
            "The best learning rate of muon lies on the upper edge of its space. Widen it:"
            " `python -m trainer sweep extend sweeps/digits --config=wider.yaml`"
        )
        return Block(self.title, (), (warning,), figures=(figure,))

    def _axis(self, stem, values, title, log, labels=()):
        series, rows = [], []
        for arm in self.arms:
            mine = [i for i, a in enumerate(self.of) if a == arm and not self.diverged[i]]
            names = tuple(self.names[i] for i in mine)
            x, y = [values[i] for i in mine], [self.goal[i] for i in mine]
            series.append(Series("points", arm, x, y, label=arm, trials=names))
            rows += [(n, arm, a, b) for n, a, b in zip(names, x, y, strict=True)]
        columns = (
            Column("trial", "trial"),
            Column("arm", "arm"),
            Column("value", title, "number"),
            Column("goal", "loss", "number"),
        )
        return self.figure(
            f"axis_{stem}",
            f"Loss by {title}, validation split",
            f"Every trial by its {title}.",
            Axis(title, log=log, labels=labels),
            Axis("loss, validation"),
            series,
            Table(f"{self.name}_axis_{stem}", f"Trials by {title}", columns, tuple(rows)),
        )

    def axes(self):
        figures = (
            self._axis("decay", self.decay, "weight_decay", True),
            self._axis("warmup", self.warmup, "warmup_steps", False),
        )
        return Block(self.title, ("Trials that diverged are not drawn.",), figures=figures)

    def curves(self):
        steps = np.linspace(20, 2000, self.rows)
        return Block(
            self.title,
            figures=(
                self._curves("step", steps, "step"),
                self._curves("time", steps * 0.0137, "training time (s)"),
            ),
        )

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
        columns = (
            Column("arm", "arm"),
            Column("x", title, "number"),
            Column("mean", "loss", "number"),
        )
        return self.figure(
            f"curves_{stem}",
            f"Loss by {title}, validation split",
            "The mean loss of each arm's compared runs, with its 95% interval; other trials faint.",
            Axis(title),
            Axis("loss, validation", log=True),
            [*faint, *bands, *lines],
            Table(f"{self.name}_curves_{stem}", "Means", columns, tuple(rows)),
        )

    def trials(self):
        columns = (
            Column("trial", "trial", "code"),
            Column("arm", "arm"),
            Column("seed", "seed", "integer"),
            Column("end", "end"),
            Column("validation", "loss, validation", "number"),
            Column("axis_1", "learning_rate", "number"),
            Column("axis_2", "weight_decay", "number"),
            Column("axis_3", "warmup_steps", "number"),
            Column("steps", "steps", "integer"),
            Column("seconds", "training time", "seconds"),
            Column("folder", "folder", "code"),
        )
        rows = tuple(
            (
                name,
                arm,
                0,
                "diverged" if self.diverged[i] else "finished",
                None if self.diverged[i] else float(self.goal[i]),
                float(self.rate_[i]),
                float(self.decay[i]),
                float(self.warmup[i]),
                2000,
                14.2 + i / 100,
                f"../{name}",
            )
            for i, (name, arm) in enumerate(zip(self.names, self.of, strict=True))
        )
        table = Table(f"{self.name}_trials", "Every run", columns, rows)
        axes = ("axis_1", "axis_2", "axis_3")
        return Trials(self.name, table, "validation", "min", axes, COMMAND)
