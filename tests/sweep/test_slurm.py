"""The workers of a sweep under Slurm, in a real one that the tests start on this machine.

The scripts that start and stop it are in ../shared/slurm beside the checkout, or in the folder
that SLURM_SCRIPTS names. They need root, and Debian's packages slurm-wlm and munge.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs import LONG, ROOT
from trainer.messages import UserError
from trainer.sweep.slurm import SlurmSettings, batch_script, read_slurm_settings, submit

SCRIPTS = Path(os.environ.get("SLURM_SCRIPTS") or ROOT.parent / "shared" / "slurm")
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue", "scancel", "runuser")
PORT = 16817  # of slurmctld, in the script

# A worker of a sweep whose result is the size of a file. It has the exit codes of a real one.
WORKER = """
import json, os, signal, sys, time
folder, goal = sys.argv[1], int(sys.argv[2])

def note(name, **values):
    with open(os.path.join(folder, name), "a") as file:
        print(json.dumps(values), file=file)

def stop(number, frame):
    signal.signal(number, lambda *_: os._exit(1))  # a real worker stops at once, and saves nothing
    time.sleep(0.5)
    note("saved", task=task, signal=signal.Signals(number).name)
    sys.exit(75)

names = ("SLURM_ARRAY_TASK_ID", "SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "PYTHONPATH", "MODULE")
task, job, array, path, module = map(os.environ.get, names)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
note("started", task=task, job=job, array=array, path=path, module=module, here=os.getcwd())
while not os.path.exists(work := os.path.join(folder, "work")) or os.path.getsize(work) < goal:
    with open(work, "a") as file:
        file.write("x")
    time.sleep(0.05)
print("complete")
"""


def rows(folder: Path, name: str) -> list[dict]:
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ask(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(condition: Callable[[], object], logs: Path) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{log.name}:\n{log.read_text()}" for log in logs.glob("*.log")]
            pytest.fail("\n".join([ask("squeue", "--states=all", "--array"), *texts]))
        time.sleep(0.1)


def states(job: str) -> list[str]:
    return ask("squeue", "-h", "--states=all", "--array", f"--jobs={job}", "--format=%T").split()


def ended(job: str) -> bool:
    return not {"PENDING", "RUNNING", "COMPLETING"} & set(states(job))


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    return file


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """Starts a Slurm with the partitions low, whose jobs are preempted, and high."""
    if not SCRIPTS.is_dir():
        pytest.skip(f"The scripts that start a Slurm are not in {SCRIPTS}.")
    if os.geteuid() != 0:
        pytest.skip("Only root can start a Slurm.")
    missing = [name for name in COMMANDS if not shutil.which(name)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: it is in Debian's slurm-wlm or munge.")
    with contextlib.ExitStack() as stack:
        # The ports are the same for all sessions of this machine.
        lock = stack.enter_context(open(Path(tempfile.gettempdir(), "lockstep-test-slurm"), "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", PORT)):
            pytest.skip(f"A process listens on port {PORT} already, maybe another Slurm.")
        # Not tmp_path, which may be too long for the path of a socket.
        folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in list(os.environ):
            if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_")):
                patch.delenv(name)
        patch.setenv("SLURM_DIR", str(folder))
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("GRACE", "1")
        stack.callback(_stop, folder, _munge())
        with open(folder / "start.log", "w") as log:  # the daemons would keep a pipe open
            subprocess.run(["bash", SCRIPTS / "start_slurm.sh"], stdout=log, stderr=log)
        if "idle" not in (folder / "start.log").read_text():
            pytest.fail((folder / "start.log").read_text())
        yield


def _munge() -> int | None:
    """Returns the process of the munged that runs, or None."""
    with contextlib.suppress(OSError, ValueError):
        process = int(Path("/run/munge/munged.pid").read_text())
        os.kill(process, 0)
        return process
    return None


def _stop(folder: Path, munge_before: int | None) -> None:
    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LONG
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.1)

    def idle() -> bool:
        subprocess.run(["scancel", "--user=root"], capture_output=True)  # also what was requeued
        return not subprocess.run(["squeue", "-h"], capture_output=True).stdout

    wait(idle)
    processes = [int(file.read_text()) for file in (folder / "run").glob("*.pid")]
    subprocess.run(["bash", SCRIPTS / "stop_slurm.sh"])
    if (munge := _munge()) and munge != munge_before:
        os.kill(munge, signal.SIGTERM)
    wait(lambda: not any(map(_alive, processes)))


def _alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(process, 0)
        return True
    return False


GOAL = 10**6  # more than the stub workers reach


def finish(folder: Path) -> None:
    """Completes the work of stub workers, also of those that are not started yet."""
    os.truncate(folder / "work", GOAL)


def start(
    folder: Path, stub: Path, goal: int = GOAL, workers: int = 1, **given: str
) -> tuple[str, list[str]]:
    """Submits stub workers, by default in the partition low."""
    folder.mkdir(exist_ok=True)
    settings = read_slurm_settings(None, [f"{key}={value}" for key, value in given.items()])
    return submit(folder, [str(stub), str(folder), str(goal)], workers, settings)


def test_the_workers_of_an_array_run_in_the_folder_and_with_the_paths_of_the_submitter(
    slurm: None, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "it's here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", "a b:$c")
    monkeypatch.setenv("SBATCH_PARTITION", "high")  # the setting overrides it
    folder = here / "a \"sweep\" of 100% #1 and 'more'"
    setup = "cd /; set -e; PATH=; MODULE='x y'\nexport MODULE"
    job, lines = start(folder, stub, 40, workers=2, partition="low", setup=setup)
    logs = folder / "slurm"
    wait_for(lambda: ended(job), logs)
    assert states(job) == ["COMPLETED"] * 2
    assert (logs / f"{job}_0.log").read_text() == "complete\n"
    assert ask("squeue", "-h", "--states=all", f"--jobs={job}_0", "--format=%P") == "low"
    started = rows(folder, "started")
    assert sorted(row["task"] for row in started) == ["0", "1"]
    for row in started:
        assert (row["here"], row["path"], row["module"]) == (str(here), "a b:$c", "x y")
    assert lines[0] == f"Submitted 2 workers as Slurm job {job}."
    assert lines[-1] == f"Cancel: scancel {job}"
    # The script alone says the same, for those who submit it again by hand.
    again = ask("sbatch", "--parsable", logs / "workers.sh")
    wait_for(lambda: ended(again), logs)
    assert [(logs / f"{again}_{task}.log").read_text() for task in (0, 1)] == ["complete\n"] * 2


def test_a_preempted_worker_saves_and_is_started_again(
    slurm: None, stub: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "sweep"
    job, _ = start(folder, stub, exclusive="true", cpus_per_task="1")
    wait_for(lambda: rows(folder, "started"), folder / "slurm")
    ask("sbatch", "--partition=high", "--output=none", "--chdir", tmp_path, "--wrap=sleep 1")
    wait_for(lambda: rows(folder, "saved"), folder / "slurm")
    finish(folder)
    wait_for(lambda: ended(job), folder / "slurm")
    assert states(job) == ["COMPLETED"]
    assert rows(folder, "saved") == [{"task": "0", "signal": "SIGTERM"}]
    assert len(rows(folder, "started")) == 2
    log = (folder / "slurm" / f"{job}_0.log").read_text()
    assert "PREEMPTION" in log and log.endswith("complete\n")


def test_a_warning_before_the_time_limit_requeues_this_task_alone(
    slurm: None, stub: Path, tmp_path: Path
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("Two workers at the same time need two cores.")
    # The last task is the hard one: it has the number of the whole array as its own.
    folder = tmp_path / "sweep"
    job, _ = start(folder, stub, workers=2)
    last: list[str] = []

    def last_has_started() -> bool:
        last[:] = [row["task"] for row in rows(folder, "started") if row["job"] == row["array"]]
        return bool(last)

    wait_for(last_has_started, folder / "slurm")
    ask("scancel", "--batch", "--signal=USR1", f"{job}_{last[0]}")  # as --signal=B:USR1@... does
    wait_for(lambda: rows(folder, "saved"), folder / "slurm")
    finish(folder)
    wait_for(lambda: ended(job), folder / "slurm")
    assert states(job) == ["COMPLETED"] * 2
    assert rows(folder, "saved") == [{"task": last[0], "signal": "SIGUSR1"}]
    tasks = [row["task"] for row in rows(folder, "started")]
    assert sorted(tasks) == sorted(["0", "1", last[0]])


def test_a_mistake_is_not_started_again_and_neither_is_a_worker_that_was_cancelled(
    slurm: None, stub: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cancelled"
    cancelled, _ = start(folder, stub)
    wait_for(lambda: rows(folder, "started"), folder / "slurm")
    ask("scancel", cancelled)
    wait_for(lambda: rows(folder, "saved"), folder / "slurm")
    (tmp_path / "wrong").mkdir()
    words = ["-c", "print('error: no such sweep'); exit(2)"]
    wrong, _ = submit(tmp_path / "wrong", words, 1, SlurmSettings({}))
    wait_for(lambda: ended(cancelled) and ended(wrong), tmp_path / "wrong" / "slurm")
    time.sleep(1)  # a worker that is requeued is pending again by then
    assert (states(cancelled), states(wrong)) == (["CANCELLED"], ["FAILED"])
    log = (tmp_path / "wrong" / "slurm" / f"{wrong}_0.log").read_text()
    assert log == "error: no such sweep\n"


def test_what_sbatch_refuses_is_passed_on(slurm: None, stub: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^sbatch refused the workers: .*invalid partition"):
        start(tmp_path / "sweep", stub, partition="gpu")
    with pytest.raises(UserError, match=r"unrecognized option '--partion=low'"):
        start(tmp_path / "sweep", stub, partion="low")


# Without Slurm.


def test_the_script_has_the_settings_and_its_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "executable", "/usr/bin/my python")
    settings = SlurmSettings(
        {"partition": "gpu", "gres": "gpu:1", "exclusive": "", "comment": 'a "b" \\'},
        setup="module load cuda",
        warning=300,
    )
    text = batch_script(Path("/sweeps/50% #1"), ["-m", "trainer", "it's"], 4, settings)
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")] == [
        '#SBATCH --job-name="sweep-50% #1"',
        "#SBATCH --partition=gpu",
        "#SBATCH --gres=gpu:1",
        "#SBATCH --exclusive",
        '#SBATCH --comment="a \\"b\\" \\\\"',
        "#SBATCH --array=0-3",
        '#SBATCH --output="/sweeps/50%% #1/slurm/%A_%a.log"',
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@300",
    ]
    assert (
        "(\nunset PYTHONPATH\nmodule load cuda\n\n"
        f"""cd -- {tmp_path} && exec '/usr/bin/my python' -m trainer 'it'"'"'s'\n) </dev/null &\n"""
    ) in text


def test_without_sbatch_the_message_says_where_to_start_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch cannot be started: No such file.*a login node"):
        submit(tmp_path, ["-c", ""], 1, SlurmSettings({}))


@pytest.mark.parametrize(
    ("code", "said", "message"),
    [
        (1, "sbatch: error: Invalid account", "sbatch refused the workers: Invalid account"),
        (0, "", "sbatch refused the workers: Usage: sbatch"),
    ],
)
def test_a_job_number_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str, message: str
) -> None:
    _fake_sbatch(tmp_path, monkeypatch, f"echo Usage: sbatch; echo '{said}' >&2; exit {code}")
    with pytest.raises(UserError) as error:
        submit(tmp_path, ["-c", ""], 1, SlurmSettings({}))
    assert str(error.value) == message


def test_a_warning_of_sbatch_and_another_cluster_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_sbatch(tmp_path, monkeypatch, "echo '12;far'; echo 'sbatch: no account given' >&2")
    assert submit(tmp_path, ["-c", ""], 1, SlurmSettings({})) == (
        "12",
        [
            "no account given",
            "Submitted 1 worker as Slurm job 12.",
            f"Logs: {tmp_path}/slurm/12_*.log",
            f"Status: python -m trainer sweep status {tmp_path}",
            "Cancel: scancel --clusters=far 12",
        ],
    )


def _fake_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{lines}\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


def test_a_setup_that_bash_cannot_parse_is_refused_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_sbatch(tmp_path, monkeypatch, f"touch {tmp_path}/submitted; echo 1")
    monkeypatch.setenv("LC_ALL", "xx_XX")  # of which bash warns
    submit(tmp_path, ["-c", ""], 1, SlurmSettings({}, "module load cuda"))
    (tmp_path / "submitted").unlink()
    # The last four would take the command of the worker as a part of theirs.
    parts = ("if true; then\n", ") && (", "echo a |", "true ||", "cat <<END\nthere is none")
    for setup in parts:
        with pytest.raises(UserError, match="is not valid bash:\n.*bash: line"):
            submit(tmp_path, ["-c", ""], 1, SlurmSettings({}, setup))
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("end", ["", "\\", "\\\n", "\\\\", " # a comment \\", " #", "&"])
def test_the_end_of_a_setup_does_not_take_the_command_of_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    words = ["-c", "import os; print(os.getcwd(), os.environ['A'])"]
    settings = SlurmSettings({}, f"cd /\nexport A=1\necho done{end}")
    file = tmp_path / "workers.sh"
    file.write_text(batch_script(tmp_path, words, 1, settings))
    done = subprocess.run(["bash", file], capture_output=True, text=True)
    said = sorted(done.stdout.splitlines())
    assert said == sorted([f"{here} 1", "done\\" if end == "\\\\" else "done"]), done.stderr


@pytest.mark.parametrize("name", ["a\\b", "a\nb"])
def test_a_folder_that_slurm_cannot_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="rename the folder"):
        submit(tmp_path / name, ["-c", ""], 1, SlurmSettings({}))


def test_the_launcher_does_not_import_jax() -> None:
    code = "import sys, trainer.sweep.slurm, trainer.cli.sweeps; exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
