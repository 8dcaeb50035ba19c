"""The wheel, the lock and the command line, as someone meets them who has only just arrived."""

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no old build directory can lend it files."""
    source = tmp_path_factory.mktemp("source") / "lockstep"
    source.mkdir()
    for room in ("trainer", "optim"):
        copytree(ROOT / room, source / room, ignore=ignore_patterns("__pycache__"))
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()  # what must not be packed, though it is a package
    (source / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    target = tmp_path_factory.mktemp("dist")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", target]
    _run(sys.executable, "-m", "pip", "wheel", "-qq", *options, source, cwd=target)
    (built,) = target.glob("*.whl")
    return built


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


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    version = PYPROJECT["project"]["version"]
    assert tops == {"trainer", "optim", f"lockstep-{version}.dist-info"}
    sources = {
        str(path.relative_to(ROOT))
        for room in ("trainer", "optim")
        for path in (ROOT / room).rglob("*.py")
    }
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_wheel_answers_for_help_from_another_folder(elsewhere: Path) -> None:
    cwd = elsewhere.parent
    where = "import optim, trainer; print(trainer.__file__, optim.__file__)"
    for file in _run(elsewhere, "-c", where, cwd=cwd).stdout.split():
        assert Path(file).is_relative_to(elsewhere.parent.parent)
    asked = _run(elsewhere, "-m", "trainer", "--help", cwd=cwd)
    assert "explain" in asked.stdout
    assert asked.stderr == ""
    assert _run(elsewhere.with_name("lockstep"), "--help", cwd=cwd).stdout == asked.stdout


def test_the_wheel_trains_from_another_folder(elsewhere: Path, tmp_path: Path) -> None:
    config = ROOT / "configs" / "muon_vit.gin"
    workdir = tmp_path / "run"
    options = [f"--gin_file={config}", f"--workdir={workdir}", "--set", "steps=2"]
    _run(elsewhere, "-m", "trainer", *options, cwd=tmp_path)
    assert (workdir / "metrics.jsonl").read_text().endswith("}\n")


def test_help_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "trainer", "--help"]
    imported = set(re.findall(r"\| +(\w+)", _run(*command, cwd=ROOT).stderr))
    assert "trainer" in imported
    heavy = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "clu", "tensorflow_datasets"}
    assert imported & heavy == set()


def test_reading_a_config_imports_no_jax() -> None:
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
def test_the_lock_pins_what_pyproject_asks_for(python: str) -> None:
    wanted = {
        "requirements.lock": [
            *PYPROJECT["project"]["dependencies"],
            *PYPROJECT["build-system"]["requires"],
        ],
        "requirements-test.lock": PYPROJECT["project"]["optional-dependencies"]["test"],
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


def test_a_run_needs_no_tensorflow_and_no_torch() -> None:
    names = {canonicalize_name(name) for name, _, _ in _pins("requirements.lock")}
    assert names & {"tensorflow", "tensorflow-cpu", "tensorboard", "torch"} == set()
