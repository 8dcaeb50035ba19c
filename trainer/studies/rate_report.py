"""What a range test of a learning rate suggests: sentences, a space to paste, and pictures."""

import math

import numpy as np

from trainer.messages import joined, plural
from trainer.report.document import Axis, Block, Column, Figure, Panel, Report, Series, Table
from trainer.studies.rate_test import RangeTest

_RISING, _STEADY = "rising rate", "rate stays"
_BEYOND = 3.0  # times the rate of divergence; see `space`


def space(tested: RangeTest) -> tuple[float, float] | None:
    """Returns the range that is suggested; None if the rate did not lower the loss."""
    # It begins at the rate from which on the gain is at least a tenth of the largest gain, and ends
    # at three times the smallest rate at which a run diverged, as a warm-up lets a run survive a
    # larger rate than this test; or at the largest rate that was tried, if no run diverged.
    if not tested.fell:
        return None
    rates = tested.rates.values
    ended = [rates[end] for end in tested.ends if end is not None]
    high = _BEYOND * min(ended) if ended else tested.rates.high
    return float(f"{rates[tested.onset]:.1e}"), float(f"{high:.1e}")  # two digits


def upper_end(tested: RangeTest) -> str:
    """Returns what the upper end of the range is."""
    if any(end is not None for end in tested.ends):
        return f"{_BEYOND:g} times the smallest rate of a divergence"
    return "the largest rate that was tried"


def yaml(tested: RangeTest) -> list[str]:
    """Returns the lines of a space to paste into an arm of a sweep; none without a range."""
    if (found := space(tested)) is None:
        return []
    low, high = found
    return ["space:", f"  {tested.paste}: !space.log_uniform {{low: {low:g}, high: {high:g}}}"]


def rate_sentences(tested: RangeTest) -> list[str]:
    """Returns what was seen, and what is suggested."""
    rates, found = tested.rates.values, space(tested)
    pairs = zip(tested.seeds, tested.ends, strict=True)
    ended = [(seed, end) for seed, end in pairs if end is not None]
    lines = []
    if found is None:
        lines.append(
            "The rising rate did not lower the loss by more than the noise, so that no range is"
            " suggested. The group may matter little in so few steps, or the other groups move the"
            " loss too much: more steps (--steps), seeds (--seeds) or larger batches show more."
        )
    else:
        low, high = rates[tested.steepest], rates[tested.lowest]
        lines.append(
            f"Steepest descent: at the rate {low:.2g}, of the mean over"
            f" {plural(len(tested.seeds), 'seed')}. The largest gain is"
            f" {-tested.mean[tested.lowest]:.3g}, at {high:.2g}."
        )
        if tested.onset == 0:
            lines.append("The loss falls from the first rate on: take a smaller --low.")
    if ended:
        at = joined([f"{rates[end]:.2g} (seed {seed})" for seed, end in ended], 6)
        lines.append(f"Divergence: at {at}.")
    if len(ended) < len(tested.seeds):
        left = plural(len(tested.seeds) - len(ended), "run")
        rest = f"{left} of {len(tested.seeds)} had not" if ended else "No run has"
        lines.append(f"{rest} diverged at {rates[-1]:.2g} (--high).")
    return lines


def notes(tested: RangeTest) -> list[str]:
    """Returns what was run, and what the test is."""
    rates = tested.rates
    seeds = joined([str(seed) for seed in tested.seeds])
    return [
        f"{rates.path} rises from {rates.low:g} to {rates.high:g} in {plural(rates.steps, 'step')},"
        f" for the seeds {seeds}; everything else is as in the config. A second run of each seed,"
        f" with the same batches, stays at {rates.low:g}.",
        "This is a heuristic (Smith, arXiv:1506.01186): a rate that a run of few steps survives may"
        " diverge later, and the best rate of a whole run is often below that of steepest descent.",
    ]


def make_rate_report(tested: RangeTest, title: str) -> Report:
    """Makes the report of a range test."""
    pasted = yaml(tested)
    text = (*notes(tested), *((f"To paste: {' '.join(pasted[1:]).strip()}",) if pasted else ()))
    block = Block(text=text, figures=(_losses(tested), _differences(tested)))
    panel = Panel("rates", "Loss by learning rate", "describes", (block,))
    return Report(title, tuple(rate_sentences(tested)), (_RISING, _STEADY), (panel,))


def _marks(tested: RangeTest) -> list[Series]:
    return [
        Series("rule", "", (float(tested.rates.values[end]),), label="divergence of a run")
        for end in sorted({end for end in tested.ends if end is not None})
    ]


def _losses(tested: RangeTest) -> Figure:
    """Draws the loss of each seed, with the rising rate and with the one that stays."""
    rates = tested.rates.values.tolist()
    series = [
        Series("line", arm, rates, _cut(row, end), label=f"{arm}, seed {seed}")
        for arm, losses in ((_STEADY, tested.steady), (_RISING, tested.losses))
        for seed, row, end in zip(tested.seeds, losses, tested.ends, strict=True)
    ]
    rows = tuple(
        (seed, step, rates[step], float(tested.losses[i, step]), float(tested.steady[i, step]))
        for i, seed in enumerate(tested.seeds)
        for step in range(len(rates))
        if math.isfinite(tested.steady[i, step])
    )
    columns = (
        *Column.named(seed="integer", step="integer", rate="number"),
        Column("rising", _RISING, "number"),
        Column("stays", _STEADY, "number"),
    )
    return Figure(
        name="losses",
        title="Loss while the learning rate rises",
        description="The training loss of each step, of each seed, by the learning rate.",
        x=Axis(tested.rates.path, log=True),
        y=Axis("loss of the step"),
        series=(*series, *_marks(tested)),
        table=Table("losses", "Losses", columns, rows),
    )


def _cut(losses: np.ndarray, end: int | None) -> list[float]:
    """Returns losses for a picture: what lies far beyond a divergence would flatten the rest."""
    found = losses.copy()
    if end is not None:
        top = 1.5 * np.nanmax(losses[: end + 1]) if end else np.inf
        found[end:][~(found[end:] < top)] = np.nan
    return found.tolist()


def _differences(tested: RangeTest) -> Figure:
    """Draws the differences of the losses of each seed, and their smoothed mean."""
    common = tested.rates.values[: tested.last].tolist()
    rows = tested.differences[:, : tested.last].tolist()
    series = [Series("line", _RISING, common, row, label="one seed", faint=True) for row in rows]
    series.append(Series("line", _RISING, common, tested.mean.tolist(), label="smoothed mean"))
    if tested.fell:
        at = tested.steepest
        point = (common[at],), (float(tested.mean[at]),)
        series.append(Series("points", "", *point, label="steepest descent"))
    return Figure(
        name="differences",
        title="What the rising rate changes in the loss",
        description=(
            "The loss with the rising rate minus that with the rate that stays, of each seed, and"
            " the mean over the seeds, smoothed by lines over a tenth of the steps."
        ),
        x=Axis(tested.rates.path, log=True),
        y=Axis("difference of the losses"),
        series=(*series, *_marks(tested)),
        table=Table(
            "differences",
            "Smoothed mean of the differences",
            Column.named(rate="number", difference="number"),
            tuple(zip(common, tested.mean.tolist(), strict=True)),
        ),
    )
