"""Reports as Markdown, CSV and LaTeX, and the folder that they are written to."""

import csv
import io
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt

from tests.report_documents import (
    COMMAND,
    HOSTILE,
    empty_report,
    make_table,
    report_of,
    small_report,
)
from tests.runs import ROOT, contents
from trainer.messages import UserError
from trainer.report import FORMATS
from trainer.report.document import Block, Column, Panel, Report, Table
from trainer.report.formats.latex import latex, tex
from trainer.report.formats.markdown import markdown
from trainer.report.write import csv_of, replaced
from trainer.report.write import write as write_formats

write = partial(write_formats, formats=FORMATS)  # all of them, unless a test names some

# Markdown, read by a parser of GitHub's dialect.


def _texts(source: str) -> Iterator[tuple[str, str]]:
    """Yields each heading, paragraph and cell, as its tag and the text that readers see."""
    tag = ""
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(source):
        if token.type == "inline":
            parts = token.children or []
            assert {part.type for part in parts} <= {
                *("text", "softbreak", "code_inline", "image", "strong_open", "strong_close"),
                *("link_open", "link_close", "text_special"),
            }
            text = "".join(" " if part.type == "softbreak" else part.content for part in parts)
            yield tag, text
        elif token.nesting == 1:
            tag = token.tag


def _links(source: str) -> list[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    parts = [part for token in tokens for part in token.children or []]
    targets = [part.attrs.get("href", part.attrs.get("src")) for part in parts]
    return [str(target) for target in targets if target is not None]


def _cells(source: str) -> list[str]:
    return [text for tag, text in _texts(source) if tag in ("td", "th")]


def _of_text(text: str) -> Report:
    table = make_table("t", "", "arm", ((text,),))
    block = Block(text=(text,), warnings=(text,), tables=(table,))
    return Report("Title", (), (), (Panel("p", "Panel", "describes", (block,)),))


@pytest.mark.parametrize(
    "name",
    [
        HOSTILE,
        "*emphasis* and **more**",
        "_a_ b_c __d__ e_",
        "learning_rate",
        "<b>bold</b> <!-- x --> &lt; &#60;",
        "a|b||c",
        "[link](http://example.com) ![image](x)",
        "[x]: http://example.com",
        "~~gone~~",
        "back\\slash \\* \\\\",
        "tick`s",
        "- item",
        "1. item",
        "1) item",
        "+ item",
        "# heading #",
        "> quote",
        "---",
        "===",
        "| a | b |",
        ":-- | --:",
        "```",
        "ends with \\",
        "<https://example.com>",
        "word " * 40 + "# 1. - * > " * 20,
    ],
)
def test_names_are_shown_in_markdown_as_they_are(name: str) -> None:
    texts = [text for _, text in _texts(markdown(_of_text(name), {}))]
    shown = " ".join(name.split())
    assert texts == ["Title", "Panel", shown, f"Warning. {shown}", "arm", shown]


def test_names_of_parameters_are_not_escaped_in_markdown() -> None:
    assert "\nweight_decay in [0.1, 0.3] (best: 0.2)\n" in markdown(
        _of_text("weight_decay in [0.1, 0.3] (best: 0.2)"), {}
    )


def test_control_characters_in_names_are_escaped_in_markdown() -> None:
    assert "\x1b" not in markdown(_of_text("a\x1b[2Jb"), {})


def test_markdown_begins_with_the_verdict_and_has_all_panels_in_order() -> None:
    report = small_report()
    texts = list(_texts(markdown(report, {})))
    assert [text for _, text in texts[:3]] == [report.title, *report.verdict]
    headings = [text for tag, text in texts if tag == "h2"]
    assert headings == [panel.title for panel in report.panels]
    assert sum(text == report.verdict[0] for _, text in texts) == 1


def test_a_command_in_a_warning_is_one_line_of_markdown() -> None:
    source = markdown(small_report(), {})
    assert f"`{COMMAND}`" in source
    assert re.search(r"^> \*\*Warning\.\*\* The best", source, re.MULTILINE)


def test_pictures_and_csv_files_are_linked_in_markdown() -> None:
    report = small_report()
    source = markdown(report, {"tuning_digits": "a b/x.png"}, {"tuning_digits_numbers": "n.csv"})
    assert re.findall(r"^!\[.*\]\((.*)\)$", source, re.MULTILINE) == ["a%20b/x.png"]
    assert "[n.csv](n.csv)" in source
    descriptions = [text for _, text in _texts(source) if "Three lines rise" in text]
    assert len(descriptions) == 2  # one of the figure without a picture
    assert "k" not in _cells(source)  # the table of a figure is not repeated


def test_numbers_are_aligned_at_the_right_in_markdown_and_columns_in_a_terminal() -> None:
    source = markdown(small_report(), {})
    rows = [line for line in source.splitlines() if "mean test accuracy" in line]
    rule = source.splitlines()[source.splitlines().index(rows[0]) + 1]
    assert re.fullmatch(r"\| -+ \|( -+: \|){4}", rule)
    assert len(rule) == len(rows[0])


def test_markdown_shows_the_best_trials_of_each_arm_with_links_to_their_folders() -> None:
    report = small_report()
    source = markdown(report, {}, {"trials_digits": "tables/trials_digits.csv"})
    rows = [line for line in source.splitlines() if "[open]" in line]
    assert len(rows) == 2 * 3 * 5
    assert [row.split()[1] for row in rows[:5]] == ["08", "07", "06", "05", "04"]
    assert "(../trials/adamw/08)" in source
    assert "The 5 best of each arm, of 27 runs; [tables/trials_digits.csv]" in source
    fewest = replace(report.trials[0], better="min")
    source = markdown(replace(report, trials=(fewest,)), {})
    rows = [line for line in source.splitlines() if "[open]" in line]
    assert [row.split()[1] for row in rows[:5]] == ["01", "02", "03", "04", "05"]  # 00 diverged


def test_a_long_table_is_cut_in_markdown() -> None:
    table = make_table("long", "Long", "n: n: integer", ((n,) for n in range(90)))
    source = markdown(report_of(table), {}, {"long": "tables/long.csv"})
    assert "|  49 |" in source and "|  50 |" not in source
    assert "The first 50 of 90 rows; [tables/long.csv](tables/long.csv) has all." in source


def test_a_report_without_numbers_is_written_as_markdown() -> None:
    source = markdown(empty_report(), {})
    assert "**Not decided: all trials diverged.**" in source
    assert "No rows." in source


# CSV


def _read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline=""), strict=True))


