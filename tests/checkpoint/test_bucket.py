"""Checkpoints in a bucket: as exact as those on a disk, and never waited for without an end."""

import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import s3_server
from tests.runs import LONG, ROOT, lines
from trainer import checkpoint
from trainer.__main__ import main
from trainer.checkpoint import CheckpointError, Checkpoints, Retention, bucket

MOTO = ROOT / ".s3/bin/moto_server"


@pytest.fixture(params=["ours", pytest.param("moto", marks=pytest.mark.s3)])
def any_server(request: Any, s3: s3_server.Server, monkeypatch: Any) -> Iterator[None]:
    if request.param == "ours":
        yield
        return
    if not MOTO.exists():
        pytest.skip("moto is not installed: `make s3` adds it.")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    moto = subprocess.Popen([MOTO, "-p", str(port)], stderr=subprocess.DEVNULL)
    end = time.monotonic() + LONG
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/lab", method="PUT")).close()
            break
        except urllib.error.URLError:
            assert moto.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    yield
    moto.kill()
    moto.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose checkpoints are in the bucket."""
    (tmp_path / "checkpoints").write_text("s3://lab/runs/a-00000001\n")
    return tmp_path


def state(seed: int) -> dict[str, Any]:
    drawn = jax.random.normal(jax.random.key(seed), (40, 30))
    return {"params": {"w": drawn, "b": jnp.ones(3, jnp.bfloat16)}, "rng": jax.random.key(seed)}


def opened(run: Path, log: list[str] | None = None, **retention: Any) -> Checkpoints:
    lines = [] if log is None else log
    return Checkpoints(run / "checkpoints", Retention(**retention), log=lines.append)


def save(checkpoints: Checkpoints, step: int, metric: float | None = None) -> None:
    checkpoints.save(step, state(step), metric=metric)
    checkpoints.wait()


def restored(checkpoints: Checkpoints, step: int | None = None) -> dict[str, str]:
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state(0))
    return checkpoint.digests(checkpoints.restore(target, step))


def test_what_is_saved_comes_back_and_old_steps_are_removed(any_server: None, run: Path) -> None:
    with opened(run, keep_latest=2, keep_best=1) as checkpoints:
        for step, metric in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
            save(checkpoints, step, metric)
        assert checkpoints.error is None
        assert checkpoints.steps() == [1, 3, 4]
        assert not checkpoints.save(4, state(5)), "It is saved already."
    with opened(run) as checkpoints:
        assert restored(checkpoints) == checkpoint.digests(state(4))
        assert restored(checkpoints, 1) == checkpoint.digests(state(1))
        assert checkpoints.discard_after(3) == [4]
        assert checkpoints.latest() == 3
    listed = checkpoint.ls(run)
    assert [(info.step, info.metric) for info in listed] == [(1, 0.9), (3, 0.2)]
    assert all(info.saved > 1.7e9 and info.problem is None for info in listed)
    assert checkpoint.check_leaves(run) == {1: [], 3: []}
    np.testing.assert_array_equal(
        checkpoint.load_params(run, 3)["w"], np.asarray(state(3)["params"]["w"])
    )


@pytest.mark.parametrize("fault", ["503", "403", "cut", "silent", "no bucket", "refused"])
def test_a_failing_server_costs_a_save_and_nothing_else(
    fault: str, s3: s3_server.Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    checkpoints = opened(run, log)
    save(checkpoints, 1)
    # Only what answers has to be in time.
    deadline = 1.5 if fault in ("403", "no bucket") else 0.7
    for name in ("DEADLINE", "DATA_DEADLINE", "_LOOK"):
        monkeypatch.setattr(bucket, name, deadline)
    if fault == "no bucket":
        gone = s3.buckets.pop("lab")
    elif fault == "refused":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    else:
        s3.fault = lambda method, path: fault
    save(checkpoints, 2)
    assert checkpoints.error is not None
    (line,) = log
    assert line.startswith("The checkpoint of step 2 could not be saved: ") and "s3://lab" in line
    assert "training continues" in line
    if fault == "403":
        assert "AWS_ACCESS_KEY_ID" in line
    with pytest.raises(
        CheckpointError, match=r"s3://lab/runs/a-00000001.* cannot be (listed|read)"
    ):
        restored(opened(run))
    s3.fault = lambda method, path: None
    for name in ("DEADLINE", "DATA_DEADLINE", "_LOOK"):
        monkeypatch.setattr(bucket, name, 60.0)
    if fault == "no bucket":
        s3.buckets["lab"] = gone
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.url)
    save(checkpoints, 3)
    assert checkpoints.error is None and checkpoints.steps() == [1, 3]
    assert restored(checkpoints) == checkpoint.digests(state(3))
    save(opened(run), 4)
    names = {key.split("/")[2].split("-")[0] for key in s3.buckets["lab"]}
    # What the failed save wrote is deleted, but for requests that tensorstore has gone on with.
    assert names == {"3", "4"} or (fault == "cut" and names == {"2", "3", "4"})


def test_a_server_that_fails_for_a_moment_is_asked_again(s3: s3_server.Server, run: Path) -> None:
    failed: list[str] = []

    def twice(method: str, path: str) -> str | None:
        if method == "PUT" and "/c/" in path and len(failed) < 2:
            failed.append(path)
            return "503"
        return None

    s3.fault = twice
    with opened(run) as checkpoints:
        save(checkpoints, 1)
        assert checkpoints.error is None and len(failed) == 2
        assert restored(checkpoints) == checkpoint.digests(state(1))


def _flip(objects: dict[str, bytes], key: str) -> None:
    content = bytearray(objects[key])
    content[len(content) // 2] ^= 0x10
    objects[key] = bytes(content)


DAMAGE: dict[str, Callable[[dict[str, bytes], str], Any]] = {
    "flipped": _flip,
    "cut": lambda objects, key: objects.update({key: objects[key][:-3]}),
    "missing": lambda objects, key: objects.pop(key),
}


@pytest.mark.parametrize(
    "kind",
    ["flipped", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("cut", "missing"))],
)
def test_damage_of_any_object_is_found_and_the_step_before_is_used(
    kind: str, s3: s3_server.Server, run: Path
) -> None:
    with opened(run) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    saved = dict(s3.buckets["lab"])
    names = ("manifest.json", "_METADATA", "w/c/0/0", "w/zarr.json", "rng/c/0")
    of_step = [key for key in saved if key.startswith("runs/a-00000001/2-") and key.endswith(names)]
    assert len(of_step) == len(names)
    for key in of_step:
        s3.buckets["lab"] = objects = dict(saved)
        DAMAGE[kind](objects, key)
        found = checkpoint.check_leaves(run)
        if kind == "missing" and key.endswith("manifest.json"):  # then it was never committed
            assert found == {1: []}
        else:
            assert found[1] == [] and found[2], key
        log: list[str] = []
        with opened(run, log) as checkpoints:
            assert restored(checkpoints) == checkpoint.digests(state(1)), key
            assert checkpoints.steps() == [1]
            save(checkpoints, 2)
            assert restored(checkpoints) == checkpoint.digests(state(2))
        with opened(run) as checkpoints:  # it is set aside between two saves, too
            save(checkpoints, 3)
            _flip(objects, max(key for key in objects if "/3-" in key and key.endswith("w/c/0/0")))
            assert restored(checkpoints) == checkpoint.digests(state(2))
            assert checkpoints.save(3, state(3))
            assert restored(checkpoints) == checkpoint.digests(state(3))
        if found.get(2):
            assert "step 2 is damaged" in log[0] and "damaged.json" in log[0]


def test_two_writers_of_one_step_never_mix_their_objects(s3: s3_server.Server, run: Path) -> None:
    one, two = opened(run), opened(run)
    save(one, 1)
    save(two, 2)
    assert one.save(3, state(3)) and two.save(3, state(3))
    one.wait()
    two.wait()
    assert one.error is None and two.error is None
    assert restored(one) == checkpoint.digests(state(3))
    assert checkpoint.check_leaves(run, 3) == {3: []}


def test_a_step_of_which_a_chunk_disappears_while_it_is_saved_is_not_committed(
    s3: s3_server.Server, run: Path
) -> None:
    def without(method: str, path: str) -> None:
        if path.endswith("_METADATA"):  # which is written after the chunks
            for key in [key for key in s3.buckets["lab"] if key.endswith("w/c/0/0")]:
                del s3.buckets["lab"][key]

    s3.fault = without
    log: list[str] = []
    with opened(run, log) as checkpoints:
        save(checkpoints, 1)
        assert checkpoints.steps() == []
    assert "params/w" in log[0] and "1 of its 1 chunks" in log[0]


def test_what_is_not_a_step_is_left_alone(s3: s3_server.Server, run: Path) -> None:
    others = {
        "runs/a-00000001/notes.txt": b"x",
        "runs/a-000000010/1-00/manifest.json": b"",
        "thesis.tex": b"x",
    }
    unfinished = {f"runs/a-00000001/7-{'0' * 16}/state/d/x": b"x"}
    s3.buckets["lab"] = {**others, **unfinished}
    with opened(run, keep_latest=1) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
        assert checkpoints.steps() == [2]
    left = s3.buckets["lab"]
    assert others.items() <= left.items() and not unfinished.items() & left.items()


RUN = """\
model: !models.mlp {width: 16, depth: 1}
data: !data.digits {batch_size: 32, validation: 0.2}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
steps: 8
save_every: 2
eval_every: 8
writers: []
"""


def test_a_run_saves_below_the_url_and_its_commands_find_it(
    s3: s3_server.Server, tmp_path: Path, capsys: Any
) -> None:
    file, workdir = tmp_path / "run.yaml", tmp_path / "a run"
    file.write_text(f"{RUN}checkpoints: s3://lab/runs/\n")
    start = ["--config", str(file), "--workdir", str(workdir)]
    assert main(start) == 0
    # Each run has a place of its own.
    place = (workdir / "checkpoints").read_text().strip()
    assert re.fullmatch("s3://lab/runs/a_run-[0-9a-f]{8}", place)
    assert main(["checkpoint", "check", str(workdir)]) == 0
    assert main(["checkpoint", "export", str(workdir), str(tmp_path / "x.safetensors")]) == 0
    assert "step 8: intact" in capsys.readouterr().out
    assert main(start) == 0
    assert "Nothing to do" in capsys.readouterr().err


def test_a_missing_bucket_and_a_wrong_url_are_refused_at_the_start(
    s3: s3_server.Server, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "run.yaml"
    for url, said in (
        ("s3://other/runs", "there is no bucket other"),
        ("http://lab/runs", "checkpoints is 'http://lab/runs', and must be gs://BUCKET/PATH"),
        ("s3://key:secret@lab", "must be gs://BUCKET/PATH"),
    ):
        file.write_text(f"{RUN}checkpoints: {url}\n")
        assert main(["--config", str(file), "--workdir", str(tmp_path / "w")]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "w").exists()
    file.write_text(f"{RUN}checkpoints: s3://lab/runs\n")
    s3.fault = lambda method, path: "403" if method == "PUT" else None
    assert main(["--config", str(file), "--workdir", str(tmp_path / "w")]) == 2
    said = capsys.readouterr().err
    assert "No checkpoint can be saved in s3://lab/runs: s3://lab denied access" in said
    assert "AWS_ACCESS_KEY_ID" in said and not (tmp_path / "w").exists()


def test_a_file_url_is_another_folder(tmp_path: Path) -> None:
    file, workdir = tmp_path / "run.yaml", tmp_path / "w"
    file.write_text(f"{RUN}checkpoints: file://{tmp_path}/elsewhere\n")
    assert main(["--config", str(file), "--workdir", str(workdir)]) == 0
    (home,) = (tmp_path / "elsewhere").iterdir()
    assert (home / "8/state.safetensors").is_file()
    assert [info.step for info in checkpoint.ls(workdir)] == [6, 8]


def test_a_sweep_refuses_a_base_that_saves_elsewhere(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "base.yaml").write_text(f"{RUN}checkpoints: s3://lab/runs\n")
    sweep = """
