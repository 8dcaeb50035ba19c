"""The wheel, the lock and the command line, as someone meets them who has only just arrived."""

import email
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import runs
from tests.runs import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PYTHONS = ("3.11", "3.12", "3.13")


def _run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{command}\n{run.stdout}\n{run.stderr}"
    return run


def _started(python: Path, way: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "trainer"] if way == "python -m trainer" else [python.with_name(way)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env = kept | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run([*command, *options], cwd=cwd, env=env, capture_output=True, text=True)


WAYS = ["python -m trainer", "lockstep"]
CONFIG = ROOT / "configs" / "mlp_lbfgs.yaml"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build from, so that no old build directory can lend it files."""
    source = tmp_path_factory.mktemp("source") / "lockstep"
    source.mkdir()
    for package in ("lockstep", "trainer", "optim"):
        copytree(ROOT / package, source / package, ignore=ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    for name in ("__init__.py", "test_it.py"):  # what must not be packed, though it is a package
        (source / "tests" / name).touch()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    return source


def build(source: Path, target: Path) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", target]
    _run(sys.executable, "-m", "pip", "wheel", "-qq", *options, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the wheel installed, in an environment and a folder of its own."""
    folder = tmp_path_factory.mktemp("elsewhere")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    options = ["--no-deps", "--no-index", wheel]
    _run(sys.executable, "-m", "pip", "--python", python, "install", "-qq", *options, cwd=folder)
    # Lends the dependencies of this environment. A .pth file found this way is not obeyed, so an
    # editable install of the checkout stays out of sight.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.mark.long
def test_the_wheel_holds_the_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.partition("/")[0] for name in names}
    version = PYPROJECT["project"]["version"]
    assert tops == {"lockstep", "trainer", "optim", f"lockstep_jax-{version}.dist-info"}
    sources = {
        str(path.relative_to(ROOT))
        for package in ("lockstep", "trainer", "optim")
        for path in (ROOT / package).rglob("*.py")
    }
    templates = {name for name in names if name.startswith("trainer/shipped/new/")}
    assert sources == {name for name in names - templates if name.endswith(".py")}
    others = {name for name in names - sources if ".dist-info/" not in name}
    scripts = ("page.js", "figures.js", "filter.js", "selection.js", "trials.js")
    page = {f"trainer/report/html/{name}" for name in ("page.css", "page.html", *scripts)}
    tex = {f"trainer/report/formats/{name}.tex" for name in ("figure", "report", "table")}
    # Type checkers read our annotations.
    typed = {f"{package}/py.typed" for package in ("lockstep", "trainer", "optim")}
    shipped = {
        f"trainer/shipped/{file.relative_to(ROOT / 'configs')}"
        for file in (ROOT / "configs").rglob("*.*")
    }
    alone = {"trainer/cli/comparison.yaml", "trainer/cli/options.txt", "trainer/sweep/slurm.sh"}
    alone |= {"trainer/engine/gpu.txtpb"}
    data = {"trainer/data/shakespeare.txt.bz2", "optim/families.yaml", "optim/published.yaml"}
    assert others == typed | page | tex | alone | shipped | data


@pytest.mark.long
def test_the_source_distribution_holds_no_tests_and_builds_the_same_wheel(
    source: Path, wheel: Path, tmp_path: Path
) -> None:
    code = "import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])"
    _run(sys.executable, "-c", code, tmp_path, cwd=source)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / packed.name.removesuffix(".tar.gz")
    assert not (unpacked / "tests").exists()
    ours, theirs = (zipfile.ZipFile(each) for each in (wheel, build(unpacked, tmp_path)))
    contents = [{name: each.read(name) for name in each.namelist()} for each in (ours, theirs)]
    assert contents[0] == contents[1]


