"""Finds and reads the files of a config."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainer.config.tree import ConfigError, Source
from trainer.config.wording import listing, nearest

MAX_BYTES = 256 * 1024
EMPTY = "is empty: a config names a model, data, an optimizer and more"
_GIN = (".gin",)
_YAML = (".yaml", ".yml")


class Places:
    """The folders where the files of a config are looked for.

    Args:
        search_paths: folders, given by the user.

    Attributes:
        folders: the folders of the files that the command names, and the search paths.
    """

    def __init__(self, search_paths: Sequence[str]):
        for folder in search_paths:
            if not os.path.isdir(folder):
                source = Source(f"--gin_search_paths={folder}")
                raise ConfigError("This is not a folder: name existing ones.", source)
        self._search_paths = list(search_paths)
        self.folders = [os.path.realpath(folder) for folder in search_paths]

    def of_command(self, file: str) -> str:
        """Returns where a file of the command line is: as it is given, or in a search path."""
        found = file
        if not os.path.lexists(file) and not os.path.isabs(file):
            found = self._only([os.path.join(each, file) for each in self._search_paths], file)
        self.trust(os.path.dirname(found))
        return found

    def of_include(self, file: str, beside: str, named: Source) -> str:
        """Returns where an included file is.

        Args:
            file: its name, as the including file gives it.
            beside: the folder of the including file; "" is the current one.
            named: where it is named.

        Raises:
            ConfigError: different files of this name are in two of the places.
        """
        first = os.path.join(beside, file)
        if os.path.isabs(file):
            return first
        places = [first, *(os.path.join(each, file) for each in ["", *self._search_paths])]
        return self._only(places, first, named)

    def trust(self, folder: str) -> None:
        """Lets messages quote the files below a folder."""
        self.folders.append(os.path.realpath(folder or "."))

    def quotes(self, file: str) -> bool:
        """Says whether messages may quote a file: it is below a folder that the command names."""
        real = os.path.realpath(file)
        return any(os.path.commonpath([real, folder]) == folder for folder in self.folders)

    def searched(self) -> str:
        """Says in a sentence where else an included file was looked for."""
        if not self._search_paths:
            return (
                "The current folder has no such file either. Name further folders with"
                " --gin_search_paths."
            )
        shown = listing(self._search_paths)
        return f"The current folder and the search paths ({shown}) have no such file either."

    def _only(self, paths: Sequence[str], otherwise: str, named: Source | None = None) -> str:
        found = [path for path in paths if "\0" not in path and os.path.exists(path)]
        for other in found[1:]:
            if not _same(found[0], other):
                raise ConfigError(
                    f"Two different files go by this name: {found[0]} and {other}. Rename one, or"
                    " include it by its absolute path.",
                    named or Source(otherwise),
                )
        return found[0] if found else otherwise


def _same(one: str, other: str) -> bool:
    try:
        if os.path.samefile(one, other):
            return True
        if not (os.path.isfile(one) and os.path.isfile(other)):  # a pipe would be waited for
            return False
        return _read(one) == _read(other)
    except OSError:
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(MAX_BYTES + 1)


def suffix_kind(path: str, source: Source) -> str:
    """Returns "gin" or "yaml", by the name of a file; raises ConfigError for any other."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _GIN:
        return "gin"
    if suffix in _YAML:
        return "yaml"
    raise ConfigError(
        f"The name {os.path.basename(path)!r} does not say what it is: a config ends in .gin,"
        " .yaml or .yml.",
        source,
    )


def read_text(path: str, named: Source | None, searched: str = "") -> tuple[str, str]:
    """Returns the text of a file and the SHA-256 of its bytes; raises ConfigError.

    Args:
        path: the file.
        named: where a file includes it; None for a file of the command line.
        searched: where else it was looked for, a sentence.
    """
    source = named or Source(path)
    which = f"The included file {path}" if named else "The file"
    try:
        file = Path(path)
        if not file.exists():
            told = [f"{which} does not exist.", _hint(file, named), searched]
            raise ConfigError(" ".join(filter(None, told)), source)
        if not file.is_file():
            kind = "a directory" if file.is_dir() else "no regular file"
            raise ConfigError(f"{which} is {kind}: name a .gin or .yaml file.", source)
        data = _read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{which} cannot be read: {reason}.", source) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{which} is larger than {MAX_BYTES // 1024} KiB: no config is.", source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        at = named or Source(path, line)
        raise ConfigError(f"{which} is no UTF-8 text: is it a binary file?", at) from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    check_text(text, source)
    if not text.strip():
        raise ConfigError(f"{which} {EMPTY}.", source)
    return text, hashlib.sha256(data).hexdigest()


def check_text(text: str, source: Source) -> None:
    """Raises ConfigError for a text that no config holds."""
    match = re.search("[\0\ud800-\udfff]", text)
    if match is not None:
        raise ConfigError(f"There is a {match[0]!r} in it, which no text holds.", source)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"It is larger than {MAX_BYTES // 1024} KiB: no config is.", source)


def _hint(file: Path, named: Source | None) -> str:
    """Says what may have been meant by a file that is not there."""
    try:
        names = sorted(each.name for each in file.parent.iterdir() if not each.is_dir())
    except OSError:
        return f"Nor does its directory {file.parent}."
    itself = os.path.basename(named.file) if named else ""
    configs = [name for name in names if name.endswith(_GIN + _YAML) and name != itself]
    near = nearest(file.stem, [Path(name).stem for name in configs])
    for name in configs:
        if Path(name).stem == near:
            return f"Did you mean {name!r}?"
    return f"In {file.parent} there is: {listing(configs)}." if configs else ""
