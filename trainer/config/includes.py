"""Finds and reads the files of a config."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from trainer.config.tree import ConfigError, Source
from trainer.config.wording import known_names, listing, nearest

MAX_BYTES = 256 * 1024
SHIPPED = "lockstep:"  # how the names of the configs begin that are part of this program
EMPTY = "is empty: a config names a model, data, an optimizer and more"
_GIN = (".gin",)
_YAML = (".yaml", ".yml")


class SearchPath:
    """Finds the files of a config, and decides which files messages may quote.

    Args:
        search_paths: the folders of `--gin_search_paths`.

    Attributes:
        folders: the folders of the files that the command names, and the search paths.
    """

    def __init__(self, search_paths: Sequence[str]):
        for folder in search_paths:
            if not os.path.isdir(folder):
                source = Source(f"--gin_search_paths={folder}")
                raise ConfigError("This is not an existing folder.", source)
        self._search_paths = list(search_paths)
        self.folders = [os.path.realpath(folder) for folder in search_paths]

    def find_file(self, file: str) -> str:
        """Returns the path of a file of the command line, and allows messages to quote its folder.

        Args:
            file: the path as given; a relative path that does not exist is looked up in the search
                paths.

        Returns:
            The path that was found; `file` if there is none.

        Raises:
            ConfigError: two search paths contain different files of this name; or there is no such
                shipped config.
        """
        found = shipped_file(file, Source(file)) or file
        # lexists: a broken link is an error of its own, and not replaced by a file elsewhere.
        if not os.path.lexists(found) and not os.path.isabs(found):
            found = self._only([os.path.join(each, file) for each in self._search_paths], file)
        self.allow_quotes(os.path.dirname(found))
        return found

    def find_include(self, file: str, beside: str, included_at: Source) -> str:
        """Returns the path of an included file.

        Args:
            file: its name in the including file.
            beside: the folder of the including file; "" is the current one.
            included_at: where the include statement is.

        Raises:
            ConfigError: two of the folders contain different files of this name; or there is no
                such shipped config.
        """
        if found := shipped_file(file, included_at):
            self.allow_quotes(os.path.dirname(found))
            return found
        first = os.path.join(beside, file)
        if os.path.isabs(file):
            return first
        places = [first, *(os.path.join(each, file) for each in ["", *self._search_paths])]
        return self._only(places, first, included_at)

    def allow_quotes(self, folder: str) -> None:
        """Allows messages to quote the files below a folder.

        Args:
            folder: the folder; "" is the current one.
        """
        if "\0" not in folder:  # no folder has such a name, and realpath would raise ValueError
            self.folders.append(os.path.realpath(folder or "."))

    def may_quote(self, file: str) -> bool:
        """Returns whether messages may quote a file: whether the command names a folder above it.

        Args:
            file: the path of the file; symbolic links are followed first.
        """
        real = os.path.realpath(file)
        return any(os.path.commonpath([real, folder]) == folder for folder in self.folders)

    def describe_search(self) -> str:
        """Returns a sentence about the other places in which an included file was looked up."""
        if not self._search_paths:
            return (
                "The current folder has no such file either. Name further folders with"
                " --gin_search_paths."
            )
        shown = listing(self._search_paths)
        return f"The current folder and the search paths ({shown}) have no such file either."

    def _only(self, paths: Sequence[str], otherwise: str, included_at: Source | None = None) -> str:
        found = [path for path in paths if "\0" not in path and os.path.exists(path)]
        for other in found[1:]:
            if not _same(found[0], other):
                raise ConfigError(
                    f"There are two different files of this name: {found[0]} and {other}."
                    " Rename one, or include it by its absolute path.",
                    included_at or Source(otherwise),
                )
        return found[0] if found else otherwise


def shipped_file(name: str, source: Source) -> str | None:
    """Returns the path of a config that is part of this program.

    Args:
        name: such as "lockstep:muon_vit.gin".
        source: where it is named.

    Returns:
        The path; None if the name does not begin with "lockstep:".

    Raises:
        ConfigError: there is no such config.
    """
    if not name.startswith(SHIPPED):
        return None
    folder = Path(__file__).parent.parent / "shipped"
    files = [file for file in sorted(folder.rglob("*.*")) if file.suffix in (*_GIN, *_YAML)]
    names = [file.relative_to(folder).as_posix() for file in files]
    wanted = name.removeprefix(SHIPPED)
    if wanted not in names:
        hint = known_names(wanted, names, "There are")
        raise ConfigError(f"No shipped config is called {wanted!r}. {hint}", source)
    return str(folder / wanted)


def _same(one: str, other: str) -> bool:
    try:
        if os.path.samefile(one, other):
            return True
        if not (os.path.isfile(one) and os.path.isfile(other)):  # reading a pipe would block
            return False
        return _read(one) == _read(other)
    except OSError:
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        # One byte more shows that a file is too large, without reading all of it.
        return stream.read(MAX_BYTES + 1)


def suffix_kind(path: str, source: Source) -> str:
    """Returns the format of a config by the suffix of its name.

    Args:
        path: the path of the file, which need not exist.
        source: the place to name in an error.

    Returns:
        "gin" or "yaml".

    Raises:
        ConfigError: the suffix is neither .gin, nor .yaml or .yml.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix in _GIN:
        return "gin"
    if suffix in _YAML:
        return "yaml"
    raise ConfigError(
        f"The format of {os.path.basename(path)!r} is unknown: the name of a config ends in .gin,"
        " .yaml or .yml.",
        source,
    )


