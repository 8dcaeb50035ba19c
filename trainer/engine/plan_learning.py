"""Finds what makes a run learn nothing, or measure something else, before its first step.

Updates that move up the loss, a learning rate that is 0 for most of the run, a loss without a
gradient, arguments that change nothing, metrics that count padding, and values of the data set.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import optim
from optim.factories import instantiate, map_floats, name_of, parameters, recipes_within
from optim.paths import flatten
from trainer.config import Call, Config
from trainer.config.vocabulary import RUN
from trainer.data.absent import DeclaredData
from trainer.engine import mesh as meshes
from trainer.engine.contracts import Batch, calling, data_error
from trainer.engine.datasets import read_batch, split_sizes
from trainer.engine.flops import reading
from trainer.engine.program import Program
from trainer.engine.step import State, output_shapes
from trainer.messages import plural

_LONGEST = 6  # elements along an axis of the arrays on which updates are measured
_STEPS = 8  # SAM moves up the loss at every other one, and optax.MultiSteps waits for some
_SMALL = 1e-3  # of its peak: a learning rate that changes next to nothing

Values = Mapping[str, tuple[np.ndarray, np.ndarray]]  # argument -> steps, values


def update_warnings(
    optimizer: optim.Optimizer, params: Any, sampled: Mapping[str, Values]
) -> Iterator[str]:
    """Yields a sentence for each group whose updates climb, or are parameters and not changes."""
    # `sampled` is from `plan.sample_floats`.
    labels = flatten(optimizer.label(params))
    for name, group in optimizer.groups.items():
        if group.is_frozen:
            continue
        within = list(recipes_within(group.optimizer))
        whole = bool(within) and "learning_rate" in parameters(within[0].func)
        if whole and all(RUN.has(name_of(each)) for each in within):
            continue  # it is an optimizer of optax or ours, and has no part of a user's
        shapes = {path: x.shape for path, x in flatten(params).items() if labels[path] == name}
        if (wrong := wrong_update(group.optimizer, shapes, sampled[name])) is not None:
            yield f"The first updates of the group {name!r} ({name_of(group.optimizer)}) {wrong}"


def wrong_update(recipe: Any, shapes: Mapping[str, tuple[int, ...]], values: Values) -> str | None:
    """Measures first updates of small arrays; returns the end of a sentence, or None."""
    # Random gradients are given, and the same with the other sign: half the difference of the two
    # updates comes from the gradients, and half their sum from the parameters alone, as weight
    # decay does. Nothing is known of an optimizer that needs more than gradients.
    random = np.random.default_rng(0)

    def draw() -> dict[str, Any]:
        # One parameter for each number of axes.
        chosen = {len(shape): (path, shape) for path, shape in shapes.items()}.values()
        sizes = {path: [min(n, _LONGEST) for n in shape] for path, shape in chosen}
        return {path: np.asarray(random.normal(size=n), np.float32) for path, n in sizes.items()}

    params, grads = draw(), draw()
    try:
        # A plan uses no accelerator.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            along, against = _moves(recipe, params, grads, values)
    except Exception:  # whatever an optimizer raises that does not get the value of the loss
        return None
    for path, p in params.items():
        with np.errstate(all="ignore"):  # a large weight decay may overflow
            odd, even = (along[path] - against[path]) / 2, (along[path] + against[path]) / 2
            growth, climb = (even * p).sum() / (p * p).sum(), (odd * grads[path]).sum()
        if growth > 0.5 and np.allclose(even, growth * p, rtol=0.05):
            return (
                f"have the parameter {path} itself in them, so that it doubles at each step: an "
                "update is added to the parameters. Return the change alone."
            )
        if climb > 0:
            return (
                f"move {path} along its gradient, up the loss: an update is added to the "
                "parameters. Multiply it by minus the learning rate, as "
                "optax.scale_by_learning_rate does."
            )
    return None


def _moves(recipe: Any, params: Any, grads: Any, values: Values) -> tuple[Any, Any]:
    """Returns the sums of the first updates for some gradients, and for their negatives."""

    def number(path: str, value: Any) -> Any:
        if not callable(value):
            return value
        known = values.get(path) or values[path.split(".")[-1]]
        return float(np.max(known[1]))  # a warm-up begins at 0

    def move(sign: Any) -> Any:
        given = jax.tree.map(lambda g: sign * g, grads)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state, total = carry
            updates, state = tx.update(given, state, params)
            params, total = (jax.tree.map(jnp.add, x, updates) for x in (params, total))
            return (params, state, total), None

        first = jax.tree.map(jnp.asarray, params)
        start = first, tx.init(first), jax.tree.map(jnp.zeros_like, first)
        return jax.lax.scan(step, start, length=_STEPS)[0][2]

    with warnings.catch_warnings(action="ignore"):
        tx = instantiate(map_floats(recipe, number), 0, jnp.float32)
        moved = jax.jit(move)
        return jax.device_get((moved(1.0), moved(-1.0)))


def rate_warnings(sampled: Mapping[str, Values]) -> list[str]:
    """Returns a sentence for each group whose learning rate is about 0 for most of the run."""
    found = []
    for group, arguments in sampled.items():
        for name, (steps, values) in arguments.items():
            peak = int(np.argmax(values))
            low = values[peak:] < _SMALL * values[peak]
            if name.split(".")[-1] == "learning_rate" and low.sum() > len(values) / 2:
                last = int(steps[peak:][~low][-1]) + 1
                found.append(
                    f"In group {group!r}, {name} has its peak {values[peak]:.4g} at step "
                    f"{steps[peak] + 1:,}, and after step {last:,} of {steps[-1] + 1:,} it is less "
                    "than a thousandth of it: most of the run changes next to nothing. Give the "
                    "schedule the length of the run."
                )
    return found


def step_warnings(program: Program, config: Config | None) -> Iterator[str]:
    """Yields sentences if updates do not depend on the batch, or on an argument of a user's."""
    state, batch = program.abstract_state(), program.feed.abstract_batch()
    traced = program.trace(state)
    after, metrics = jax.tree.map(lambda _: False, traced.out_info)
    params = after._replace(params=jax.tree.map(lambda _: True, after.params))
    shown = jax.tree.map(lambda _: True, metrics)

    def from_batch(asked: Any) -> bool:
        return any(reading(traced, asked)[1][-len(batch) :])

    # A loss of the parameters alone reads no batch, either.
    if not from_batch((params, metrics)) and from_batch((after, shown)):
        yield (
            "The updates do not depend on the batch, and the loss does: its gradient is 0, and"
            " nothing is learned. The loss does not read the outputs of the model, or only through"
            " a function without a derivative, such as argmax, round or a comparison."
        )
    whole = jax.tree.map(lambda _: True, after)._replace(hyperparams=False)
    equations, _ = reading(traced, (whole, metrics))
    place = len(jax.tree.leaves(state[: state._fields.index("hyperparams")]))
    inputs = traced.jaxpr.jaxpr.invars[place]
    # `Inputs.insert` takes each of them from the array; a single one is not sliced.
    used = {
        each.params.get("start_indices", (0,))[0]
        for each in equations
        if any(x is inputs for x in each.invars)
    }
    for index, path in enumerate(program.inputs.values):
        call_path, _, name = path.rpartition(".")
        if index in used or config is None or not {path, call_path} <= config.sources.keys():
            continue
        call = config.at(call_path)
        if isinstance(call, Call) and not RUN.has(call.name):
            yield (
                f"No update depends on {path}: {call.name} does not use its argument {name!r}, and"
                " a search over it would compare equal runs."
            )


