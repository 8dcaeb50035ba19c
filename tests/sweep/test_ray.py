"""The workers of a sweep on a Ray cluster: three nodes, which the tests start on this machine."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ray_cluster, runs
from tests.runs import SWEPT
from tests.sweep.test_sweep import assert_equal, folders, replaced, sweep, write_sweep
from trainer.__main__ import main
from trainer.sweep import ray as launcher
from trainer.sweep.presence import announced
from trainer.sweep.ray import RaySettings, read_ray_settings

STEPS = 60

# A worker of a sweep. Each start takes the next of the exit codes that it is given.
WORKER = """
import json, os, pathlib, signal, sys, time
folder, *codes = sys.argv[1:-1]  # the last is --watched
number = 0
while True:
    try:
        os.mkdir(os.path.join(folder, f"start{number}"))
        break
    except FileExistsError:
        number += 1
names = ("CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION", "PYTHONPATH", "MINE")
facts = {name: os.environ.get(name) for name in names}
facts |= {"here": os.getcwd(), "pid": os.getpid(), "ray": "ray" in sys.modules}
pathlib.Path(folder, f"facts{number}").write_text(json.dumps(facts))

def save(*_):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    time.sleep(4)  # longer than Ray's own handler of SIGTERM lets a process live
    pathlib.Path(folder, f"saved{number}").touch()
    os._exit(75)

signal.signal(signal.SIGTERM, save)
if codes[number] == "wait":
    if os.read(0, 1) == b"":
        save()
print(f"error: this is start {number}", file=sys.stderr)
sys.exit(int(codes[number]))
"""

# A process that starts stub workers: FOLDER ADDRESS SETTINGS WORKERS CODES
DRIVER = """
import json, pathlib, sys
from trainer.sweep import ray
from trainer.train.signals import StopSignals
folder, stub, workers, settings, *codes = sys.argv[1:]
with StopSignals(until_exit=True) as signals:
    given = ray.read_ray_settings(None, json.loads(settings))
    words = [stub, folder, *codes]
    log = lambda line: print(line, flush=True)
    sys.exit(ray.run_tasks(words, pathlib.Path(folder), int(workers), given, signals, log))
