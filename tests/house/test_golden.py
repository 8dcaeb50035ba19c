"""Folders that an earlier version wrote are read, continued and reported as it would have done.

golden.tar.xz is from Lockstep 0.2.0. It is not written anew when a test fails, because then users'
folders would fail, too; but where the words of a report are changed on purpose, `python -m
tests.golden --report` replaces the report in it.
"""

import json
import math
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.golden import ARCHIVE, rows_of_sweep
from tests.runs import LONG, environment, lines
from trainer.__main__ import main

# The same bits are promised to one fingerprint, and allowed differences to all others.
SAME = ("jax", "jaxlib", "numpy", "optax", "flax", "cpu", "isa", "devices", "xla_flags")


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "golden"


def same_results(ours: list[dict], theirs: list[dict], before: Path, after: Path) -> None:
    """Asserts that rows are equal, or on another machine or version begin close to each other.

    There the first two rows that differ are compared, and of later ones only what they name: at
    these learning rates a difference by rounding grows tenfold in 50 steps. At a rate above 0.3 it
    is one row: on a CPU without AVX-512 the first differed by 2%, and the second by 16%.
    """
    prints = [
        json.loads((folder / "run.json").read_text())["fingerprint"] for folder in (before, after)
    ]
    if all(prints[0].get(key) == prints[1].get(key) for key in SAME):
        assert ours == theirs
        return
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    assert all(math.isfinite(x) for row in ours for x in row.values())
    differing = [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]]
    for one, other in differing[: 1 if theirs[0].get("learning_rate/all", 0) > 0.3 else 2]:
        assert one == pytest.approx(other, rel=0.1, abs=0.1), one["step"]


@pytest.mark.long
def test_a_stopped_run_goes_on(golden: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(golden)
    assert main(["--config=run.yaml", "--workdir=stopped_run"]) == 0
    assert "Restored step 10." in capsys.readouterr().err
    ours, theirs = Path("stopped_run"), Path("run")
    same_results(lines(ours), lines(theirs), theirs, ours)


def test_a_finished_run_has_nothing_to_do_and_its_checkpoint_is_whole(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.chdir(golden)
    before = (golden / "run" / "metrics.jsonl").read_bytes()
    assert main(["--config=run.yaml", "--workdir=run"]) == 0
    assert "Nothing to do" in capsys.readouterr().err
    assert (golden / "run" / "metrics.jsonl").read_bytes() == before
    assert main(["checkpoint", "check", "run"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["stopped_sweep", "killed_sweep"])
def test_an_interrupted_sweep_goes_on(
    golden: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys
):
    monkeypatch.chdir(golden)
    # The killed worker is of another machine, and counts as dead when it was silent for so long.
    # Its results are those of XLA's defaults, from which those of a quick compilation drift away.
    code = (
        "import sys; from trainer.__main__ import main; from trainer.sweep import presence;"
        " from trainer.writers import locks; presence.SILENT, locks.BEAT = 1.0, 0.1;"
        f" sys.exit(main(['sweep', 'work', '{name}']))"
    )
    env = environment(XLA_FLAGS="")
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=LONG).returncode == 0
    ours, theirs = rows_of_sweep(Path(name)), rows_of_sweep(Path("sweep"))
    assert ours.keys() == theirs.keys() and len(ours) == 12
    for run, of_run in ours.items():
        same_results(of_run, theirs[run], Path("sweep") / run, Path(name) / run)
    assert main(["sweep", "check", name]) == 0


def test_a_finished_sweep_is_reported_with_the_same_words_and_numbers(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """Equal but for the version and the command in the last line."""
    monkeypatch.chdir(golden)
    assert main(["report", "sweep", "--formats=markdown", "--output=again"]) == 0
    assert capsys.readouterr().out.replace("again:", "report:") == Path("verdict.txt").read_text()
    texts = [Path(name, "report.md").read_text().splitlines()[:-1] for name in ("report", "again")]
    assert texts[0] == texts[1], "If they were meant to: python -m tests.golden --report"