def mask_warnings(program: Program, first: Mapping[str, Batch]) -> list[str]:
    """Returns a sentence for each metric that counts the padding of a split."""
    # `first` has the first batch of each split, from `Evaluation.check`.
    sizes = split_sizes(program.experiment.data)
    padded = [
        split
        for split, batch in first.items()
        if (sizes[split] or 0) % meshes.size_of(batch) or not np.all(batch["mask"])
    ]
    return [
        f"The metric {name!r} does not use its argument `mask`, and batches of the {padded[0]} "
        "split have padding, which it counts as examples: let from_model_output take `mask`, which "
        "is 0 for padding, and weight by it, as clu.metrics.Average does."
        for name in program.evaluation.unmasked
        if padded
    ]


# The values of a data set. Arrays in memory are read once: all of them or, of large ones, examples
# at equal distances. Of a data set without an attribute `split_arrays`, the first batches are read.

_MOST_BYTES = 2**28  # of a split that are read, which takes a few tenths of a second
_MOST_EXAMPLES = 200_000
_MOST_CLASSES = 1_000  # of which numbers of examples are compared
_SHOWN_CLASSES = 12  # of which the plan lists the numbers of examples
_SHARED = 0.01  # the share of a split that may be in the training split without a warning
_IGNORED = 1 / 3  # the share of the examples that a loss may ignore without a warning
_UNEQUAL = 10  # how many times as many examples one class may have as another


