"""A run's folder: one config, one writer at a time, and a record of every process."""

import errno
import fcntl
import json
import os
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

from trainer import config as configs
from trainer.config import Call, ConfigError
from trainer.workdir import Change, Fenced, Lock, Workdir, check_name, compare, fingerprint
from trainer.workdir import fingerprint as fingerprints  # the function; the module is below
from trainer.workdir import lock as lock_module
from trainer.workdir.fingerprint import REFUSED, _code

ROOT = Path(__file__).resolve().parent.parent

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
            folder, config, plan="the plan", fingerprint=print_, log=log.append, **options
        )
        every.append(workdir)
        return workdir

    yield open_one
    for one in every:
        one.lock.close()


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


def test_a_new_folder_has_the_config_the_plan_and_the_record(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    workdir = opened()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert configs.load([workdir.config_file]).root == CONFIG
    assert workdir.plan_file.read_text() == "the plan"
    (entry,) = record(folder)["lineage"]
    assert record(folder)["fingerprint"] == PRINT
    assert (entry["pid"], entry["host"]) == (os.getpid(), socket.gethostname())
    assert (entry["exit"], entry["restored"], entry["epoch"]) == (None, None, 1)
    assert "pytest" in " ".join(entry["command"])
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_every_process_adds_to_the_lineage(opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("stopped")
    second = opened()
    second.restored(70)
    second.lock.close()  # as a kill would
    third = opened(print_=PRINT | {"cores": 4})
    third.restored(90)
    third.close("done")
    lineage = record(folder)["lineage"]
    assert [entry["exit"] for entry in lineage] == ["stopped", "killed", "done"]
    assert [entry["restored"] for entry in lineage] == [None, 70, 90]
    assert [entry["epoch"] for entry in lineage] == [1, 2, 3]
    assert [entry["changed"] for entry in lineage] == [[], [], ["cores: 2 -> 4"]]
    assert lineage[0]["fingerprint"] == lineage[1]["fingerprint"] != lineage[2]["fingerprint"]
    assert record(folder)["fingerprint"]["cores"] == 4


def test_an_error_is_noted_as_failed(opened: Callable[..., Workdir], folder: Path) -> None:
    with pytest.raises(RuntimeError), opened():
        raise RuntimeError
    with opened():
        pass
    assert [entry["exit"] for entry in record(folder)["lineage"]] == ["failed", "done"]


def test_what_a_killed_process_left_of_a_file_is_removed(
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
    opened().close("stopped")
    before = content(folder)
    with pytest.raises(ConfigError) as error:
        opened(config)
    said = str(error.value).splitlines()
    assert len(said) <= 7
    assert [line.strip() for line in said[1:-1]] == lines
    assert "--allow_changed=" in said[-1] and str(folder) in said[0]
    assert content(folder) == before


def test_many_differences_are_counted(opened: Callable[..., Workdir]) -> None:
    opened().close("stopped")
    with pytest.raises(ConfigError) as error:
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
def test_what_may_change_is_said(
    allowed: tuple[str, ...], passes: bool, opened: Callable[..., Workdir], log: list[str]
) -> None:
    opened().close("stopped")
    changed = other(steps=20, data=Call("data.digits", {"batch_size": 64}))
    if not passes:
        with pytest.raises(ConfigError, match="holds another config"):
            opened(changed, allow_changed=allowed)
        return
    workdir = opened(changed, allow_changed=allowed)
    assert [change.key for change in workdir.changes] == ["data.batch_size", "steps"]
    assert len(log) == 2 and all("as allowed" in line for line in log)
    assert configs.load([workdir.config_file]).root == changed
    workdir.close("stopped")
    with pytest.raises(ConfigError, match="holds another config"):
        opened()


def test_a_misspelt_permission_is_refused(opened: Callable[..., Workdir], folder: Path) -> None:
    with pytest.raises(ConfigError, match="--allow_changed=stesp names nothing"):
        opened(allow_changed=["stesp"])
    assert not folder.exists()


# ---------------------------------------------------------------------------------------------
# Another fingerprint


@pytest.mark.parametrize("key", ["data", "seed", "batch_size", "x64", "prng", "processes"])
def test_what_alters_the_data_or_the_program_is_refused(
    key: str, opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    opened().close("stopped")
    before = content(folder)
    changed = PRINT | {key: "another"}
    with pytest.raises(ConfigError, match=f"(?s)alters the {REFUSED[key]}.*{key}: .*-> another"):
        opened(print_=changed)
    assert content(folder) == before
    with pytest.raises(ConfigError):
        opened(print_=changed, allow_changed=["threefry_partitionable"])
    for allowed in (key, REFUSED[key]):
        shutil.rmtree(folder)
        opened().close("stopped")
        log.clear()
        assert opened(print_=changed, allow_changed=[allowed]).changes == [
            Change(REFUSED[key], key, PRINT.get(key), "another")
        ]
        assert len(log) == 1


@pytest.mark.parametrize("key", ["cores", "jax", "devices", "isa", "commit", "xla_flags"])
def test_what_alters_bits_is_announced(
    key: str, opened: Callable[..., Workdir], log: list[str]
) -> None:
    opened().close("stopped")
    workdir = opened(print_=PRINT | {key: "another"})
    assert [change.kind for change in workdir.changes] == ["bits"]
    assert len(log) == 1 and f"{key}: " in log[0] and "bits may differ" in log[0]
    workdir.close("stopped")
    log.clear()
    opened(print_=PRINT | {key: "another"}).close("done")
    assert log == [], "It is said once."


def test_compare_tells_kinds_apart() -> None:
    assert compare(PRINT, dict(reversed(PRINT.items()))) == []
    old, new = {"cores": 2, "x64": False, "data": "a"}, {"data": "b", "cores": 3, "x64": True}
    assert sorted(compare(old, new)) == [
        ("bits", "cores", 2, 3),
        ("data", "data", "a", "b"),
        ("program", "x64", False, True),
    ]
    assert compare(old, new)[-1].kind == "bits"
    assert str(Change("bits", "flags", "", "x" * 100)).endswith("...")


def test_the_fingerprint_says_where_and_by_what() -> None:
    import jax
    import numpy

    found = fingerprints(config="c", data="d", seed=3, batch_size=8)
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
            for c in compare(found, fingerprint(**dict(config="c", data="d", seed=3, batch_size=8)))
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


def test_the_commit_and_the_changes_since(
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


def test_a_file_in_its_place(opened: Callable[..., Workdir], folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        opened()
    assert folder.read_text() == "mine"


def test_a_file_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file" / "deep" / "run"):
        with pytest.raises(ConfigError, match="Choose another --workdir"):
            Workdir(path, CONFIG, plan="", fingerprint=PRINT)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir()
    if os.geteuid() == 0:  # root may write wherever the file system lets it
        command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(shut)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("Nothing is closed to root where it cannot mount a file system.")
    else:
        shut.chmod(0o500)
    try:
        for path in (shut, shut / "run"):
            with pytest.raises(ConfigError, match="cannot be (made|written)"):
                Workdir(path, CONFIG, plan="", fingerprint=PRINT)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(shut)], check=True)


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/1/x"])
def test_results_without_a_config_are_nobodys(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("")
    with pytest.raises(ConfigError, match="holds results but no config.yaml"):
        opened()
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("name", ["", "8.orbax-checkpoint-tmp/state", "removed/3"])
def test_what_a_save_that_broke_off_leaves_is_no_result(
    name: str, opened: Callable[..., Workdir], folder: Path
) -> None:
    """As where the folder was deleted under a run that was just saving."""
    (folder / "checkpoints" / name).mkdir(parents=True)
    opened()


@pytest.mark.parametrize("path", ["/a/\udcfc/run", "/a/\xfc/run"])
def test_a_name_that_has_other_bytes_in_utf_8_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "/a/\xfc/run":
        check_name(path)  # as ever, where names are UTF-8
        monkeypatch.setattr(os, "fsencode", lambda name: name.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"workdir /a/\S+/run cannot hold checkpoints: .* UTF-8"):
        check_name(path)


def test_a_folder_with_a_stranger_s_log_is_fine(
    opened: Callable[..., Workdir], folder: Path
) -> None:
    folder.mkdir(parents=True)
    (folder / "slurm-17.out").write_text("hello")
    opened()
    assert (folder / "slurm-17.out").read_text() == "hello"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": 99}', '{"format": 1, "fingerprint": {}}']
)
def test_a_broken_record_is_named(text: str, opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("done")
    (folder / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json cannot be read"):
        opened()
    (folder / "run.json").unlink()
    opened()


def test_a_full_disk_is_no_traceback(tmp_path: Path, log: list[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("A file system can be mounted by root only.")
    try:
        workdir = Workdir(disk / "a", CONFIG, plan="", fingerprint=PRINT, log=log.append)
        with open(disk / "fill", "wb", buffering=0) as fill:
            while fill.write(bytes(4096)) == 4096:
                pass
    except OSError:
        with pytest.raises(ConfigError, match="cannot be (made|written): No space left"):
            Workdir(disk / "b", CONFIG, plan="", fingerprint=PRINT)
        workdir.restored(5)
        assert "No space left" in log[-1]
        workdir.close("failed")
        assert record(disk / "a")["lineage"][-1]["exit"] is None, "The old record is whole."
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def other_first(monkeypatch: pytest.MonkeyPatch, take: Callable[[], Any]) -> list[Any]:
    """Lets another process come between a lock's reading of the epoch and its writing."""
    real, others = lock_module._read_epoch, []

    def read(path: Path) -> tuple[int, str]:
        found = real(path)
        if not others:
            others.append(None)
            others[0] = take()
        return found

    monkeypatch.setattr(lock_module, "_read_epoch", read)
    return others


def test_one_of_two_that_take_over_at_once_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Lock(tmp_path)
    others = other_first(monkeypatch, lambda: Lock(tmp_path, take_over=True))
    locks = [Lock(tmp_path, take_over=True), others[0]]
    assert [lock.epoch for lock in locks] == [2, 2]
    locks[0].check_fence()
    with pytest.raises(Fenced, match="was taken over"):
        locks[1].check_fence()


def test_a_folder_that_is_lost_while_it_is_opened_is_told(
    opened: Callable[..., Workdir], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened()

    def again(self: Lock) -> None:
        monkeypatch.undo()
        Lock(self.directory, take_over=True)
        self.check_fence()

    monkeypatch.setattr(Lock, "check_fence", again)
    with pytest.raises(ConfigError, match="was taken over by process"):
        opened(take_over=True)


def test_a_broken_epoch_is_named(opened: Callable[..., Workdir], folder: Path) -> None:
    opened().close("done")
    (folder / "epoch").write_text("two")
    with pytest.raises(ConfigError, match="'two' where a number belongs"):
        opened()


# ---------------------------------------------------------------------------------------------
# One writer: real processes


HOLDER = """
    import sys
    from trainer.workdir import Fenced, Lock
    from trainer.config import ConfigError

    try:
        lock = Lock(sys.argv[1], take_over="--take_over" in sys.argv)
    except ConfigError as error:
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
        except Fenced as error:
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


def test_a_second_process_is_refused_and_a_dead_one_s_lock_is_taken(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    assert first.line() == "1"
    pid = first.process.pid
    said = f"in use by process {pid} on {socket.gethostname()} "
    with pytest.raises(ConfigError, match=said):
        Lock(tmp_path)
    second = hold()
    assert second.process.wait() == 1
    assert said in second.end()
    assert first.ask() == "mine"
    first.end()
    with_epoch = Lock(tmp_path)
    assert with_epoch.epoch == 2
    with_epoch.check_fence()
    with_epoch.close()
    with pytest.raises(Fenced, match="was closed"):
        with_epoch.check_fence()


def test_in_one_process_too(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Lock(tmp_path)
    lock.close()
    Lock(tmp_path).close()


def test_one_of_many_gets_it(hold: Callable[..., Holder]) -> None:
    racers = [hold() for _ in range(4)]
    answers = sorted(racer.line() for racer in racers)
    assert answers == ["", "", "", "1"]


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
    with pytest.raises(ConfigError, match=f"process {new.process.pid}"):
        Lock(tmp_path)


def test_a_holder_on_another_host_is_not_taken_for_dead(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    """Another host: flock says that it is held, and the process number means nothing here."""
    first = hold()
    first.line()
    path = tmp_path / "lock"
    holder = json.loads(path.read_text()) | {"host": "far", "machine": "far", "pid": 2**22 + 1}
    path.write_text(json.dumps(holder))
    with pytest.raises(ConfigError, match=f"process {2**22 + 1} on far.*--take_over"):
        Lock(tmp_path)
    lock = Lock(tmp_path, take_over=True)
    assert lock.epoch == 2
    assert "taken over" in first.ask()
    lock.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_lock_that_a_child_of_a_dead_process_holds_is_taken(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    first.line()
    child = int(first.ask("fork"))
    try:
        first.end()
        lock = Lock(tmp_path)
        assert lock.epoch == 2
        lock.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_was_given_back_is_free_even_if_a_child_lives(
    hold: Callable[..., Holder], tmp_path: Path
) -> None:
    first = hold()
    first.line()
    child = int(first.ask("fork"))
    try:
        assert first.ask("close") == "closed"
        Lock(tmp_path).close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_where_the_file_system_has_no_locks(
    hold: Callable[..., Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    first = hold()
    first.line()
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match=f"process {first.process.pid}"):
        Lock(tmp_path)
    first.end()
    lock = Lock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Lock(tmp_path)
    lock.close()
    Lock(tmp_path).close()


def test_a_folder_that_is_gone_fences_too(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    (tmp_path / "epoch").unlink()
    with pytest.raises(Fenced, match="removed"):
        lock.check_fence()
    lock.close()


ZOMBIE = """
    import sys
    import jax, jax.numpy as jnp
    from trainer import writers
    from trainer.checkpoint import Checkpoints
    from trainer.config import Call
    from trainer.workdir import Fenced, Workdir

    config = Call("experiment", {"steps": 10})
    workdir = Workdir(sys.argv[1], config, plan="", fingerprint={})
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
    except Fenced as error:
        workdir.close("failed")
        sys.exit(f"fenced: {error}")
"""


@pytest.mark.parametrize("after", [4])
def test_a_whole_run_that_wakes_up_commits_nothing(after: int, folder: Path) -> None:
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
        with Workdir(folder, config, plan="", fingerprint={}, take_over=True) as workdir:
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
        before = committed(folder)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
        assert "fenced: The workdir" in said and "was taken over" in said, said
        assert process.returncode == 1
        assert committed(folder) == before
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"pid": "x"}'])
def test_a_lock_file_of_anything_is_no_obstacle(text: str, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(text)
    Lock(tmp_path).close()


def test_a_fenced_folder_is_not_written(
    opened: Callable[..., Workdir], folder: Path, log: list[str]
) -> None:
    old = opened()
    old.restored(10)
    new = opened(take_over=True)
    before = content(folder)
    with pytest.raises(Fenced, match=f"taken over by process {os.getpid()}"):
        old.write("result.json", "{}")
    with pytest.raises(Fenced):
        old.restored(20)
    old.close("done")
    assert content(folder) == before
    new.close("done")
    assert [entry["exit"] for entry in record(folder)["lineage"]] == ["killed", "done"]


def test_a_lock_file_that_was_replaced_meanwhile_is_not_the_lock(
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
    lock = Lock(tmp_path)
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    with pytest.raises(ConfigError, match="in use"):
        Lock(tmp_path)
    lock.close()
