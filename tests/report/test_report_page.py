"""The page of a report as a file: whole, small, escaped, and readable without its script."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from tests.report_documents import ARMS, UNUSABLE, bare_reports, large_report
from trainer.report.document import Axis, Block, Figure, Panel, Report, Series
from trainer.report.html.page import page

VOID = {"meta", "link", "br", "wbr", "input", "col", "img"}
# HTML lets these end where the next one begins.
OPTIONAL = {"td", "tr"}


class Reader(HTMLParser):
    """Checks that elements are closed in order, and collects their attributes and texts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag in {"td", "th"} and self.open[-1] == "td":
            self.open.pop()
        if tag == "tr":
            self._leave(OPTIONAL)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in OPTIONAL:
            self._leave(OPTIONAL)
        elif tag == "tr" and self.open[-1] == "td":
            self.open.pop()
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def _leave(self, tags):
        while self.open[-1] in tags:
            self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts).replace("\xa0", " ")


@pytest.fixture(scope="module")
def written():
    return page(large_report())


@pytest.mark.parametrize("workloads", [("digits",), ("digits", "fashion_mnist")])
def test_256_trials_with_curves_of_100_points_take_600_kilobytes(workloads):
    made = large_report(256 // len(workloads), 100, workloads=workloads)
    lines = [s for figure in made.figures for s in figure.series if s.faint]
    assert len(lines) == 512
    assert len(page(made).encode()) <= 600_000


@pytest.mark.long
def test_the_page_refers_to_nothing_outside(written):
    reader = Reader(written)
    for tag, attributes in reader.elements:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes and "srcset" not in attributes
        target = attributes.get("href", "#")
        assert target.startswith(("#", "data:,", "../")), target
    style = "".join(re.findall(r"<style>(.*?)</style>", written, re.S))
    assert "@import" not in style and "url(" not in style
    script = "".join(re.findall(r"<script>(.*?)</script>", written, re.S))
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket", script)
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", written))
    assert addresses == {"http://www.w3.org/2000/svg"}


def test_the_verdict_comes_first_and_the_contents_name_every_panel(written):
    made = large_report(20, 10)
    reader = Reader(page(made))
    text = reader.text
    first = text.index(made.verdict[0])
    assert first < text.index("Contents") < text.index("Cost")
    links = [a["href"][1:] for tag, a in reader.elements if tag == "a" and "panel-" in a["href"]]
    sections = [a["id"] for tag, a in reader.elements if tag == "section"]
    assert links == sections and len(sections) == len(made.panels)


def test_all_figures_tables_texts_and_warnings_are_on_the_page():
    made = large_report(30, 10)
    reader = Reader(page(made))
    text = re.sub(r"\s+", " ", reader.text)
    for panel in made.panels:
        assert panel.title in text
        for block in panel.blocks:
            for words in (*block.text, *block.warnings):
                assert words.replace("`", "") in text
            for table in (*block.tables, *(figure.table for figure in block.figures)):
                assert all(column.title in text for column in table.columns)
                for row in table.rows:
                    for cell, column in zip(row, table.columns, strict=True):
                        assert column.text_of(cell) in text
    assert text.count("Figure ") >= len(made.figures)
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("details") == tags.count("figure") == len(made.figures)


def test_a_text_of_the_verdict_is_not_shown_twice():
    made = large_report(20, 10)
    assert Reader(page(made)).text.count(made.verdict[0]) == 1


def test_every_figure_has_a_title_a_description_and_a_legend_in_color_dash_and_marker(written):
    reader = Reader(written)
    svgs = [a for tag, a in reader.elements if tag == "svg" and "plot" in (a.get("class") or "")]
    ids = {a["id"] for _, a in reader.elements if "id" in a}
    assert len(svgs) == len(large_report(20, 10).figures)
    for attributes in svgs:
        assert set(attributes["aria-labelledby"].split()) <= ids
    symbols = re.findall(r'<symbol id="k\d+".*?</symbol>', written)
    shapes = {re.search(r'<path transform.*? d="(.*?)"', symbol)[1] for symbol in symbols}
    dashes = {
        (re.search(r"stroke-dasharray=\"(.*?)\"", symbol) or [0, ""])[1] for symbol in symbols
    }
    assert len(shapes) == len(dashes) == len(ARMS)
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)(?=[")])', written))
    assert used - {""} <= ids


def test_ids_are_unique(written):
    ids = [a["id"] for _, a in Reader(written).elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_names_of_any_characters_are_text():
    evil = '</script><script>alert("1")</script>&amp;<!--'
    made = large_report(12, 5, arms=(evil, "b\x00\ud800", "'c'"), workloads=(evil,))
    panels = (*made.panels, Panel(evil, evil, "tests", (Block(evil, (evil,), (evil,)),)))
    made = dataclasses.replace(made, title=evil, verdict=(evil,), made=evil, panels=panels)
    written = page(made)
    written.encode("utf-8")
    reader = Reader(written)
    assert "alert" in reader.text
    scripts = [a for tag, a in reader.elements if tag == "script"]
    assert len(scripts) == len(made.figures) + len(made.trials) + 2
    for data in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', written, re.S):
        json.loads(data)


@pytest.mark.parametrize("made", bare_reports())
def test_a_report_that_lacks_things_is_written(made):
    Reader(page(made))


def test_a_figure_without_any_finite_value_says_so():
    series = (Series("line", "a", [0.0, 1.0], [float("nan"), float("inf")]),)
    figure = Figure("f", "F", "D", Axis("x"), Axis("y"), series, UNUSABLE)
    made = Report("t", (), ("a",), (Panel("p", "P", "describes", (Block(figures=(figure,)),)),))
    assert "no finite values" in Reader(page(made)).text


def test_the_trials_have_their_place_before_the_methods():
    made = large_report(20, 10)
    panels = tuple(panel for panel in made.panels if panel.name != "trials")
    reader = Reader(page(dataclasses.replace(made, panels=panels)))
    sections = [a["id"] for tag, a in reader.elements if tag == "section"]
    assert sections[-2:] == ["panel-trials", "panel-methods"]


def test_without_the_script_the_best_trials_are_shown_with_links_to_their_folders(written):
    made = large_report()
    best = min((row for row in made.trials[0].table.rows if row[4] is not None), key=lambda r: r[4])
    place = written.index('class="block trials"')
    assert f'<a href="{best[-1]}">' in written[place : written.index("<script", place)]


def test_workloads_stand_side_by_side_and_wide_tables_below_each_other(written):
    narrow = written[written.index('id="panel-tuning"') :]
    assert '<div class="blocks beside">' in narrow[: narrow.index("</section>")]
    wide = written[written.index('id="panel-pairs"') :]
    wide = wide[: wide.index("</section>")]
    figures, tables = wide.split('<div class="blocks">')
    assert 'class="blocks beside"' in figures and figures.count("<figure") == 2
    assert "<figure" not in tables and tables.count("<table") == 2
    assert tables.index("<h3>digits</h3>") < tables.index("<h3>fashion_mnist</h3>")
