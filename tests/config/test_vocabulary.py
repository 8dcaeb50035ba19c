"""What a config may name computes: it opens no socket, and touches no file but a data set's."""

import importlib
import inspect
import json
import os
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import audit, photos_builder, runs
from trainer import data
from trainer.config import ConfigError
from trainer.config.vocabulary import SWEEP, Vocabulary
from trainer.data.shards import write_shards

OURS = {root: home for root, home in SWEEP.modules.items() if root != "optax"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Calls everything in a process of its own, beside prepared data sets."""
    home = tmp_path_factory.mktemp("home")
    data.digits(data_dir=str(home / "data"))
    digits = home / "data" / "sklearn_digits" / "1.0.0"
    (digits / "arrays.npz").unlink()
    shutil.copytree(digits, home / "data" / "fashion_mnist" / "3.0.1")
    (home / "data" / "shards").mkdir()
    for split in ("train", "test"):
        dtype = np.dtype("<u2")
        write_shards(home / "data" / "shards", split, [np.arange(1000) % 300], dtype, 600)
    photos = photos_builder.TinyPhotos(data_dir=home / "data", file_format="array_record")
    photos.download_and_prepare(download_dir=tmp_path_factory.mktemp("downloads"))
    shutil.copytree(home / "data", home / "cache")
    (home / "tmp").mkdir()
    changed = {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    changed["JAX_COMPILATION_CACHE_DIR"] = ""  # whose files are not those of a function called
    folders = str(home / "data"), str(home / "cache")
    return home, json.loads(runs.python("-m", "tests.audit", *folders, **changed))


def offered(root: str) -> set[str]:
    """Returns the functions and classes in `__all__` of one of our packages."""
    module = importlib.import_module(OURS[root])
    values = {name: getattr(module, name) for name in module.__all__}
    return {
        f"{root}.{name}"
        for name, value in values.items()
        if inspect.isclass(value) or inspect.isfunction(value)
    }


@pytest.mark.long
def test_every_name_of_the_vocabulary_is_called(report: tuple[Path, dict[str, Any]]):
    _, calls = report
    ours = {name for root in OURS for name in offered(root)}
    assert {name for name in calls if name.split(".")[0] in OURS} == ours
    failed = {name: calls[name]["why"] for name in ours if not calls[name]["called"]}
    assert failed == {}
    theirs = [call["called"] for name, call in calls.items() if name.startswith("optax.")]
    assert len(theirs) > 300 and sum(theirs) > 0.85 * len(theirs)
    for name in set(audit.ARGUMENTS) & set(calls):
        assert calls[name]["called"], calls[name]["why"]


@pytest.mark.long
def test_only_data_sets_touch_files(report: tuple[Path, dict[str, Any]]):
    _, calls = report
    acts = {name: call["acts"] for name, call in calls.items() if not name.startswith("data.")}
    # scipy keeps the numbers of Sobol's sequence in a file of its own, which is read once.
    (event, file, mode), *more = acts.pop("method.coordinate_descent")
    assert (event, mode, more) == ("open", "r", []) and "scipy" in Path(file).parts
    assert {name: act for name, act in acts.items() if act} == {}


@pytest.mark.long
def test_a_data_set_touches_only_its_folder(report: tuple[Path, dict[str, Any]]):
    home, calls = report
    installed = [Path(sys.prefix).resolve(), runs.ROOT / "trainer"]
    seen = set()
    for name in offered("data"):
        for event, *arguments in calls[name]["acts"]:
            if event == "mmap.__new__":  # of a file that was opened
                continue
            reads = event in ("os.listdir", "os.scandir") or event == "open" and arguments[1] == "r"
            paths = arguments if event == "os.rename" else arguments[:1]
            for path in (Path(os.path.abspath(path)) for path in paths):
                inside = next(
                    (f for f in (home / "data", home / "cache") if f in [path, *path.parents]), 0
                )
                seen.add((name, getattr(inside, "name", ""), reads))
                in_packages = reads and any(each in path.resolve().parents for each in installed)
                assert inside or in_packages or home / "tmp" in path.parents, (name, event, path)
    for name in ("data.digits", "data.fashion_mnist", "data.text"):
        assert {(name, "data", False), (name, "cache", False), (name, "data", True)} <= seen
    assert not [path for path in (home / "tmp").rglob("*") if path.is_file()]  # TFDS's own
    prepared = {"sklearn_digits", "fashion_mnist", "tiny_photos", "shards", "text"}
    assert {path.name for path in (home / "data").iterdir()} == {*prepared, "empty"}
    assert {path.name for path in (home / "cache").iterdir()} == {*prepared, "call.yaml"}
    assert {path.name for path in home.iterdir()} == {"data", "cache", "tmp"}


def test_the_audit_detects_files_sockets_and_folders(tmp_path: Path):
    code = "import json, socket; from tests.audit import Watch; watch = Watch(); watch.acts = []\n"
    code += (
        f"open({str(tmp_path / 'x')!r}, 'w').close(); socket.socket(); import os; os.mkdir('y')\n"
    )
    code += "import tarfile; acts, watch.acts = watch.acts, None; print(json.dumps(acts))"
    acts = json.loads(runs.python("-c", code, cwd=tmp_path))
    assert [act[0] for act in acts] == ["open", "socket.__new__", "os.mkdir"]


def inner_names() -> list[str]:
    """Lists the public functions and classes in modules of our packages, as a config would."""
    names = []
    for root, home in OURS.items():
        package = importlib.import_module(home)
        for found in pkgutil.walk_packages(getattr(package, "__path__", []), f"{home}."):
            if found.name.rpartition(".")[2].startswith("_"):
                continue
            module = importlib.import_module(found.name)
            names += [
                f"{root}{found.name.removeprefix(home)}.{name}"
                for name, value in vars(module).items()
                if not name.startswith("_") and (inspect.isclass(value) or inspect.isroutine(value))
            ]
    return names


def test_a_config_can_name_only_the_public_functions():
    vocabulary = Vocabulary(language=SWEEP)
    names = [*inner_names(), "losses.jax.devices", "losses.Mapping", "losses.Loss", "metrics.Any"]
    some = {"data.prepare.main", "data.tfds_arrays.read_splits", "models.layers.Linear"}
    assert some <= set(names)
    assert len(names) > 100
    for name in names:
        with pytest.raises(ConfigError, match="has no module|is not among|comes from|neither"):
            vocabulary.function(name)
    for root in OURS:
        for name in offered(root):
            assert callable(vocabulary.function(name).call)


def test_explain_does_not_run_functions_outside_of_the_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    from trainer.__main__ import main

    text = f"include '{runs.ROOT / 'configs' / 'muon_vit.gin'}'\n"
    text += "experiment.data = @data.prepare.main()\n"
    text += f"data.prepare.main.arguments = ['mnist', '--data_dir', '{tmp_path / 'made'}']\n"
    (tmp_path / "run.gin").write_text(text)
    assert main(["explain", f"--gin_file={tmp_path / 'run.gin'}"]) == 2
    assert "trainer.data has no module 'prepare'" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_packages_of_the_user_may_be_named_in_full(lab: None):
    vocabulary = Vocabulary(["my_lab"])
    for name in ("my_lab.nets.Spiralnet", "my_lab.optimizers.sawtooth", "my_lab.losses.focal"):
        assert callable(vocabulary.function(name).call)
    with pytest.raises(ConfigError, match="'trainer' is taken: trainer.* means this program"):
        Vocabulary(["trainer.data.prepare"])