@dataclass(frozen=True)
class _Split:
    """Examples of a split."""

    name: str  # "training", "validation" or "test"
    arrays: Mapping[str, np.ndarray]  # field -> [examples, ...], without examples whose mask is 0
    numbers: np.ndarray  # of the examples, from 0
    mask: np.ndarray | None  # [examples, positions]
    # the distance of these examples in the split; None if they are its first batch
    apart: int | None

    @property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def what(self) -> str:
        """What the examples are, such as "the test split"."""
        if self.apart is None:
            return f"the first {self.name} batch"
        return f"{'' if self.apart == 1 else 'a sample of '}the {self.name} split"


class DataScan(NamedTuple):
    """What was found in the data of a program."""

    warnings: list[str]  # sentences about what is probably a mistake
    classes: str = ""  # how many training examples each class has, if that is unequal
    outputs: int = 0  # of the model for an example; 0 if that is not known


def scan(program: Program, state: State, first: Mapping[str, Batch]) -> DataScan:
    """Looks at a program's data."""
    # `first` has the first batch of each split that is evaluated, from `Evaluation.check`. Raises
    # ComponentError if the loss says that labels are numbers of classes, and one is not.
    experiment = program.experiment
    warnings = [*getattr(experiment.data, "plan_warnings", ())]
    if isinstance(experiment.data, DeclaredData):
        return DataScan(warnings)
    splits = [split for split in _splits(experiment.data, first) if split.size]
    warnings += [text for split in splits for text in _not_finite(split)]
    if (outputs := program.evaluation.outputs) is None:  # there is no split to evaluate
        with meshes.ambient(program.mesh):
            outputs = output_shapes(experiment, state, program.feed.abstract_batch())
    key = getattr(experiment.loss, "class_labels", None)
    classes = getattr(outputs, "shape", (0,))[-1]
    for split in splits:
        if key is None:
            warnings += _perhaps_wrong(split, experiment.loss, outputs)
        elif _is_number(split, key, outputs):
            ignored = getattr(experiment.loss, "ignore_label", None)
            _refuse_wrong(split, key, classes, ignored)
            warnings += _mostly_ignored(split, key, ignored)
    held = [split for split in splits if split.apart is not None]
    if not held or held[0].name != "training":  # nothing of it counts
        return DataScan(warnings, outputs=classes)
    train, others = held[0], held[1:]
    warnings += [
        f"All {split.size:,} examples of {split.what} have the same {key!r}."
        for split in held
        for key, x in split.arrays.items()
        if split.size > 1 and x.size and bool((x == x[:1]).all())
    ]
    warnings += [text for split in others for text in _shared(train, split)]
    told = ""
    if key is not None and classes <= _MOST_CLASSES and _is_number(train, key, outputs):
        if train.arrays[key].ndim == 1:
            known = _count(train, key, classes)
            warnings += _classes(train, known, others, key)
            told = _class_counts(train, known)
    return DataScan(warnings, told, classes)


def _splits(data: Any, first: Mapping[str, Batch]) -> Iterator[_Split]:
    """Yields the splits of a data set, the training split first."""
    if (held := getattr(data, "split_arrays", None)) is not None:
        for split in ("train", *split_sizes(data)):
            name = "training" if split == "train" else split
            with calling("data"):
                arrays = held[split]
                total = len(next(iter(arrays.values())))
                bytes_each = sum(x.nbytes for x in arrays.values()) / max(total, 1)
                most = max(1, min(_MOST_EXAMPLES, int(_MOST_BYTES / max(bytes_each, 1))))
                apart = math.ceil(total / most)
                found = _counted(name, {key: x[::apart] for key, x in arrays.items()}, apart)
            yield found
        return
    yield _counted("training", read_batch(data, 0), None)
    for split, evaluated in first.items():
        yield _counted(split, evaluated, None)


def _counted(name: str, arrays: Mapping[str, Any], apart: int | None) -> _Split:
    """Returns a split without the examples whose mask is 0."""
    fields = {key: np.asarray(x) for key, x in arrays.items() if key != "mask"}
    numbers = np.arange(len(next(iter(fields.values())))) * (apart or 1)
    mask = np.asarray(arrays["mask"]) if "mask" in arrays else None
    if mask is not None and mask.ndim == 1:
        fields = {key: x[mask > 0] for key, x in fields.items()}
        mask, numbers = None, numbers[mask > 0]
    return _Split(name, fields, numbers, mask, apart)


