"""Mistakes that users make, and what Lockstep says of each.

    python -m tests.mistakes [NAME...]

prints an answer for each, and how many are good, poor and silent. An answer is good if it says what
is expected before the first step, in at most twelve lines: an error with exit code 2, or a warning
with exit code 0. What only happens in a run is an error with exit code 1. It is poor if it says
something else, and silent if nothing is said.
"""

import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.__main__ import main

RUN = """
model: !models.mlp {width: 8, depth: 1, num_classes: 3, inputs: x}
data: !data.ArrayDataset
  train: !mine.rows {seed: 0}
  test: !mine.rows {seed: 1}
  batch_size: 8
loss: !losses.softmax_cross_entropy {}
metrics: {accuracy: !metrics.accuracy {}}
optimizer: !optax.adamw {learning_rate: 0.01}
steps: 4
writers: []
"""
SWEEP = """
base: run.yaml
arms:
  adamw:
    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}
  lion:
    set: {optimizer: !optax.lion {learning_rate: 0.001, weight_decay: 1e-4}}
    space: {optimizer.learning_rate: !space.log_uniform {low: 2e-4, high: 2e-2}}
trials: 4
method: !method.random {seed: 0}
searches: 4
goal: {metric: loss, mode: min, select_on: test}
"""
DATA = RUN[RUN.index("data:") : RUN.index("loss:")]
TRAIN = "--config=run.yaml --vocabulary=mine --workdir=run"
# What the second arm of the sweep sets.
LION = "    set: {optimizer: !optax.lion {learning_rate: 0.001, weight_decay: 1e-4}}\n"
# The user's module, before what a mistake adds to it.
CODE = """
import sys

import clu.metrics
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


def rows(seed: int):
    random = np.random.default_rng(seed)
    label = np.arange(96, dtype=np.int32) % 3
    x = random.normal(size=(96, 4)) + label[:, None]
    return changed(seed, {"x": x.astype(np.float32), "label": label})


def changed(seed, rows):
    return rows
"""


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the answer that it should get.

    Attributes:
        says: a regular expression that the answer has, with "." for line ends too.
        run: pairs (old, new) that change `RUN`.
        sweep: pairs that change `SWEEP`; the command is then `sweep --check`.
        code: what is added to the user's module.
        command: the words of the command.
        warns: whether the answer is a warning, after which the command ends with 0.
        exits: the exit code of an error.
    """

    says: str
    run: Sequence[tuple[str, str]] = ()
    sweep: Sequence[tuple[str, str]] | None = None
    code: str = ""
    command: str = "explain --config=run.yaml --vocabulary=mine"
    warns: bool = False
    exits: int = 2


def line(says: str, key: str, value: str, **more) -> Mistake:
    """A mistake in one line of the config of a run."""
    (old,) = [each for each in RUN.splitlines() if each.strip().startswith(f"{key}:")]
    indent = old[: len(old) - len(old.lstrip())]
    return Mistake(says, run=[(old, f"{indent}{key}: {value}")], **more)


def more(says: str, text: str, **rest) -> Mistake:
    """A mistake in a line that is added to the config of a run."""
    return Mistake(says, run=[("steps: 4", f"steps: 4\n{text}")], **rest)


def rows(says: str, change: str, warns: bool = False, **rest) -> Mistake:
    """A mistake in the arrays; `change` is a statement about `rows`, of the split `seed`."""
    code = f"\n\ndef changed(seed, rows):\n    {change}\n    return rows\n"
    return Mistake(says, code=code, warns=warns, **rest)


def streamed(says: str, batch: str, evaluated: str = "rows(1)", **rest) -> Mistake:
    """A mistake in a data set that is streamed; it yields the expressions `batch` and `evaluated`.

    Its `first` returns whether it is called for the first time, or the second.
    """
    code = (
        "\n\nclass stream:\n    batch_size, num_examples, splits = 8, 96, {'test': 96}\n"
        "    element_spec = {'x': jax.ShapeDtypeStruct((8, 4), np.float32),\n"
        "                    'label': jax.ShapeDtypeStruct((8,), np.int32)}\n"
        "    def train(self, batch_index, seed):\n"
        "        while True:\n"
        "            batch = {k: v[:8] for k, v in rows(batch_index).items()}\n"
        f"            yield {batch}\n"
        "            batch_index += 1\n"
        "    def evaluate(self, split):\n"
        f"        yield ({evaluated}) | {{'mask': np.ones(96, np.float32)}}\n"
        "    calls = 0\n"
        "    def first(self):\n"
        "        self.calls += 1\n"
        "        return self.calls <= 2\n"
    )
    return Mistake(says, run=[(DATA, "data: !mine.stream {}\n")], code=code, **rest)


def swept(says: str, old: str, new: str, warns: bool = False) -> Mistake:
    """A mistake in the file of a sweep."""
    return Mistake(says, sweep=[(old, new)], warns=warns)


def mixture(says: str, arguments: str) -> Mistake:
    """A mistake in the arguments of a mixture of two texts."""
    parts = "parts: {web: !data.text {}, code: !data.text {split_seed: 1}}"
    return Mistake(says, run=[(DATA, f"data: !data.mixture {{{parts}, {arguments}}}\n")])


def metric(says: str, body: str, head: str = "@flax.struct.dataclass") -> Mistake:
    """A mistake in a metric of the user's; `body` are its methods, in one line each."""
    methods = {
        "empty": "return cls(jnp.float32(0))",
        "from_model_output": "return cls(loss.mean())",
        "merge": "return type(self)(self.total + other.total)",
        "compute": "return self.total",
    }
    name, _, statement = body.partition(": ")
    if name:
        methods[name] = statement
    code = (
        f"\n\n{head}\nclass Bad(clu.metrics.Metric):\n    total: jax.Array\n"
        f"    @classmethod\n    def empty(cls): {methods['empty']}\n"
        "    @classmethod\n"
        f"    def from_model_output(cls, *, loss, **_): {methods['from_model_output']}\n"
        f"    def merge(self, other): {methods['merge']}\n"
        f"    def compute(self): {methods['compute']}\n"
    )
    text = "metrics: {accuracy: !metrics.accuracy {}}"
    return Mistake(says, run=[(text, "metrics: {bad: !partial:mine.Bad {}}")], code=code)


