"""No file that the program reads can make it execute something, or write where it should not.

tests/house/test_house.py reads the same off the syntax trees: no pickle, eval, exec or unsafe YAML
loader is anywhere in trainer and optim. Here malicious files meet the program that runs.
"""

import ast
import io
import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lockstep as ls
from tests import runs, short
from trainer import checkpoint, config, writers
from trainer.__main__ import main
from trainer.checkpoint import CheckpointError, Checkpoints, integrity
from trainer.cli import options, sweeps
from trainer.sweep.plan_file import digest_of
from trainer.workdir import Provenance, Workdir

pytestmark = pytest.mark.usefixtures("lab")


@pytest.fixture(scope="module")
def run(lab: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.stopped(tmp_path_factory.mktemp("run"), 4)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_the_test_pickle_does_execute_code_when_loaded(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


# Configs.

GIN = [
    "import os\n",
    "import unruly_bomb\n",
    "from os import system\n",
    "experiment.model = @os.system()\nos.system.command = 'touch {harm}'\n",
    "experiment.model = @os.popen()\nos.popen.cmd = 'touch {harm}'\n",
    "experiment.model = @builtins.eval()\nbuiltins.eval.source = 'open({harm!r}, \"w\")'\n",
    "experiment.model = @subprocess.run()\nsubprocess.run.args = ['touch', '{harm}']\n",
    "experiment.model = @pathlib.Path.touch()\npathlib.Path.touch.self = '{harm}'\n",
    "experiment.model = @models.model.os.system()\n",
    "experiment.model = @models.__loader__.load_module()\n",
    "experiment.steps = __import__('os').system('touch {harm}')\n",
    "experiment.steps = (lambda: open('{harm}', 'w'))()\n",
    "include '/dev/stdin'\n",
]
YAML = [
    "experiment: !!python/object/apply:os.system ['touch {harm}']\n",
    "experiment: !!python/object/new:os.system ['touch {harm}']\n",
    "experiment: !!python/name:os.system\n",
    "!!python/module:unruly_bomb\n",
    "experiment: !os.system {{command: 'touch {harm}'}}\n",
    "experiment: !builtins.exec {{source: \"open('{harm}', 'w')\"}}\n",
]


@pytest.mark.parametrize(
    ("name", "text"), [("a.gin", text) for text in GIN] + [("a.yaml", text) for text in YAML]
)
def test_reading_a_config_executes_no_code(tmp_path, monkeypatch, capsys, name, text):
    harm = tmp_path / "harm"
    (tmp_path / "unruly_bomb.py").write_text(f"open({str(harm)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / name
    file.write_text(text.format(harm=harm))
    base = tmp_path / "base.gin"
    base.write_text(runs.CONFIG)
    for command in ("train", "explain", "config"):
        given = [f"--gin_file={base}", f"--gin_file={file}", "--vocabulary=unruly"]
        given += [f"--workdir={tmp_path / 'run'}"] if command == "train" else []
        code = main([command, *given])
        # `config` prints a tree and calls nothing, so that a name may pass that nobody looks up.
        assert code == 2 or command == "config"
        assert not harm.exists() and "unruly_bomb" not in sys.modules
        assert "Traceback" not in capsys.readouterr().err


def test_a_file_cannot_add_packages_to_the_vocabulary(tmp_path):
    file = tmp_path / "a.gin"
    file.write_text("experiment.model = @unruly.points()\n")
    assert main(["explain", f"--gin_file={file}"]) == 2


@pytest.mark.long
def test_a_sweep_from_elsewhere_imports_no_package_that_the_command_does_not_name(
    tmp_path, monkeypatch, capsys
):
    harm, sweep, file = tmp_path / "harm", tmp_path / "sweep", tmp_path / "sweep.yaml"
    (tmp_path / "unruly_bomb.py").write_text(f"__all__ = []\nopen({str(harm)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), os.pathsep)
    (tmp_path / "base.gin").write_text(runs.CONFIG)
    file.write_text("base: base.gin\nfinal: null\ngoal: {metric: loss, select_on: test}\n")
    begin = ["sweep", f"--config={file}", "--vocabulary=unruly", f"--workdir={sweep}"]
    assert main([*begin, "--plan_only"]) == 0
    plan = sweep / "plan.json"
    content = json.loads(plan.read_text())
    (revision,) = content["revisions"]
    revision["vocabulary"].append("unruly_bomb")
    revision["digest"] = digest_of(revision)
    text = json.dumps(content)
    plan.write_text(text)
    assert "unruly_bomb" in text
    file.write_text(file.read_text() + "seeds: 2\n")
    extend = ["sweep", "extend", str(sweep), f"--config={file}", "--vocabulary=unruly"]
    work = ["sweep", "work", str(sweep), "--vocabulary=unruly"]
    for words in (extend, [*extend, "--dry_run"], work):
        said = runs.refused(capsys, *words)
        assert f"error: {plan} names unruly_bomb" in said and "--vocabulary=unruly_bomb" in said
    for words in (["sweep", "status"], ["sweep", "show"], ["report"], ["plot"]):
        main([*words, str(sweep), *["base/0"] * (words[-1] == "show")])
    file.write_text(file.read_text().replace("seeds: 2\n", ""))
    assert "--vocabulary=unruly_bomb" in runs.refused(capsys, *begin)  # in a process of its own
    assert not harm.exists() and "unruly_bomb" not in sys.modules
    assert plan.read_text() == text
    assert main([*work, "--vocabulary=unruly_bomb"]) == 0 and harm.exists()


# What lies in the current folder.


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with files that have the names of installed packages, and with a user's package."""
    for name in ("yaml", "numpy", "rich", "jax", "optim", "json"):
        (tmp_path / f"{name}.py").write_text(f"open('ran_{name}', 'w').close()\nraise SystemExit")
    (tmp_path / "of_here.py").write_text("def net(width: int): ...\n")
    (tmp_path / "run.gin").write_text(runs.CONFIG)
    (tmp_path / "sweep.yaml").write_text(
        "base: run.gin\nspace: {optimizer.b1: !space.values {values: [0.8, 0.9]}}\nfinal: null\n"
        "goal: {metric: loss, select_on: test}\n"
    )
    return tmp_path


def lockstep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as its script does, whose folder is the first of Python's path."""
    (folder / "bin").mkdir(exist_ok=True)
    script = folder / "bin" / "lockstep"
    script.write_text("import sys\nfrom trainer.__main__ import script\nsys.exit(script())\n")
    command, env = [sys.executable, str(script), *words], runs.environment()
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


LOCKSTEP = [
    ["config", "--config=run.gin", "--set=model=!of_here.net {width: 3}", "--vocabulary=unruly"],
    ["explain", "--config=run.gin", "--vocabulary=unruly"],
    ["sweep", "--config=sweep.yaml", "--vocabulary=unruly", "--workdir=sweep", "--workers=2"],
    ["verify", "--config=run.gin", "--vocabulary=unruly", "--steps=2"],
]


@short.parametrize("words", LOCKSTEP)
def test_the_command_executes_no_file_of_the_current_folder(beside: Path, words: list[str]):
    for more in ([], ["--vocabulary=of_here"]):
        done = lockstep(beside, *words, *more)
        assert done.returncode == (2 if words[0] == "config" and not more else 0), done.stderr
        assert not list(beside.glob("ran_*"))
        shutil.rmtree(beside / "sweep", ignore_errors=True)
    assert words[0] != "config" or "model: !of_here.net\n  width: 3\n" in done.stdout


def test_workers_on_other_machines_are_started_so_too(monkeypatch: pytest.MonkeyPatch):
    begin = ["sweep", "--config=sweep.yaml", "--vocabulary=of_here"]
    arguments = options.parser().parse_args(begin)
    for safe in ("", "1"):
        monkeypatch.setenv("PYTHONSAFEPATH", safe)
        words = sweeps._worker_words(Path("sweep"), arguments)
        assert words[words[0] == "-P" :][:3] == ["-m", "trainer", "sweep"]
        assert ("-P" in words) == bool(safe) and "--vocabulary=of_here" in words


@pytest.mark.long
def test_processes_of_the_library_search_the_current_folder_only_for_a_vocabulary(
    beside: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(beside)
    for path in ["", str(beside)]:  # of a notebook, and of one that was told where it stands
        monkeypatch.syspath_prepend(path)
        edits = {"model": ls.call.of_here.net(width=3), "data": ls.call.data.digits(batch_size=8)}
        config = ls.load_config("run.gin", set=edits)
        with pytest.raises(ls.UserError, match="There is no function 'of_here.net'"):
            ls.explain(config, devices=2)
        with pytest.raises(ls.UserError, match="model is None"):
            ls.explain(config, devices=2, vocabulary=["of_here"])
        assert not list(beside.glob("ran_*"))


# Which commands call the writers that a config names.


@pytest.mark.long
def test_reading_a_run_or_sweep_calls_no_writer_of_its_config(tmp_path, monkeypatch, capsys):
    (tmp_path / "base.gin").write_text(runs.CONFIG.replace("= []", "= ['tensorboard']"))
    file, sweep = tmp_path / "sweep.yaml", tmp_path / "sweep"
    file.write_text(
        "base: base.gin\nspace: {optimizer.b1: !space.values {values: [0.8, 0.9]}}\n"
        "final: null\ngoal: {metric: loss, select_on: test}\n"
    )
    words = [f"--config={file}", "--vocabulary=unruly", f"--workdir={sweep}"]
    assert main(["sweep", *words]) == 0
    trials = sorted(sweep.glob("trials/*/*/*"))
    assert len(trials) == 2 and all([*each.glob("events.out.*")] for each in trials)
    before = sorted(tmp_path.rglob("events.out.*"))
    monkeypatch.setattr(writers, "create", None)
    config = f"--config={trials[0] / 'config.yaml'}"
    kept = ["--steps=2", f"--workdir={tmp_path / 'verified'}"]
    for command in (
        ["verify", config, "--vocabulary=unruly", *kept],
        ["explain", config, "--vocabulary=unruly"],
        ["report", str(sweep), f"--output={tmp_path / 'report'}", "--formats=markdown"],
        ["report", *map(str, trials), f"--output={tmp_path / 'runs'}", "--formats=markdown"],
        ["compare", *map(str, trials), "--vocabulary=unruly"],
        ["plot", str(sweep)],
        ["sweep", "check", str(sweep)],
        ["sweep", "show", str(sweep), "base/0"],
        ["sweep", "status", str(sweep)],
    ):
        assert main(command) == 0, capsys.readouterr()
    assert sorted(tmp_path.rglob("events.out.*")) == before
    assert (tmp_path / "verified" / "whole" / "metrics.jsonl").exists()


# What lies in a workdir.


def copy(run: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", str(run), str(target)], check=True)
    return target


@short.parametrize("name", ["config.yaml", "run.json", "metrics.jsonl", "nonfinite.json"])
def test_a_pickle_in_place_of_a_file_is_not_loaded(run, tmp_path, capsys, name):
    workdir = copy(run, tmp_path / "run")
    (workdir / name).write_bytes(pickle.dumps(Bomb(tmp_path / "harm")))
    code = runs.train(run.parent / "run.gin", workdir, "--until=5")
    main(["replay", str(workdir), "--vocabulary=unruly", "--step=1"])
    main(["plot", str(workdir)])
    assert not (tmp_path / "harm").exists()
    assert code == (2 if name in ("config.yaml", "run.json") else 75), capsys.readouterr().err


@pytest.mark.parametrize("kind", ["object array", "pickle"])
def test_a_pickle_in_a_checkpoint_is_not_loaded(run, tmp_path, kind):
    buffer = io.BytesIO()
    if kind == "pickle":
        pickle.dump(Bomb(tmp_path / "harm"), buffer)
    else:
        array = np.empty(1, object)
        array[0] = Bomb(tmp_path / "harm")
        np.save(buffer, array, allow_pickle=True)
    workdir = copy(run, tmp_path / "run")
    for file in (workdir / "checkpoints").rglob("*"):
        if file.is_file():
            file.write_bytes(buffer.getvalue())
    assert main(["checkpoint", "check", str(workdir)]) == 1
    assert main(["checkpoint", "ls", str(workdir)]) == 1
    with pytest.raises(CheckpointError):
        checkpoint.load_params(workdir)
    assert runs.train(run.parent / "run.gin", workdir) == 1
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["../../../harm", "/harm", "params/../../harm", ""])
def test_a_manifest_cannot_name_files_outside_of_its_folder(run, tmp_path, name):
    """An attacker can seal what he wrote: the names themselves must lead nowhere."""
    workdir = copy(run, tmp_path / "run")
    step = workdir / "checkpoints" / "4"
    (tmp_path / "harm").write_bytes(b"kept")
    manifest = step / integrity.MANIFEST
    inner = json.loads(manifest.read_text())["manifest"]
    inner["leaves"][name] = next(iter(inner["leaves"].values()))
    manifest.write_text(integrity.seal(inner))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert any(checkpoint.check_leaves(workdir).values())
    with pytest.raises(CheckpointError):
        Checkpoints(workdir / "checkpoints", read_only=True).restore({}, 4)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_symbolic_link_in_place_of_a_file_is_not_written_through(run, tmp_path):
    workdir = copy(run, tmp_path / "run")
    outside = tmp_path / "outside"
    (workdir / "metrics.jsonl").rename(outside)
    (workdir / "run.json").unlink()
    (workdir / "run.json").symlink_to(outside)
    content = outside.read_bytes()
    runs.train(run.parent / "run.gin", workdir, "--until=5")
    assert outside.read_bytes() == content


@pytest.mark.parametrize("name", ["../harm", "/harm", "a/../../harm", "..", ""])
def test_a_name_cannot_lead_out_of_a_workdir(tmp_path, name):
    folder = Workdir(tmp_path / "run", config.Call("experiment", {}), Provenance({}))
    with pytest.raises(ValueError, match="not the name of a file"):
        folder.write(name, "harm")
    folder.close("done")


def test_lines_of_metrics_that_nest_too_deeply_are_omitted(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 2}\n' + "[" * 100_000 + '\n{"step": 2, "a": 3}\n')
    assert [row["step"] for row in writers.read_metrics(file)] == [1, 2]


# Permissions.


def test_only_the_owner_can_access_the_folders_of_a_run(run):
    for folder in (run, run / "checkpoints", *(run / "checkpoints").glob("[0-9]*")):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder


def test_the_cache_of_compiled_programs_is_private(tmp_path):
    code = "import jax; from trainer.train import runtime; runtime.keep_compiled_programs();"
    code += "print(jax.config.jax_compilation_cache_dir)"
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(runs.ROOT)}

    def said() -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        ).stdout.strip()

    folder = tmp_path / "lockstep" / "compiled"
    assert said() == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)  # what others may have put there is not run
    assert said() == "None"


def test_only_the_vocabulary_imports_modules_by_computed_names():
    dynamic = set()
    for path in [*(runs.ROOT / "trainer").rglob("*.py"), *(runs.ROOT / "optim").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in {"import_module", "find_spec", "run_module", "run_path"}:
                if not isinstance(node.args[0], ast.Constant):
                    dynamic.add(str(path.relative_to(runs.ROOT)))
    # Those beside the vocabulary import by names that stand in Python code, not in a file.
    writers = {f"trainer/writers/{name}.py" for name in ("__init__", "tensorboard")}
    by_code = {"trainer/config/__init__.py", *writers}
    assert dynamic <= {"trainer/config/vocabulary.py"} | by_code