def test_csv_has_the_names_of_the_columns_and_all_digits() -> None:
    values = (0.1 + 0.2, 1e-300, 2**60, -0.0, np.float64(1 / 3), np.float32(0.1), np.int64(7), 5e-5)
    table = make_table("t", "T", "a_b: A_B: number; c: C: number", ((x, x) for x in values))
    head, *rows = _read(csv_of(table))
    assert head == ["a_b", "c"]
    assert [float(row[0]) for row in rows] == [float(value) for value in values]
    assert rows[2][0] == str(2**60)  # an integer has no point


def test_csv_has_empty_fields_for_none_and_names_what_is_not_finite() -> None:
    columns = tuple(Column(name, name, "number") for name in "abcd")
    table = Table("t", "T", columns, ((None, math.nan, math.inf, -math.inf),))
    assert _read(csv_of(table))[1] == ["", "nan", "inf", "-inf"]
    single = Table("t", "T", columns[:1], ((None,), (1.0,)))
    assert _read(csv_of(single)) == [["a"], [""], ["1.0"]]


def test_csv_quotes_names_as_rfc_4180_says() -> None:
    names = ('say "x"', "a,b", "a;b", "", " x ", "Müller")
    text = csv_of(make_table("t", "T", "arm", ((name,) for name in names)))
    assert [row[0] for row in _read(text)[1:]] == list(names)
    assert '"say ""x"""\r\n' in text


def test_csv_has_no_cell_that_a_spreadsheet_computes_or_that_moves_a_cursor() -> None:
    names = ("=1+1", "+1", "-x", "@SUM(A1)", "\t=1", "two\r\nlines", "\x1b[31m", HOSTILE)
    text = csv_of(make_table("t", "T", "arm; x: x: number", ((name, -1.5) for name in names)))
    cells = [row[0] for row in _read(text)[1:]]
    assert cells[:4] == ["'=1+1", "'+1", "'-x", "'@SUM(A1)"]
    assert cells[4:7] == ["\\t=1", "two\\r\\nlines", "\\x1b[31m"]
    assert all(cell.isprintable() and cell[:1] not in set("=+-@") for cell in cells)
    assert {row[1] for row in _read(text)[1:]} == {"-1.5"}  # numbers stay numbers


