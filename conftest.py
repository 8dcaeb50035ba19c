"""Settings and fixtures of all tests: the CPU, a compilation cache, counts, torch, loggers, Ray.

It stands at the root, so that the doctests of trainer and optim run under the same rules.
"""

import os

from tests import compiled_programs, s3_server

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before the first import of jax
os.environ.setdefault("XLA_FLAGS", compiled_programs.xla_flags())  # read with the first program
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(compiled_programs.folder())
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# No lines of our code in the programs that are handed to XLA: the laws take 4% less time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import contextlib
import functools
import importlib.util
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

pytest_plugins = ["tests.suite"]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keeps the search for doctests from importing what stands beside the tests.

    Scripts that tests start as processes set XLA's flags at their head, for the whole process. The
    files of configs/new/ have equal names, and are of packages that a command writes.
    """
    if collection_path.name == "shipped":
        return True
    in_tests = Path(__file__).parent / "tests" in collection_path.parents
    script = collection_path.suffix == ".py" and not collection_path.name.startswith("test_")
    return True if in_tests and script else None


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shows the values of containers and partials, where pytest would only number them."""
    if isinstance(val, functools.partial):
        return getattr(val.func, "__name__", None)
    if not isinstance(val, list | tuple | dict) or " at 0x" in (text := ascii(val)):
        return None
    return text if len(text) <= 40 else f"{text[:37]}..."


def pytest_configure(config: pytest.Config) -> None:
    """Cleans the folder of compiled programs before the test processes start."""
    if not hasattr(config, "workerinput"):
        compiled_programs.clean()


# Recorded once for every program handed to XLA, also when the persistent cache answers.
_COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Callable[[], contextlib.AbstractContextManager[list[str]]]:
    """Yields a context manager that lists the programs compiled inside it, as "jit(step)".

    In `with compilations() as names:` the list has one name a compiled program, in order, and grows
    while the block runs. Operations outside jit are programs too ("jit(add)"), so compare with a
    block of the same eager work, or ask for one function: `names.count("jit(step)")`.
    """

    @contextlib.contextmanager
    def count() -> Iterator[list[str]]:
        names: list[str] = []

        def listen(event: str, duration: float, **details: str | int) -> None:
            if event == _COMPILED:
                names.append(str(details.get("fun_name", "?")))

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield names
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return count


@pytest.fixture
def strict_promotion() -> Iterator[None]:
    """Makes an implicit change of dtype an error, for tests of arithmetic that is all ours.

    It cannot hold for the whole suite: optax multiplies int32 counts with floats in its schedules
    and bias corrections, which strict promotion refuses. Flax's layers pass. Ask for it with
    `pytestmark = pytest.mark.usefixtures("strict_promotion")` at the head of a file.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def lab() -> Iterator[None]:
    """Lets configs and imports find the packages of tests/lab, in processes of the tests too."""
    with pytest.MonkeyPatch.context() as patch:
        folder = Path(__file__).parent / "tests" / "lab"
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), os.pathsep)
        yield


@pytest.fixture
def copied(computed: Path, tmp_path: Path) -> Path:
    """A copy, to be changed, of the folder that the fixture `computed` of a file has."""
    return Path(shutil.copytree(computed, tmp_path / "sweep"))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Returns a function that mounts an empty disk with options of tmpfs: "size=64k", "ro"."""
    disk = tmp_path / "disk"

    def mount(options: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("A file system can be mounted by root only.")
        return disk

    yield mount
    subprocess.run(["umount", "-l", str(disk)], capture_output=True)


@pytest.fixture
def shut(tmp_path: Path, mounted: Callable[[str], Path]) -> Path:
    """A folder in which nothing can be written."""
    if os.geteuid() == 0:  # root may write wherever the file system lets it
        return mounted("ro")
    folder = tmp_path / "shut"
    folder.mkdir(0o500)
    return folder


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    """A server of S3 with a bucket "lab", whose URL this process and its children have."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with s3_server.serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def torch() -> Any:
    """The torch module, for tests that take a known answer from it; they are skipped without it."""
    return pytest.importorskip("torch", reason="torch is not installed: `make torch` adds it.")


@pytest.fixture(scope="session")
def ray() -> None:
    """Skips tests of sweeps on a Ray cluster without Ray, which only their processes import."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: `make ray` adds it.")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an MLflow store without runs, whose tables take ten seconds to create."""
    for package in ("wandb", "mlflow", "sqlalchemy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: `make loggers` adds it.")
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in MLflow's own code
        importlib.import_module("mlflow").MlflowClient(f"sqlite:///{file}")
    return file


@pytest.fixture
def loggers(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets W&B and MLflow write into files of the test; it is skipped without their packages."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that ask for the fixtures `torch`, `loggers` and `ray` by these names."""
    for item in items:
        for name in ("torch", "loggers", "ray"):
            if isinstance(item, pytest.Function) and name in item.fixturenames:
                item.add_marker(name)
