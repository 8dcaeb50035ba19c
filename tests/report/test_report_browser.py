"""The page of a report in headless Chromium: what readers see, hover, sort, filter and copy."""

import base64
import csv
import io
import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.report_documents import REPEAT, bare_reports, best_of_k, large_report
from trainer.report.document import Column
from trainer.report.figures.svg import Scale
from trainer.report.html.page import page

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="Chromium and chromedriver are not on the PATH (on Debian: chromium, chromium-driver).",
)
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-prefers-reduced-motion",
)
MADE = large_report(60, 20)
ROWS: list[Any] = list(MADE.trials[0].table.rows)
GOAL, RATE = 4, 5  # columns
NUMBER = Column("x", "x", "number")


class Browser:
    """A page in Chromium."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, file, width=1280, scheme="light", media="", hash=""):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        emulated = {"features": features, "media": media}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
        self.driver.get("about:blank")
        self.driver.get(file.as_uri() + hash)
        self.run("return 0")  # the driver may return before the page's scripts have run
        return self

    def run(self, script, *arguments):
        """Waits until the page shows what was changed, and runs the body of a function."""
        wait = """
            const done = arguments[arguments.length - 1], given = [...arguments].slice(0, -1);
            const busy = () => document.readyState !== "complete" ||
              (typeof TRIALS === "object" && TRIALS.some((table) => table.pending));
            const frame = () => requestAnimationFrame(() => (busy() ? frame() : run()));
            const run = () => done((function () {%s}).apply(null, given));
            frame();
            """
        return self.driver.execute_async_script(wait % script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def keys(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def point(self, x, y):
        """Moves the pointer to a place of the window."""
        moved = {"type": "mouseMoved", "x": x, "y": y}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", moved)
        self.run("return 0")

    def errors(self):
        return [entry for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]

    def filter(self, **state):
        """Sets the filter of the first table: text=, arms=, low={column: value}, sort=..."""
        self.run(
            "Object.assign(TRIALS[0].state, given_); TRIALS[0].fill(); TRIALS[0].apply()".replace(
                "given_", "arguments[0]"
            ),
            state,
        )

    def shown(self):
        return self.run("return TRIALS[0].visible")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in (*OPTIONS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "index.html"
    path.write_text(page(MADE), encoding="utf-8")
    return path


@pytest.fixture
def browser(driver, file):
    opened = Browser(driver).open(file)
    yield opened
    assert opened.errors() == []


# Every visible text and its contrast with what lies behind it, by the formula of WCAG 2.
CONTRAST = """
const parse = (color) => {
  const parts = color.match(/[\\d.]+/g).map(Number);
  return parts.length < 4 ? [...parts, 1] : parts;
};
const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = (e) => {
  for (; e; e = e.parentElement) {
    const color = parse(getComputedStyle(e).backgroundColor);
    if (color[3] > 0.9) return color;
  }
  throw "no background";
};
const worst = [];
for (const e of document.querySelectorAll("body *")) {
  if (!e.getClientRects().length || e.closest("details:not([open]), script, style")) continue;
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own) continue;
  const style = getComputedStyle(e);
  const ink = parse(e instanceof SVGElement ? style.fill : style.color);
  const pair = [light(ink), light(behind(e))].sort((a, b) => b - a);
  const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
  if (ratio < 4.5) worst.push([e.tagName, e.getAttribute("class"), e.textContent, ratio]);
}
return worst;
"""


@pytest.mark.parametrize(
    ("width", "scheme"), list(itertools.product([390, 1280], ["light", "dark"]))
)
def test_nothing_overflows_all_text_can_be_read_and_nothing_fails(browser, file, width, scheme):
    browser.open(file, width, scheme)
    seen = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
    assert seen[0] <= seen[1] == width
    assert browser.run(CONTRAST) == []
    dark = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, dark[4:-1].split(", "))) < 200) == (scheme == "dark")


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_axes_stay_in_the_page_and_do_not_overlap(browser, file, width):
    browser.open(file, width)
    overlaps = browser.run(
        """
        const found = [];
        for (const svg of document.querySelectorAll("svg.plot")) {
          const boxes = [...svg.querySelectorAll("text:not(.turned)")].map((text) =>
            [text.textContent, text.getBoundingClientRect()]);
          for (const [text, box] of boxes) {
            if (box.left < 0 || box.right > innerWidth) found.push(["out", text]);
          }
          boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            if (wide > 1 && high > 3) found.push([svg.closest("figure").id, a, b]);
          }));
        }
        return found;
        """
    )
    assert overlaps == []


def test_the_theme_can_be_changed(browser):
    before = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.find("#theme").click()
    assert browser.run("return getComputedStyle(document.body).backgroundColor") != before
    browser.find("#theme").click()
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == before


def test_cells_are_written_as_python_writes_them(browser):
    numbers = [0, 1, -1, 0.5, 1 / 3, -2e-5, 1e-4, 9.99996e-5, 12345.6, 99999.4, 123456.0, 1e5]
    numbers += [1e300, 2.5e-300, 119.96, 120.0, 7199.0, 7200.0, 1e6, 0.0001, 9999.5, 0.05, 1e-12]
    kinds = ["text", "integer", "number", "p", "share", "seconds", "code"]
    cases = [(kind, cell) for kind in kinds for cell in [*numbers, None, "words"]]
    odd = [("integer", 1e300), ("integer", -2e-5)]  # no integers
    cases = [case for case in cases if case not in odd]
    found = browser.run("return arguments[0].map(([kind, cell]) => textOf(kind, cell))", cases)
    texts = [Column("", "", kind).text_of(value) for kind, value in cases]
    wrong = [(c, t, f) for c, t, f in zip(cases, texts, found, strict=True) if t != f]
    assert wrong == []


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.0, 7.0), (0.2, 0.31), (0.0, 12345.0)])
def test_ticks_after_a_change_of_the_scale_are_those_of_python(browser, low, high):
    for log in (False, True):
        if log and low <= 0:
            continue
        scale = Scale(low, high, log)
        found = browser.run(
            "return new Scale(arguments[0], 0, 1).ticks()", f"{low} {high} {int(log)}"
        )
        np.testing.assert_allclose(
            [v for v, _ in found], [t.value for t in scale.ticks()], atol=1e-9
        )
        assert [bool(t) for _, t in found] == [bool(t.text) for t in scale.ticks()]


# The filter


def kept(test):
    return [i for i, row in enumerate(ROWS) if test(row)]


def test_words_comparisons_and_ranges_select_trials(browser):
    rate = lambda row: row[RATE]  # noqa: E731
    browser.filter(text="learning_rate < 0.01 soap")
    assert sorted(browser.shown()) == kept(lambda r: rate(r) < 0.01 and r[1] == "soap")
    browser.filter(text="", low={str(RATE): 0.001}, high={str(GOAL): 0.4})
    chosen = kept(lambda r: rate(r) >= 0.001 and r[GOAL] is not None and r[GOAL] <= 0.4)
    assert sorted(browser.shown()) == chosen
    count = browser.find(".trials .shown").text
    assert count.startswith(f"{len(chosen)} of {len(ROWS)} trials")
    browser.find(".trials .shown button").click()
    assert len(browser.shown()) == len(ROWS)


def test_the_controls_select_trials(browser):
    browser.find(".trials .filter input[type=search]").send_keys("muon learning_rate>0.002")
    assert sorted(browser.shown()) == kept(lambda r: r[1] == "muon" and r[RATE] > 0.002)
    browser.find(".trials .shown button").click()
    assert len(browser.shown()) == len(ROWS)  # also waits until nothing moves under the pointer
    browser.find(".trials .filter input[value=diverged]").click()
    assert sorted(browser.shown()) == kept(lambda r: r[3] != "diverged")
    box = browser.find(".trials .ranges input")
    box.send_keys("0.3")
    assert sorted(browser.shown()) == kept(lambda r: r[GOAL] is not None and r[GOAL] >= 0.3)
    box.send_keys("x")
    assert "wrong" in box.get_attribute("class")


@pytest.mark.parametrize("column", range(len(ROWS[0])))
def test_the_table_sorts_by_every_column(browser, column):
    head = browser.driver.find_elements("css selector", ".trials thead th button")[column]
    if column != GOAL:  # by which it is sorted from the beginning
        browser.run("arguments[0].click()", head)
    up = [ROWS[i][column] for i in browser.shown()]
    browser.run("arguments[0].click()", head)
    down = [ROWS[i][column] for i in browser.shown()]
    usable = [cell for cell in up if cell is not None]
    assert usable == sorted(usable) and up[len(usable) :] == [None] * (len(up) - len(usable))
    assert [cell for cell in down if cell is not None] == usable[::-1]


def test_rows_that_are_scrolled_to_are_shown(driver, tmp_path):
    made = large_report(600, 3, workloads=("digits",))
    path = tmp_path / "index.html"
    path.write_text(page(made), encoding="utf-8")
    opened = Browser(driver).open(path)
    assert opened.run("return document.querySelectorAll('.trials tbody tr').length") < 80
    opened.run("const s = document.querySelector('.trials .scroll'); s.scrollTop = s.scrollHeight")
    last = opened.run("return TRIALS[0].cell(TRIALS[0].visible.at(-1), 0)")
    shown = opened.run(
        """
        const box = document.querySelector(".trials .scroll").getBoundingClientRect();
        return [...document.querySelectorAll(".trials tbody tr")].filter((row) => {
          const at = row.getBoundingClientRect();
          return at.top < box.bottom && at.bottom > box.top;
        }).map((row) => row.cells[0].textContent);
        """
    )
    assert shown[-1] == last or last in shown
    assert len(shown) > 10


def test_a_filter_computes_the_best_of_k_again(browser):
    browser.filter(text="learning_rate>0.0005")
    figure = next(f for f in MADE.figures if f.name == "digits_tuning")
    found = dict(
        browser.run(
            """
            const plot = PLOTS.find((p) => p.data.s.some((s) => s.r));
            return plot.series.filter((s) => s.r).map((s) => [ARMS[s.a], s.now]);
            """
        )
    )
    diverged = 0
    for series in figure.series:
        if series.recipe != "best_of_k":
            continue
        values = [
            math.inf if row[GOAL] is None else row[GOAL]
            for row in ROWS
            if row[1] == series.arm and row[RATE] > 0.0005
        ]
        diverged += sum(map(math.isinf, values))
        expected = best_of_k(values)
        assert len(found[series.arm]) == len(expected) < len(series.y)
        for ours, theirs in zip(found[series.arm], expected, strict=True):
            assert ours is None if math.isinf(theirs) else abs(ours - theirs) < 1e-7
    assert diverged
    # Bands are of all trials, and not shown.
    hidden = browser.run(
        """
        const plot = PLOTS.find((p) => p.data.s.some((s) => s.r));
        return plot.series.filter((s) => s.k === "band").map((s) => s.element.style.display);
        """
    )
    assert set(hidden) == {"none"}


def test_a_filter_hides_points_and_curves_of_other_trials_of_its_workload(browser):
    drawn = """
        return PLOTS.map((p) => [p.figure.closest(".block").dataset.trials,
          p.series.filter((s) => s.faint && !s.hidden).length,
          p.series.filter((s) => s.k === "points" && s.t && s.x.length)
            .map((s) => p.places(s).flat().length)]);
        """
    before = browser.run(drawn)
    browser.filter(text="learning_rate<0.01")
    after = browser.run(drawn)
    for (table, faint, points), (_, faint_before, points_before) in zip(after, before, strict=True):
        if table == "1":
            assert (faint, points) == (faint_before, points_before)
        elif faint_before:
            assert faint == len(kept(lambda r: r[RATE] < 0.01)) < faint_before
    assert any(points != old for (_, _, points), (_, _, old) in zip(after, before, strict=True))
    browser.filter(text="")
    assert browser.run(drawn) == before


def test_panels_that_test_are_grey_while_a_filter_is_on(browser):
    tests = [panel for panel in MADE.panels if panel.kind == "tests"]
    opacity = """
        return [...document.querySelectorAll('.panel[data-kind="tests"] > .blocks')].map((b) =>
          Number(getComputedStyle(b).opacity));
        """
    assert set(browser.run(opacity)) == {1}
    browser.filter(text="muon")
    assert max(browser.run(opacity)) < 0.6
    notes = [e.text for e in browser.driver.find_elements("css selector", ".stale")]
    chosen = len(kept(lambda r: r[1] == "muon"))
    assert len(notes) == len(tests)
    assert f"{chosen} of {len(ROWS)} trials of digits" in notes[0]
    assert "of all trials" in notes[0]
    browser.filter(text="")
    assert set(browser.run(opacity)) == {1}


def test_the_address_holds_the_filter(browser, file):
    browser.filter(text="soap", arms=["soap", "muon"], low={str(RATE): 0.001}, sort=[RATE, -1])
    chosen = browser.shown()
    browser.driver.implicitly_wait(0)
    address = ""
    for _ in range(100):
        address = browser.run("return location.hash")
        if address:
            break
    assert address.startswith("#trials?")
    browser.open(file, hash=address)
    assert browser.shown() == chosen
    assert browser.find(".trials input[type=search]").get_attribute("value") == "soap"


def test_a_foreign_address_is_ignored(browser, file):
    browser.open(file, hash="#trials?0.arm=%5B&0.min.nothing=1&9.text=a&0.sort=none&0.end=5")
    assert len(browser.shown()) == len(ROWS)


def test_a_button_saves_what_a_table_shows_as_csv(browser):
    read = """
        return [...document.querySelectorAll(".table")].filter((x) => x.querySelector(".csv")).map(
          (x) => { const table = x.querySelector("table"); return [csvOf(table),
            [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))]; })"""
    found = browser.run(read)
    assert len(found) > 5
    for text, cells in found:
        assert list(csv.reader(io.StringIO(text, newline=""))) == cells
    hostile = """
        const place = document.createElement("div");
        place.innerHTML = "<table><tr><td>=1+1<td>a, \\"b\\"<td>-3<td>-x<td>@c</table>";
        return csvOf(place.querySelector("table"))"""
    [row] = csv.reader(io.StringIO(browser.run(hostile), newline=""))
    assert row == ["'=1+1", 'a, "b"', "-3", "'-x", "'@c"]


def test_the_command_that_repeats_a_trial_is_copied(browser):
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    first = ROWS[browser.shown()[0]]
    browser.run("document.querySelector('.trials tbody button').click()")
    assert browser.run("return window.copied") == REPEAT.replace("{trial}", first[0])
    link = browser.find(".trials tbody a").get_attribute("href")
    assert link.endswith(f"/{first[0]}")


def test_words_of_a_command_are_quoted_for_a_shell(browser):
    words = ["a/b-1", "a b", "it's", "$(rm)", ""]
    import shlex

    assert browser.run("return arguments[0].map(shellWord)", words) == [
        shlex.quote(w) for w in words
    ]


# The highlight


def dim(browser, selector):
    script = """
        return [...document.querySelectorAll(arguments[0])].map((e) =>
          [e.dataset.a, Number(getComputedStyle(e).opacity)]);
        """
    return browser.run(script, selector)


def test_a_name_highlights_its_arm_everywhere(browser):
    box = browser.find(".arms button[data-a='1']")
    place = browser.run(
        "const r = arguments[0].getBoundingClientRect(); return [r.x + 9, r.y + 9]", box
    )
    browser.point(*place)
    for selector in ("g.s[data-a]", "path.s[data-a]", "table tr[data-a]", ".legend .arm[data-a]"):
        found = dim(browser, selector)
        assert {arm for arm, _ in found} >= {"0", "1"}
        assert all((opacity < 0.5) == (arm != "1") for arm, opacity in found), selector
    browser.point(640, 5)
    assert {opacity for _, opacity in dim(browser, "g.s[data-a]")} == {1}


def test_the_keyboard_reaches_names_and_points_and_escape_clears(browser):
    from selenium.webdriver.common.keys import Keys

    browser.find(".arms button[data-a='2']").send_keys(Keys.ENTER)
    assert browser.find(".arms button[data-a='2']").get_attribute("aria-pressed") == "true"
    assert all((opacity < 0.5) == (arm != "2") for arm, opacity in dim(browser, "g.s[data-a]"))
    browser.keys(Keys.ESCAPE)
    assert {opacity for _, opacity in dim(browser, "g.s[data-a]")} == {1}
    for _ in range(80):
        browser.keys(Keys.TAB)
        if browser.run("return document.activeElement.matches('g.s[data-a]')"):
            break
    assert browser.run("return document.activeElement.getAttribute('aria-label')").startswith(
        "muon"
    )
    browser.keys(Keys.ARROW_RIGHT)
    tip = browser.find("#tip")
    figure = MADE.figures[0]
    assert "muon" in tip.text and "final/muon/0" in tip.text
    assert NUMBER.text_of(float(figure.series[0].y[0])) in tip.text
    assert all((opacity < 0.5) == (arm != "0") for arm, opacity in dim(browser, "g.s[data-a]"))
    browser.keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_pointing_at_a_point_shows_its_values(browser):
    index = next(i for i, f in enumerate(MADE.figures) if f.name == "digits_axis_rate")
    place = browser.run(
        """
        const plot = PLOTS[arguments[0]];
        plot.svg.scrollIntoView({ block: "center" });
        const [x, y] = plot.places(plot.series[0]).flat()[0];
        const box = plot.svg.getBoundingClientRect();
        const unit = box.width / plot.svg.viewBox.baseVal.width;
        return [box.left + x * unit, box.top + y * unit];
        """,
        index,
    )
    browser.point(*place)
    series = MADE.figures[index].series[0]
    tip = browser.find("#tip").text
    for words in (
        series.arm,
        series.trials[0],
        NUMBER.text_of(float(series.x[0])),
        NUMBER.text_of(float(series.y[0])),
    ):
        assert words in tip


def test_the_y_axis_changes_between_linear_and_logarithmic(browser):
    index = next(i for i, f in enumerate(MADE.figures) if f.name == "digits_curves_step")
    state = """
        const { svg } = PLOTS[arguments[0]];
        const paths = svg.querySelectorAll(".s path:first-child, path.s");
        return [svg.querySelector(".yt").textContent, [...paths].map((e) => e.getAttribute("d"))];
        """
    before = browser.run(state, index)
    button = f"#f{index + 1} .scale button"
    browser.run("document.querySelector(arguments[0]).click()", button)
    linear = browser.run(state, index)
    assert linear[0] != before[0] and linear[1] != before[1]
    # A front line lies where the linear scale says.
    series_number = next(
        i for i, s in enumerate(MADE.figures[index].series) if s.kind == "line" and not s.faint
    )
    at, low, high = browser.run(
        """
        const plot = PLOTS[arguments[0]], { top, bottom } = plot;
        const at = plot.places(plot.series[arguments[1]]).flat().map(([, y]) => bottom - y);
        return [at.map((y) => y / (bottom - top)), plot.y.low, plot.y.high];
        """,
        index,
        series_number,
    )
    y = np.asarray(MADE.figures[index].series[series_number].y)
    np.testing.assert_allclose(at, (y - low) / (high - low), atol=1e-3)
    browser.run("document.querySelector(arguments[0]).click()", button)
    again = browser.run(state, index)
    assert again[0] == before[0] and again[1] != linear[1]


# Print


def test_print_opens_tables_and_leaves_out_what_is_pressed(browser, file):
    browser.open(file, media="print")
    visible = """
        return [...document.querySelectorAll(arguments[0])]
          .filter((e) => e.getClientRects().length).length;
        """
    for selector in (".filter", "#theme", "nav", ".scale", ".small"):
        assert browser.run(visible, selector) == 0, selector
    assert browser.run(visible, "details table") == len(MADE.figures)
    assert browser.run(visible, ".verdict p") == 2
    pdf = base64.b64decode(browser.driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert pdf[:4] == b"%PDF"


def test_reports_that_lack_things_open_without_an_error(driver, tmp_path):
    evil = "</script><script>window.hacked=1</script>\"'&"
    hostile = large_report(12, 4, arms=(evil, "\ud800"), workloads=(evil,))
    for number, made in enumerate([*bare_reports(), hostile]):
        path = Path(tmp_path) / f"{number}.html"
        path.write_text(page(made), encoding="utf-8")
        opened = Browser(driver).open(path)
        assert opened.errors() == []
        assert opened.run("return window.hacked ?? 0") == 0
        assert opened.run("return typeof PLOTS") == "object"