# LaTeX


def _typeset(folder: Path, files: dict[str, str], name: str = "report") -> str:
    """Compiles a document and returns what TeX said."""
    if shutil.which("pdflatex") is None or shutil.which("pdftotext") is None:
        pytest.skip("There is no pdflatex or pdftotext on this machine.")
    for stem, text in files.items():
        (folder / f"{stem}.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{name}.tex"]
    options = {"cwd": folder, "stdin": subprocess.DEVNULL, "capture_output": True, "timeout": 120}
    done = subprocess.run(command, **options)
    log = done.stdout.decode("utf-8", "replace")
    if re.search(r"File `(siunitx|booktabs|graphicx|geometry)\.sty' not found", log):
        pytest.skip("LaTeX has no siunitx, booktabs, graphicx or geometry on this machine.")
    assert done.returncode == 0, log[-3000:]
    assert "Overfull" not in log and "Float too large" not in log
    assert "Missing character" not in (folder / f"{name}.log").read_text("utf-8", "replace")
    return log


def _compile(folder: Path, files: dict[str, str]) -> str:
    """Compiles report.tex and returns the text of the PDF."""
    _typeset(folder, files)
    command = ["pdftotext", "-layout", folder / "report.pdf", "-"]
    return subprocess.run(command, check=True, capture_output=True).stdout.decode("utf-8")


def test_latex_compiles_with_hostile_names_and_missing_numbers(tmp_path: Path) -> None:
    files = latex(small_report())
    assert set(files) == {"report", "results", "ledger", "arms_digits", "arms_fashion", "pairs"}
    text = re.sub(r"\s+", " ", _compile(tmp_path, files))
    assert "97.12 ± 0.21" in text
    assert "[sgd]*x* | <b>" in text
    assert "not a number" in text and "−∞" in text
    assert "<0.0001" in text.replace("< 0.", "<0.")
    assert "a_b & 100% #1 $x$ {" in text
    assert "../trials/a b/c|d" in text


CHARACTERS = (
    "".join(map(chr, range(0x20, 0x7F)))
    + "".join(map(chr, range(0xA1, 0x180)))
    + "αβγδεζηθικλμνξπρστυφχψωΔΣΩϵϕµ−±×·≤≥≈≠→←∞–—‘’“”…₀₁₂₃₄₅₆₇₈₉"
    + "中🙂\u0301\u200f\ud800"
)


def test_latex_compiles_with_every_character(tmp_path: Path) -> None:
    rows = tuple((f"x{CHARACTERS[at : at + 12]}x",) for at in range(0, len(CHARACTERS), 12))
    rows += (("--- `` '' ?` !` ,, << >>",), ("*",), ("[2ex]",), ("",))
    table = make_table("arms", "-- % _ #1 {", "arm: arm % _", rows[:45])
    text = _compile(tmp_path, latex(replace(report_of(table), title="A & B")))
    if shutil.which("kpsewhich") and subprocess.run(["kpsewhich", "lmodern.sty"]).returncode == 0:
        for shown in ("x89:;<=>?@ABCx", "[2ex]", "--- `` '' ?` !` ,, << >>", "U+4E2D"):
            assert shown in text


def test_columns_of_latex_have_room_for_their_numbers() -> None:
    kinds = ("integer", "number", "number", "p", "share", "seconds")
    columns = tuple(Column(f"c{i}", f"c{i}", kind) for i, kind in enumerate(kinds))
    rows = (
        (12345, -12.345, 3e-5, 0.031, 0.5, 7200.0),
        (7, 0.012345, -1.0, 1e-9, 1.0, 90.0),
        (None, math.inf, 0.0, None, math.nan, None),
    )
    text = latex(report_of(Table("arms", "A", columns, rows)))["arms"]
    formats = re.findall(r"S\[table-format=(.*?)\]", text)
    assert formats == ["5", "-2.5", "-1.3e-1", "<1.4", "3.1", "1.4"]
    lines = [line.strip() for line in text.splitlines() if line.endswith(r"\\")]
    assert lines[-3:] == [
        r"12345 & -12.35 & 3.000e-5 & 0.031 & 50.0 & 2.00 \\",
        r"7 & 0.01235 & -1.000e0 & < 0.0001 & 100 & 0.0250 \\",
        r"{--} & {$\infty$} & 0.000e0 & {--} & {not a number} & {--} \\",
    ]
    assert r"{c4 (\%)} & {c5 (h)}" in text


