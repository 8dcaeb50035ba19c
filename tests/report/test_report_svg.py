"""Figures as SVG, PDF and PNG: coordinates, scales, styles and what is left out."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tests.report_documents import UNUSABLE, large_report
from trainer.report.document import Axis, Figure, Series
from trainer.report.figures.drawing import draw, save
from trainer.report.figures.svg import Scale, scales, style, svg

SVG = "{http://www.w3.org/2000/svg}"


def figure(*series, x=None, y=None, title="A title", description="What it shows."):
    return Figure("name", title, description, x or Axis("x"), y or Axis("y"), series, UNUSABLE)


def drawn(shown, arms=("a", "b")):
    """Returns the series of a figure as the page shows it, and left, top, right and bottom."""
    tree = ET.fromstring(svg(shown, arms, "f1"))
    box = [int(side) for side in tree.attrib["data-box"].split()]
    return [each for each in tree.iter() if "s" in each.get("class", "").split()], box


def points(element):
    """Returns the vertices of the first path of a series, and how often it begins anew."""
    path = element if element.tag == f"{SVG}path" else element.find(f"{SVG}path")
    data = path.attrib["d"]
    found, at, command, numbers = [], [0.0, 0.0], "", []
    for token in re.findall(r"[A-Za-z]|-?\d+", data):
        if token.isalpha():
            command, numbers = token, []
            continue
        numbers.append(int(token))
        if command in "hv":
            at["hv".index(command)] += numbers.pop()
        elif len(numbers) < 2:
            continue
        else:
            a, b = numbers
            at = [a, b] if command == "M" else [at[0] + a, at[1] + b]
            numbers = []
        found.append(tuple(at))
    return np.array(found), data.count("M")


def test_points_lie_where_the_scale_says():
    values = [1.0, 10.0, 100.0]
    shown = figure(
        Series("points", "a", values, [0.0, 2.0, 8.0]), x=Axis("rate", log=True), y=Axis("loss")
    )
    (element,), (left, top, right, bottom) = drawn(shown)
    # 3% of the range are left free at each end.
    low, high = np.log10(1) - 0.06, np.log10(100) + 0.06
    x = left + (right - left) * (np.log10(values) - low) / (high - low)
    y = bottom - (bottom - top) * (np.array([0.0, 2.0, 8.0]) + 0.24) / 8.48
    found, _ = points(element)
    np.testing.assert_allclose(found[:3], np.stack([x, y], 1), atol=0.51)


def test_a_category_lies_in_the_middle_of_its_slot():
    shown = figure(Series("points", "a", [0, 1, 3], [1, 2, 3]), x=Axis("arm", labels=tuple("pqrs")))
    (element,), (left, _, right, _) = drawn(shown)
    expected = [left + (right - left) * (i + 0.5) / 4 for i in (0, 1, 3)]
    np.testing.assert_allclose(points(element)[0][:3, 0], expected, atol=0.51)
    assert set("pqrs") <= {
        text.text for text in ET.fromstring(svg(shown, ["a"], "f1")).iter(f"{SVG}text")
    }


@pytest.mark.parametrize(
    ("low", "high", "log", "texts"),
    [
        (0, 1, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (-3, 7, False, ["−2", "0", "2", "4", "6"]),
        (0, 123456, False, ["0", *(f"{n}0,000" for n in range(2, 13, 2))]),
        (0.02, 0.5, True, ["0.02", "0.05", "0.1", "0.2", "0.5"]),
        (1e-5, 0.3, True, ["10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹"]),
        (1, 2e6, True, ["10⁰", "10²", "10⁴", "10⁶"]),
        (0.5, 0.7, True, ["0.50", "0.55", "0.60", "0.65", "0.70"]),
        (0, 9e-5, False, ["0", "2×10⁻⁵", "4×10⁻⁵", "6×10⁻⁵", "8×10⁻⁵"]),
    ],
)
def test_ticks_are_round_numbers_and_decades(low, high, log, texts):
    _, y = scales(figure(Series("line", "a", [0, 1], [low, high]), y=Axis("y", log=log)))
    shown = [tick for tick in y.ticks() if tick.text]
    assert [tick.text for tick in shown if low <= tick.value <= high][: len(texts)] == texts
    assert all(y.low <= tick.value <= y.high for tick in y.ticks())


def test_a_value_that_is_not_finite_interrupts_a_line():
    shown = figure(Series("line", "a", range(6), [0, 1, np.nan, np.inf, 1, 0]))
    (element,), _ = drawn(shown)
    found, runs = points(element)
    assert runs == 2 and len(found) == 4


def test_a_value_below_zero_has_no_place_on_a_logarithmic_axis():
    shown = figure(Series("points", "a", [1, 2, 3], [-1, 0, 5]), y=Axis("y", log=True))
    (element,), _ = drawn(shown)
    assert len({tuple(p) for p in points(element)[0].tolist()}) == 1


def test_a_faint_line_is_shorter_and_passes_all_of_its_points():
    random = np.random.default_rng(0)
    x, y = np.arange(400.0), np.exp(-np.arange(400) / 90) + random.normal(0, 0.002, 400)
    shown = figure(Series("line", "a", x, y, faint=True))
    (element,), (left, top, right, bottom) = drawn(shown)
    found = 2 * points(element)[0]
    horizontal, vertical = scales(shown)
    px = left + (right - left) * horizontal.at(x)
    py = bottom - (bottom - top) * vertical.at(y)
    assert len(found) < 150
    # Points that were left out are at most 1.5 pixels, or 3 units, from the line; the grid adds 1.
    steep = np.abs(np.gradient(py) / np.gradient(px))
    distance = np.abs(np.interp(px, found[:, 0], found[:, 1]) - py) / np.hypot(1, steep)
    assert distance.max() < 6 and np.median(distance) < 2


def test_faint_curves_that_explode_do_not_flatten_those_in_front():
    steps = np.arange(50.0)
    front = Series("line", "a", steps, 2 - steps / 50)
    faint = [Series("line", "b", steps, 2.0**steps, faint=True) for _ in range(20)]
    (_, y) = scales(figure(*faint, front))
    assert y.high - y.low < 2.2 * (2 - 1.0)
    elements, (_, top, _, bottom) = drawn(figure(*faint, front))
    assert np.abs(points(elements[0])[0]).max() < 5 * (bottom - top)  # no giant coordinates


def test_a_band_without_a_limit_leaves_the_figure():
    band = Series("band", "a", [0, 1, 2], [0, 0, 0], [np.inf, 1, 1])
    (element, _), (_, top, *_) = drawn(figure(band, Series("line", "a", [0, 1, 2], [0, 1, 0.5])))
    found, runs = points(element)
    assert runs == 1 and found[:, 1].min() < top


def test_a_band_is_held_whole_unless_it_is_far_wider_than_what_is_in_front():
    line = Series("line", "a", [0, 1], [1.0, 2.0])
    for top, highest in ((2.5, 2.5), (40.0, 3.0)):
        (_, y) = scales(figure(Series("band", "a", [0, 1], [0.5, 0.5], [2.0, top]), line))
        assert highest <= y.high < highest + 0.2 and y.low <= 0.5
    (_, y) = scales(figure(Series("band", "a", [0], [1.0], [3.0]), Series("points", "a", [0], [2])))
    assert y.low <= 1 and y.high >= 3


def test_a_rule_spans_the_axes():
    level, place = Series("rule", "", (), [3.0]), Series("rule", "", [1.0])
    (across, along), (left, top, right, bottom) = drawn(figure(level, place))
    assert across.find(f"{SVG}path").attrib["d"].startswith(f"M{left} ")
    assert across.find(f"{SVG}path").attrib["d"].endswith(f"H{right}")
    assert re.fullmatch(rf"M\d+ {top}V{bottom}", along.find(f"{SVG}path").attrib["d"])


def test_names_of_any_characters_are_shown_and_nothing_else():
    arm = "a<b>&\"c'\x00$x$\ud800"
    shown = figure(
        Series("line", arm, [0, 1], [0, 1], label="<i>&"),
        title="<title> & co",
        description="</desc><script>",
        x=Axis("x", labels=("<x>", "&amp;")),
    )
    text = svg(shown, [arm], "f7")
    tree = ET.fromstring(text.encode("utf-8"))
    assert tree.find(f"{SVG}title").text == "<title> & co"
    assert tree.find(f"{SVG}desc").text == "</desc><script>"
    assert {"<x>", "&amp;"} <= {each.text for each in tree.iter(f"{SVG}text")}
    assert "script" not in {each.tag.removeprefix(SVG) for each in tree.iter()}


def test_title_and_description_name_the_figure():
    tree = ET.fromstring(svg(figure(Series("line", "a", [0, 1], [0, 1])), ["a"], "f3"))
    ids = {each.get("id"): each.text for each in tree.iter() if each.get("id")}
    said = [ids[name] for name in tree.attrib["aria-labelledby"].split()]
    assert said == ["A title", "What it shows."]


@pytest.mark.parametrize(
    "series",
    [
        (),
        (Series("line", "a", (), ()),),
        (Series("line", "a", [0, 1], [np.nan, np.inf]),),
        (Series("points", "a", [1.0], [2.0]),),
        (Series("interval", "a", [0.0], [np.nan], [1.0]),),
        (Series("band", "a", [0.0, 1.0], [-np.inf, -np.inf], [np.inf, np.inf]),),
        (Series("steps", "nobody", [0.0, 1.0], [5.0, 5.0]),),
        (Series("rule", "", (), [np.nan]),),
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_a_figure_of_almost_nothing_is_drawn(series, log, tmp_path):
    shown = figure(*series, x=Axis("x", log=log), y=Axis("y", log=log))
    assert "nan" not in svg(shown, ["a"], "f1").replace("finite", "")
    ET.fromstring(svg(shown, ["a"], "f1"))
    save(shown, ["a"], tmp_path / "figure")


@pytest.mark.long
def test_pdf_and_png_are_written_with_the_scales_and_styles_of_the_svg(tmp_path):
    made = large_report(20, 10)
    for each in made.figures[:6]:
        paths = save(each, made.arms, tmp_path / each.name)
        assert [path.read_bytes()[:4] for path in paths] == [b"%PDF", b"\x89PNG"]
        assert b"/Type3" not in paths[0].read_bytes()
        (axes,) = draw(each, made.arms).axes
        x, y = scales(each)
        for scale, limits, kind in (
            (x, axes.get_xlim(), axes.get_xscale()),
            (y, axes.get_ylim(), axes.get_yscale()),
        ):
            np.testing.assert_allclose(limits, (scale.low, scale.high))
            assert kind == ("log" if scale.log else "linear")
    handles = draw(each, made.arms).legends[0].legend_handles
    colors = {x.get_label(): x.get_color() for x in handles if x.get_label() in made.arms}
    assert colors == {arm: style(i).color for i, arm in enumerate(made.arms)}


def test_legends_of_files_explain_bands_bars_and_rules():
    shown = figure(
        Series("band", "muon", [0, 1], [0, 1], [1, 2], label="95% band"),
        Series("interval", "muon", [0], [0], [1], label="95% interval"),
        Series("line", "muon", [0, 1], [0, 1], label="muon"),
        Series("rule", "", (), [0.5], label="target"),
    )
    (legend,) = draw(shown, ["muon"]).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "muon",
        "95% band",
        "95% interval",
        "target",
    ]


def test_equal_figures_make_equal_files(tmp_path):
    made = large_report(20, 10)
    for name in ("one", "two"):
        save(made.figures[0], made.arms, tmp_path / name)
    for suffix in (".pdf", ".png"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


def test_dollars_in_names_are_no_formulas(tmp_path):
    arm = "a$\\frac{$"
    shown = figure(
        Series("line", arm, [0, 1], [0, 1]), title="$", x=Axis("$\\no", labels=("$1", "2$"))
    )
    save(shown, [arm], tmp_path / "figure")


@pytest.mark.long
def test_names_that_a_font_cannot_show_are_escaped_or_boxes_without_a_warning(tmp_path):
    arm = "a\x1b[31m運"
    shown = figure(Series("line", arm, [0, 1], [0, 1]), title="t\x07", x=Axis("運"))
    save(shown, [arm], tmp_path / "figure")
    (axes,) = draw(shown, [arm]).axes
    assert axes.figure.legends[0].get_texts()[0].get_text() == r"a\x1b[31m運"


def test_places_of_a_scale_are_those_of_the_closed_form():
    scale = Scale(0.01, 100.0, log=True)
    np.testing.assert_allclose(scale.at([0.01, 1.0, 100.0]), [0.0, 0.5, 1.0])
    assert np.isnan(scale.at([0.0, -1.0, np.nan, np.inf])).all()
    np.testing.assert_allclose(Scale(-1.0, 3.0).at([0.0, 5.0]), [0.25, 1.5])