def _not_finite(split: _Split) -> Iterator[str]:
    for key, x in split.arrays.items():
        if not np.issubdtype(x.dtype, np.inexact) and x.dtype.kind != "V":  # V: bfloat16
            continue
        finite = np.isfinite(x.astype(np.float32) if x.dtype.kind == "V" else x)
        wrong = np.flatnonzero(~finite.all(axis=tuple(range(1, x.ndim))))
        if not wrong.size:
            continue
        then = "a step that reads one has no finite loss"
        if split.name != "training":
            then = "its loss is then probably NaN, and no run has a result"
        yield (
            f"{key!r} has values that are not finite in {wrong.size:,} of {split.size:,} examples "
            f"of {split.what}, first in example {split.numbers[wrong[0]]:,} (from 0): {then}. "
            f"{_columns(finite)}Remove these examples, or replace the values."
        )


def _columns(finite: np.ndarray) -> str:
    """Says in which columns of a table [examples, columns] the values are that are not finite."""
    columns = np.flatnonzero(~finite.all(axis=0)) if finite.ndim == 2 else np.arange(0)
    if not 0 < len(columns) < finite.shape[-1]:
        return ""
    shown = ", ".join(map(str, columns[:3])) + (", ..." if len(columns) > 3 else "")
    which = "column" if len(columns) == 1 else "columns"
    return f"They are in {which} {shown} of {finite.shape[1]} (from 0) only. "


def _shared(train: _Split, split: _Split) -> Iterator[str]:
    """Yields a sentence about examples of a split that are equal to one of the training split."""
    known = set(_rows(train))
    if (count := sum(row in known for row in _rows(split))) >= max(1, _SHARED * split.size):
        yield (
            f"{count:,} of {split.size:,} examples of {split.what} are equal, in every field, to "
            f"one of {train.what}: what is measured on them is not about unseen examples. Remove "
            "them from one of the two."
        )


def _rows(split: _Split) -> Iterator[int]:
    """Yields a hash of each example, 64 bits that are equal for equal examples."""
    arrays = [split.arrays[key] for key in sorted(split.arrays)]
    for index in range(split.size):
        yield hash(b"".join([x[index].tobytes() for x in arrays]))


def _is_number(split: _Split, key: str, outputs: Any) -> bool:
    """Returns whether a field has numbers of classes, and not their probabilities."""
    x = split.arrays.get(key)
    ndim = len(getattr(outputs, "shape", ()))
    return x is not None and np.issubdtype(x.dtype, np.integer) and x.ndim == ndim - 1


