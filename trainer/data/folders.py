"""Where prepared data sets lie, and what is checked of a folder before TFDS reads it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAME = re.compile(
    r"(?P<name>[a-zA-Z]\w*)(/(?P<config>[\w+.-]+))?(:(?P<version>\d+\.\d+\.\d+))?", re.ASCII
)
_VERSION = re.compile(r"\d+\.\d+\.\d+", re.ASCII)

# TFDS imports the module of every class that these files name.
_FEATURE = re.compile(r"tensorflow_datasets\.core\.features\.\w+(\.\w+)*", re.ASCII)
_CLASS_KEYS = {
    "features.json": ("pythonClassName", "python_class_name", "type"),  # "type" until TFDS 4.3
    "dataset_info.json": ("pythonClassName", "python_class_name"),
}
_TEMPLATE_KEYS = ("filepathTemplate", "filepath_template")
_DEEPEST = 100


class Refused(ValueError):
    """Says why a folder is not read, although TFDS would read it."""


def data_root(data_dir: str | None = None) -> Path:
    """Returns the directory where data sets are kept.

    Args:
        data_dir: the directory; if None, $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data.

    Raises:
        ValueError: it begins with the home of a user that there is not, or is relative to a
            current folder that was deleted.
    """
    given = data_dir or os.environ.get("LOCKSTEP_DATA_DIR") or "~/.cache/lockstep/data"
    try:
        return Path(given).expanduser().absolute()
    except (RuntimeError, OSError) as error:
        raise ValueError(f"There is no directory {given!r} for data sets: {error}") from error


def prepared_directory(name: str, root: Path) -> Path | None:
    """Returns the directory of a prepared data set, of the newest version; None if there is none.

    Args:
        name: as in TFDS: "name", "name/config", "name:1.0.0" or "name/config:1.0.0".
        root: the directory where data sets are kept.

    Raises:
        ValueError: the name is not of this form, or the directory cannot be listed.
    """
    parts = _NAME.fullmatch(name)
    if parts is None or parts["config"] in (".", ".."):
        raise ValueError(
            f"{name!r} is not the name of a data set of TFDS, such as 'mnist', 'cifar10:3.0.2' or "
            "'name/config:1.0.0'. Name another folder in data_dir."
        )
    home = root / parts["name"] / (parts["config"] or "")
    try:
        versions = [entry.name for entry in home.iterdir() if _VERSION.fullmatch(entry.name)]
        wanted = [each for each in versions if parts["version"] in (None, each)]
        found = [each for each in wanted if (home / each / "dataset_info.json").is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{home} cannot be listed ({error.strerror}).") from error
    newest = max(found, key=lambda each: [int(part) for part in each.split(".")], default=None)
    return None if newest is None else home / newest


def check_folder(directory: Path) -> None:
    """Refuses a prepared data set that could make TFDS run code or read files elsewhere.

    TFDS imports the modules of the classes that `features.json` and `dataset_info.json` name, and
    opens files whose names are put together from `dataset_info.json`.

    Args:
        directory: of a version of the data set, where dataset_info.json is.

    Raises:
        Refused: a feature that is not one of TFDS's own, a file name that leads elsewhere, or
            something in the directory that is not a file.
        ValueError: one of the two files is not JSON.
        OSError: the directory or one of the two files cannot be read.
    """
    for path in directory.iterdir():
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
            named = [content, *(splits if isinstance(splits, list) else [])]
            for each in named:
                if isinstance(each, dict) and isinstance(each.get("name"), str):
                    _check_file_name(each["name"], directory)


def _check_file_name(part: str, directory: Path) -> None:
    if "/" in part or "\\" in part or "\0" in part:
        raise Refused(
            f"{directory / 'dataset_info.json'} names the files {part[:100]!r}. Only files in its "
            "own folder are read."
        )


def _strings(tree: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yields every string that stands in a dict, with its key."""
    if depth > _DEEPEST:
        raise ValueError(f"Lists and dicts are nested more than {_DEEPEST} deep.")
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from _strings(value, depth + 1)
        elif isinstance(value, str) and isinstance(key, str):
            yield key, value
