"""Shards of tokens that change while a run reads them, and the memory that reading them takes."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests import runs, short
from trainer import checkpoint
from trainer.__main__ import main
from trainer.data import shards
from trainer.data.shards import TokenStream
from trainer.messages import UserError
from trainer.writers.summary import read_outcome


def cut(file: Path) -> None:
    os.truncate(file, 2000)


def overwrite(file: Path) -> None:
    content = np.fromfile(file, "<u2")
    content[512:] = content[512:][::-1]
    with file.open("r+b") as opened:  # the same file, with the same size
        opened.write(content.tobytes())


def replace(file: Path) -> None:
    shutil.copy(file, file.with_suffix(".new"))
    overwrite(file.with_suffix(".new"))
    file.with_suffix(".new").rename(file)


def write(folder: Path, count: int = 4000) -> list[Path]:
    tokens = np.random.default_rng(0).integers(0, 50, count)
    found = []
    for split in ("train", "test"):
        found += shards.write_shards(folder, split, [tokens], np.dtype("<u2"), count // 2)
    return found


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (cut, "was cut short while it was in use: it had 5,024 bytes, and has 2,000."),
    (overwrite, "was written to or replaced"),
    (replace, "replaced"),
    (os.remove, "was removed"),
]


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_shard_that_changes_while_it_is_read_is_named(
    tmp_path: Path, change: Callable, words: str, opened: bool
):
    files = write(tmp_path)[:2]
    stream = TokenStream.of_files(files)
    starts = np.array([0, 1990, 3900])
    if opened:
        assert stream.windows(starts, 50).shape == (3, 50)
    change(files[1])
    stream.windows(np.array([0, 500]), 50)  # of the other shard
    with pytest.raises(UserError) as caught:
        stream.windows(starts, 50)
    assert str(files[1]) in str(caught.value) and words in str(caught.value)


CONFIG = """
model: !models.gpt {{vocab_size: 50, width: 8, depth: 1, num_heads: 1}}
data: !data.tokens
  train: {folder}/train_*.bin
  test: {folder}/test_*.bin
  length: 16
  batch_size: 8
  vocab_size: 50
loss: !losses.softmax_cross_entropy {{}}
optimizer: !optax.sgd {{learning_rate: 0.1}}
steps: 12
log_every: 1
eval_every: 4
save_every: 12
hooks: [!culprit.change {{}}]
writers: []
"""
SWEEP = """
base: run.yaml
space: {optimizer.learning_rate: !space.values {values: [0.1, 0.2]}}
goal: {metric: loss, select_on: test}
final: null
"""
HOOK = """
import os
from pathlib import Path
from tests.data import test_changed_shards

def change():
    def hook(step, metrics, params):
        name, at, file = os.environ["CHANGE"].split()
        if step == int(at):
            getattr(test_changed_shards, name)(Path(file))
    return hook
"""


@short.parametrize(
    ("change", "at", "split"),
    [("cut", 6, "train"), ("overwrite", 6, "train"), ("cut", 8, "test")],
)
def test_a_run_whose_shards_change_ends_with_a_sentence_and_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    change: str,
    at: int,
    split: str,
):
    (tmp_path / "culprit.py").write_text(HOOK)
    (tmp_path / "shards").mkdir()
    files = [file for file in write(tmp_path / "shards") if file.name.startswith(split)]
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path / "shards"))
    kept = files[0].read_bytes()

    monkeypatch.syspath_prepend(tmp_path)
    options = [f"--config={tmp_path / 'run.yaml'}", "--vocabulary=culprit"]

    def train(workdir: str, change: str = "cut -1 none") -> int:
        monkeypatch.setenv("CHANGE", change)
        return main([*options, f"--workdir={tmp_path / workdir}"])

    assert train("run", f"{change} {at} {files[0]}") == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {files[0]} was ") and "newest checkpoint" in said
    # Of the last step with the shards of before, some read ahead, although no save was due.
    assert at <= [info.step for info in checkpoint.ls(tmp_path / "run")][-1] < 12
    files[0].write_bytes(kept)
    assert train("run") == 0
    assert train("plain") == 0
    assert runs.lines(tmp_path / "run") == runs.lines(tmp_path / "plain")
    assert checkpoint.diff_checkpoints(tmp_path / "run", 12, 12, other=tmp_path / "plain") == []


@pytest.mark.long
def test_no_trial_of_a_sweep_has_failed_when_its_shards_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (tmp_path / "culprit.py").write_text(HOOK)
    file = write(tmp_path)[0]
    kept = file.read_bytes()
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{runs.ROOT}")  # of the process that computes
    workdir = tmp_path / "sweep"
    command = ["sweep", f"--config={tmp_path / 'sweep.yaml'}", f"--workdir={workdir}"]
    monkeypatch.setenv("CHANGE", f"cut 6 {file}")
    assert main([*command, "--vocabulary=culprit"]) == 1
    assert f"error: {file} was cut short" in capsys.readouterr().err
    assert not list(workdir.glob("trials/*/*/*"))
    file.write_bytes(kept)
    monkeypatch.setenv("CHANGE", "cut -1 none")
    assert main([*command, "--vocabulary=culprit"]) == 0
    ends = [read_outcome(trial) for trial in workdir.glob("trials/*/*/*")]
    assert [each and each.end for each in ends] == ["done"] * 2


def test_few_of_many_shards_are_open(tmp_path: Path):
    tokens = np.arange(2000)
    stream = TokenStream.of_files(
        shards.write_shards(tmp_path, "train", [tokens], np.dtype("<u2"), 4)
    )
    before = len(os.listdir("/proc/self/fd"))
    assert stream.windows(np.arange(0, 2000, 2), 2).ravel().tolist() == tokens.tolist()
    assert 0 < len(os.listdir("/proc/self/fd")) - before < 200


@pytest.mark.long
def test_windows_of_a_large_shard_take_little_memory(tmp_path: Path):
    # The resident memory grows by what is mapped and read ahead, and not by what the system caches.
    code = f"""
import numpy as np, resource
from pathlib import Path
from trainer.data.shards import TokenStream
stream = TokenStream.of_files([Path({str(tmp_path / "train_000000.bin")!r})])
def memory():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
stream.windows(np.array([0]), 1025)
before = memory()
starts = np.random.default_rng(0).integers(0, len(stream) - 1025, [100, 16])
read = sum(stream.windows(some, 1025).size for some in starts)
print(2 * read, memory() - before)
"""
    tokens = np.zeros(50_000_000, np.uint16)
    shards.write_shards(tmp_path, "train", [tokens], tokens.dtype, len(tokens))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read, grown = map(int, done.stdout.split())
    assert read > 3_000_000 and grown < 4 * read