def _means(rows: tuple[tuple[object, ...], ...]) -> str:
    heads = "arm; mean: 95% mean: number; low: 95% low: number; high: 95% high: number"
    return latex(report_of(make_table("arms", "A", heads, rows)))["arms"]


def test_a_symmetric_interval_is_half_of_its_width_in_latex() -> None:
    text = _means((("a", 12.3456, 12.3, 12.3912), ("b", 1.0, -9.0, 11.0), ("c", 3.0, None, None)))
    assert r"a & 12.346 & $\pm$\,\phantom{0}\num{0.046} \\" in text
    assert r"b & 1.000 & $\pm$\,\num{10.000} \\" in text
    assert r"c & 3.000 &  \\" in text
    assert "half of the width of the 95\\% interval" in text
    tiny = _means((("a", 1.234e-5, 1.134e-5, 1.334e-5),))
    assert r"a & 0.0000123 & $\pm$\,\num{0.0000010} \\" in tiny


@pytest.mark.parametrize("high", [0.97, math.inf, None])
def test_an_interval_that_is_not_symmetric_keeps_its_ends_in_latex(high: float | None) -> None:
    text = _means((("a", 0.9, 0.6, high),))
    assert text.count("S[table-format") == 3
    assert "half of the width" not in text


def test_latex_has_the_means_of_all_workloads_in_one_table() -> None:
    text = latex(small_report())["results"]
    assert r"\caption{Test accuracy,{} on all workloads. Student" in text
    assert r"{digits (\%)}" in text and r"{fashion (\%)}" in text
    assert r"adamw & 96.01 & $\pm$\,\num{1.01} & 96.01 & $\pm$\,\num{1.01} \\" in text
    assert "results" not in latex(empty_report())


def _wide() -> Report:
    """Returns a report with tables as wide as those of sweeps."""
    decisions = (
        "arm; than: against; d: difference: number; from: 95% from: number; to: to: number;"
        " deviations: in standard deviations: number; p: p: p; decision;"
        " needed: needed, in a fresh sweep: integer"
    )
    matters, note = "better, by more than matters", "The intervals hold for all pairs. " * 9
    pairs = (
        ("adamw", "sgd", -0.01792, -0.03861, 0.013, 0.7722, 1.0, "not decided", 18),
        ("adamw", "lion", -0.08747, -0.1286, -0.0403, 2.471, 1e-9, matters, 38),
        ("sgd", "lion", -0.06955, -0.1018, -0.04772, 1.942, 0.001, matters, 39),
    )
    spaces = "arm; points: points: integer; seeds: seeds: integer; method; path: path: code; space"
    path, low = "optimizer.learning_rate.peak_value", "log_uniform 0.0003 to 0.03"
    costs = "number done diverged failed missing retried steps examples tokens".split()
    ledger = "; ".join(["arm", "runs", *(f"{name}: {name}: integer" for name in costs)])
    counts = (60, 60, 0, 0, 0, 0, 12000, 768000, 76800000)
    return report_of(
        make_table("pairs", "Pairs", decisions, pairs, note),
        make_table("one_pair", "One pair", decisions, pairs[1:2], note),
        make_table("spaces", "Spaces", spaces, [("adamw", 20, 1, "sobol, seed 0", path, low)] * 6),
        make_table("ledger", "Costs", ledger, [("adamw", "search", *counts)] * 3),
        panel="pairs",
    )


ONE = r"\documentclass{article}"
NEURIPS = r"\documentclass{article}\usepackage[textwidth=5.5in]{geometry}"
TWO = r"\documentclass[twocolumn]{article}"
PACKAGES = r"\usepackage[T1]{fontenc}\usepackage{booktabs}\usepackage{graphicx}\usepackage{siunitx}"