def loss(says: str, body: str, more: str = "", **rest) -> Mistake:
    """A mistake in a loss of the user's, whose body is `body`."""
    code = (
        f"{more}\n\ndef mine():\n    def loss(outputs, batch):\n        {body}\n    return loss\n"
    )
    return line(says, "loss", "!mine.mine {}", code=code, **rest)


def optimizer(says: str, body: str, **rest) -> Mistake:
    """A mistake in the `update` of an optimizer of the user's."""
    code = (
        "\n\ndef descent(learning_rate: float):\n    def update(updates, state, params=None):\n"
        f"        {body}\n"
        "    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)\n"
    )
    return line(says, "optimizer", "!mine.descent {learning_rate: 0.1}", code=code, **rest)


def chain(says: str, parts: str) -> Mistake:
    """A mistake in the parts of a chain."""
    return line(says, "optimizer", f"!optim.chain {{learning_rate: 0.1, before: [{parts}]}}")


def schedule(says: str, body: str) -> Mistake:
    """A mistake in a schedule of the user's, whose body is `body`."""
    code = f"\n\ndef falling():\n    def rate(step):\n        {body}\n    return rate\n"
    return line(says, "optimizer", "!optax.sgd {learning_rate: !mine.falling {}}", code=code)


def module(says: str, body: str, more: Sequence[tuple[str, str]] = ()) -> Mistake:
    """A mistake in a flax model of the user's, whose `__call__` has the body `body`.

    `more` are further changes of `RUN`.
    """
    code = (
        "\n\nclass Net(nn.Module):\n    @nn.compact\n    def __call__(self, x, train):\n"
        f"        {body}\n"
    )
    value = "!models.from_linen {module: !mine.Net {}, inputs: x}"
    found = line(says, "model", value, code=code)
    return replace(found, run=[*found.run, *more])


def groups(*patterns: str) -> str:
    """Returns an optimizer with a group for each pattern."""
    sgd = "!optax.sgd {learning_rate: 0.1}"
    each = [f"g{n}: !optim.group {{match: {x}, optimizer: {sgd}}}" for n, x in enumerate(patterns)]
    return f"!optim.optimizer {{groups: {{{', '.join(each)}}}}}"


def of(command: str, says: str, warns: bool = False) -> Mistake:
    """A mistake in a command."""
    return Mistake(says, command=command, warns=warns)


def own(says: str, body: str, value: str, **rest) -> Mistake:
    """A mistake in an optimizer of the user's, `o` with the body `body`, and in its call."""
    code = f"\n\ndef o(learning_rate=0.1, gamma=0.3):\n    {body}\n"
    return line(says, "optimizer", value, code=code, warns=True, **rest)


def scheduled(schedule: str) -> Mistake:
    """A schedule that is shorter than the run, which has 400 steps."""
    says = "after step . of 400 it is less than a thousandth"
    found = line(says, "optimizer", f"!optax.sgd {{learning_rate: {schedule}}}", warns=True)
    return replace(found, run=[*found.run, ("\nsteps: 4\n", "\nsteps: 400\n")])