def _labels(split: _Split, key: str, ignored: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the labels that count, and the number of the example of each."""
    x = split.arrays[key]
    counts = np.ones(x.shape, bool) if ignored is None else x != ignored
    if split.mask is not None and split.mask.shape == x.shape:
        counts &= split.mask > 0
    return x[counts], split.numbers[np.nonzero(counts)[0]]


def _refuse_wrong(split: _Split, key: str, classes: int, ignored: int | None) -> None:
    labels, examples = _labels(split, key, ignored)
    if split.apart is not None and not labels.size:
        raise data_error(
            f"Every {key!r} of {split.what} is {ignored}, the ignore_label of the loss: no example "
            "counts. Correct the labels, or choose another ignore_label.",
        )
    wrong = (labels < 0) | (labels >= classes)
    if not wrong.any():
        return
    values = np.unique(labels[wrong])
    shown = ", ".join(str(value) for value in values[:3]) + (", ..." if len(values) > 3 else "")
    known = np.unique(labels)
    advice = (
        f"Give the model at least {int(labels.max()) + 1} outputs (`num_classes` of Lockstep's "
        "models), or correct them."
    )
    if 1 < len(known) <= classes:
        advice = (
            f"The split has {len(known)} different labels: number them from 0 to {len(known) - 1}, "
            "for all splits at once, as numpy.unique(labels, return_inverse=True) does."
        )
    elif values[-1] < 0:
        advice = "Remove these examples."
    if len(values) == 1 and values[0] < 0 and len(known) > 2:
        advice += (
            f" If {values[0]} stands for no label, set `ignore_label: {values[0]}` of the loss, so "
            "that they count neither in the loss nor in the metrics."
        )
    raise data_error(
        f"{key!r} is {shown} in {plural(int(wrong.sum()), 'label')} of {split.what}, first in "
        f"example {examples[wrong][0]:,} (from 0). The loss reads it as the number of a class, and "
        f"the model has {classes} outputs: classes 0 to {classes - 1}. {advice}",
    )


def _mostly_ignored(split: _Split, key: str, ignored: int | None) -> Iterator[str]:
    """Yields a sentence if a loss ignores many examples of a split, or all classes but one."""
    if ignored is None or split.arrays[key].ndim != 1:
        return
    labels, _ = _labels(split, key, ignored)
    if (share := 1 - len(labels) / split.size) > _IGNORED:
        yield (
            f"The loss ignores {share:.0%} of the examples of {split.what}, whose {key!r} is "
            f"{ignored}, its ignore_label."
        )
    if share and len(np.unique(labels)) == 1:
        yield (
            f"All examples of {split.what} that the loss does not ignore are of class {labels[0]}: "
            "a model that always answers it makes no mistake."
        )


def _perhaps_wrong(split: _Split, loss: Any, outputs: Any) -> Iterator[str]:
    """Yields a sentence for each field that a loss may read as classes, and that has others."""
    classes = getattr(outputs, "shape", (0,))[-1]
    for key in _read_by(loss, outputs, split):
        if not _is_number(split, key, outputs):
            continue
        labels, _ = _labels(split, key)
        # A single output is a number or a logit, and many values are numbers of something else.
        if classes == 1 or not 0 < len(np.unique(labels)) <= 2 * classes:
            continue
        if labels.min() < 0 or labels.max() >= classes:
            yield (
                f"{key!r} has values from {labels.min()} to {labels.max()} in {split.what}, and "
                f"the model has {plural(classes, 'output')}. If the loss reads it as the number of "
                "a class, some have none, and jax reads another class or NaN without an error."
            )


def _read_by(loss: Any, outputs: Any, split: _Split) -> Sequence[str]:
    """Returns the integer fields of a batch that a loss reads; none if it cannot be traced."""
    size = getattr(outputs, "shape", (1,))[0]
    counts = (size,) if split.mask is None else (size, *split.mask.shape[1:])
    try:
        shapes = meshes.resized(split.arrays, size)
        shapes["mask"] = jax.ShapeDtypeStruct(counts, np.float32)
        # A function of its own, because a loss may be an object that cannot be hashed.
        traced = jax.jit(lambda *given: loss(*given)).trace(outputs, shapes)
    except Exception:  # the step, which is traced later, tells the user
        return ()
    _, read = reading(traced, jax.tree.map(lambda _: True, traced.out_info))
    fields = zip(sorted(shapes), read[-len(shapes) :], strict=True)  # as jax flattens a dict
    return [name for name, is_read in fields if is_read and name != "mask"]


def _classes(train: _Split, known: np.ndarray, others: Sequence[_Split], key: str) -> Iterator[str]:
    """Yields sentences about classes that one split lacks, and about unequal ones."""
    # `known` is how many training examples each class has.
    for split in others:
        found = _count(split, key, classes := len(known))
        unknown = np.flatnonzero((known == 0) & (found > 0))
        absent = np.flatnonzero((known > 0) & (found == 0))
        if unknown.size:
            number = plural(int(found[unknown[0]]), "example")
            yield (
                f"Of class {unknown[0]}, {split.what} has {number} and {train.what} has none"
                f"{_more(unknown)}."
            )
        if absent.size and split.size >= 10 * classes:
            yield f"Of class {absent[0]}, {split.what} has no example{_more(absent)}."
    most, least = int(known.argmax()), int(np.where(known, known, known.max()).argmin())
    if known[most] >= _UNEQUAL * known[least] > 0:
        shares = known / known.sum()
        yield (
            f"The classes of {train.what} are unequal: {shares[most]:.1%} of its examples are of "
            f"class {most}, and {shares[least]:.1%} of class {least}. A model that always answers "
            f"{most} has an accuracy of {shares[most]:.3g} there."
        )


def _count(split: _Split, key: str, classes: int) -> np.ndarray:
    labels = split.arrays[key]
    return np.bincount(labels[labels >= 0], minlength=classes)


def _class_counts(train: _Split, known: np.ndarray) -> str:
    """Returns how many examples each class has, if classes are few and one is twice another."""
    present = np.flatnonzero(known)
    if len(present) > _SHOWN_CLASSES or 1 < len(present) and known.max() < 2 * known[present].min():
        return ""
    counts = ", ".join(f"{known[number]:,} of class {number}" for number in present)
    whose = "training examples" if train.apart == 1 else f"examples of {train.what}"
    return (
        f"{whose}: {counts}; an answer that is always {known.argmax()} has an accuracy of"
        f" {known.max() / known.sum():.3g}"
    )


def _more(classes: np.ndarray) -> str:
    rest = len(classes) - 1
    return f", and so for {rest} more {'class' if rest == 1 else 'classes'}" if rest else ""