def _set(folder: Path, preamble: str, files: dict[str, str]) -> dict[str, tuple[str, float, float]]:
    """Returns, for each table, its environment, its own width and that of the column, in points."""
    names = [name for name in files if name != "report"]
    shown = r"\lockstepname,\the\wd\lockstepbox,\the\columnwidth"
    body = "".join(
        f"\\section{{A}}\n\\input{{{n}}}\n\\typeout{{<{n},{shown}>}}\n\\clearpage\n" for n in names
    )
    document = f"{preamble}{PACKAGES}\\begin{{document}}\n{body}\\end{{document}}\n"
    log = _typeset(folder, {**files, "paper": document}, "paper")
    found = re.findall(r"<(\w+),(table\*?),([\d.]+)pt,([\d.]+)pt>", log)
    assert [each[0] for each in found] == names
    return {name: (which, float(own), float(column)) for name, which, own, column in found}


@pytest.mark.parametrize("preamble", [ONE, NEURIPS, TWO], ids=["one", "neurips", "two"])
def test_no_table_of_latex_is_wider_than_its_column(preamble: str, tmp_path: Path) -> None:
    _set(tmp_path, preamble, latex(small_report()))
    for which, own, column in _set(tmp_path, preamble, latex(_wide())).values():
        assert column == {ONE: 345, NEURIPS: 397.48499, TWO: 229.5}[preamble]
        width = 469 if which == "table*" else column
        assert 8 * min(1, width / own) >= 6, "letters of less than six points"


def test_a_table_of_latex_is_over_both_columns_if_it_is_wide_or_the_document_says_so(
    tmp_path: Path,
) -> None:
    files = latex(_wide())
    means = {"arms": _means((("a", 12.3456, 12.3, 12.3912),))}
    chosen = _set(tmp_path, TWO, files | means)
    assert {name: which for name, (which, _, _) in chosen.items()} == {
        **dict.fromkeys(("pairs", "one_pair"), "table*"),
        **dict.fromkeys(("spaces", "ledger", "arms"), "table"),
    }
    for name in ("table", "table*"):
        chosen = _set(tmp_path, f"{TWO}\\newcommand{{\\lockstepfloat}}{{{name}}}", files)
        assert {which for which, _, _ in chosen.values()} == {name}


def test_each_table_of_latex_says_what_it_needs_and_is_made_smaller_where_it_is_too_wide() -> None:
    for report in (small_report(), _wide()):
        for name, text in latex(report).items():
            if name != "report":
                assert r"\ifdim\wd\lockstepbox>\linewidth" in text
                assert r"\resizebox{\linewidth}{!}{\usebox{\lockstepbox}}" in text
                for package in re.findall(r"\\usepackage(.*?\})", PACKAGES):
                    assert f"%   \\usepackage{package}" in text
                    assert f"\\usepackage{package}" in latex(report)["report"]


def test_long_cells_of_latex_have_several_lines_unless_the_table_would_be_too_long() -> None:
    text = latex(_wide())["spaces"]
    lines = r"\texttt{optimizer.learning\_} \\ \texttt{rate.peak\_value}"
    assert f"\\begin{{tabular}}[t]{{@{{}}l@{{}}}}{lines}\\end{{tabular}}" in text
    assert "\\begin{tabular}[t]{@{}l@{}}log\\_uniform \\\\ 0.0003 to 0.03\\end{tabular}" in text
    rows = (("optimizer.learning_rate.peak_value",),) * 40
    report = report_of(make_table("spaces", "S", "path: path: code", rows), panel="ledger")
    assert latex(report)["spaces"].count(r"learning\_rate.peak") == 40


def test_counts_that_are_all_0_are_named_in_the_caption_in_latex() -> None:
    text = latex(_wide())["ledger"]
    assert "Columns that are 0 in all rows: diverged,{} failed,{} missing,{} retried." in text
    assert "{failed}" not in text
    assert r"adamw & search & 60 & 60 & 12000 & 768000 & 76800000 \\" in text
    for rows in ((("a", 0),), (("a", 0), ("b", None)), (("a", 0), ("b", 1))):
        table = make_table("arms", "A", "arm; failed: failed: integer", rows)
        assert "{failed}" in latex(report_of(table))["arms"]