@pytest.mark.long
def test_the_wheel_names_its_license_and_holds_it(wheel: Path) -> None:
    version = PYPROJECT["project"]["version"]
    with zipfile.ZipFile(wheel) as packed:
        folder = f"lockstep_jax-{version}.dist-info"
        metadata = email.message_from_bytes(packed.read(f"{folder}/METADATA"))
        text = packed.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert text == (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004\n" in text
    assert "\n   Copyright 2026 The Lockstep authors\n" in text


@pytest.mark.long
def test_the_version_is_that_of_pyproject(elsewhere: Path, tmp_path: Path) -> None:
    version = PYPROJECT["project"]["version"]
    for way in WAYS:
        done = _started(elsewhere, way, "--version", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (0, f"lockstep {version}\n")
    code = "import optim, trainer; print(optim.__version__, trainer.__version__)"
    assert _run(elsewhere, "-c", code, cwd=tmp_path).stdout.split() == [version, version]


@pytest.mark.long
def test_the_wheel_prints_help_in_another_folder(elsewhere: Path) -> None:
    cwd = elsewhere.parent
    where = "import optim, trainer; print(trainer.__file__, optim.__file__)"
    for file in _run(elsewhere, "-c", where, cwd=cwd).stdout.split():
        assert Path(file).is_relative_to(elsewhere.parent.parent)
    asked = _run(elsewhere, "-m", "trainer", "--help", cwd=cwd)
    assert "explain" in asked.stdout
    assert asked.stderr == ""
    assert _run(elsewhere.with_name("lockstep"), "--help", cwd=cwd).stdout == asked.stdout


@pytest.mark.long
def test_the_wheel_trains_from_another_folder(elsewhere: Path, tmp_path: Path) -> None:
    config = ROOT / "configs" / "muon_vit.gin"
    workdir = tmp_path / "run"
    options = [f"--gin_file={config}", f"--workdir={workdir}", "--set", "steps=2"]
    _run(elsewhere, "-m", "trainer", *options, cwd=tmp_path)
    assert (workdir / "metrics.jsonl").read_text().endswith("}\n")


@pytest.mark.long
@pytest.mark.parametrize("shadow", ["optim/__init__.py", "optim.py"])
def test_a_folder_or_file_that_shadows_trainer_or_optim_is_named(
    shadow: str, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).touch()
    (found,) = tmp_path.iterdir()
    done = _started(elsewhere, WAYS[0], "explain", f"--config={CONFIG}", cwd=tmp_path)
    what = "folder" if found.is_dir() else "file"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: The {what} {str(found)!r} shadows Lockstep's own package 'optim': Python finds it "
        "first. Rename it, or run the command in another folder.\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("shadow", ["optim/__init__.py", "optim.py", "trainer/__init__.py"])
def test_help_and_version_answer_beside_a_package_of_the_users(
    shadow: str, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text("raise SystemExit('this is not Lockstep')\n")
    version = f"lockstep {PYPROJECT['project']['version']}\n"
    ours = sys.executable, elsewhere  # an editable install, and a wheel
    commands = [[python, "-m", "trainer"] for python in ours]
    if shadow.startswith("trainer"):  # `python -m` is then the user's own
        commands = [[python.with_name("lockstep")] for python in map(Path, ours)]
    for command in commands:
        for words in (["--version"], ["sweep", "--version"], ["checkpoint", "export", "--version"]):
            assert _run(*command, *words, cwd=tmp_path).stdout == version
        for words, said in ((["-h"], "explain"), (["sweep", "show", "--help"], "TRIAL")):
            assert said in _run(*command, *words, cwd=tmp_path).stdout


@pytest.mark.parametrize("inside", ["", "cli/__init__.py"])
def test_help_answers_beside_a_package_trainer_that_has_modules_of_our_names(
    inside: str, tmp_path: Path
) -> None:
    for name in ("__init__.py", inside or "x.py"):
        (tmp_path / "trainer" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "trainer" / name).write_text("x = 1\n")
    command = Path(sys.executable).with_name("lockstep")
    done = _run(command, "sweep", "--help", cwd=tmp_path)
    assert "--dry_run" in done.stdout and done.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize("editable", [True, False])
def test_shipped_configs_are_named_from_every_folder(
    editable: bool, elsewhere: Path, tmp_path: Path
) -> None:
    python = sys.executable if editable else elsewhere
    shipped = _run(
        python, "-m", "trainer", "config", "--config=lockstep:muon_vit.gin", cwd=tmp_path
    )
    path = ROOT / "configs" / "muon_vit.gin"
    assert (
        shipped.stdout
        == _run(python, "-m", "trainer", "config", f"--config={path}", cwd=tmp_path).stdout
    )
    (tmp_path / "mine.yaml").write_text("include: lockstep:muon_vit.yaml\nsteps: 7\n")
    mine = _run(python, "-m", "trainer", "config", "--config=mine.yaml", cwd=tmp_path).stdout
    assert "steps: 7\n" in mine and "!optim.muon" in mine
    (tmp_path / "sweep.yaml").write_text(
        "base: lockstep:muon_vit.yaml\nspace: {steps: !space.values {values: [1, 2]}}\n"
        "goal: {select_on: test}\nfinal: null\n"
    )
    checked = _run(python, "-m", "trainer", "sweep", "--config=sweep.yaml", "--check", cwd=tmp_path)
    assert "2 runs" in checked.stdout
    command = [python, "-m", "trainer", "config", "--config=lockstep:muon_vti.gin"]
    wrong = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert (
        "No shipped config is called 'muon_vti.gin'. Did you mean 'muon_vit.gin'?" in wrong.stderr
    )


@pytest.mark.long
@pytest.mark.parametrize("editable", [True, False])
def test_the_library_is_imported_from_another_folder(
    editable: bool, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "optim").mkdir()  # empty, so that it does not hide the package
    python = sys.executable if editable else elsewhere
    config = f"ls.load_config({str(CONFIG)!r})"
    code = f"import lockstep as ls; print({config}['model'].name, ls.optim.muon.__name__)"
    done = _run(python, "-c", code, cwd=tmp_path)
    assert done.stdout == "models.mlp muon\n"
    (tmp_path / "lockstep").mkdir()  # as a clone of this repository beside the user's script
    assert _run(python, "-c", code, cwd=tmp_path).stdout == done.stdout
    (tmp_path / "optim.py").write_text("")
    (tmp_path / "optim").rmdir()
    failed = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert failed.stderr.splitlines()[-1].startswith("ImportError: Lockstep needs its own package")


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_folder_called_trainer_or_optim_without_python_files_is_ignored(
    way: str, elsewhere: Path, tmp_path: Path
) -> None:
    for name in ("optim", "trainer"):
        (tmp_path / name).mkdir()
    done = _started(elsewhere, way, "config", f"--config={CONFIG}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_the_command_lockstep_works_beside_a_package_of_the_users_called_trainer(
    elsewhere: Path, tmp_path: Path
) -> None:
    """`python -m trainer` is then the user's own."""
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").touch()
    done = _started(elsewhere, "lockstep", "config", f"--config={CONFIG}", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    done = _started(elsewhere, "python -m trainer", "config", f"--config={CONFIG}", cwd=tmp_path)
    assert done.returncode and "'trainer' is a package and cannot be directly exec" in done.stderr


def test_in_an_editable_install_a_package_of_the_users_called_trainer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python then runs our `trainer/__main__.py` as a part of the user's package."""
    file = tmp_path / "trainer" / "__init__.py"
    file.parent.mkdir()
    theirs = types.ModuleType("trainer")
    theirs.__spec__ = importlib.util.spec_from_file_location(
        "trainer", file, submodule_search_locations=[str(file.parent)]
    )
    monkeypatch.setitem(sys.modules, "trainer", theirs)
    said = runs.refused(capsys, "config")
    assert said.startswith(f"error: The folder {str(file.parent)!r} shadows Lockstep's own package")


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_package_in_the_current_folder_is_a_vocabulary(
    way: str, elsewhere: Path, tmp_path: Path
) -> None:
    (tmp_path / "lab_of_tests.py").write_text("def net(width: int): ...\n")
    options = [f"--config={CONFIG}", "--set", "model=!lab_of_tests.net {width: 3}"]
    options += ["--vocabulary=lab_of_tests"]
    done = _started(elsewhere, way, "config", *options, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model: !lab_of_tests.net\n  width: 3\n" in done.stdout


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trainer", "--help"]
    imported = set(re.findall(r"\| +(\w+)", _run(*command, cwd=ROOT).stderr))
    assert "trainer" in imported
    heavy = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "clu", "tensorflow_datasets"}
    assert imported & heavy == set()


def test_reading_a_config_does_not_import_jax() -> None:
    source = "import sys, trainer.config; print({'jax', 'numpy'} & set(sys.modules))"
    assert _run(sys.executable, "-c", source, cwd=ROOT).stdout == "set()\n"


def _pins(*locks: str) -> Iterator[tuple[str, str, Marker | None]]:
    for lock in locks:
        for line in (ROOT / lock).read_text().splitlines():
            if not line.startswith("#"):
                pin = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; (.+))?", line)
                assert pin, f"{lock}: {line!r} is not `name==version`, with or without a marker."
                yield pin[1], pin[2], Marker(pin[3]) if pin[3] else None


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_pins_the_packages_of_pyproject(python: str) -> None:
    wanted = {
        "requirements.lock": [
            *PYPROJECT["project"]["dependencies"],
            *PYPROJECT["build-system"]["requires"],
        ],
        "requirements-test.lock": PYPROJECT["project"]["optional-dependencies"]["test"],
        "requirements-docs.lock": PYPROJECT["project"]["optional-dependencies"]["docs"],
    }
    for lock, lines in wanted.items():
        pinned: dict[str, str] = {}
        for name, version, marker in _pins(lock):
            if marker is None or marker.evaluate({"python_version": python}):
                assert canonicalize_name(name) not in pinned, f"{lock} pins {name} twice."
                pinned[canonicalize_name(name)] = version
        for requirement in map(Requirement, lines):
            version = pinned.get(canonicalize_name(requirement.name))
            assert version, f"{lock} lacks {requirement.name}: run `make lock`."
            assert requirement.specifier.contains(version), f"{requirement}: run `make lock`."


def test_a_run_needs_neither_tensorflow_nor_torch() -> None:
    names = {canonicalize_name(name) for name, _, _ in _pins("requirements.lock")}
    assert names & {"tensorflow", "tensorflow-cpu", "tensorboard", "torch"} == set()
