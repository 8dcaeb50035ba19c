"""The ranges and ticks of the axes of a figure, the same in SVG, PDF and PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.report.document import Axis, Figure

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_MARGIN = 0.03  # the part of the range that is added at each end


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    value: float
    text: str  # "" for a minor tick


@dataclass(frozen=True)
class Scale:
    """The map from the values of an axis to the length of the axis."""

    low: float  # at the start of the axis
    high: float  # at its end, larger than `low`
    log: bool = False  # whether equal lengths are equal ratios
    labels: tuple[str, ...] = ()  # names of categories at 0, 1, 2 and so on
    empty: bool = False  # whether nothing finite is shown, so that the range has no meaning

    def at(self, values: ArrayLike) -> NDArray[np.float64]:
        """Returns where values lie: 0 at `low`, 1 at `high`, NaN for a value without a place."""
        values = np.asarray(values, np.float64)
        low, high = self.low, self.high
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.log:
                values = np.where(values > 0, np.log10(values), np.nan)
                low, high = math.log10(low), math.log10(high)
            return np.where(np.isfinite(values), (values - low) / (high - low), np.nan)

    def limited(self, values: ArrayLike) -> NDArray[np.float64]:
        """Returns the ends of a band, where infinite ones lie just outside of the range."""
        values = np.asarray(values, np.float64)
        margin = 0.1 * (self.high - self.low)
        above = self.high * 2 if self.log else self.high + margin
        below = self.low / 2 if self.log else self.low - margin
        values = np.where(values == np.inf, above, values)
        return np.where((values == -np.inf) | ((values <= 0) & self.log), below, values)

    def ticks(self) -> list[Tick]:
        """Returns the ticks in the range, with text at those that are labelled."""
        if self.labels:
            return [Tick(float(i), label) for i, label in enumerate(self.labels)]
        if self.empty:
            return []
        if self.log and self.high / self.low >= 5:
            return self._log_ticks()
        return _linear_ticks(self.low, self.high)

    def _log_ticks(self) -> list[Tick]:
        decades = math.log10(self.high / self.low)
        every = max(1, math.ceil(decades / 6))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        labelled = {1} if decades > 2.5 else {1, 2, 5}
        digits = range(1, 10) if every == 1 else (1,)
        powers = self.low < 1e-3 or self.high > 2e5
        ticks = []
        for exponent in range(first, last + 1):
            for digit in digits:
                value = float(f"{digit}e{exponent}")
                if self.low <= value <= self.high:
                    shown = digit in labelled and exponent % every == 0
                    ticks.append(Tick(value, _power(digit, exponent, powers) if shown else ""))
        return ticks


def scales(figure: Figure) -> tuple[Scale, Scale]:
    """Returns the scales of the x and y axis."""
    # Both hold all finite values of the series in front. Bands and faint series widen the range by
    # at most its own length at each end, and faint series only by what holds 96% of their values,
    # so that curves of diverged trials do not flatten all others; the drawings cut them there.
    faint = [each for each in figure.series if each.faint]
    bands = [each for each in figure.series if each.kind == "band" and not each.faint]
    front = [each for each in figure.series if each.kind != "band" and not each.faint]
    groups = (front, bands, faint)
    x = [[s.x for s in group if s.kind != "rule" or not len(s.y)] for group in groups]
    y = [[ends for s in group for ends in (s.y, s.high)] for group in groups]
    return _scale(figure.x, x), _scale(figure.y, y)


def _scale(axis: Axis, values: Sequence[Sequence[ArrayLike]]) -> Scale:
    # `values` are those of the series in front, of bands and of faint series.
    if axis.labels:
        return Scale(-0.5, len(axis.labels) - 0.5, False, axis.labels)
    groups = []
    for arrays in values:
        joined = np.concatenate([*(np.asarray(each, np.float64) for each in arrays), np.zeros(0)])
        groups.append(joined[np.isfinite(joined) & ((joined > 0) | (not axis.log))])
    if not any(group.size for group in groups):
        return Scale(1.0, 10.0, axis.log, empty=True)
    low, high = _range(*(np.log10(group) if axis.log else group for group in groups))
    if high - low < 1e-9 * max(1.0, abs(low), abs(high)):
        half = 0.3 if axis.log else 0.1 * abs(low) or 0.5
        low, high = low - half, high + half
    margin = _MARGIN * (high - low)
    start = low - margin
    if not axis.log and 0 <= low < 5 * margin:
        start = 0.0 if low else -margin
    if axis.log:
        return Scale(10.0**start, 10.0 ** (high + margin), True)
    return Scale(start, high + margin)


def _range(
    front: NDArray[np.float64], bands: NDArray[np.float64], faint: NDArray[np.float64]
) -> tuple[float, float]:
    ends = [group for group in (front, bands) if group.size]
    if faint.size:
        ends.append(np.quantile(faint, [0.02, 0.98]))
    low, high = min(float(each.min()) for each in ends), max(float(each.max()) for each in ends)
    first, last = (float(front.min()), float(front.max())) if front.size else (0.0, 0.0)
    if (length := last - first) > 0:
        low, high = max(low, first - length), min(high, last + length)
    return low, high


def _linear_ticks(low: float, high: float) -> list[Tick]:
    rough = (high - low) / 5
    power = math.floor(math.log10(rough))
    step = min((m * 10.0**power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    power = math.floor(math.log10(step) + 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [float(f"{i * step:.12g}") for i in range(first, last + 1)]
    largest = max(map(abs, values), default=0.0)
    if largest >= 1e6 or largest < 1e-3:
        exponent = math.floor(math.log10(largest)) if largest else 0
        return [Tick(value, _scientific(value, exponent, power)) for value in values]
    decimals = max(0, -power)
    return [Tick(v, f"{v:,.{decimals}f}".replace("-", "−")) for v in values]


def _scientific(value: float, exponent: int, power: int) -> str:
    if not value:
        return "0"
    digits = f"{value / 10.0**exponent:.{max(0, exponent - power)}f}".replace("-", "−")
    return f"{digits}×10{str(exponent).translate(_SUPERSCRIPT)}"


def _power(digit: int, exponent: int, powers: bool) -> str:
    if not powers:
        return f"{float(f'{digit}e{exponent}'):,.{max(0, -exponent)}f}"
    power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    return power if digit == 1 else f"{digit}×{power}"