def test_latex_leaves_out_what_does_not_fit_on_a_page_and_says_so() -> None:
    files = latex(report_of(make_table("points", "Points", "arm", ((str(n),) for n in range(46)))))
    assert set(files) == {"report"}
    assert "% points has 46 rows" in files["report"]


def test_text_between_backticks_is_code_in_latex() -> None:
    panel = Panel("verdict", "V", "tests", ())
    text = latex(Report("R", ("Run `a_b --c`.",), (), (panel,)))["report"]
    assert r"Run \texttt{a\_b -{}-{}c}." in text
    assert tex("a  \n b") == "a b"


# The folder


def test_a_report_is_written_with_all_of_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "sweep" / "report"
    report = small_report()
    paths = write(report, folder)
    assert paths[:2] == [folder / "index.html", folder / "report.md"]
    assert {path.relative_to(folder).as_posix() for path in paths} == set(contents(folder)) - {
        ".report.json"
    }
    names = [path.relative_to(folder).as_posix() for path in paths]
    assert [name for name in names if name.endswith(".csv")] == [
        f"tables/{table.name}.csv" for table in report.tables
    ]
    for kind in ("pdf", "png"):
        assert (folder / f"figures/tuning_digits.{kind}").stat().st_size > 1000
    assert (folder / "latex/report.tex").exists()
    source = (folder / "report.md").read_text()
    links = [link for link in _links(source) if not link.startswith("../trials/")]
    assert len(links) == 2 + 2 + 2  # pictures, their tables, trials
    assert all((folder / link).exists() for link in links)
    assert [path.name for path in folder.parent.iterdir()] == ["report"]


def test_only_the_formats_that_are_asked_for_are_written(tmp_path: Path) -> None:
    paths = write(small_report(), tmp_path / "r", formats=("markdown", "png"))
    names = [path.relative_to(tmp_path / "r").as_posix() for path in paths]
    assert names == [
        "report.md",
        *(f"figures/tuning_{w}.png" for w in ("digits", "fashion")),
    ]
    assert ".csv" not in (tmp_path / "r" / "report.md").read_text()
    assert write(small_report(), tmp_path / "r", formats=("markdown",)) == [
        tmp_path / "r" / "report.md"
    ]
    assert "figures/" not in (tmp_path / "r" / "report.md").read_text()
    assert set(contents(tmp_path / "r")) == {"report.md", ".report.json"}


def test_a_report_without_numbers_is_written(tmp_path: Path) -> None:
    write(empty_report(), tmp_path / "r")
    assert not (tmp_path / "r" / "figures").exists()


