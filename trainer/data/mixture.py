"""A mixture of data sets of tokens, by weights that may change during a run.

Start with `mixture`. `Stage` says which part each training example comes from.
"""

import functools
import hashlib
import heapq
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.config.units import Units, quantity
from trainer.data.absent import DataAbsent, DeclaredData
from trainer.data.order import process_rows
from trainer.data.tokens import TokenDataset
from trainer.messages import check_positive, plural

_NAME = "data.mixture"
_PERIOD = 100_000  # the most examples after which the order of the parts repeats
_LEAST = 2 / _PERIOD  # the smallest weight, of which such a period has an example
_TOGETHER = 4096  # examples whose places are computed at once
_CLOSE = 1e-6  # how near to 1 weights sum, and to whole numbers the examples of a shorter period


@functools.lru_cache(maxsize=32)
def _counts(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Returns how many examples each part has in the shortest period that has its weights."""
    periods = np.arange(1, _PERIOD + 1)[:, None]
    exact = periods * np.asarray(weights) / math.fsum(weights)
    counts = np.rint(exact).astype(np.int64)
    fits = (abs(counts - exact) <= _CLOSE).all(1) & (counts.sum(1) == periods[:, 0])
    if fits.any():
        return tuple(counts[np.argmax(fits)].tolist())
    nearest = np.floor(exact[-1]).astype(np.int64)
    nearest[np.argsort(nearest - exact[-1], kind="stable")[: _PERIOD - nearest.sum()]] += 1
    return tuple(nearest.tolist())


@functools.lru_cache(maxsize=32)
def _period(counts: tuple[int, ...]) -> np.ndarray:
    """Returns of which part each example of a period is, int64, for so many of each part."""
    # Of the first n examples, each part has its share to within less than one, if its example i has
    # a place from floor(i / share) to ceil((i + 1) / share) - 1. Always taking, of those that may
    # come, the one whose last place is the first achieves that (Tijdeman, "The chairman assignment
    # problem", 1980; Baruah et al., "Proportionate progress", 1996).
    size, done = sum(counts), [0] * len(counts)
    owners = np.empty(size, np.int64)
    later = [(0, part) for part, count in enumerate(counts) if count]  # (first place, part)
    ready: list[tuple[int, int]] = []  # (last place, part)
    for place in range(size):
        while later and later[0][0] <= place:
            _, part = heapq.heappop(later)
            heapq.heappush(ready, (-(-(done[part] + 1) * size // counts[part]) - 1, part))
        _, part = heapq.heappop(ready)
        owners[place] = part
        done[part] += 1
        heapq.heappush(later, (done[part] * size // counts[part], part))
    return owners


class Stage(NamedTuple):
    """Examples from `first` on, of which each period has `counts` of each part."""

    first: int
    counts: tuple[int, ...]
    before: np.ndarray  # how many examples of each part precede the stage

    def used(self, example: int) -> np.ndarray:
        """Returns how many examples of each part precede an example of the stage."""
        periods, rest = divmod(example - self.first, sum(self.counts))
        begun = np.bincount(_period(self.counts)[:rest], minlength=len(self.counts))
        return self.before + periods * np.array(self.counts) + begun

    def owners(self, example: int, count: int) -> np.ndarray:
        """Returns of which part each of `count` examples is.

        >>> Stage(first=0, counts=(1, 3), before=np.zeros(2)).owners(1, 6).tolist()
        [1, 0, 1, 1, 1, 0]
        """
        return _period(self.counts)[(example - self.first + np.arange(count)) % sum(self.counts)]


class MixtureDataset:
    """The mixture of parts for a run of so many steps; None if they are not known."""

    def __init__(
        self,
        parts: Mapping[str, TokenDataset | DeclaredData],
        weights: Mapping[Any, Any],
        batch_size: int | None,
        repeat: Sequence[str],
        steps: int | None = None,
    ):
        import jax  # the arrays themselves need no jax

        # By name: the order in a file decides nothing.
        self.parts: dict[str, Any] = dict(sorted(parts.items()))
        self._weights, self._repeat, self._steps = weights, repeat, steps
        first = self._first = _first(self.parts)
        sizes = {name: part.batch_size for name, part in self.parts.items()}
        if batch_size is None and len({*sizes.values()}) > 1:
            raise ValueError(
                f"{_NAME} has parts of the batch sizes {_listed(sizes)}. Give it a batch_size."
            )
        self.batch_size = first.batch_size if batch_size is None else batch_size
        check_positive(_NAME, batch_size=self.batch_size)
        self.element_spec = {
            key: jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype)
            for key, x in first.element_spec.items()
        }
        self.eval_spec: Mapping[str, Any] = first.eval_spec
        self.tokens_per_example: int = first.tokens_per_example
        self.vocab_size: int = first.vocab_size
        self.tokenizer = getattr(first, "tokenizer", None)
        self.splits: dict[str, int | None] = {
            f"{split}/{name}": count
            for name, part in self.parts.items()
            for split, count in part.splits.items()
        }
        self._shares = _shares(weights, self.parts)
        if not set(repeat) <= set(parts):
            known = ", ".join(self.parts)
            raise ValueError(f"{_NAME} got repeat={list(repeat)}, but its parts are {known}.")
        used = {name for shares in self._shares.values() for name, x in shares.items() if x}
        self.num_examples: int = sum(self.parts[name].num_examples for name in used)

    def for_steps(self, steps: int) -> "MixtureDataset":
        """Returns the mixture for a run; ValueError if a part ends before its share."""
        length = self.tokens_per_example
        made = MixtureDataset(self.parts, self._weights, self.batch_size, self._repeat, steps)
        for name, (asked, has) in made._read().items():
            if asked > has and name not in self._repeat:
                raise ValueError(
                    f"The part {name!r} of {_NAME} ends before its share: it has {has * length:,} "
                    f"tokens to train on, {plural(has, 'sequence')} of {length}, and {steps:,} "
                    f"steps ask for {asked * length:,}. Give it more text or less weight, or let "
                    f"it be read again, {asked / has:.3g} times in all: repeat: [{name}]."
                )
        return made

    @functools.cached_property
    def stages(self) -> list[Stage]:
        """The stages in their order; ValueError if two begin together or none with step 0."""
        units = Units(self._steps, self.batch_size, self.num_examples, self.tokens_per_example)
        starts = {key: units.steps(key) for key in self._shares}
        if min(starts.values()) != 0 or len({*starts.values()}) < len(starts):
            said = ", ".join(f"{key!r} (step {step:,})" for key, step in starts.items())
            raise ValueError(
                f"{_NAME} has weights from {said}. They begin at different steps, the first at 0."
            )
        stages: list[Stage] = []
        for key in sorted(starts, key=lambda key: starts[key]):
            counts = _counts(tuple(float(self._shares[key][name]) for name in self.parts))
            first = starts[key] * self.batch_size
            before = stages[-1].used(first) if stages else np.zeros(len(counts), np.int64)
            stages.append(Stage(first, counts, before))
        return stages

    def _stage(self, example: int) -> Stage:
        return next(stage for stage in reversed(self.stages) if stage.first <= example)

    def _read(self) -> dict[str, tuple[int, int]]:
        """Returns how many examples of each part the run reads, and how many there are."""
        end = (self._steps or 0) * self.batch_size
        used = zip(self.parts.items(), self._stage(end).used(end).tolist(), strict=True)
        return {name: (count, part.num_examples) for (name, part), count in used}

    @property
    def plan_lines(self) -> list[str]:
        """Lines of the plan of a run: the weights, and what is read of each part."""
        length, lines = self.tokens_per_example, []
        for stage in self.stages:
            total = sum(stage.counts)
            shares = {x: f"{n / total:.6g}" for x, n in zip(self.parts, stage.counts, strict=True)}
            step = stage.first // self.batch_size
            lines.append(f"mixture from step {step:,} on: {_listed(shares)}")
        for name, (asked, has) in self._read().items():
            read = f"{asked * length:,} of {has * length:,} training tokens"
            lines.append(f"  {name}: {read}, {asked / has:.3g} epochs")
        return lines

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of the fingerprints of the parts, their shares and where these change."""
        prints = {name: part.fingerprint for name, part in self.parts.items()}
        stages = [(stage.first, stage.counts) for stage in self.stages]
        return hashlib.sha256(f"{prints} {stages}".encode()).hexdigest()

    def train(
        self, batch_index: int = 0, seed: int = 0, rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of the training batches from `batch_index` on; see `TokenDataset.train`."""
        own = process_rows(self.batch_size, _NAME, rank, size)
        windows = np.empty((own.stop - own.start, self.tokens_per_example + 1), np.int32)
        for owners, starts in self._placed(batch_index, seed):
            for number, part in enumerate(self.parts.values()):
                rows = np.flatnonzero(owners[own] == number)
                windows[rows] = part.windows(starts[own][rows])
            yield self._first.fields(windows)

    def _placed(self, index: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the part and the first token of each example of the batches from an index on."""
        # Of many batches at once: for one, this takes longer than to read its tokens.
        size, first = self.batch_size, index * self.batch_size
        while True:
            stage = self._stage(first)
            later = [each.first for each in self.stages if each.first > first]
            end = min([first + max(1, _TOGETHER // size) * size, *later])
            owners, starts = stage.owners(first, end - first), np.empty(end - first, np.int64)
            used = stage.used(first).tolist()
            for number, part in enumerate(self.parts.values()):
                own = owners == number
                starts[own] = part.starts(used[number], np.count_nonzero(own), seed)
            for start in range(0, end - first, size):
                yield owners[start : start + size], starts[start : start + size]
            first = end

    def evaluate(
        self, split: str = "test", rank: int | None = None, size: int | None = None
    ) -> Iterator[dict[str, np.ndarray]]:
        """Yields a part of each batch of "validation/code", or of "validation" of all parts."""
        split, _, name = split.partition("/")
        for part in [name] if name else [x for x in self.parts if split in self.parts[x].splits]:
            yield from self.parts[part].evaluate(split, rank, size)


def mixture(
    parts: Mapping[str, TokenDataset],
    weights: Mapping[str | int, float | Mapping[str, float]],
    batch_size: int | None = None,
    repeat: Sequence[str] = (),
) -> MixtureDataset:
    """Returns a mixture of data sets of tokens, by weights that may change during a run.

    The sequences of a part come in the order in which a run of the part alone, with the same seed,
    would read them. Of the first n sequences of the run, or of a stage with its own weights, each
    part has its weight times n to within less than one. Which part a sequence comes from is a
    function of its place alone: seed, processes and where a run is resumed do not matter. Weights
    become fractions with a common denominator of at most 100,000: those of up to five decimals are
    exact, and others change by less than 1e-5.

    The metrics of a split are those of all its sequences, as `validation/loss`, and those of each
    part, as `validation/code/loss`; `best_metric` and the goal of a sweep may name them, as
    `code/loss`. An epoch has the sequences of all parts with a weight.

    Args:
        parts: name -> data set, of `data.tokens` or `data.text`, with the same length, tokens and
            fields. Names have letters, digits, "_", "-" and ".".
        weights: name of each part -> its share of the tokens, which sum to 1; 0 for a part that
            is evaluated only. Or step -> such weights, which hold from this step on, as in
            `{0: {web: 1, code: 0}, 80%: {web: 0.7, code: 0.3}}`.
        batch_size: sequences per training batch, over all processes and parts; None for that of
            the parts, if it is the same. Evaluation batches are those of each part, whose own
            batch_size has no other effect than that of its order="stream".
        repeat: names of parts that are read again after their last sequence, in another order. It
            is an error if the steps of a run ask for more of another part than it has.

    Raises:
        DataAbsent: a part is not on this machine, and declares its shapes.
        ValueError: the parts do not agree, or weights or names do not fit them.

    Example:
        >>> from trainer.data import mixture, text
        >>> parts = {"plays": text(length=64), "works": text(length=64, split_seed=1)}
        >>> mixed = mixture(parts, {"plays": 0.75, "works": 0.25}, batch_size=8)
        >>> next(mixed.train(batch_index=0, seed=0))["tokens"].shape, sorted(mixed.splits)[2:]
        ((8, 64), ['validation/plays', 'validation/works'])
    """
    mixed = MixtureDataset(parts, weights, batch_size, repeat)
    absent = {name: x for name, x in mixed.parts.items() if isinstance(x, DeclaredData)}
    if absent:
        said = " ".join(f"Part {name!r}: {part.message}" for name, part in absent.items())
        raise DataAbsent(_NAME, said, mixed)
    return mixed


def _first(parts: Mapping[str, Any]) -> Any:
    """Returns a part whose fields are those of all; raises ValueError if parts do not agree."""
    allowed = TokenDataset | DeclaredData
    wrong = [
        x for x in parts if not re.fullmatch(r"[\w.-]+", x) or not isinstance(parts[x], allowed)
    ]
    if wrong or not parts:
        kinds = [f"the part {x!r} of the type {type(parts[x]).__name__}" for x in wrong]
        what = ", ".join(kinds) or "no parts"
        raise ValueError(
            f"{_NAME} has {what}. Its parts are data sets of data.tokens or data.text; their "
            "names, which metrics have, are of letters, digits, '_', '-' and '.'."
        )
    # Of a part that is not here, the fields may be unknown.
    owner = next((x for x in parts if isinstance(parts[x], TokenDataset)), next(iter(parts)))
    wanted: dict[str, Any] = {}
    for name, part in {owner: parts[owner], **parts}.items():
        traits = {"length": part.tokens_per_example, "vocab_size": part.vocab_size}
        if isinstance(part, TokenDataset):
            traits |= {"end_of_text": part.known.end_of_text}
            traits |= {"fields": ", ".join(part.element_spec)}
            counts = getattr(part.tokenizer, "token_bytes", None)
            digest = "unknown" if counts is None else hashlib.sha256(counts.tobytes()).hexdigest()
            traits["the hash of the tokenizer"] = digest[:8]
        for trait, value in traits.items():
            if value != wanted.setdefault(trait, value):
                raise ValueError(
                    f"{_NAME} has parts that do not agree: {trait} is {wanted[trait]} of "
                    f"{owner!r}, and {value} of {name!r}. Give all of them one length and one "
                    "tokenizer.json; tokenizer='bpe' makes one for each text."
                )
    return parts[owner]


def _shares(weights: Mapping[Any, Any], parts: Mapping[str, Any]) -> dict[Any, Mapping[str, Any]]:
    """Returns the weights of parts by the steps from which they hold; raises ValueError."""
    staged = any(isinstance(shares, Mapping) for shares in weights.values())
    stages = dict(weights) if staged else {0: weights}
    for step, shares in stages.items():
        is_step = quantity(step) if isinstance(step, str) else type(step) is int and step >= 0
        if not is_step or not isinstance(shares, Mapping) or set(shares) != set(parts):
            given = f"{step!r}: {shares!r}" if staged else repr(shares)
            raise ValueError(
                f"{_NAME} has the parts {', '.join(parts)}, and {given} in weights. "
                "Give each part a weight, 0 if it is only evaluated; or such weights by steps, as "
                "in {0: {web: 1, code: 0}, 80%: {web: 0.7, code: 0.3}}."
            )
        where = f"weights from {step!r}" if staged else "weights"
        for name, weight in shares.items():
            if not isinstance(weight, int | float) or not (weight == 0 or _LEAST <= weight <= 1):
                raise ValueError(
                    f"{_NAME} has {weight!r} for {name!r} in {where}. A weight is a share of the "
                    f"tokens: 0, or from {_LEAST} to 1."
                )
        if round(abs((total := math.fsum(shares.values())) - 1), 9) > _CLOSE:
            scaled = {name: f"{weight / (total or 1):.6g}" for name, weight in shares.items()}
            raise ValueError(
                f"{_NAME} has {where} that sum to {total:.8g}, not to 1. In this ratio, they are "
                f"{_listed(scaled)}."
            )
    return stages


def _listed(values: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
