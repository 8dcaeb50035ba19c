"""Figures of metrics: styles of series, curves, and the command `plot`."""

import html
import itertools
import json
import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from tests import runs
from trainer.__main__ import main
from trainer.report.figures.svg import style
from trainer.report.plots import (
    Line,
    Points,
    combine,
    describe_bands,
    draw_in_terminal,
    save_figure,
    smooth,
)

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0: linear RGB as people with protanopia,
# deuteranopia and tritanopia see it. Ottosson 2020: linear RGB to OKLab.
SEEN = {
    "three primary colors": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_CONES = [
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
]
TO_LAB = [
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
]


def linear(color: str) -> np.ndarray:
    """Returns "#rrggbb" as linear RGB, [3]."""
    rgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.2."""
    low, high = sorted(linear(color) @ [0.2126, 0.7152, 0.0722] for color in (one, other))
    return float((high + 0.05) / (low + 0.05))


def distance(one: str, other: str, seen: str) -> float:
    """Returns the distance in OKLab of two colors, as some people see them."""
    rgb = np.array([np.array(SEEN[seen]) @ linear(color) for color in (one, other)])
    lab = np.cbrt(np.clip(rgb @ np.array(TO_CONES).T, 0, None)) @ np.array(TO_LAB).T
    return float(np.linalg.norm(lab[0] - lab[1]))


def test_colors_can_be_seen_on_white_and_on_dark() -> None:
    assert min(contrast(style(index).color, "#ffffff") for index in range(8)) > 2.2
    assert min(contrast(style(index).color_on_dark, "#16181d") for index in range(8)) > 3


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("field", ["color", "color_on_dark"])
def test_colors_can_be_told_apart(field, seen) -> None:
    colors = [getattr(style(index), field) for index in range(8)]
    closest = min(distance(*pair, seen) for pair in itertools.combinations(colors, 2))
    # On white 0.076 as in the original. On dark, light grey and yellow have 0.059.
    assert closest > (0.075 if field == "color" else 0.055)


def test_styles_without_color_repeat_after_35_series_and_with_color_after_280() -> None:
    assert len({style(index)[2:] for index in range(35)}) == 35
    assert len({style(index) for index in range(280)}) == 280


# Curves.


def points(steps, values, x=None) -> Points:
    steps = np.array(steps)
    return Points(steps, np.array(steps if x is None else x, float), np.array(values, float))


def test_the_mean_of_runs_is_taken_at_the_steps_that_all_have() -> None:
    line = combine([points([1, 2, 3], [1, 2, 9]), points([1, 3], [4, 11], x=[2, 5])])
    np.testing.assert_array_equal(line.x, [1.5, 4])
    np.testing.assert_array_equal(line.y, [2.5, 10])


def test_the_band_of_two_runs_is_from_the_smaller_to_the_larger() -> None:
    line = combine([points([1, 2], [1, 7]), points([1, 2], [4, 5])])
    np.testing.assert_array_equal([line.low, line.high], [[1, 5], [4, 7]])
    assert describe_bands([line]) == "band: from the smaller to the larger of 2"


@pytest.mark.parametrize("runs", [3, 8])
def test_the_band_of_three_runs_or_more_is_the_t_interval_of_scipy(runs) -> None:
    values = np.random.default_rng(0).normal(size=(runs, 5))
    line = combine([points(range(5), each) for each in values])
    mean, error = values.mean(0), stats.sem(values, axis=0)
    np.testing.assert_allclose(
        [line.low, line.high], stats.t.interval(0.95, runs - 1, mean, error), rtol=1e-12
    )
    assert describe_bands([line]) == "band: 95% t interval of the mean"
    assert len(line.faint) == runs


def test_a_run_alone_has_no_band_and_its_own_values_behind_it_if_it_is_smoothed() -> None:
    alone = points([1, 2], [1, 3])
    assert combine([alone]).low is None and combine([alone]).faint == ()
    smoothed = combine([alone], 0.5)
    np.testing.assert_array_equal(smoothed.faint[0][1], [1, 3])
    assert describe_bands([smoothed]) == ""


def test_smoothing_has_no_bias_towards_zero_and_is_the_mean_that_pandas_computes() -> None:
    np.testing.assert_allclose(smooth(np.full(9, 7.0), 0.99), 7.0, rtol=1e-12)
    # 0.9^2 * 1 + 0.9 * 2 + 6 over 0.9^2 + 0.9 + 1: pandas' ewm(alpha=0.1, adjust=True).mean()
    assert smooth([1, 2, 6], 0.9)[-1] == pytest.approx((0.81 + 1.8 + 6) / 2.71)
    np.testing.assert_array_equal(smooth([1, 2, 6], 0), [1, 2, 6])


def test_a_value_that_is_not_finite_does_not_spoil_those_after_it() -> None:
    smoothed = smooth([1, np.inf, np.nan, 3], 0.5)
    assert np.isposinf(smoothed[1]) and np.isnan(smoothed[2])
    assert smoothed[3] == smooth([1, 3], 0.5)[1]


# The terminal.


def rows_of(text: str) -> list[str]:
    return [line.partition("|")[2] for line in text.splitlines() if "|" in line]


def test_the_axis_of_a_terminal_fits_the_data_with_labels_that_differ() -> None:
    text = draw_in_terminal({"a": ([0, 1], [0.98123, 0.98127])}, "title")
    labels = [line.partition("|")[0].strip() for line in text.splitlines() if "|" in line]
    assert (labels[0], labels[-1]) == ("0.98127", "0.98123") and len(set(labels)) == 10
    rows = rows_of(text)
    assert rows[0].endswith("*") and rows[-1].startswith("*")


def test_a_logarithmic_axis_of_a_terminal_makes_an_exponential_a_line() -> None:
    x = np.arange(1, 101)
    rows = rows_of(draw_in_terminal({"a": (x, 10.0**-x)}, "", height=10, log_y=True))
    firsts = np.array([row.index("*") for row in rows])
    assert np.ptp(np.diff(firsts)) <= 4
    rows = rows_of(draw_in_terminal({"a": (x, 1.0 / x)}, "", log_x=True, log_y=True))
    assert np.ptp(np.diff([row.index("*") for row in rows])) <= 4


def test_a_curve_is_drawn_only_where_it_has_points() -> None:
    curves = {"short": ([0, 1], [1, 1]), "long": ([0, 10], [2, 2])}
    rows = rows_of(draw_in_terminal(curves, "", width=11))
    assert (rows[0], rows[-1]) == ("o" * 11, "**")


@pytest.mark.parametrize("values", [[1.0], [5.0, 5.0], [np.nan, 3.0, np.nan]])
def test_one_value_can_be_drawn_in_a_terminal(values) -> None:
    text = draw_in_terminal({"a": (np.arange(len(values)), values)}, "")
    labels = [line.partition("|")[0] for line in text.splitlines() if "|" in line]
    assert "*" in rows_of(text)[4] and len(set(labels)) == 10


def test_many_curves_have_different_marks_and_lines_that_fit_a_terminal() -> None:
    curves = {f"run {n}": ([0, 1], [n, n + 1]) for n in range(60)}
    text = draw_in_terminal(curves, "")
    legend = text.rpartition("---\n")[2].splitlines()[1:]
    assert max(map(len, legend)) <= 80 and legend[-1].endswith("and 36 more")
    marks = re.findall(r"(\S) run \d+", "\n".join(legend))
    assert len(marks) == len(set(marks)) == 24


# Files.


def lines_of(count: int) -> dict[str, Line]:
    x = np.arange(1, 60)
    return {f"run {n}": Line(x, x * (1.0 + n)) for n in range(count)}


@pytest.mark.parametrize(
    ("suffix", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("SVG", b"<")]
)
def test_the_suffix_chooses_the_format_and_the_same_figure_has_the_same_bytes(
    suffix, start, tmp_path
) -> None:
    files = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for file in files:
        save_figure(lines_of(3), file, "title", "step", "loss")
    assert files[0].read_bytes() == files[1].read_bytes()
    content = files[0].read_bytes()
    assert content.startswith(start) and b"CreationDate" not in content and b"date>" not in content


def test_a_legend_lies_outside_of_the_axes_and_does_not_narrow_them(tmp_path, monkeypatch) -> None:
    widths = []

    def measure(self: Figure, *args: object, **options: object) -> None:
        self.draw_without_rendering()
        box = self.axes[0].get_window_extent()
        for legend in self.legends:
            assert legend.get_window_extent().y1 <= box.y0
            assert legend.get_window_extent().x1 <= self.bbox.x1 + 1
            assert legend.get_window_extent().y0 >= 0
        widths.append(box.width / self.dpi)

    monkeypatch.setattr(Figure, "savefig", measure)
    for count in (1, 3, 12, 60):
        save_figure(lines_of(count), tmp_path / "a.png", "", "step", "loss")
    assert min(widths) > 4.5 and max(widths) < 1.1 * min(widths)


def test_the_curves_of_a_figure_differ_without_color(tmp_path, monkeypatch) -> None:
    found = []

    def look(self: Figure, *args: object, **options: object) -> None:
        found.extend(
            (line.get_linestyle(), str(line._dash_pattern), line.get_marker())  # type: ignore[attr-defined]
            for line in self.axes[0].lines
        )

    monkeypatch.setattr(Figure, "savefig", look)
    save_figure(lines_of(30), tmp_path / "a.png", "", "step", "loss")
    assert len(set(found)) == 30


def test_names_are_shown_as_they_are(tmp_path) -> None:
    x = np.arange(3)
    names = ["_first", "a$b$\\frac", "<b>&"]
    save_figure({name: Line(x, x) for name in names}, tmp_path / "a.svg", "$x", "a_b$", "$\\")
    svg = re.sub("<!--.*?-->", "", (tmp_path / "a.svg").read_text())
    svg = html.unescape(svg)
    assert [name for name in [*names, "$x", "a_b$", "$\\"] if name not in svg] == []


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_names_that_a_font_cannot_show_are_escaped_or_boxes_without_a_warning(
    suffix: str, tmp_path
) -> None:
    x = np.arange(3)
    lines = {name: Line(x, x) for name in ("a\x1b[31m", "運行", "\U0001f9ea")}
    save_figure(lines, tmp_path / f"a.{suffix}", "b\x1b", "c\x07", "運")
    if suffix == "svg":
        shown = [text.text for text in ElementTree.parse(tmp_path / "a.svg").iter() if text.text]
        assert {r"a\x1b[31m", r"b\x1b", r"c\x07", "運行", "運"} <= set(shown)


def test_a_logarithmic_axis_fits_the_curves_and_not_a_band_that_reaches_zero(
    tmp_path, monkeypatch
) -> None:
    limits = []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *_, **__: limits.append(self.axes[0].get_ylim())
    )
    y = np.array([1.0, 0.1])
    line = Line([1, 2], y, low=np.array([0.5, 1e-30]), high=np.array([2.0, 1.0]), runs=3)
    save_figure({"a": line}, tmp_path / "a.png", "", "step", "loss", log_y=True)
    assert 0.005 < limits[0][0] < 0.1


# The command.

CONFIG = "model: !models.mlp {{}}\nseed: {}\noptimizer: !optax.sgd {{learning_rate: {}}}\n"


def write_run(folder, seed=None, rate=0.1, rows=((1, 3.0), (2, 2.0), (3, 1.0))) -> str:
    folder.mkdir(parents=True)
    if seed is not None:
        (folder / "config.yaml").write_text(CONFIG.format(seed, rate))
    text = "".join(
        json.dumps({"step": step, "loss": value, "epochs": step / 2}) + "\n" for step, value in rows
    )
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def plotted(capsys, *options) -> str:
    return runs.printed(capsys, "plot", "--metric=loss", *options)


def refused(capsys, *options) -> str:
    return runs.refused(capsys, "plot", "--metric=loss", *options)


def test_runs_that_differ_in_their_seeds_only_are_drawn_as_one(tmp_path, capsys) -> None:
    runs = [write_run(tmp_path / f"sgd_{seed}", seed) for seed in range(10, 13)]
    runs += [write_run(tmp_path / f"fast_{seed}", seed, rate=0.5) for seed in range(2)]
    runs.append(write_run(tmp_path / "other"))  # without a config.yaml
    text = plotted(capsys, *runs)
    assert "loss by step, mean of 1 to 3 runs" in text and "* sgd   o fast   + other\n" in text
    assert "* sgd_10   o sgd_11   + sgd_12   x fast_0" in plotted(capsys, *runs, "--each_run")


def test_groups_that_would_have_one_name_are_named_by_their_first_runs(tmp_path, capsys) -> None:
    runs = [write_run(tmp_path / f"run_{n}", seed=n, rate=n // 2 + 1) for n in range(4)]
    assert "* run_0 and 1 more   o run_2 and 1 more\n" in plotted(capsys, *runs)
    seeds = [write_run(tmp_path / f"{n}/muon", seed=n) for n in range(2)]
    assert "  * muon\n" in plotted(capsys, *seeds)


def test_the_x_axis_can_be_another_value_of_the_rows(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run")
    text = plotted(capsys, run, "--x=epochs")
    assert text.startswith("loss by epochs\n") and re.search(r"\n +0\.5 +1\.5\n", text)
    said = refused(capsys, run, "--x=perf/seconds")
    assert "has no metric 'perf/seconds'. It has: epochs, loss." in said


def test_points_that_a_logarithmic_axis_cannot_show_are_counted(tmp_path, capsys) -> None:
    run = write_run(tmp_path / "run", rows=[(0, 2.0), (1, 0.0), (2, 1.0), (3, math.nan), (4, 1.0)])
    said = "1 of 5 points are not drawn: they are not finite. 2 of 5 points are not on a"
    assert said in plotted(capsys, run, "--log_x", "--log_y")
    assert "not on a" not in plotted(capsys, run)
    negative = write_run(tmp_path / "negative", rows=[(1, -1.0)])
    assert "No point of loss is positive" in refused(capsys, negative, "--log_y")
    diverged = write_run(tmp_path / "diverged", rows=[(1, math.nan)])
    assert "No value of loss is finite" in refused(capsys, diverged)


def test_runs_of_a_group_without_a_common_step_are_refused(tmp_path, capsys) -> None:
    runs = [write_run(tmp_path / f"a_{n}", seed=n, rows=[(n + 1, 1.0)]) for n in range(2)]
    assert "draw them one by one with --each_run" in refused(capsys, *runs)
    assert "* a_0   o a_1\n" in plotted(capsys, *runs, "--each_run")


@pytest.mark.parametrize("weight", ["1", "-0.1", "a", "nan"])
def test_a_weight_that_smooths_nothing_is_refused(weight, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["plot", "run", f"--smoothing={weight}"])
    assert "write a number of at least 0 and below 1" in capsys.readouterr().err


def test_a_figure_of_seeds_says_what_its_band_is(tmp_path, capsys) -> None:
    runs = [write_run(tmp_path / f"sgd_{seed}", seed) for seed in range(3)]
    file = tmp_path / "a.svg"
    assert "is drawn in" in plotted(capsys, *runs, f"--figure={file}", "--smoothing=0.5")
    svg = file.read_text()
    assert "loss by step, mean of 3 runs, smoothed by 0.5" in svg
    assert "band: 95% t interval of the mean" in svg
    assert "\\n" not in svg  # the end of a line, and not its two characters