base: base.yaml
arms: {adamw: {space: {optimizer.learning_rate: !space.log_uniform {low: 1e-3, high: 0.1}}}}
trials: 2
method: !method.sobol {seed: 0}
goal: {metric: loss}
"""
    (tmp_path / "sweep.yaml").write_text(sweep)
    start = ["sweep", f"--config={tmp_path}/sweep.yaml", f"--workdir={tmp_path}/s", "--plan_only"]
    assert main(start) == 2
    said = capsys.readouterr().err
    assert "base.yaml:9: " in said and "saves checkpoints in s3://lab/runs" in said
    (tmp_path / "sweep.yaml").write_text(f"{sweep}set: {{checkpoints: null}}\n")
    assert main(start) == 0


@pytest.mark.parametrize("url", ["file://{}", "file://{}/", "s3://lab", "gs://lab/runs", "x" * 99])
def test_a_file_of_somebody_else_names_no_place_that_no_run_has_chosen(
    url: str, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    for year in ("1", "2", "3"):
        (precious / year).mkdir(parents=True)
    (tmp_path / "checkpoints").write_text(url.format(precious))
    with opened(tmp_path, keep_latest=1, keep_best=0) as checkpoints:
        assert checkpoints.steps() == []
        save(checkpoints, 4)
        assert checkpoints.error is not None
    assert sorted(path.name for path in precious.iterdir()) == ["1", "2", "3"]


@pytest.mark.long
def test_verify_leaves_nothing_in_the_bucket(s3: s3_server.Server, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{RUN}checkpoints: s3://lab/runs\n")
    assert main(["verify", f"--config={tmp_path}/run.yaml"]) == 0
    assert s3.buckets["lab"] == {} and s3.requests == []


@pytest.mark.long
def test_a_killed_run_goes_on_from_the_bucket_with_the_bits_of_one_on_a_disk(
    s3: s3_server.Server, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{RUN}checkpoints: s3://lab/runs\n")
    (tmp_path / "disk.yaml").write_text(RUN)
    assert main(["--config", str(tmp_path / "disk.yaml"), "--workdir", str(tmp_path / "disk")]) == 0
    killing = """
import os, signal, sys
from trainer.checkpoint import bucket
commit = bucket.Bucket.commit
def kill(self, place, step, *rest):
    if step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    commit(self, place, step, *rest)
bucket.Bucket.commit = kill
from trainer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
    start = ["--config", str(file), "--workdir", str(tmp_path / "a")]
    died = subprocess.run([sys.executable, "-c", killing, *start], cwd=ROOT, timeout=LONG)
    assert died.returncode == -9
    assert checkpoint.ls(tmp_path / "a")[-1].step == 4
    assert main(start) == 0
    assert checkpoint.diff_checkpoints(tmp_path / "a", 8, 8, tmp_path / "disk") == []
    rows = [lines(tmp_path / name) for name in ("a", "disk")]
    losses = [[row["train/loss"] for row in of if "train/loss" in row] for of in rows]
    assert losses[0] == losses[1]
    left = {key.split("/")[2].split("-")[0] for key in s3.buckets["lab"]}
    assert left == {"run.txt", "6", "8"}, "What the killed process wrote is deleted."
    shutil.rmtree(tmp_path / "a")
