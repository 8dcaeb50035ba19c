"""A console that cannot be written: the run goes on, and the exit code is the run's."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import runs
from trainer import checkpoint
from trainer.__main__ import main
from trainer.config import Call, dump, load

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="/dev/full is of Linux")
RATE = {"learning_rate": 0.1}
SPOKEN = "experiment.writers = ['console']\nexperiment.log_every = 1\n"


def start(*command: str, **more: Any) -> subprocess.Popen[str]:
    env = runs.environment(JAX_COMPILATION_CACHE_DIR="")
    return subprocess.Popen([sys.executable, *command], cwd=runs.ROOT, env=env, text=True, **more)


def exit_of(workdir: Path) -> str:
    return json.loads((workdir / "run.json").read_text())["lineage"][-1]["exit"]


@pytest.mark.long
@needs_full
@pytest.mark.parametrize("streams", [("stdout",), ("stderr",), ("stdout", "stderr")])
def test_a_console_on_a_full_disk_does_not_stop_a_run(tmp_path, streams):
    config, workdir = runs.write_config(tmp_path, SPOKEN), tmp_path / "run"
    with FULL.open("w") as full:
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        given |= {name: full for name in streams}
        run = start("-m", "trainer", *runs.options(config, workdir), **given)
        said = run.communicate(timeout=runs.LONG)
    assert run.returncode == 0, said
    assert not said[1] or "Traceback" not in said[1]
    assert (exit_of(workdir), len(runs.lines(workdir))) == ("done", 20)


@pytest.mark.long
def test_a_run_without_stdout_trains_without_a_console(tmp_path):
    config, workdir = runs.write_config(tmp_path, SPOKEN), tmp_path / "run"
    shell = 'exec "$@" >&-'
    command = [sys.executable, "-m", "trainer", *runs.options(config, workdir)]
    env = runs.environment(JAX_COMPILATION_CACHE_DIR="")
    done = subprocess.run(["sh", "-c", shell, "sh", *command], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.long
def test_a_run_piped_to_tee_saves_when_ctrl_c_ends_both(tmp_path):
    more = "experiment.steps = 100_000\nexperiment.save_every = 100_000\n"
    more += "experiment.eval_every = 100_000\n"  # as Ctrl-C in `python -m trainer ... | tee log`
    config, workdir = runs.write_config(tmp_path, SPOKEN + more), tmp_path / "run"
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = start("-m", "trainer", *runs.options(config, workdir), **pipe)
    assert run.stdout is not None
    while not run.stdout.readline().startswith("step 5/"):
        assert run.poll() is None
    run.stdout.close()
    run.send_signal(signal.SIGINT)
    assert run.wait(runs.LONG) == 75
    assert exit_of(workdir) == "stopped"
    assert [info.step for info in checkpoint.ls(workdir)][-1] == runs.lines(workdir)[-1]["step"]


@needs_full
def test_the_second_signal_ends_a_process_whose_stderr_cannot_be_written():
    code = """
        import os, signal, time
        from trainer.train.signals import StopSignals
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            while signals.received is None:
                time.sleep(0.01)
            print(signals.received, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    """
    with FULL.open("w") as full:
        run = start("-c", textwrap.dedent(code), stdout=subprocess.PIPE, stderr=full)
        said, _ = run.communicate(timeout=runs.LONG)
    assert (said, run.returncode) == ("SIGTERM\n", 128 + signal.SIGTERM)


@pytest.mark.long
@pytest.mark.parametrize("command", ["config", "explain"])
def test_a_command_ends_quietly_when_its_reader_closes_the_pipe(tmp_path, command):
    given = runs.files(runs.write_config(tmp_path))
    reading, writing = os.pipe()
    os.close(reading)  # as `| head` does when it has its lines
    pipe = {"stdout": writing, "stderr": subprocess.PIPE}
    run = start("-m", "trainer", command, *given, "--vocabulary=unruly", **pipe)
    os.close(writing)
    said = run.communicate(timeout=runs.LONG)
    assert (run.returncode, said[1]) == (0, "")


@needs_full
def test_a_command_that_cannot_print_exits_1(tmp_path):
    given = runs.files(runs.write_config(tmp_path))
    with FULL.open("w") as full:
        pipe = {"stdout": full, "stderr": subprocess.PIPE}
        run = start("-m", "trainer", "config", *given, "--vocabulary=unruly", **pipe)
        said = run.communicate(timeout=runs.LONG)
    assert run.returncode == 1
    assert said[1] == "error: the output is incomplete: No space left on device.\n"


EVIL = "\x1b]0;owned\x07\x1b[2J\r\n\x9b1A\u202e"
ESCAPED = "\\x1b]0;owned\\x07\\x1b[2J"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


def test_control_characters_in_names_are_printed_escaped(tmp_path, lab, capsys):
    """A name in a config may hold what moves the cursor or retitles the window of a terminal."""
    (tmp_path / "base.gin").write_text(runs.CONFIG)
    tree = load([tmp_path / "base.gin"], [], ["steps=2"]).root
    groups = {EVIL: Call("optim.group", {"match": ".*", "optimizer": Call("optax.adam", RATE)})}
    changes = {
        "optimizer": Call("optim.optimizer", {"groups": groups}),
        "metrics": {f"{EVIL}b": Call("metrics.accuracy")},
        "writers": ["console"],
    }
    config, workdir = tmp_path / f"c{EVIL}.yaml", tmp_path / f"run{EVIL}"
    config.write_text(dump(Call("experiment", dict(tree.kwargs) | changes)))
    options = [f"--config={config}", "--vocabulary=unruly"]
    assert ESCAPED in runs.printed(capsys, "explain", *options)
    (tmp_path / "again.yaml").write_text(printed := runs.printed(capsys, "config", *options))
    assert not CONTROLS.search(printed)
    assert load([tmp_path / "again.yaml"]).root == load([config]).root
    assert main([*options, f"--workdir={workdir}"]) == 0
    shown = capsys.readouterr()
    assert "Done: 2 steps." in shown.err and "learning_rate/" in shown.out
    plan = (workdir / "plan.txt").read_text()
    assert ESCAPED in plan and ESCAPED in shown.out and ESCAPED in shown.err
    assert main(["explain", f"--config={config}", "--set", f"{EVIL}=1"]) == 2
    assert main(["checkpoint", "check", str(workdir)]) == 0
    assert main(["checkpoint", "ls", str(tmp_path / f"gone{EVIL}")]) == 2
    assert main(["plot", str(workdir), f"--metric=eval/{EVIL}b"]) == 0
    with pytest.raises(SystemExit):
        main([f"--no_such_option={EVIL}"])
    last = capsys.readouterr()
    for text in (plan, *shown, *last):
        assert text and not CONTROLS.search(text), repr(text)