MUON = (
    "!optim.optimizer {groups: {a: !optim.group {match: .*Conv.*kernel, optimizer: !optim.muon "
    "{learning_rate: 0.1}}, b: !optim.group {match: .*, optimizer: !optax.sgd "
    "{learning_rate: 0.1}}}}"
)
KEEP = "jax.tree.map(lambda x: -0.1 * x, updates)"
WARMED = "!optax.sgd {learning_rate: !schedules.warmup_cosine {peak_value: 1, warmup_steps: 0.1}}"
TEST_ONLY = "rows = rows if seed == 0 else"
MISTAKES: dict[str, Mistake] = {
    # names and types of the config
    "argument misspelt": line("run.yaml:2: .*'widht'.*'width'", "model", "!models.mlp {widht: 8}"),
    "function misspelt": line(
        "run.yaml:7: .*Did you mean", "loss", "!losses.softmax_crossentropy {}"
    ),
    "module misspelt": line("run.yaml:9: .*optaxx", "optimizer", "!optaxx.adamw {}"),
    "key of the root misspelt": more("run.yaml:11: .*'log_every'", "log_evry: 2"),
    "four at once": Mistake(
        "4 mistakes.*:2: .*'width'.*:6: .*'batch_size'.*:8: .*metrics.accuracy.*:10: .*'30O'",
        run=[
            ("width", "widht"),
            ("batch_size", "batch_sise"),
            ("s.accuracy", "s.acuracy"),
            ("steps: 4", "steps: 30O"),
        ],
    ),
    "one mistake twice in a line": chain(
        r"^error: run.yaml:9: .*'parts\.polar'", "!optim.parts.polar {}, !optim.parts.polar {}"
    ),
    "part in its module": chain(r"mean 'parts\.adam'", "!optim.parts.adam {}"),
    "part of an optimizer's name": chain(r"mean 'parts\.soap'", "!optim.parts.soap {}"),
    "number in words": line("run.yaml:10: .*'four'", "steps", "four"),
    "number in quotes": line("run.yaml:10: .*without quotes", "steps", "'4'"),
    "steps of 0": line("run.yaml:10: .*at least 1", "steps", "0"),
    "steps as a float": line("run.yaml:10: .*1_000\\.$", "steps", "1e3"),
    "share of the steps": line("run.yaml:9: .*'10%'", "optimizer", WARMED),
    "width as a float": line(
        "run.yaml:2: .*Write it as 100\\.$", "model", "!models.mlp {width: 1e2}"
    ),
    "fraction of a step": line("run.yaml:10: .*number of steps", "steps", "2.5"),
    "unit misspelt": line("run.yaml:10: .*epoks", "steps", "3 epoks"),
    "tokens of data without tokens": line("run.yaml:10: .*tokens", "steps", "1M tokens"),
    "key twice": more("run.yaml:.*twice|steps", "steps: 5"),
    "tab in YAML": more("run.yaml:", "\tseed: 1"),
    "call without a tag": line("run.yaml:9: .*!name", "optimizer", "{learning_rate: 0.1}"),
    "argument missing": line("run.yaml:9: .*learning_rate: add", "optimizer", "!optax.adamw {}"),
    "list for a number": line(
        "run.yaml:9: .*learning_rate", "optimizer", "!optax.adamw {learning_rate: [0.1]}"
    ),
    "None in YAML": more("run.yaml:11: .*null", "ema_decay: None"),
    "config of a sweep": more("run.yaml:.*sweep", "trials: 3"),
    "override of a path that is not there": of(
        "explain --config=run.yaml --vocabulary=mine --set optimizer.learning_rat=1",
        "learning_rate",
    ),
    "override without a sign": of("explain --config=run.yaml --set steps 100", "--set steps=100"),
    "vocabulary left out": of("explain --config=run.yaml", "--vocabulary=mine"),
    "vocabulary misspelt": of("explain --config=run.yaml --vocabulary=mime", "mime"),
    "file misspelt": of("explain --config=rum.yaml", "rum.yaml.*run.yaml|run.yaml"),
    "option misspelt": of("explain --confg=run.yaml", "--config"),
    "command misspelt": of("explan --config=run.yaml", "explain"),
    "tokens for each parameter of data without tokens": line(
        "run.yaml:10: .*'20 tokens/parameter' is a number of tokens, and the data set does not say",
        "steps",
        "20 tokens/parameter",
    ),
    "weights of a mixture that do not sum to 1": mixture(
        r"run.yaml:3: data.mixture has weights that sum to 1\.1, not to 1\. In this ratio",
        "weights: {web: 0.8, code: 0.3}",
    ),
    "part of a mixture without a weight": mixture(
        "run.yaml:3: .*the parts code, web.*Give each part a weight, 0 if it is only evaluated",
        "weights: {web: 1}",
    ),
    "part of a mixture that ends before its share": mixture(
        r"run.yaml:3: The part 'code'.* ends before its share.*sequences of 256.* repeat: \[code\]",
        "weights: {web: 0.5, code: 0.5}, repeat: [web], batch_size: 50_000",
    ),
    # values of the data
    "label -1": rows("'label' is -1.*ignore_label", "rows['label'][::10] = -1"),
    "label -4": rows("'label' is -4", "rows['label'][3] = -4"),
    "labels from 1": rows("'label' is 3.*number them from 0 to 2", "rows['label'] += 1"),
    "label of the test split": rows(
        "'label' is 7.*test", f"{TEST_ONLY} rows | {{'label': rows['label'] + 7}}"
    ),
    "NaN of the training split": rows("not finite.*training", "rows['x'][5, 2] = np.nan", True),
    "NaN of the test split": rows(
        "not finite.*test",
        f"{TEST_ONLY} rows | {{'x': np.where(rows['x'] > 3, np.nan, rows['x'])}}",
        True,
    ),
    "infinity": rows("not finite", "rows['x'][5, 2] = np.inf", True),
    "test is train": Mistake("96 of 96 examples", run=[("seed: 1", "seed: 0")], warns=True),
    "constant field": rows("equal in all|constant|is 0", "rows['x'][:] = 0", True),
    "class that training lacks": rows(
        "class 2", "rows['label'] = rows['label'] % 2 if seed == 0 else rows['label']", True
    ),
    "unequal classes": rows(
        "unequal", "rows['label'] = (np.arange(96) % 40 == 0).astype(np.int32)", True
    ),
    "label that a loss of one's own reads": loss(
        "values from 0 to 3|from 0 to 3",
        "return optax.softmax_cross_entropy_with_integer_labels(outputs, batch['label'])",
        more="\n\ndef changed(seed, rows):\n    rows['label'][::9] = 3\n    return rows\n",
        warns=True,
    ),
    "texts": rows("dtype|text|<U", "rows['x'] = rows['x'].astype(str)"),
    "labels as floats": rows(
        "label.*float|float.*label", "rows['label'] = rows['label'].astype(np.float32)"
    ),
    "arrays of two lengths": rows("95|96", "rows['x'] = rows['x'][1:]"),
    "arrays in a tuple": rows(
        r"run.yaml:3: data.ArrayDataset takes.*a dict of arrays.*of type tuple",
        "rows = (rows['x'], rows['label'])",
    ),
    "no arrays": rows("run.yaml:3: .*a dict of arrays.*NoneType", "rows = None"),
    "lists for arrays": rows(
        "run.yaml:3: .*a dict of arrays.*given .x. of type list", "rows['x'] = rows['x'].tolist()"
    ),
    "number for an array": rows(
        "run.yaml:3: .*a dict of arrays.*.label. of type int", "rows['label'] = 3"
    ),
    "no example": rows("example", "rows = {k: v[:0] for k, v in rows.items()}"),
    "batch larger than the data": line("run.yaml:.*batch", "batch_size", "97"),
    "batch of 0": line("run.yaml:.*batch_size", "batch_size", "0"),
    "fields of two splits": rows("y", f"{TEST_ONLY} {{'y': rows['x'], 'label': rows['label']}}"),
    "shapes of two splits": rows(
        "shape|\\(3,\\)|x", f"{TEST_ONLY} rows | {{'x': rows['x'][:, 1:]}}"
    ),
    "mask of another shape": rows("mask", "rows['mask'] = np.ones((96, 2, 2), np.float32)"),
    "identifier that does not fit": rows("id", "rows['id'] = np.arange(96) + 2**40"),
    "cell that is no number": rows(r"3\.4kg.*mine\.py:\d+", "float('3.4kg')"),
    "error in a function of one's own": rows(r"KeyError.*mine\.py:\d+", "rows['z']"),
    "exit in a function of one's own": rows(
        r"run.yaml:4: .*SystemExit: no data.*mine\.py:\d+", "raise SystemExit('no data')"
    ),
    "exit in a stream": streamed(
        r"run.yaml:3: .*SystemExit: no data.*mine\.py:\d+", "sys.exit('no data')"
    ),
    "exit in a run": streamed(
        r"SystemExit: no data \(mine\.py:\d+\)",
        "batch if batch_index != 2 else sys.exit('no data')",
        command=TRAIN,
        exits=1,
    ),
    "syntax error in a module of one's own": Mistake(r"mine\.py:\d+", code="\n\ndef broken(:\n"),
    "field that the model does not find": line("image.*inputs", "model", "!models.mlp {width: 8}"),
    # a data set that is streamed
    "field misspelt in a batch": streamed(
        "run.yaml:3: .*element_spec.*x, label.*yielded x, lable",
        "{'x': batch['x'], 'lable': batch['label']}",
    ),
    "further field in a batch": streamed(
        "run.yaml:3: .*yielded x, label, more", "batch | {'more': batch['x']}"
    ),
    "shape of a batch": streamed(
        r"run.yaml:3: .*float32\[8, 4\].*float32\[8, 3\]", "batch | {'x': batch['x'][:, 1:]}"
    ),
    "batch of float64": streamed(
        "run.yaml:3: .*float32.*float64", "batch | {'x': batch['x'].astype(float)}"
    ),
    "batch of uint8": streamed(
        "run.yaml:3: .*int32.*uint8", "batch | {'label': batch['label'].astype(np.uint8)}"
    ),
    "batch in a tuple": streamed("run.yaml:3: .*yielded a tuple", "(batch['x'], batch['label'])"),
    "field misspelt in a batch of a sweep": streamed(
        "run.yaml:3: .*yielded x, lable", "{'x': batch['x'], 'lable': batch['label']}", sweep=()
    ),
    "stream that raises": streamed(r"run.yaml:3: .*3\.4kg.*mine\.py:\d+", "float('3.4kg')"),
    "training data that fail in a run": streamed(
        r"could not convert.*'3\.4kg' \(mine\.py:\d+\)",
        "batch if batch_index != 2 else float('3.4kg')",
        command=TRAIN,
        exits=1,
    ),
    "test data that fail in a run": streamed(
        r"could not convert.*'3\.4kg' \(mine\.py:\d+\)",
        "batch",
        evaluated="rows(1) if self.first() else float('3.4kg')",
        command=TRAIN,
        exits=1,
    ),
    "label that is ignored in all examples": line(
        "run.yaml:3: Every 'label' of the training split is 0.*ignore_label",
        "loss",
        "!losses.softmax_cross_entropy {ignore_label: 0}",
        code="\n\ndef changed(seed, rows):\n    rows['label'] *= 0\n    return rows\n",
    ),
    # metrics
    "metric of four numbers": metric(r"mine\.py:\d+.*scalar", "compute: return jnp.zeros(4)"),
    "merge of nothing": metric(r"merge.*mine\.py", "merge: return None"),
    "metric of a text": metric(r"bad.*mine\.py:\d+", "compute: return 'good'"),
    "metric that raises": metric(r"ZeroDivisionError.*mine\.py:\d+", "compute: return 1 / 0"),
    "metric that is no dataclass": metric("flax.struct.dataclass", "", head=""),
    "metric that reads another field": metric(
        r"scores.*mine\.py:\d+", "from_model_output: return cls(_['batch']['scores'].mean())"
    ),
    "best metric that is not there": more("accurcy.*accuracy", "best_metric: accurcy"),
    "best metric without validation": more("validation", "best_metric: accuracy", warns=True),
    "smallest accuracy": more(
        "best_mode.*max|max", "best_metric: accuracy\nbest_mode: min", warns=True
    ),
    # losses
    "mean of a loss": loss("each example|\\[batch\\]|shape", "return jnp.mean(outputs)"),
    "loss of another shape": loss("shape|example", "return outputs[:5]"),
    "loss of nothing": loss("None", "return None"),
    "loss of integers": loss("int|float", "return batch['label']"),
    "loss with a field that is not there": loss(
        r"KeyError.*'y'.*mine\.py:\d+", "return batch['y']"
    ),
    "loss that compares traced values": loss(
        r"mine\.py:\d+", "return outputs[:, 0] if outputs.sum() > 0 else -outputs[:, 0]"
    ),
    "loss of pairs of examples": loss(
        "every example with every other", "return (outputs[:, :1] - batch['label']) ** 2"
    ),
    "loss of a wrong broadcast": loss(r"mine\.py:\d+", "return outputs - jnp.ones(7)"),
    # models
    "outputs of another shape": module(r"label|shape|outputs", "return nn.Dense(3)(x).sum()"),
    "width that does not divide": line(
        "run.yaml:2: .*heads",
        "model",
        "!models.vit {width: 30, num_heads: 4, num_classes: 3, inputs: x}",
    ),
    "model that raises": module(r"TypeError|mine\.py:\d+", "return nn.Dense(3)(x, 1, 2)"),
    "model named and not called": line("call", "model", "!partial:models.mlp {width: 8}"),
    # optimizers
    "rate that is negative": line(
        "negative|learning_rate", "optimizer", "!optax.adamw {learning_rate: -0.1}"
    ),
    "b2 of 1": line("b2", "optimizer", "!optax.adamw {learning_rate: 0.1, b2: 1.0}"),
    "leaf that is dropped": optimizer(
        "mine.descent.*no update for the parameter",
        f"u = dict({KEEP}); u.pop(sorted(u)[0]); return u, state",
    ),
    "update of another shape": optimizer(
        "shape", "return jax.tree.map(lambda x: x.sum(), updates), state"
    ),
    "update that needs parameters": optimizer(
        r"mine\.py:\d+|params", "return jax.tree.map(lambda x: x, None['a']), state"
    ),
    "update that raises": optimizer(r"'x7'.*mine\.py:\d+", f"return {KEEP}, int('x7')"),
    "update that asserts": optimizer(
        r"AssertionError.*no state.*mine\.py:\d+", "assert state, 'no state'; return updates, state"
    ),
    "init that raises": line(
        r"'x7'.*mine\.py:\d+",
        "optimizer",
        "!mine.descent {}",
        code="\n\ndef descent():\n    init = lambda params: int('x7')\n"
        "    return optax.GradientTransformation(init, optax.identity().update)\n",
    ),
    "update without a state": optimizer(
        r"mine\.descent.*must return \(updates, state\)", f"return {KEEP}"
    ),
    "updates in a list": optimizer(
        r"mine\.descent.*returned list.*for each parameter",
        "return jax.tree.leaves(updates), state",
    ),
    "if in an update": optimizer(
        r"jnp\.where.*mine\.py:\d+",
        f"return ({KEEP} if optax.tree.norm(updates) > 1 else updates), state",
    ),
    "if in a schedule": schedule(
        r"learning_rate.*jnp\.where.*mine\.py:\d+", "return 0.1 if step < 2 else 0.01"
    ),
    "schedule that raises": schedule(r"learning_rate.*'x7'.*mine\.py:\d+", "return int('x7')"),
    "schedule of a vector": schedule(r"shape \(3,\)", "return jnp.ones(3)"),
    "pattern that matches nothing": line(
        "matches no|no parameter",
        "optimizer",
        groups("headd/.*", ".*"),
    ),
    "parameter that no group matches": line(
        "No group takes",
        "optimizer",
        groups(".*bias"),
    ),
    "pattern that is none": line(
        "pattern|regular",
        "optimizer",
        groups("'('"),
    ),
    "schedule longer than the run": line(
        "steps|longer|before",
        "optimizer",
        "!optax.sgd {learning_rate: !schedules.warmup_cosine {peak_value: 1, warmup_steps: 40}}",
    ),
    "decay without the length of its warm-up": line(
        "warmup_steps",
        "optimizer",
        "!optax.sgd {learning_rate: !schedules.warmup_cosine {peak_value: 1}}",
    ),
    "two normalizations": line(
        "parts",
        "optimizer",
        "!optim.chain {learning_rate: 0.1, before: [!parts.match_norm {}, !parts.match_rms {}]}",
    ),
    "two kinds of decay": line(
        "decay the same",
        "optimizer",
        "!optim.chain {learning_rate: 0.1, before: [!parts.momentum {}], "
        "after: [!parts.decay {rate: 0.1}, !parts.cautious_decay {rate: 0.1}]}",
        warns=True,
    ),
    "two polar factors": line(
        "parts.polar",
        "optimizer",
        "!optim.chain {learning_rate: 0.1, before: [!parts.polar {}, !parts.polar {}]}",
    ),
    "lengths that sign ignores": line(
        "optax.scale_by_sign after it ignores",
        "optimizer",
        "!optim.chain {learning_rate: 0.1, "
        "before: [!optax.normalize_by_update_norm {}, !optax.scale_by_sign {}]}",
    ),
    "convolution under Muon": module(
        r"matrices=\{'Conv_0/kernel': 'conv'\}",
        "return nn.Dense(3)(nn.Conv(8, (2, 2))(x.reshape(-1, 2, 2, 1)).reshape(len(x), -1))",
        more=[("!optax.adamw {learning_rate: 0.01}", MUON)],
    ),
    "two decays": line(
        "parts.decay stands twice",
        "optimizer",
        "!optim.chain {learning_rate: 0.1, before: [!parts.momentum {}], "
        "after: [!parts.decay {rate: 0.1}, !parts.decay {rate: 0.1}]}",
    ),
    "chain of nothing": line(
        "no part", "optimizer", "!optim.chain {learning_rate: 0.1, before: []}"
    ),
    "norm to clip that is negative": line(
        "clip_norm", "optimizer", groups(".*").replace("{groups", "{clip_norm: -1.0, groups")
    ),
    # runs that learn nothing, or measure something else
    "optimizer without its minus": own(
        "up the loss.*scale_by_learning_rate", "return optax.scale_by_adam()", "!mine.o {}"
    ),
    "optimizer that returns parameters": optimizer(
        "group 'all' .mine.descent. have the parameter .* itself",
        "u = jax.tree.map(lambda p, g: p - learning_rate * g, params, updates); return u, state",
        warns=True,
    ),
    "mask that lets gradients through": line(
        r"group 'all' .optax.masked. move .*bias along its gradient",
        "optimizer",
        "!optax.masked {inner: !optax.sgd {learning_rate: 0.1}, mask: !partial:mine.kernels {}}",
        code="\n\ndef kernels(params):\n    return jax.tree.map(lambda x: x.ndim > 1, params)\n",
        warns=True,
    ),
    "argument that an optimizer ignores": own(
        "No update depends on optimizer.learning_rate: mine.o",
        "return optax.sgd(0.1)",
        "!mine.o {learning_rate: 0.01}",
    ),
    "searched argument that an optimizer ignores": own(
        "adamw.*No update depends on optimizer.learning_rate: mine.o",
        "return optax.sgd(0.1)",
        "!mine.o {learning_rate: 0.01}",
        sweep=[],
    ),
    "decay that ends before the run": scheduled(
        "!optax.cosine_decay_schedule {init_value: 0.01, decay_steps: 4}"
    ),
    "warm-up and decay that end before the run": scheduled(
        "!schedules.warmup_cosine {peak_value: 0.01, warmup_steps: 1, decay_steps: 4}"
    ),
    "loss of an argmax": loss(
        "its gradient is 0",
        "return (outputs.argmax(-1) != batch['label']).astype(jnp.float32)",
        warns=True,
    ),
    "loss that ignores the outputs": loss(
        "its gradient is 0", "return batch['x'].sum(-1)", warns=True
    ),
    "metric that counts padding": replace(
        metric("'bad' does not use its argument .mask.", ""),
        run=[
            ("metrics: {accuracy: !metrics.accuracy {}}", "metrics: {bad: !partial:mine.Bad {}}"),
            ("batch_size: 8", "batch_size: 7"),
        ],
        warns=True,
    ),
    # the rest of a run
    "seed that is negative": more("run.yaml:11: .*seed", "seed: -1"),
    "interval of 0": more("run.yaml:11: .*log_every", "log_every: 0"),
    "decay of an average above 1": more("run.yaml:11: .*ema_decay", "ema_decay: 2.0"),
    "dtype that is none": more("run.yaml:11: .*precision", "precision: float8"),
    "writer misspelt": more(
        "tensorboard",
        "hooks: []",
        command="explain --config=run.yaml --vocabulary=mine --set writers=[tensorbord]",
    ),
    "reaction that is none": more("halt.*skip.*rollback", "on_nonfinite: stop"),
    "microbatches that do not divide": more("run.yaml:.*microbatches", "microbatches: 3"),
    "mesh of devices that are not here": more("run.yaml:11: .*1 device|mesh", "mesh: {data: 64}"),
    "pattern of sharding that matches nothing": more(
        "heads/kernel", "sharding: {heads/kernel: fsdp}"
    ),
    "start from a run that is not there": more("nowhere", "warm_start: {from: nowhere}"),
    "hook that is none": more("run.yaml:11: .*hooks", "hooks: [!metrics.accuracy {}]"),
    "diagnostics misspelt": more("update_ratio", "diagnostics: [update_ration]"),
    "no checkpoint kept": more("run.yaml:11: .*keep_latest", "keep_latest: 0"),
    # sweeps
    "method misspelt": swept("method.random", "!method.random", "!method.randm"),
    "arms without names": swept(
        "no space", SWEEP[SWEEP.index("arms:") : SWEEP.index("trials")], "arms: {}\n"
    ),
    "difference that is none": swept("differs", "trials: 4", "trials: 4\ndiffers: [shedule]"),
    "setting of a path that is not there": swept(
        "optimiser", "set: {optimizer:", "set: {optimiser:"
    ),
    "target in words": swept("target", "metric: loss,", "metric: loss, target: low,"),
    "space of two ends that are equal": swept(
        "low|high", "low: 1e-3, high: 1e-1", "low: 0.1, high: 0.1"
    ),
    "two methods": swept("twice|method", "trials: 4", "trials: 4\nmethod: !method.grid {}"),
    "path of a space misspelt": swept(
        "learning_rat",
        "adamw:\n    space: {optimizer.learning_rate:",
        "adamw:\n    space: {optimizer.learning_rat:",
    ),
    "interval upside down": swept("low|high", "low: 1e-3, high: 1e-1", "low: 1e-1, high: 1e-3"),
    "interval from 0": swept("low", "low: 1e-3", "low: 0"),
    "list for a space": swept(
        "space.values", "!space.log_uniform {low: 1e-3, high: 1e-1}", "[0.1, 0.2]"
    ),
    "integers for a rate": swept(
        "integers",
        "!space.log_uniform {low: 2e-4, high: 2e-2}",
        "!space.integers {low: 1, high: 4}",
        True,
    ),
    "goal misspelt": swept("los", "metric: loss", "metric: lss"),
    "split that is not there": swept("validation", "select_on: test", "select_on: validation"),
    "smallest accuracy as goal": swept(
        "max", "metric: loss, mode: min", "metric: accuracy, mode: min", True
    ),
    "trials of 0": swept("trials", "trials: 4", "trials: 0"),
    "trial for trials": swept("'trials'", "trials: 4", "trails: 4"),
    "base misspelt": swept("rum.yaml", "base: run.yaml", "base: rum.yaml"),
    "two equal arms": swept(
        "adamw.*lion|lion.*adamw|same",
        LION + "    space: {optimizer.learning_rate: !space.log_uniform {low: 2e-4, high: 2e-2}}",
        "    space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 1e-1}}",
    ),
    "schedule of one arm only": swept(
        "schedule",
        "learning_rate: 0.001, weight_decay: 1e-4}}\n    space: {optimizer.learning_rate:",
        "learning_rate: !schedules.warmup_cosine {peak_value: 0.001, warmup_steps: 1}, "
        "weight_decay: 1e-4}}\n    space: {optimizer.learning_rate.peak_value:",
        True,
    ),
    "decay of one arm only": swept(
        "weight_decay", ", weight_decay: 1e-4", ", weight_decay: 0.0", True
    ),
    "too few searches": swept("at least 3 searches", "searches: 4", "searches: 2"),
    # commands
    "report of nothing": of("report nowhere", "nowhere"),
    "extension of nothing": of("sweep extend nowhere", "There is no folder .*nowhere"),
    "extension of a folder that is no sweep": of("sweep extend .", "no plan.json"),
    "report of a config": of("report run.yaml", "run.yaml"),
    "sample of nothing": of("sample nowhere --prompt=a", "nowhere"),
    "check of nothing": of("checkpoint check nowhere", "nowhere"),
    "claim of nothing": of("claim verify nowhere nowhere --public=1", "nowhere"),
    "compare with nothing": of("compare run.yaml nowhere.yaml", "nowhere.yaml"),
    "optimizer misspelt": of("optimizers adamww", "adamw"),
    "devices of 0": of("explain --config=run.yaml --vocabulary=mine --devices=0", "devices"),
    "memory in words": of(
        "explain --config=run.yaml --vocabulary=mine --devices=8 --device_memory=much", "much"
    ),
}