"""


class Nodes:
    """Three nodes of Ray, and the environment of the processes that use them."""

    def __init__(self, folder: Path):
        more = {**ray_cluster.ENVIRONMENT, "RAY_TMPDIR": str(folder)}
        self.environment = runs.environment(**more)
        for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
            self.environment.pop(name, None)
        self._log = open(folder / "log", "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_cluster", "3"],
            cwd=runs.ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.address = self._answer()["address"]

    def _answer(self) -> dict:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], runs.LONG)
        line = self.process.stdout.readline() if ready else ""
        self._log.seek(0)
        assert line, f"The cluster does not answer: {self._log.read()[-3000:]}"
        return json.loads(line)

    def ask(self, command: str) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        tree = ray_cluster.descendants(self.process.pid)
        try:
            self.process.communicate(timeout=runs.LONG)  # closes its standard input
        except subprocess.TimeoutExpired:
            pass
        for process in tree:
            if process in ray_cluster.descendants(process) and _alive(process):
                os.kill(process, signal.SIGKILL)
        self._log.close()


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def nodes(ray: None) -> Iterator[Nodes]:
    # Not tmp_path, which may be too long for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        found = Nodes(Path(folder))
        try:
            yield found
        finally:
            found.end()


def start(
    nodes: Nodes, folder: Path, codes: str, workers: int = 1, settings: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    """Starts stub workers with these exit codes; "wait" waits for a signal."""
    folder.mkdir()
    (folder / "stub.py").write_text(WORKER)
    given = json.dumps([f"address={nodes.address}", *settings])
    words = [str(folder), str(folder / "stub.py"), str(workers), given, *codes.split()]
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *words],
        cwd=folder,
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        said, _ = process.communicate(timeout=runs.LONG)
    finally:
        process.kill()
    return process.returncode, said


def facts(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("facts*"))]


# A sweep.


@pytest.mark.usefixtures("lab")
def test_a_sweep_that_loses_a_node_in_mid_wave_has_the_bits_of_an_undisturbed_one(
    nodes: Nodes, tmp_path: Path
) -> None:
    base = SWEPT
    given = {"steps": STEPS, "steps_per_call": 1, "save_every": 10, "eval_every": 20}
    for name, value in given.items():
        base = replaced(name, str(value), base)
    made = [
        write_sweep(
            tmp_path / str(seconds),
            replaced("loss", f"!unruly.slow_loss {{seconds: {seconds}}}", base),
            more="checkpoints: final",
            trials=6,
        )
        for seconds in (0.0, 0.1)
    ]
    undisturbed, workdir = tmp_path / "undisturbed", tmp_path / "sweep"
    assert sweep(made[0], undisturbed) == 0
    file = made[1]
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={workdir}", "--launcher=ray"]
    command = [sys.executable, "-m", "trainer", "sweep", *words, "--workers=3"]
    command += ["--ray", f"address={nodes.address}"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=nodes.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    killed: list[str] = []  # the wave of the worker whose node was killed

    def kill() -> bool:
        for record in announced(workdir):
            wave = workdir / "waves" / (record["wave"] or "none")
            if list(wave.glob("checkpoints/[1-9]*/manifest.json")):
                tree = nodes.ask(f"kill {record['pid']}")["killed"]  # none on the head
                if tree:
                    assert record["pid"] in tree and wave.is_dir()
                    killed.append(wave.name)
                    return True
        return process.poll() is not None

    runs.wait_for(kill)
    code, said = ended(process)
    assert code == 0 and killed, said
    assert "The node of worker" in said and "has died; it is started again." in said
    assert said.count("is started again") == 1
    assert nodes.ask("add")
    names = [trial.relative_to(undisturbed) for trial in folders(undisturbed)]
    assert len(names) == 8 and names == [x.relative_to(workdir) for x in folders(workdir)]
    for name in names:
        assert_equal(workdir / name, undisturbed / name, STEPS)
    assert main(["sweep", "check", str(workdir)]) == 0
    logs = "".join(log.read_text() for log in (workdir / "ray").glob("*.log"))
    assert logs.count(f"({killed[0]})") == 2, "the wave was begun, and went on elsewhere"


# Workers whose exit codes are known.


def test_a_worker_that_has_saved_is_started_again_and_one_that_failed_is_not(
    nodes: Nodes, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    code, said = ended(start(nodes, folder, "75 1 2 0", workers=3))
    assert code == 2, said
    assert len(facts(folder)) == 4
    assert said.count("has saved and stopped; it is started again.") == 1
    for number in (1, 2):
        assert f": error: this is start {number}\n" in said
        assert f"ended with exit code {number}. Log: {folder}/ray/" in said
    logs = "".join(file.read_text() for file in folder.glob("ray/*_*.log"))
    assert logs.count("error: this is start") == 4
    assert not any(each["ray"] for each in facts(folder))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_lets_its_workers_save(
    nodes: Nodes, tmp_path: Path, number: int
) -> None:
    folder = tmp_path / "sweep"
    process = start(nodes, folder, "wait wait wait wait", workers=4)
    runs.wait_for(lambda: len(facts(folder)) == 3 or process.poll() is not None)
    process.send_signal(number)
    code, said = ended(process)
    assert code == 75, said
    assert len(list(folder.glob("saved*"))) == 3
    assert len(facts(folder)) == 3  # the fourth had no room, and was not started
    assert "The cluster has room for 3 of them now" in said and "again." not in said
    assert not any(_alive(each["pid"]) for each in facts(folder))


def test_the_workers_of_a_command_that_is_killed_save_and_end(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start(nodes, folder, "wait wait", workers=2)
    runs.wait_for(lambda: len(facts(folder)) == 2 or process.poll() is not None)
    process.kill()
    ended(process)
    runs.wait_for(lambda: len(list(folder.glob("saved*"))) == 2)
    runs.wait_for(lambda: not any(_alive(each["pid"]) for each in facts(folder)))


def test_a_worker_has_the_devices_that_were_asked_for(nodes: Nodes, tmp_path: Path) -> None:
    cases = {
        "whole": (("num_gpus=2", "env.MINE=a b"), "0,1", None, "a b"),
        "half": (("num_gpus=0.5", "num_cpus=0.5"), "0", "0.450", None),
        "all": ((), None, None, None),
    }
    for name, (settings, devices, share, mine) in cases.items():
        folder = tmp_path / name
        code, said = ended(start(nodes, folder, "0", settings=settings))
        assert code == 0, said
        (found,) = facts(folder)
        assert found["CUDA_VISIBLE_DEVICES"] == devices
        assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == share
        assert (found["MINE"], found["here"]) == (mine, str(folder))
        assert found["PYTHONPATH"] == nodes.environment["PYTHONPATH"]


def test_what_no_node_has_is_said(nodes: Nodes, tmp_path: Path) -> None:
    process = start(nodes, tmp_path / "sweep", "0", settings=("resources.fast=1",))
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], runs.LONG)
    line = process.stdout.readline() if ready else ""
    assert "1 worker with num_cpus=1, fast=1 each, by Ray." in line
    assert "has room for none of them now; the others wait" in line
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 75, said


# Mistakes.


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    file = tmp_path / "ray" / "1.log"
    code, _, said = launcher._work(["-c", "1"], str(tmp_path), None, {}, str(file))
    assert code == 2 and "does not see the folder" in said[0] and str(tmp_path) in said[0]
    file.touch()
    code, _, said = launcher._work(["-c", "1"], str(tmp_path / "gone"), None, {}, str(file))
    assert code == 2 and "gone, in which the sweep was started, is not a folder on" in said[0]
    assert launcher._work(["-c", "1"], str(tmp_path), None, {}, str(file))[0] == 0


def test_an_address_at_which_nothing_or_something_else_answers_is_a_mistake(
    nodes: Nodes, tmp_path: Path
) -> None:
    code = "from trainer.sweep import ray; ray._CONNECT = 6.0\n"
    code += "from trainer.messages import UserError\nimport sys\n"
    code += "from trainer.train.signals import StopSignals\n"
    code += "try: ray._connect(ray.read_ray_settings(None, sys.argv[1:]), StopSignals())\n"
    code += "except UserError as error: print(error, flush=True)\n"
    with socket.create_server(("127.0.0.1", 0)) as other:
        silent = other.getsockname()[1]
        said = _said(code, nodes, tmp_path, f"address=127.0.0.1:{silent}")
        assert f"Ray at 127.0.0.1:{silent} " in said
    said = _said(code, nodes, tmp_path, f"address=127.0.0.1:{silent}")
    assert said.startswith(f"No Ray answers at 127.0.0.1:{silent}: Connection refused. The command")
    assert "--ray address=HOST:PORT" in said and "without --launcher=ray" in said


def test_a_command_that_waits_for_ray_can_be_stopped(nodes: Nodes, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(runs.LONG)
        settings = (f"address=127.0.0.1:{silent.getsockname()[1]}",)
        process = start(nodes, folder, "0", settings=settings)
        connection, _ = silent.accept()
        connection.close()
        process.send_signal(signal.SIGTERM)
        code, said = ended(process)
    assert code == 75 and not facts(folder), said


def _said(code: str, nodes: Nodes, folder: Path, setting: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, setting],
        cwd=folder,
        env=nodes.environment,
        capture_output=True,
        text=True,
        timeout=runs.LONG,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Without Ray.


def test_without_ray_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lab: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file, workdir = write_sweep(tmp_path), tmp_path / "sweep"
    assert sweep(file, workdir, "--launcher=ray") == 2
    said = capsys.readouterr().err
    assert "needs the package ray, which is not installed" in said
    assert "pip install 'lockstep-jax[ray]'" in said and not workdir.exists()


def test_settings_of_ray_are_read_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text(
        "address: head:6379\nnum_cpus: 8\nnum_gpus: 1\nmemory: 16G\nresources.fast: 0.5\n"
        "env.JAX_PLATFORMS: cpu\n"
    )
    settings = read_ray_settings(str(file), ["num_gpus=0.25", "env.A=b=c", "memory=500MiB"])
    assert settings == RaySettings(
        "head:6379",
        {"num_cpus": 8, "num_gpus": 0.25, "memory": 500 * 2**20, "resources": {"fast": 0.5}},
        {"JAX_PLATFORMS": "cpu", "A": "b=c"},
    )
    assert read_ray_settings(None) == RaySettings("auto", {}, {})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_gpus", "--ray num_gpus: A setting is KEY=VALUE, such as num_gpus=1."),
        ("num_gpu=1", "'num_gpu' is not a setting of --launcher=ray. Did you mean 'num_gpus'?"),
        ("partition=gpu", "The settings are: address, env.NAME, memory, num_cpus, num_gpus"),
        ("num_gpus=1.5", "num_gpus must be a whole number, or a fraction below 1"),
        ("num_cpus=-1", "num_cpus must be a whole number"),
        ("num_gpus=two", "got 'two'."),
        ("memory=8 GB", "memory must be a number of bytes, or one with a unit such as 8G"),
        ("memory=0", "got '0'."),
        ("resources=fast", "resources needs a name after a dot, such as resources.fast=1."),
        ("env=A", "env needs a name after a dot, such as env.JAX_PLATFORMS=cpu."),
        ("resources.GPU=1", "resources.GPU is Ray's own resource: write num_gpus."),
        ("resources.fast=many", "resources.fast must be a whole number"),
        ("address=ray://head:10001", "is HOST:PORT, such as 10.0.0.1:6379, or auto"),
        ("address=head", "got 'head'."),
        ("address=head:65536", "got 'head:65536'."),
    ],
)
def test_a_wrong_setting_of_ray_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    with pytest.raises(ValueError) as error:
        read_ray_settings(None, [setting])
    assert message in str(error.value)


def test_a_variable_with_a_wrong_address_is_named(
    monkeypatch: pytest.MonkeyPatch, ray: None
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head")
    monkeypatch.setattr(launcher.importlib, "import_module", lambda name: None)
    with pytest.raises(
        ValueError, match="^RAY_ADDRESS=head: The address of a cluster is HOST:PORT"
    ):
        launcher._connect(RaySettings(), runs.Signals())


def test_a_mistake_in_the_file_of_settings_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text("num_gpus: 1\nresources: {fast: 1}\n")
    with pytest.raises(ValueError, match=r"ray.yaml:2: resources needs a name after a dot"):
        read_ray_settings(str(file))
    file.write_text("num_gpus: true\n")
    with pytest.raises(ValueError, match=r"ray.yaml:1: The value of num_gpus must be a string or"):
        read_ray_settings(str(file))
