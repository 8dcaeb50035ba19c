"""The JSON files of runs and sweeps: what is wrong with one is said in a sentence."""

import errno
import os
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pytest

from trainer.writers.json_files import DamagedFile, read_json
from trainer.writers.lines import iterate_metrics, merge_lines, read_metrics
from trainer.writers.summary import Summary, read_summary


class Point(TypedDict):
    value: float
    step: int


class Content(TypedDict):
    names: list[str]
    count: int
    best: NotRequired[dict[str, Point]]
    maybe: NotRequired[int | None]
    free: NotRequired[Any]


GOOD = (
    '{"names": ["a"], "count": 1, "best": {"x": {"value": 2, "step": 3}}, "maybe": null, "new": {}}'
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.json"


def test_a_file_of_the_right_types_is_read_with_keys_that_are_not_known(file):
    file.write_text(GOOD)
    content = read_json(file, Content, "remove it.")
    assert content["names"] == ["a"] and content.get("best") == {"x": {"value": 2, "step": 3}}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("  \n", "it is empty"),
        (GOOD[:25], "it is not JSON: "),
        (b"\xff\xfe{", "it is not JSON: "),
        ("[" * 100_000, "it nests too deeply"),
        ("1" * 5000, "a number is out of range"),
        ("5", "its content is 5, and not an object"),
        ('{"count": 1}', "it has no 'names'"),
        ('{"names": 5, "count": 1}', "names is 5, and not a list"),
        ('{"names": [null], "count": 1}', "names[0] is None, and not a text"),
        ('{"names": ["\\ud800"], "count": 1}', "surrogates not allowed"),
        ('{"names": [], "count": 1.0}', "count is 1.0, and not an integer"),
        ('{"names": [], "count": true}', "count is True, and not an integer"),
        (f'{{"names": [], "count": {2**63}}}', "count is a number out of range"),
        ('{"names": [], "count": 1, "maybe": "x"}', "maybe is 'x', and not an integer or null"),
        ('{"names": [], "count": 1, "best": [1]}', "best is [1], and not an object"),
        (
            '{"names": [], "count": 1, "best": {"x": {"value": 1e400, "step": 1}}}',
            "best['x'].value is a number out of range",
        ),
        (
            f'{{"names": [], "count": 1, "best": {{"x": {{"value": {10**400}, "step": 1}}}}}}',
            "best['x'].value is a number out of range",
        ),
        ('{"names": [], "count": 1, "best": {"x": {"value": 1}}}', "best['x'] has no 'step'"),
    ],
)
def test_other_content_is_refused_with_the_file_and_the_reason(file, text, why):
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DamagedFile) as refused:
        read_json(file, Content, "remove it.")
    said = str(refused.value)
    assert said.startswith(f"{file} is damaged (") and why in said and said.endswith("remove it.")
    assert refused.value.file == file


def test_what_is_no_file_is_refused_and_never_waited_for(file):
    file.mkdir()
    with pytest.raises(DamagedFile, match="it is a folder, and not a file"):
        read_json(file, Content, "remove it.")
    file.rmdir()
    os.mkfifo(file)
    with pytest.raises(DamagedFile, match="it is a pipe, and not a file"):
        read_json(file, Content, "remove it.")
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(DamagedFile, match="it is a device, and not a file"):
        read_json(file, Content, "remove it.")
    file.unlink()
    with pytest.raises(FileNotFoundError):
        read_json(file, Content, "remove it.")
    file.write_text(GOOD)
    with pytest.raises(FileNotFoundError):
        read_json(file / "inner", Content, "remove it.")


def test_an_error_of_the_disk_is_no_damage(file, monkeypatch):
    file.write_text(GOOD)

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(file))

    monkeypatch.setattr("trainer.writers.files.os.open", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        read_json(file, Content, "remove it.")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"step": 4', '"step": 1e400'),
        lambda text: text.replace("0.5", "1e400"),
        lambda text: text.replace("0.5", str(10**400)),
        lambda text: text.replace('"nan"', '"not a number"'),
        lambda text: text.replace('"why": ""', '"why": null'),
        lambda text: text.replace('"metrics": {', '"metrics": [{').replace("},", "}],", 1),
        lambda text: text[:100],
    ],
)
def test_a_damaged_summary_counts_as_none(tmp_path, change):
    text = Summary("done", 4, {"loss": 0.5, "other": float("nan")}).text()
    (tmp_path / "summary.json").write_text(text)
    for folder in (tmp_path, str(tmp_path)):
        found = read_summary(folder)
        assert found is not None and found.metrics["loss"] == 0.5
    assert change(text) != text
    (tmp_path / "summary.json").write_text(change(text))
    assert read_summary(tmp_path) is None


def test_a_row_keeps_its_numbers_whatever_else_stands_in_it(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"step": 1, "a": 0.5, "b": "text", "c": null, "d": [1]}\n'
        f'{{"step": 2, "a": {10**400}, "b": "NaN"}}\n'
        f'{{"step": {10**400}, "a": 1}}\n{{"step": -1, "a": 1}}\n{{"step": true, "a": 1}}\n'
        '{"step": 3, "a": 1e400}\n'
    )
    rows = read_metrics(file)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0] == {"step": 1, "a": 0.5}
    assert set(rows[1]) == {"step", "b"} and rows[2]["a"] == float("inf")
    assert [set(row) for row in iterate_metrics(file)] == [set(row) for row in rows]
    with open(file, "rb") as lines:  # as a run that puts back what another program removed
        assert b'"a": "Infinity"' in merge_lines(lines, [])[-1]