def answer(mistake: Mistake, folder: Path) -> tuple[str, str]:
    """Makes a mistake in an empty folder.

    Returns "good", "poor" or "silent", and what was said.
    """

    def changed(text: str, changes: Sequence[tuple[str, str]]) -> str:
        for old, new in changes:
            assert text.count(old) == 1, (old, text)
            text = text.replace(old, new)
        return text

    (folder / "run.yaml").write_text(changed(RUN, mistake.run))
    (folder / "mine.py").write_text(CODE + mistake.code)
    words = mistake.command.split()
    if mistake.sweep is not None:
        (folder / "sweep.yaml").write_text(changed(SWEEP, mistake.sweep))
        words = "sweep --config=sweep.yaml --vocabulary=mine --check".split()
    said = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        path = sys.path.copy()
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code
        finally:
            sys.path[:] = path
            sys.modules.pop("mine", None)
    text = said.getvalue()
    found = re.search(mistake.says, text, re.DOTALL)
    if mistake.warns:
        lines = [each for each in text.splitlines() if re.search(mistake.says, each)]
        warned = code == 0 and found is not None
        return ("good" if warned else "poor" if code else "silent"), "\n".join(
            lines
        ) if warned else text
    if code == 0:
        return "silent", text
    short = len(text.splitlines()) <= 12 and "Traceback" not in text
    return ("good" if code == mistake.exits and found and short else "poor"), text


def answers(names: Sequence[str]) -> int:
    """Prints the answers to mistakes, and returns the number of those that are not good."""
    counts = dict.fromkeys(("good", "poor", "silent"), 0)
    for name in names or MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            verdict, said = answer(MISTAKES[name], Path(folder))
        counts[verdict] += 1
        print(f"{verdict}: {name}")
        if verdict != "good" or names:
            print("\n".join(f"    {each}" for each in said.splitlines()[:40]), flush=True)
    print(", ".join(f"{verdict} {count}" for verdict, count in counts.items()))
    return counts["poor"] + counts["silent"]


if __name__ == "__main__":
    sys.exit(bool(answers(sys.argv[1:])))