@pytest.mark.long
def test_the_same_report_gives_the_same_bytes(tmp_path: Path) -> None:
    source = (
        "import sys, tests.report.test_report_writers as t; from pathlib import Path; "
        "t.write(t.small_report(), Path(sys.argv[1]))"
    )
    trees = []
    for seed in "12":
        folder = tmp_path / seed
        # Another moment, other hashes of strings, and another time zone.
        environment = os.environ | {"PYTHONHASHSEED": seed, "TZ": f"UTC{seed}"}
        command = [sys.executable, "-c", source, str(folder)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        trees.append(contents(folder))
    assert trees[0] == trees[1]
    assert b"CreationDate" not in trees[0]["figures/tuning_digits.pdf"]


def test_a_report_replaces_the_old_one_and_keeps_the_files_of_the_user(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    report = small_report()
    write(report, folder)
    (folder / "latex" / "report.pdf").write_bytes(b"compiled")
    (folder / "link").symlink_to(tmp_path)
    fewer = replace(report, panels=report.panels[:2], trials=())
    for _ in range(2):
        paths = write(fewer, folder)
        assert not (folder / "figures").exists()
        assert set(contents(folder)) == {
            *(path.relative_to(folder).as_posix() for path in paths),
            *(".report.json", "latex/report.pdf"),
        }
        assert (folder / "link").is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    write(small_report(), folder, formats=("markdown",))
    (folder / "index.html").write_text("mine")
    before = contents(folder)
    with pytest.raises(UserError, match="index.html is not of the last report"):
        write(small_report(), folder)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not the folder of a report: it has notes\.txt"):
        write(small_report(), tmp_path)
    with pytest.raises(UserError, match="is a file"):
        write(small_report(), tmp_path / "notes.txt")
    with pytest.raises(UserError, match="Not a directory"):
        write(small_report(), tmp_path / "notes.txt" / "report")
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"files": 3}', "\udcff"])
def test_a_damaged_list_of_files_is_named(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "report"
    write(small_report(), folder, formats=("csv",))
    (folder / ".report.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=r"\.report\.json, the list of the files"):
        write(small_report(), folder)


def test_an_empty_folder_and_a_link_to_a_folder_are_used(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for _ in range(2):
        write(small_report(), tmp_path / "link", formats=("csv",))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "tables" / "pairs.csv").exists()


@pytest.mark.long
def test_an_error_while_a_report_is_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(small_report(), tmp_path / "report")
    before = contents(tmp_path)

    def broken(*_: object) -> list[Path]:
        raise RuntimeError("broken")

    monkeypatch.setattr("trainer.report.figures.drawing.save", broken)
    with pytest.raises(RuntimeError, match="broken"):
        write(small_report(), tmp_path / "report")
    monkeypatch.undo()
    write(small_report(), tmp_path / "report")
    assert contents(tmp_path) == before


@pytest.mark.long
@pytest.mark.parametrize("moment", ["draw", "first", "second"])
def test_a_kill_never_leaves_a_part_of_a_report(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "report"
    write(small_report(), folder)
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    source = f"""
import os, signal, sys
import trainer.report.figures.drawing
import tests.report.test_report_writers as t
from pathlib import Path

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

real, calls = os.rename, []

def rename(*paths):  # killed before the first rename, or between the two
    calls.append(paths)
    if len(calls) == {{"first": 1, "second": 2}}.get("{moment}"):
        kill()
    real(*paths)

os.rename = rename
if "{moment}" == "draw":
    trainer.report.figures.drawing.save = kill
t.write(t.replace(t.small_report(), title="new"), Path(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", source, str(folder)], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    if moment != "second":
        assert contents(folder) == before
    assert len(list(tmp_path.iterdir())) == 2
    write(small_report(), folder)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_folder_that_a_live_process_writes_is_not_removed(tmp_path: Path) -> None:
    host = re.sub(r"\W", "-", socket.gethostname())
    other = tmp_path / f".report.{host}.{os.getppid()}.tmp"
    other.mkdir()
    write(empty_report(), tmp_path / "report")
    assert other.exists()


@pytest.mark.long
def test_the_folder_of_a_process_on_another_host_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process id says nothing here; what it moved aside and did not replace is taken back."""
    folder, gone = tmp_path / "report", subprocess.Popen(["true"])
    gone.wait()
    with monkeypatch.context() as first:
        first.setattr(os, "getpid", lambda: gone.pid)
        first.setattr(socket, "gethostname", lambda: "node1.cluster")
        with replaced(folder) as staged:
            first.undo()
            write(empty_report(), folder)
            assert staged.exists()
    (folder / "notes.txt").write_text("mine")
    os.rename(folder, staged.with_suffix(".old"))  # it was killed between its two renames
    write(empty_report(), folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_full_disk_leaves_the_old_report(mounted: Callable[[str], Path]) -> None:
    disk = mounted("size=300k")
    write(empty_report(), disk / "report")
    before = contents(disk)
    (disk / "filler").write_bytes(bytes(150_000))
    with pytest.raises(UserError, match=r"cannot be written to .*: No space left on device\."):
        write(small_report(), disk / "report")
    (disk / "filler").unlink()
    assert contents(disk) == before


def test_a_disk_that_is_read_only_is_named(shut: Path) -> None:
    with pytest.raises(UserError, match="Read-only file system|Permission denied"):
        write(small_report(), shut / "report")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\0", "arms_DIGITS"])
def test_a_table_whose_name_is_no_name_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    report = small_report()
    tables = (Table(name, "T", (), ()), Table("fine", "T", (), ()))
    more = Panel("more", "More", "describes", (Block(tables=tables),))
    with pytest.raises(ValueError, match="cannot be names of files"):
        write(replace(report, panels=(*report.panels, more)), tmp_path / "report")
    assert list(tmp_path.iterdir()) == []
