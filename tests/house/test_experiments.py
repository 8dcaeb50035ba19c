"""What `make experiments` says of numbers: within their intervals, outside, or missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from experiments import check

RECORDED = [0.10, 0.12, 0.11, 0.13, 0.09, 0.10, 0.12, 0.11]


def test_the_interval_is_that_of_scipy():
    # The prediction interval for the mean of m values is that of a t with these scale and location.
    spread = stats.tstd(RECORDED) * (1 / 8 + 1 / 3) ** 0.5
    expected = stats.t.interval(0.99, 7, loc=stats.tmean(RECORDED), scale=spread)
    assert check.interval(RECORDED, seeds=3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("found", "code", "shown"),
    [
        ({"muon eval/loss": [0.11, 0.12]}, 0, "0.1150"),
        ({"muon eval/loss": [0.5, 0.6]}, 1, "OUTSIDE"),
        ({"adamw eval/loss": [0.11]}, 1, "nan"),
    ],
)
def test_numbers_outside_of_their_intervals_end_in_exit_code_1(
    found: dict[str, list[float]],
    code: int,
    shown: str,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
):
    (tmp_path / "study").mkdir()
    expected = {"values": {"muon eval/loss": RECORDED}}
    (tmp_path / "study" / "expected.json").write_text(json.dumps(expected))
    monkeypatch.setattr(check, "FOLDER", tmp_path)
    monkeypatch.setattr(check, "STUDIES", {"study": "seeds"})
    monkeypatch.setattr(check, "compute", lambda *arguments: None)
    monkeypatch.setattr(check, "numbers", lambda folder: found)
    assert check.main([]) == code
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("study", check.STUDIES)
def test_every_study_has_a_short_form_and_expected_numbers(study: str):
    folder = check.FOLDER / study
    assert (folder / "short.yaml").exists()
    expected = json.loads((folder / "expected.json").read_text())
    assert all(len(values) == check.RECORDED for values in expected["values"].values())
