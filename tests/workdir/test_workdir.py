"""A run's folder: one config, one writer at a time, and a record of every process."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import LONG, ROOT
from trainer import config as configs
from trainer.config import Call
from trainer.messages import UserError
from trainer.workdir import (
    Change,
    Provenance,
    Workdir,
    WorkdirLock,
    WorkdirTakenOver,
    check_name,
    fingerprint_differences,
    make_fingerprint,
)
from trainer.workdir.fingerprint import REFUSED, _code
from trainer.writers import locks
from trainer.writers.files import replace_file

CONFIG = Call(
    "experiment",
    {"steps": 10, "seed": 0, "data": Call("data.digits", {"batch_size": 128}), "log_every": 5},
)
PRINT = {"config": "c", "data": "d", "seed": 0, "batch_size": 128, "cores": 2, "jax": "1"}


def other(**changes: Any) -> Call:
    return Call("experiment", dict(CONFIG.kwargs) | changes)


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


@pytest.fixture
def opened(folder: Path, log: list[str]) -> Iterator[Callable[..., Workdir]]:
    every: list[Workdir] = []

    def open_one(config: Call = CONFIG, print_: Any = PRINT, **options: Any) -> Workdir:
        workdir = Workdir(
            folder, config, Provenance(print_), {"plan.txt": "the plan"}, log=log.append, **options
        )
        every.append(workdir)
        return workdir

    yield open_one
    for one in every:
        one.lock.close()


def stepped(workdir: Workdir) -> Workdir:
    """Writes what a run has after a step: a row of metrics."""
    workdir.metrics_file.write_text('{"step": 1}\n')
    return workdir


def content(folder: Path) -> dict[str, Any]:
    """Everything that could be touched: names, times, bytes."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in [folder, *folder.rglob("*")]
    }


def committed(folder: Path) -> dict[str, Any]:
    """All files but those of a save that was begun: these stay temporary, and are swept later."""
    return {
        name: told
        for name, told in content(folder).items()
        if told[1] is not False and ".orbax-checkpoint-tmp" not in name
    }


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


# ---------------------------------------------------------------------------------------------
# The folder


