"""Finds prepared data sets, moves them to their place, and checks a folder before TFDS reads it."""

import contextlib
import glob
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NAME = re.compile(
    r"(?P<name>[a-zA-Z]\w*)(/(?P<config>[\w+.-]+))?(:(?P<version>\d+\.\d+\.\d+))?", re.ASCII
)
_VERSION = re.compile(r"\d+\.\d+\.\d+", re.ASCII)

# TFDS imports the module of every class that these files name, so that other names could run code.
_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.\w+(\.\w+)*", re.ASCII)
_CLASS_KEYS = {
    "features.json": ("pythonClassName", "python_class_name", "type"),  # "type" until TFDS 4.3
    "dataset_info.json": ("pythonClassName", "python_class_name"),
}
_TEMPLATE_KEYS = ("filepathTemplate", "filepath_template")
_DEEPEST = 100


class Refused(ValueError):
    """A prepared data set that is not read, for the reason in the message."""


def data_root(data_dir: str | None = None) -> Path:
    """Returns the folder of data sets; None is $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data."""
    # Raises ValueError if the path begins with the home of an unknown user, or if it is relative
    # and the current folder was deleted.
    folder = data_dir or os.environ.get("LOCKSTEP_DATA_DIR") or "~/.cache/lockstep/data"
    try:
        return Path(folder).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"There is no directory {folder!r} for data sets: {error}") from error


def matching(pattern: str) -> list[Path]:
    """Returns the given path, if it exists, else those that match it as a glob, by name."""
    # The path comes first because a file name may have the characters of a glob. "~" is the home.
    given = os.path.expanduser(pattern)
    if os.path.exists(given):
        return [Path(given)]
    return [Path(match) for match in sorted(glob.glob(given, recursive=True))]


def prepare_aside(root: Path, build: Callable[[Path], Path]) -> Path:
    """Prepares a data set in a temporary folder of `root`, then moves it in one step."""
    # `build` is called with an empty folder, prepares in it, checks that what it prepared can be
    # read, and returns the data set's folder below it. Several processes may do this at once: the
    # last to come finds a data set in its place, and replaces it by an equal one. A process that is
    # killed leaves nothing in that place. Raises OSError if `root` cannot be written.
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=root) as aside:
        fresh = build(Path(aside))
        place = root / fresh.relative_to(aside)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(fresh, place)
        except OSError:  # something is there: whole, or damaged
            with contextlib.suppress(OSError):
                os.rename(place, Path(aside) / "replaced")
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(fresh, place)
    return place


def prepared_directory(name: str, root: Path) -> Path | None:
    """Returns the folder of a data set's newest prepared version; None if there is none."""
    # The name is as in TFDS: "name", "name/config", "name:1.0.0" or "name/config:1.0.0". Raises
    # ValueError if it is not of this form, or if the directory cannot be listed.
    match = _NAME.fullmatch(name)
    if match is None or match["config"] in (".", ".."):
        raise ValueError(
            f"{name!r} is not the name of a data set of TFDS, such as 'mnist', 'cifar10:3.0.2' or "
            "'name/config:1.0.0'. Name another folder in data_dir."
        )
    home = root / match["name"] / (match["config"] or "")
    try:
        versions = [entry.name for entry in home.iterdir() if _VERSION.fullmatch(entry.name)]
        wanted = [each for each in versions if match["version"] in (None, each)]
        found = [each for each in wanted if (home / each / "dataset_info.json").is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{home} cannot be listed ({error.strerror}).") from error
    # As numbers: 1.10.0 is newer than 1.9.0.
    newest = max(found, key=lambda each: [int(number) for number in each.split(".")], default=None)
    return None if newest is None else home / newest


def base_name(name: str) -> str:
    """Returns a data set's name without config and version: "cifar10" of "cifar10:3.0.2"."""
    return re.split("[:/]", name)[0]


@contextlib.contextmanager
def opened(directory: Path, hint: str = "Remove") -> Iterator[Any]:
    """Gives TFDS's builder of a prepared data set; ValueError if it, or the block, cannot read."""
    try:
        check_prepared(directory)  # before TFDS, which imports the classes that the files name
        import tensorflow_datasets

        open_directory: Any = tensorflow_datasets.builder_from_directory
        yield open_directory(directory)
    except Refused:
        raise
    except Exception as error:  # damaged files raise many types
        raise ValueError(
            f"The data set in {directory} cannot be read ({type(error).__name__}: {error}). {hint} "
            "that directory and prepare the data set again."
        ) from error


def check_prepared(directory: Path) -> None:
    """Refuses a prepared data set that could make TFDS run code or read files elsewhere."""
    # TFDS imports the modules of the classes that `features.json` and `dataset_info.json` name, and
    # opens files whose names it derives from `dataset_info.json`.
    # Raises Refused if a feature is not one of TFDS's own, a file name has a path, or an entry of
    # the folder is neither a regular file nor a folder; ValueError if one of the two files is not
    # valid JSON, or nested too deeply; OSError if something cannot be read.
    for path in directory.iterdir():
        # Opening a pipe would wait for its writer.
        if not (path.is_file() or path.is_dir()):
            raise Refused(
                f"{path} is not a regular file, so the data set in {directory} is not read."
            )
    for file, keys in _CLASS_KEYS.items():
        if not (directory / file).exists():
            continue
        content = json.loads((directory / file).read_bytes().decode())
        for key, value in _strings(content, 0):
            if key in keys and not _FEATURE.fullmatch(value):
                raise Refused(
                    f"{directory / file} names the class {value[:100]!r}, which TFDS would import. "
                    "Only TFDS's own features, tensorflow_datasets.core.features.*, are read."
                )
            if file == "dataset_info.json" and key in _TEMPLATE_KEYS:
                _check_file_name(value, directory)
        if file == "dataset_info.json" and isinstance(content, dict):
            splits = content.get("splits")
            # The name of the data set and the names of its splits begin the names of its files.
            for each in [content, *(splits if isinstance(splits, list) else [])]:
                if isinstance(each, dict) and isinstance(each.get("name"), str):
                    _check_file_name(each["name"], directory)


def _check_file_name(name: str, directory: Path) -> None:
    if "/" in name or "\\" in name or "\0" in name:
        raise Refused(
            f"{directory / 'dataset_info.json'} names the files {name[:100]!r}. Only files in its "
            "own folder are read."
        )


def _strings(tree: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yields the key and the value of every string value in nested dicts and lists."""
    if depth > _DEEPEST:
        raise ValueError(f"Lists and dicts are nested more than {_DEEPEST} deep.")
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from _strings(value, depth + 1)
        elif isinstance(value, str) and isinstance(key, str):
            yield key, value