def read_text(path: str, included_at: Source | None, searched: str = "") -> tuple[str, str]:
    """Returns the text of a file and the SHA-256 of its bytes; raises ConfigError.

    Args:
        path: the file.
        included_at: the include statement; None for a file of the command line.
        searched: a sentence about the other places in which it was looked up.
    """
    source = included_at or Source(path)
    which = f"The included file {path}" if included_at else "The file"
    try:
        file = Path(path)
        if not file.exists():
            told = [f"{which} does not exist.", _hint(file, included_at), searched]
            raise ConfigError(" ".join(filter(None, told)), source)
        if not file.is_file():
            kind = "a directory" if file.is_dir() else "not a regular file"
            raise ConfigError(f"{which} is {kind}: name a .gin or .yaml file.", source)
        data = _read(path)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):  # which is a ValueError, too
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{which} cannot be read: {reason}.", source) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{which} is larger than {MAX_BYTES // 1024} KiB, the limit.", source)
    try:
        text = data.decode("utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        at = included_at or Source(path, line)
        raise ConfigError(f"{which} is not UTF-8 text: is it a binary file?", at) from None
    # One kind of line end, so that both readers count lines as an editor does.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    check_text(text, source)
    if not text.strip():
        raise ConfigError(f"{which} {EMPTY}.", source)
    return text, hashlib.sha256(data).hexdigest()


def check_text(text: str, source: Source) -> None:
    """Checks the length and the characters of a text before it is parsed.

    Args:
        text: the text of a file or of an option.
        source: the place to name in an error.

    Raises:
        ConfigError: the text is too long, or contains NUL or half of a surrogate pair.
    """
    # Python decodes bytes of an option that are not UTF-8 to half surrogates, which config.yaml
    # cannot contain.
    match = re.search("[\0\ud800-\udfff]", text)
    if match is not None:
        raise ConfigError(f"The text contains {match[0]!r}, which is not allowed.", source)
    if len(text) > MAX_BYTES:
        raise ConfigError(f"The text is larger than {MAX_BYTES // 1024} KiB, the limit.", source)


def _hint(file: Path, included_at: Source | None) -> str:
    """Returns advice for a file that does not exist."""
    try:
        names = sorted(each.name for each in file.parent.iterdir() if not each.is_dir())
    except OSError:
        return f"Nor does its directory {file.parent}."
    itself = os.path.basename(included_at.file) if included_at else ""
    configs = [name for name in names if name.endswith(_GIN + _YAML) and name != itself]
    near = nearest(file.stem, [Path(name).stem for name in configs])
    for name in configs:
        if Path(name).stem == near:
            return f"Did you mean {name!r}?"
    return f"In {file.parent} there is: {listing(configs)}." if configs else ""