def test_a_new_folder_contains_the_config_the_plan_and_the_record(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    workdir = opened()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert configs.load([workdir.config_file]).root == CONFIG
    assert (workdir.path / "plan.txt").read_text() == "the plan"
    (entry,) = record(folder)["lineage"]
    assert record(folder)["fingerprint"] == PRINT
    assert (entry["pid"], entry["host"]) == (os.getpid(), socket.gethostname())
    assert (entry["exit"], entry["restored"], entry["epoch"]) == (None, None, 1)
    assert entry["command"][1:] == sys.orig_argv[1:]
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_every_process_adds_to_the_lineage(opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("stopped")
    second = opened()
    second.record(restored=70)
    second.lock.close()  # as a kill would
    third = opened(print_=PRINT | {"cores": 4})
    third.record(restored=90)
    third.close("done")
    lineage = record(folder)["lineage"]
    assert [entry["exit"] for entry in lineage] == ["stopped", "killed", "done"]
    assert [entry["restored"] for entry in lineage] == [None, 70, 90]
    assert [entry["epoch"] for entry in lineage] == [1, 2, 3]
    assert [entry["changed"] for entry in lineage] == [[], [], ["cores: 2 -> 4"]]
    assert lineage[0]["fingerprint"] == lineage[1]["fingerprint"] != lineage[2]["fingerprint"]
    assert record(folder)["fingerprint"]["cores"] == 4


def test_an_error_is_recorded_as_failed(opened: Callable[..., Workdir], folder: Path) -> None:
    for kind in ("failed", "done"):
        opened().close(kind)
    assert [entry["exit"] for entry in record(folder)["lineage"]] == ["failed", "done"]


def test_a_partial_file_of_a_killed_process_is_removed(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    opened().close("stopped")
    mine = folder / ".notes.tmp"
    mine.write_text("a file of the user's")
    code = """
        import os, signal, sys
        from pathlib import Path
        from trainer.writers.files import replace_file
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        replace_file(Path(sys.argv[1]), b"x")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder / "metrics.jsonl")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL
    assert len(list(folder.glob(".metrics.jsonl.*.tmp"))) == 1
    opened()
    assert list(folder.glob(".*.tmp")) == [mine]


def test_processes_of_two_machines_with_one_number_replace_a_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "shared.json"

    def pieces():
        yield b"one "
        replace_file(file, b"two")  # as the other machine does, with the same process id
        assert file.read_bytes() == b"two"
        yield b"and all of it"

    replace_file(file, pieces())
    assert file.read_bytes() == b"one and all of it"
    assert list(tmp_path.iterdir()) == [file]


def test_files_are_written_whole_and_stay_inside(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    workdir = opened()
    workdir.write("result.json", "{}")
    assert (folder / "result.json").read_text() == "{}"
    for name in ("../result.json", "/result.json", "a/b", "", ".", "..", "a/../../b"):
        with pytest.raises(ValueError, match="not the name of a file"):
            workdir.write(name, "x")
    assert not (folder.parent / "result.json").exists()


# ---------------------------------------------------------------------------------------------
# Another config


CHANGED = {
    "a leaf": (other(steps=20), ["steps: 10 -> 20"]),
    "a leaf below": (
        other(data=Call("data.digits", {"batch_size": 64})),
        ["data.batch_size: 128 -> 64"],
    ),
    "several": (other(steps=20, seed=1), ["seed: 0 -> 1", "steps: 10 -> 20"]),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_another_config_is_refused_key_by_key(
    kind: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    config, lines = CHANGED[kind]
    stepped(opened()).close("stopped")
    before = content(folder)
    with pytest.raises(UserError) as error:
        opened(config)
    said = str(error.value).splitlines()
    assert len(said) <= 7
    assert [line.strip() for line in said[1:-1]] == lines
    assert "--allow_changed=" in said[-1] and str(folder) in said[0]
    assert content(folder) == before


def test_the_advice_about_a_key_with_a_colon_can_be_followed(
    opened: Callable[..., Workdir],
) -> None:
    key = "(?:a)/b"  # of a table by patterns of parameters
    before, after = (other(warm_start=Call("w", {"rename": {key: x}})) for x in ("c", "d"))
    stepped(opened(before)).close("stopped")
    with pytest.raises(UserError) as error:
        opened(after)
    advised = str(error.value).splitlines()[-1].rpartition("--allow_changed=")[2].rstrip(".")
    assert advised.endswith(key)
    opened(after, allow_changed=[advised]).close("stopped")


def test_many_differences_are_counted(opened: Callable[..., Workdir]) -> None:
    stepped(opened()).close("stopped")
    with pytest.raises(UserError) as error:
        opened(other(steps=1, seed=2, log_every=3, data=4, model=5, loss=6))
    said = str(error.value).splitlines()
    assert len(said) <= 7 and said[-2].strip() == "... and 3 more"


@pytest.mark.parametrize(
    ("allowed", "passes"),
    [
        ((), False),
        (("steps",), False),
        (("steps", "data"), True),
        (("steps", "data.batch_size"), True),
        (("steps", "batch_size"), True),
        (("config",), True),
        (("program",), True),
        (("seed", "log_every"), False),
    ],
)
def test_an_allowed_change_is_announced(
    allowed: tuple[str, ...], passes: bool, opened: Callable[..., Workdir], log: list[str]
) -> None:
    stepped(opened()).close("stopped")
    changed = other(steps=20, data=Call("data.digits", {"batch_size": 64}))
    if not passes:
        with pytest.raises(UserError, match="has another config"):
            opened(changed, allow_changed=allowed)
        return
    workdir = opened(changed, allow_changed=allowed)
    assert [change.key for change in workdir.changes] == ["data.batch_size", "steps"]
    assert len(log) == 2 and all("as allowed" in line for line in log)
    assert configs.load([workdir.config_file]).root == changed
    workdir.close("stopped")
    with pytest.raises(UserError, match="has another config"):
        opened()


def test_a_misspelt_permission_is_refused(opened: Callable[..., Workdir], folder: Path) -> None:
    with pytest.raises(UserError, match="--allow_changed=stesp names nothing"):
        opened(allow_changed=["stesp"])
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------
# Another fingerprint


@pytest.mark.parametrize("key", ["data", "seed", "batch_size", "x64", "prng", "processes"])
def test_a_change_of_the_data_or_the_program_is_refused(
    key: str, opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    stepped(opened()).close("stopped")
    before = content(folder)
    changed = PRINT | {key: "another"}
    told = f"(?s)would change the {REFUSED[key]} of.*{key}: .*-> another"
    with pytest.raises(UserError, match=told):
        opened(print_=changed)
    assert content(folder) == before
    with pytest.raises(UserError):
        opened(print_=changed, allow_changed=["threefry_partitionable"])
    for allowed in (key, REFUSED[key]):
        shutil.rmtree(folder)
        stepped(opened()).close("stopped")
        log.clear()
        assert opened(print_=changed, allow_changed=[allowed]).changes == [
            Change(REFUSED[key], key, PRINT.get(key), "another")
        ]
        assert len(log) == 1


def test_data_that_differ_although_nothing_else_does_are_perhaps_not_seeded(
    opened: Callable[..., Workdir],
) -> None:
    before = PRINT | {"code": {"lab.py": "0e"}}
    stepped(opened(print_=before)).close("stopped")
    told = r"(?s)config and your code are the same.*np\.random\.default_rng\(seed\)"
    for more, expected in (({}, True), ({"code": {"lab.py": "0f"}}, False), ({"seed": 1}, False)):
        with pytest.raises(UserError) as refused:
            opened(print_=before | {"data": "another"} | more)
        assert bool(re.search(told, str(refused.value))) == expected, refused.value


@pytest.mark.parametrize("key", ["cores", "jax", "devices", "isa", "commit", "xla_flags"])
def test_a_change_that_alters_bits_is_announced(
    key: str, opened: Callable[..., Workdir], log: list[str]
) -> None:
    stepped(opened()).close("stopped")
    workdir = opened(print_=PRINT | {key: "another"})
    assert [change.kind for change in workdir.changes] == ["bits"]
    assert len(log) == 1 and f"{key}: " in log[0] and "bits may differ" in log[0]
    workdir.close("stopped")
    log.clear()
    opened(print_=PRINT | {key: "another"}).close("done")
    assert log == [], "It is said once."


# What a run may leave behind that failed before its first step: nothing but these.
BEFORE_STEPS = ["metrics.jsonl", "checkpoints/", "summary.json", "log.txt", "tokenizer.json"]


def test_a_run_without_a_step_takes_another_config_code_and_data(
    opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    opened(print_=PRINT | {"code": {"lab.py": "a"}}).close("failed")
    for name in BEFORE_STEPS:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
    (folder / "events.out.tfevents.1.host.2").write_text("the old config")
    changed = PRINT | {"code": {"lab.py": "b"}, "data": "e", "cores": 4}
    workdir = opened(other(steps=20), changed)
    assert configs.load([workdir.config_file]).root == other(steps=20)
    assert record(folder)["fingerprint"] == changed
    assert [change.key for change in workdir.changes] == ["steps", "data", "code", "cores"]
    assert log[0] == "Changed since this run ended before its first step: steps: 10 -> 20."
    assert len(log) == 4
    assert not list(folder.glob("events.out.*")) and not (folder / "tokenizer.json").exists()
    stepped(workdir).close("failed")
    with pytest.raises(UserError, match="has another config"):
        opened(other(steps=30), changed)


def test_a_run_without_a_step_keeps_its_files_if_nothing_changed(
    opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    opened().close("failed")
    events = folder / "events.out.tfevents.1.host.2"
    events.write_text("the config")
    opened().close("failed")
    assert events.exists() and log == []


@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "samples.jsonl",
        "nonfinite.json",
        "rollbacks.json",
        "trace.jsonl",
        "checkpoints/4/state",
        "checkpoints/damaged/4/state",
        "trials/muon/0000/0/metrics.jsonl",  # of a wave of a sweep
        "notes.txt",
    ],
)
def test_anything_of_a_step_keeps_another_config_out(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    opened().close("killed")
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}\n")
    before = content(folder)
    with pytest.raises(UserError, match="has another config"):
        opened(other(steps=20))
    with pytest.raises(UserError, match="would change the program"):
        opened(print_=PRINT | {"x64": True})
    assert content(folder) == before


def test_compare_distinguishes_the_kinds_of_changes() -> None:
    assert fingerprint_differences(PRINT, dict(reversed(PRINT.items()))) == []
    old, new = {"cores": 2, "x64": False, "data": "a"}, {"data": "b", "cores": 3, "x64": True}
    assert sorted(fingerprint_differences(old, new)) == [
        ("bits", "cores", 2, 3),
        ("data", "data", "a", "b"),
        ("program", "x64", False, True),
    ]
    assert fingerprint_differences(old, new)[-1].kind == "bits"
    assert str(Change("bits", "flags", "", "x" * 100)).endswith("...")


def test_the_fingerprint_records_the_machine_and_the_versions() -> None:
    import jax
    import numpy

    found = make_fingerprint(config="c", data="d", seed=3, batch_size=8)
    assert json.loads(json.dumps(found)) == found
    assert {"config": "c", "data": "d", "seed": 3, "batch_size": 8}.items() <= found.items()
    assert set(REFUSED) <= set(found)
    assert (found["jax"], found["numpy"]) == (jax.__version__, numpy.__version__)
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["devices"] == f"{len(jax.devices())} x cpu cpu"
    assert found["prng"] == "threefry2x32" and found["x64"] is False
    with jax.enable_x64(True):
        assert [
            c.key
            for c in fingerprint_differences(
                found, make_fingerprint(**dict(config="c", data="d", seed=3, batch_size=8))
            )
        ] == ["x64"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("x = 1\n")
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "First"]):
        subprocess.run([git, "-C", str(root), *who, *command], check=True)
    return root


def test_the_commit_and_uncommitted_changes_are_recorded(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = ["git", "-C", str(checkout)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert _code(checkout) == {"commit": head.stdout.strip(), "uncommitted": "none"}
    hashes = set()
    for text in ("x = 2\n", "x = 3\n"):
        (checkout / "code.py").write_text(text)
        hashes.add(_code(checkout)["uncommitted"])
    assert len(hashes) == 2 and "none" not in hashes
    assert _code(tmp_path) == {}
    # What a checkout's own settings name is not run.
    trap = checkout / "trap"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    trap.chmod(0o755)
    settings = ["core.fsmonitor", "diff.external", "diff.d.textconv", "diff.d.command"]
    settings += ["filter.one.clean", "filter.one.smudge", "filter.a=b.process"]
    for setting in settings:
        subprocess.run([*git, "config", setting, str(trap)], check=True)
    subprocess.run([*git, "config", "filter.one.required", "true"], check=True)
    attributes = checkout / ".git" / "info" / "attributes"
    for kind in ("filter=one", "filter=a=b", "diff=d"):
        attributes.write_text(f"* {kind}\n")
        (checkout / "code.py").write_text(f"{kind}\n")
        hashes.add(_code(checkout)["uncommitted"])
    assert _code(checkout)["commit"] == head.stdout.strip() and len(hashes) == 5
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _code(checkout) == {}


# ---------------------------------------------------------------------------------------------
# Folders that cannot be used


def test_a_file_in_place_of_the_workdir_is_refused(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    folder.parent.mkdir()
    folder.write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        opened()
    assert folder.read_text() == "mine"


def test_a_file_in_place_of_a_parent_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(UserError, match="Choose another --workdir"):
            Workdir(path, CONFIG, Provenance(PRINT))


def test_a_folder_that_cannot_be_written_is_refused(shut: Path) -> None:
    for path in (shut, shut / "run"):
        with pytest.raises(UserError, match="cannot be (made|written)"):
            Workdir(path, CONFIG, Provenance(PRINT))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/1/x"])
def test_a_folder_with_results_and_without_a_config_is_refused(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("")
    with pytest.raises(UserError, match="has results but no config.yaml"):
        opened()
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("name", ["", "8.orbax-checkpoint-tmp/state", "removed/3"])
def test_the_remains_of_an_interrupted_save_do_not_count_as_results(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    """As where the folder was deleted under a run that was just saving."""
    (folder / "checkpoints" / name).mkdir(parents=True)
    opened()


@pytest.mark.parametrize("path", ["/a/\udcfc/run", "/a/\xfc/run"])
def test_a_folder_name_that_is_not_utf_8_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/a/\xfc/run":
        check_name(path)  # as ever, where names are UTF-8
        monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    with pytest.raises(UserError, match=r"workdir /a/\S+/run cannot hold checkpoints: .* UTF-8"):
        check_name(path)


@pytest.mark.parametrize("name", ["slurm-17.out", "log.txt", "train.log", "log", ".nfs17"])
def test_a_folder_with_a_log_file_of_another_program_is_accepted(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text("hello")
    opened()
    assert (folder / name).read_text() == "hello"


@pytest.mark.parametrize(
    "name",
    [
        *("thesis.tex", "photos/1.jpg", "config.yaml", "logbook.md", "run.yaml", "muon/run.json"),
        *("config_full.yaml", "summary.json"),
    ],
)
def test_a_folder_with_other_files_than_a_runs_is_refused_and_left_alone(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    """A config.yaml of the user's is not one of a run's: comments, for one, would be lost."""
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("# mine\n" + configs.dump(CONFIG))
    before = content(folder)
    words = rf"not the folder of a run: it holds {Path(name).parts[0]}, and no run\.json"
    with pytest.raises(UserError, match=words) as caught:
        opened()
    assert f"such as --workdir={folder / 'run'}." in str(caught.value)
    assert content(folder) == before


@pytest.mark.parametrize("left", [[], ["run.json"], ["run.json", "lock"], ["config.yaml"]])
def test_the_folder_of_a_run_is_recognized_without_some_of_its_files(
    left: list[str], opened: Callable[..., Workdir], folder: Path
) -> None:
    opened().close("stopped")
    for name in left:
        (folder / name).unlink()
    (folder / ".config.yaml.17.tmp").write_text("from a process that was killed")
    if "run.json" not in left:
        (folder / "notes.md").write_text("a file of the user's, added later")
    opened()
    assert configs.load([folder / "config.yaml"]).root == CONFIG


@pytest.mark.long
def test_a_run_may_write_its_output_to_a_file_in_its_folder(folder: Path, tmp_path: Path) -> None:
    """As by `python -m trainer --workdir=runs/a > runs/a/output`."""
    folder.mkdir(parents=True)
    code = """
        import sys
        from trainer.config import Call
        from trainer.workdir import Provenance, Workdir
        Workdir(sys.argv[1], Call("experiment", {}), Provenance({})).close("done")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    with open(folder / "output", "w") as output, open(tmp_path / "other", "w") as other:
        for streams in ({"stdout": output, "stderr": other}, {"stdout": other, "stderr": output}):
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run(command, env=env, check=True, **streams)
            (folder / "run.json").unlink()
        elsewhere = {"stdout": other, "stderr": subprocess.PIPE}
        done = subprocess.run(command, env=env, text=True, **elsewhere)
    assert done.returncode == 1 and "it holds output, and no run.json" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 99}', '{"format": 1, "fingerprint": {}}']
)
def test_a_broken_record_is_named(text: str, opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("done")
    (folder / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json is damaged \(.*\): repair it, or move it away"):
        opened()
    (folder / "run.json").unlink()
    opened()


def test_a_full_disk_is_reported_without_a_traceback(
    mounted: Callable[[str], Path], log: list[str]
) -> None:
    disk = mounted("size=64k")
    try:
        workdir = Workdir(disk / "a", CONFIG, Provenance(PRINT), log=log.append)
        with open(disk / "fill", "wb", buffering=0) as fill:
            while fill.write(bytes(4096)) == 4096:
                pass
    except OSError:
        with pytest.raises(UserError, match="cannot be (made|written): No space left"):
            Workdir(disk / "b", CONFIG, Provenance(PRINT))
        workdir.record(restored=5)
        assert "No space left" in log[-1]
        workdir.close("failed")
        assert record(disk / "a")["lineage"][-1]["exit"] is None, "The old record is whole."


def other_first(monkeypatch: pytest.MonkeyPatch, take: Callable[[], Any]) -> list[Any]:
    """Lets another process come between a lock's reading of the epoch and its writing."""
    real, others = locks._read_epoch, []

    def read(path: Path) -> tuple[int, str]:
        found = real(path)
        if not others:
            others.append(None)
            others[0] = take()
        return found

    monkeypatch.setattr(locks, "_read_epoch", read)
    return others


def test_only_one_of_two_simultaneous_take_overs_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WorkdirLock(tmp_path)
    others = other_first(monkeypatch, lambda: WorkdirLock(tmp_path, take_over=True))
    both = [WorkdirLock(tmp_path, take_over=True), others[0]]
    assert [lock.epoch for lock in both] == [2, 2]
    both[0].check_fence()
    with pytest.raises(WorkdirTakenOver, match="was taken over"):
        both[1].check_fence()


def test_a_folder_that_is_deleted_while_it_is_opened_is_an_error(
    opened: Callable[..., Workdir], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()

    def again(self: WorkdirLock) -> None:
        monkeypatch.undo()
        WorkdirLock(self.directory, take_over=True)
        self.check_fence()

    monkeypatch.setattr(WorkdirLock, "check_fence", again)
    with pytest.raises(UserError, match="was taken over by process"):
        opened(take_over=True)


def test_a_broken_epoch_is_named(opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("done")
    (folder / "epoch").write_text("two")
    with pytest.raises(UserError, match="must hold a number, and holds b'two'"):
        opened()


# ---------------------------------------------------------------------------------------------
# One writer: real processes


HOLDER = """
    import sys
    from trainer.workdir import WorkdirTakenOver, WorkdirLock
    from trainer.messages import UserError

    try:
        lock = WorkdirLock(sys.argv[1], take_over="--take_over" in sys.argv)
    except UserError as error:
        sys.exit(str(error))
    print(lock.epoch, flush=True)
    for line in sys.stdin:
        if line == "close\\n":
            lock.close()
            print("closed", flush=True)
            continue
        if line == "fork\\n":
            import os, time
            child = os.fork()
            if not child:
                os.close(0), os.close(1), os.close(2)
                time.sleep(120)
                os._exit(0)
            print(child, flush=True)
            continue
        try:
            lock.check_fence()
            print("mine", flush=True)
        except WorkdirTakenOver as error:
            print(error, flush=True)
"""


class Holder:
    """A process that holds the lock, and does what it is told."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(HOLDER), str(folder)]
        self.process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str = "fence") -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.line()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> str:
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[..., Holder]]:
    every: list[Holder] = []

    def start(*options: str) -> Holder:
        every.append(Holder(tmp_path, *options))
        return every[-1]

    yield start
    for holder in every:
        holder.signal(signal.SIGCONT)
        holder.end()


def test_a_second_process_is_refused_and_the_lock_of_a_dead_one_is_taken_over(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    assert first.line() == "1"
    pid = first.process.pid
    said = f"in use by process {pid} on {socket.gethostname()} "
    with pytest.raises(UserError, match=said):
        WorkdirLock(tmp_path)
    second = hold()
    assert second.process.wait() == 1
    assert said in second.end()
    assert first.ask() == "mine"
    first.end()
    with_epoch = WorkdirLock(tmp_path)
    assert with_epoch.epoch == 2
    with_epoch.check_fence()
    with_epoch.close()
    with pytest.raises(WorkdirTakenOver, match="was closed"):
        with_epoch.check_fence()


def test_a_second_lock_in_the_same_process_is_refused(tmp_path: Path) -> None:
    lock = WorkdirLock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        WorkdirLock(tmp_path)
    lock.close()
    WorkdirLock(tmp_path).close()


def test_only_one_of_four_simultaneous_processes_gets_the_lock(hold: Callable[..., Holder]) -> None:
    racers = [hold() for _ in range(4)]
    answers = sorted(racer.line() for racer in racers)
    assert answers == ["", "", "", "1"]


@pytest.mark.long
def test_a_process_that_wakes_up_after_a_take_over_cannot_write(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    old = hold()
    assert old.line() == "1"
    old.signal(signal.SIGSTOP)
    refused = hold()
    assert refused.process.wait() == 1, "A stopped process is not a dead one."
    new = hold("--take_over")
    assert new.line() == "2"
    assert new.ask() == "mine"
    old.signal(signal.SIGCONT)
    said = old.ask()
    assert f"was taken over by process {new.process.pid}" in said and "writes nothing" in said
    assert old.ask("close") == "closed"
    assert new.ask() == "mine", "What the old one does when it ends does not free the new one's."
    with pytest.raises(UserError, match=f"process {new.process.pid}"):
        WorkdirLock(tmp_path)


def test_a_lock_held_on_another_host_is_respected(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    """Another host: flock says that it is held, and the process number means nothing here."""
    first = hold()
    first.line()
    path = tmp_path / "lock"
    holder = json.loads(path.read_text()) | {"host": "far", "machine": "far", "pid": 2**22 + 1}
    path.write_text(json.dumps(holder))
    with pytest.raises(UserError, match=f"process {2**22 + 1} on far.*--take_over"):
        WorkdirLock(tmp_path)
    lock = WorkdirLock(tmp_path, take_over=True)
    assert lock.epoch == 2
    assert "taken over" in first.ask()
    lock.close()


@pytest.mark.parametrize("lives", [True, False])
def test_a_process_on_another_host_whose_lock_is_not_seen_here_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """Its clock may be wrong: what tells is that it counts up in the file."""
    monkeypatch.setattr(locks, "BEAT", 0.1)
    with monkeypatch.context() as there:
        there.setattr(locks, "machine", lambda: "far")
        there.setattr(socket, "gethostname", lambda: "far")
        first = WorkdirLock(tmp_path, beat=True)
    if not lives:
        first._heartbeat.close()  # type: ignore[union-attr]
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # only its own host sees a lock
    if lives:
        with pytest.raises(UserError, match="on far.*--take_over. The file system does not show"):
            WorkdirLock(tmp_path)
        first.check_fence()
    WorkdirLock(tmp_path, take_over=lives).close()
    with pytest.raises(WorkdirTakenOver):
        first.check_fence()
    first.close()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_lock_inherited_by_a_child_of_a_dead_process_is_taken_over(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    first.line()
    child = int(first.ask("fork"))
    try:
        first.end()
        lock = WorkdirLock(tmp_path)
        assert lock.epoch == 2
        lock.close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.long
def test_a_released_lock_is_free_even_if_a_child_process_lives(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    first.line()
    child = int(first.ask("fork"))
    try:
        assert first.ask("close") == "closed"
        WorkdirLock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.long
def test_without_file_locks_the_recorded_process_decides(
    hold: Callable[..., Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    first = hold()
    first.line()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(UserError, match=f"process {first.process.pid}"):
        WorkdirLock(tmp_path)
    first.end()
    lock = WorkdirLock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()}"):
        WorkdirLock(tmp_path)
    lock.close()
    WorkdirLock(tmp_path).close()


def test_a_process_whose_epoch_file_was_removed_cannot_write(tmp_path: Path) -> None:
    lock = WorkdirLock(tmp_path)
    (tmp_path / "epoch").unlink()
    with pytest.raises(WorkdirTakenOver, match="removed"):
        lock.check_fence()
    lock.close()


ZOMBIE = """
    import sys
    import time
    import jax, jax.numpy as jnp
    from trainer import writers
    from trainer.checkpoint import Checkpoints
    from trainer.config import Call
    from trainer.workdir import Provenance, WorkdirTakenOver, Workdir

    config = Call("experiment", {"steps": 10})
    workdir = Workdir(sys.argv[1], config, Provenance({}))
    fence = workdir.check_fence
    checkpoints = Checkpoints(workdir.checkpoints, fence=fence)
    writer = writers.create(["tensorboard"], workdir.path, resumed=0, fence=fence)
    state = {"x": jnp.zeros(100_000)}
    try:
        for step in range(1, 10**6):
            state = {"x": state["x"] + 1}
            writer.write_scalars(step, {"x": step})
            writer.flush()
            checkpoints.save(step, state)
            print(step, flush=True)
            time.sleep(0.3)  # stopped here, not between a check of the lock and the write after it
    except WorkdirTakenOver as error:
        workdir.close("failed")
        sys.exit(f"fenced: {error}")
"""


@pytest.mark.long
@pytest.mark.parametrize("after", [4])
def test_a_run_that_wakes_up_after_a_take_over_saves_nothing(after: int, folder: Path) -> None:
    import jax
    import jax.numpy as jnp

    from trainer import writers
    from trainer.checkpoint import Checkpoints

    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(ZOMBIE), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    try:
        while process.stdout.readline().strip() != str(after):
            assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        config = Call("experiment", {"steps": 10})
        workdir = Workdir(folder, config, Provenance({}), take_over=True)
        checkpoints = Checkpoints(workdir.checkpoints, fence=workdir.check_fence)
        state = checkpoints.restore({"x": jax.ShapeDtypeStruct((100_000,), jnp.float32)})
        step = int(state["x"][0])
        assert step >= after - 1
        writer = writers.create([], folder, resumed=step, fence=workdir.check_fence)
        writer.write_scalars(step + 1, {"x": -1})
        writer.close()
        checkpoints.discard_after(step)
        checkpoints.save(step + 1, {"x": state["x"] - 1})
        checkpoints.close()
        workdir.close("done")
        before = committed(folder)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=LONG)
        assert "fenced: The workdir" in said and "was taken over" in said, said
        assert process.returncode == 1
        assert committed(folder) == before
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"pid": "x"}'])
def test_a_lock_file_with_any_contents_is_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(text)
    WorkdirLock(tmp_path).close()


def test_a_workdir_that_was_taken_over_is_not_written(
    opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    old = opened()
    old.record(restored=10)
    new = opened(take_over=True)
    before = content(folder)
    with pytest.raises(WorkdirTakenOver, match=f"taken over by process {os.getpid()}"):
        old.write("result.json", "{}")
    with pytest.raises(WorkdirTakenOver):
        old.record(restored=20)
    old.close("done")
    assert content(folder) == before
    new.close("done")
    assert [entry["exit"] for entry in record(folder)["lineage"]] == ["killed", "done"]


def test_a_lock_file_replaced_before_it_was_locked_does_not_count_as_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it another process can put a new one in its place."""
    real = fcntl.flock
    replaced: list[int] = []

    def flock(descriptor: int, operation: int) -> None:
        if not replaced:
            replaced.append(descriptor)
            (tmp_path / "new").write_text("")
            (tmp_path / "new").replace(tmp_path / "lock")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = WorkdirLock(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with pytest.raises(UserError, match="in use"):
        WorkdirLock(tmp_path)
    lock.close()
