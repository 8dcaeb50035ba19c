"""Finds and reads the files of a config, with Gin bindings and `--set` options."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import wording
from trainer.config.edit import merge, override
from trainer.config.nodes import Node, check_argument, plain, to_config
from trainer.config.tree import Call, Config, ConfigError, ConfigFile, Source, Unused
from trainer.config.vocabulary import RUN, Language
from trainer.config.wording import describe, known_names, listing, nearest

MAX_BYTES = 256 * 1024
SHIPPED = "lockstep:"  # the prefix of the names of shipped configs
EMPTY = "is empty: a config names a model, data, an optimizer and more"
_KINDS = {".gin": "gin", ".yaml": "yaml", ".yml": "yaml"}


def shipped_file(name: str, source: Source) -> str | None:
    """Returns the path of "lockstep:muon_vit.gin", say; None without this prefix."""
    if not name.startswith(SHIPPED):
        return None
    folder = Path(__file__).parent.parent / "shipped"
    files = [file for file in sorted(folder.rglob("*.*")) if file.suffix in _KINDS]
    names = [file.relative_to(folder).as_posix() for file in files]
    names = [name for name in names if not name.startswith("new/")]  # of the command new
    if (wanted := name.removeprefix(SHIPPED)) not in names:
        hint = known_names(wanted, names, "There are")
        raise ConfigError(f"No shipped config is called {wanted!r}. {hint}", source)
    return str(folder / wanted)


def _only(paths: Sequence[str], otherwise: str, included_at: Source | None = None) -> str:
    found = [path for path in paths if "\0" not in path and os.path.exists(path)]
    for other in found[1:]:
        if not _same(found[0], other):
            raise ConfigError(
                f"There are two different files of this name: {found[0]} and {other}."
                " Rename one, or include it by its absolute path.",
                included_at or Source(otherwise),
            )
    return found[0] if found else otherwise


def _same(one: str, other: str) -> bool:
    try:
        regular = os.path.isfile(one) and os.path.isfile(other)  # reading a pipe would block
        return os.path.samefile(one, other) or (regular and _read(one) == _read(other))
    except OSError:
        return False


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        # One byte more shows that a file is too large, without reading all of it.
        return stream.read(MAX_BYTES + 1)


def _kind_of(path: str, source: Source) -> str:
    """Returns "gin" or "yaml" by the suffix of a config; raises ConfigError."""
    if (kind := _KINDS.get(Path(path).suffix.lower())) is None:
        raise ConfigError(
            f"The format of {os.path.basename(path)!r} is unknown: the name of a config ends in"
            " .gin, .yaml or .yml.",
            source,
        )
    return kind


def read_text(path: str, included_at: Source | None, searched: str = "") -> tuple[str, str]:
    """Returns the text of a file and the SHA-256 of its bytes; raises ConfigError."""
    # `included_at` is the include statement, None for a file of the command line; `searched` is a
    # sentence about the other places in which the file was looked up.
    source = included_at or Source(path)
    which = f"The included file {path}" if included_at else "The file"
    try:
        file = Path(path)
        if not file.exists():
            message = [f"{which} does not exist.", _hint(file, included_at), searched]
            raise ConfigError(" ".join(filter(None, message)), source)
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
    """Raises ConfigError for a text that is too long, or has NUL or half of a surrogate pair."""
    # Python decodes bytes of an option that are not UTF-8 to half surrogates, which YAML refuses.
    if (match := re.search("[\0\ud800-\udfff]", text)) is not None:
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
    configs = [name for name in names if name.endswith(tuple(_KINDS)) and name != itself]
    near = nearest(file.stem, [Path(name).stem for name in configs])
    for name in configs:
        if Path(name).stem == near:
            return f"Did you mean {name!r}?"
    return f"In {file.parent} there is: {listing(configs)}." if configs else ""


# Combining files, bindings and settings.

# Cycles are refused, but files that include two others each could still multiply.
MAX_FILES = 100


def load(
    files: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str] = (),
    sets: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    language: Language = RUN,
) -> Config:
    """Reads a config, without executing or importing anything that it names; raises ConfigError.

    Example:
        >>> config = load(["configs/muon_vit.gin"], sets=["steps=100"])
        >>> config.root.kwargs["steps"]
        100
    """
    # Later files override earlier ones, `bindings` of Gin override the files, and `sets`, of the
    # form path=value in YAML, all else. An included file is looked up in the folder of the
    # including file, then in the current folder, then in the search paths.
    if not (paths := [os.fspath(file) for file in files]):
        raise ConfigError("No config is given: name one with --config=configs/muon_vit.gin.")
    kinds = [_kind_of(path, Source(path)) for path in paths]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"The files {', '.join(paths[:4])} are Gin and YAML: use files of one format, and"
            " change single values with --set path=value, which works for both."
        )
    reader = _FileReader(kinds[0], search_paths, language)
    paths = [reader.find_file(path) for path in paths]
    unused: Sequence[Unused] = ()
    if kinds[0] == "gin":
        from trainer.config import gin_reader

        for path in paths:
            reader.gin(path, None)
        for text in bindings:
            source = _binding_source(text, 1 if "\n" in text.strip() else 0)
            check_text(text, source)
            reader.gin_text(text, source, "", included_at=None)
        root, unused = gin_reader.resolve(reader.statements, Source(paths[0]), language)
    elif bindings:
        raise ConfigError(
            "Gin's bindings change Gin files, and this config is YAML: use --set path=value, as in"
            " --set optimizer.clip_norm=1.0.",
            _binding_source(bindings[0], 0),
        )
    else:
        root = reduce(merge, [reader.yaml(path, None) for path in paths])
    for text in sets:
        check_text(text, Source("--set"))
    config = dataclasses.replace(to_config(root), files=tuple(reader.read), unused=tuple(unused))
    # Last: settings change the resolved tree, from whichever file a value comes.
    return override(config, sets)


def _binding_source(text: str, line: int) -> Source:
    shown = " ".join(text.split())
    return Source(f"--gin_bindings={shown[:40]}{'...' if len(shown) > 40 else ''}", line)


class _FileReader:
    """Finds and reads files and what they include, and decides which files messages may quote."""

    # `statements` and `read` are in order. `_quotable` are the folders of the files that the
    # command names, and of `--gin_search_paths`.

    def __init__(self, kind: str, search_paths: Sequence[str], language: Language):
        for folder in search_paths:
            if not os.path.isdir(folder):
                source = Source(f"--gin_search_paths={folder}")
                raise ConfigError("This is not an existing folder.", source)
        self.language, self._kind = language, kind
        self._search_paths = list(search_paths)
        self._quotable = [os.path.realpath(folder) for folder in search_paths]
        self._open: list[str] = []
        self._count, self._section = 0, 0
        self.statements: list = []
        self.read: list[ConfigFile] = []

    def gin(self, path: str, included_at: Source | None) -> None:
        with self._opened(path, included_at) as text:
            self.gin_text(text, Source(path, 1), os.path.dirname(path), included_at)

    def gin_text(
        self, text: str, source: Source, directory: str, included_at: Source | None
    ) -> None:
        from trainer.config import gin_reader

        self._section += 1
        first: dict = {}
        for statement in gin_reader.read_statements(text, source):
            if isinstance(statement, gin_reader.Include):
                at = statement.source
                if source.file.startswith("--"):  # the command line names it
                    self._allow_quotes(os.path.dirname(statement.file))
                self.gin(self._find_include(statement.file, directory, at), at)
                # Statements after an include may override it, so they are a section of their own.
                self._section += 1
                continue
            if isinstance(statement, gin_reader.Binding):
                # In one file a second binding is a slip. Gin itself silently takes the last one.
                if statement.key in first:
                    raise ConfigError(
                        f"This binds {statement} for the second time; the first is at"
                        f" {first[statement.key]}. Remove one.",
                        statement.source,
                    )
                first[statement.key] = statement.source
            place = {"section": self._section, "included": included_at is not None}
            self.statements.append(dataclasses.replace(statement, **place))

    def yaml(self, path: str, included_at: Source | None) -> Node:
        with self._opened(path, included_at) as text:
            root, included = self._yaml_root(text, path)
            bases = []
            for name, at in included:
                bases.append(self.yaml(self._find_include(name, os.path.dirname(path), at), at))
        return reduce(merge, [*bases, root])

    def _yaml_root(self, text: str, path: str) -> tuple[Node, list[tuple[str, Source]]]:
        """Returns the tree of a file, and the files that its key `include` names."""
        from trainer.config import yaml_reader

        document = yaml_reader.read(text, Source(path, 1))
        if document is None or document.value is None:
            raise ConfigError(f"The file {EMPTY}.", Source(path))
        if not isinstance(document.value, dict):
            given = describe(plain(document))
            raise ConfigError(
                f"The root of a config must be a mapping ({self.language.keys}, ...), not {given}."
                f" {wording.in_yaml(str(document.value))}".rstrip(),
                document.source,
            )
        items = dict(document.value)
        if (root := self.language.root) in items:
            raise ConfigError(
                f"The root of a YAML config is the {root} itself: write {self.language.keys} and"
                " the rest without this key. If this is Gin, name the file .gin.",
                items[root].argument_source,
            )
        include = items.pop("include", None)
        for key, item in items.items():
            check_argument(key, item.argument_source)
        named = [] if include is None else [include]
        if include is not None and isinstance(include.value, list):
            named = include.value
        for node in named:
            if not isinstance(node.value, str):
                given = describe(plain(node))
                text = f"include names a file or a list of files, not {given}."
                raise ConfigError(text, node.source)
        included = [(node.value, node.source) for node in named]
        return Node(Call(root, items), document.source), included

    @contextmanager
    def _opened(self, path: str, included_at: Source | None) -> Iterator[str]:
        """Gives a file's text, which messages quote only if the command names its folder."""
        # A config written by somebody else can include any file that the user can read, and
        # messages are copied into logs and mails.
        if included_at is not None and _kind_of(path, included_at) != self._kind:
            raise ConfigError(
                f"A {self._kind} file cannot include {path!r}: use one format.", included_at
            )
        self._count += 1
        if self._count > MAX_FILES:
            raise ConfigError(f"The config includes more than {MAX_FILES} files.", included_at)
        real = os.path.realpath(path) if "\0" not in path else path
        if real in self._open:
            names = [os.path.basename(each) for each in [*self._open, real]]
            raise ConfigError(
                f"The files include each other: {' -> '.join(names[-6:])}.", included_at
            )
        # A folder of somebody else may contain a link to any file of the user's.
        if included_at is not None and not self._may_quote(path):
            if _KINDS.get(Path(real).suffix.lower()) != self._kind:
                raise ConfigError(
                    f"The included file {path} is a symbolic link to {real}, whose name is not the"
                    f" name of a {self._kind} file. It is not read.",
                    included_at,
                )
        searched = "The current folder has no such file either. Name further folders with"
        searched += " --gin_search_paths."
        if self._search_paths:
            paths = f"the search paths ({listing(self._search_paths)})"
            searched = f"The current folder and {paths} have no such file either."
        text, sha256 = read_text(path, included_at, searched if included_at else "")
        self.read.append(ConfigFile(path, real, sha256, included_at is not None))
        self._open.append(real)
        try:
            yield text
        except ConfigError as error:
            at = error.source
            if included_at is None or at is None or at.file != path or self._may_quote(path):
                raise
            raise ConfigError(
                f"This cannot be read as {self._kind}. The file is {real},"
                " outside of the folders of the files that the command names, so its text is not"
                " shown here. Open it to see what is wrong.",
                at,
            ) from None
        self._open.pop()  # not in `finally`: an error ends the reading

    # The paths of files.

    def find_file(self, file: str) -> str:
        """Returns the path of a file of the command line, and lets messages quote its folder."""
        # A relative path that does not exist is looked up in the search paths; if it is not there
        # either, it is returned unchanged. Raises ConfigError if two search paths contain different
        # files of this name, or if there is no such shipped config.
        found = shipped_file(file, Source(file)) or file
        # lexists: a broken link is an error of its own, and not replaced by a file elsewhere.
        if not os.path.lexists(found) and not os.path.isabs(found):
            found = _only([os.path.join(each, file) for each in self._search_paths], file)
        self._allow_quotes(os.path.dirname(found))
        return found

    def _find_include(self, file: str, beside: str, included_at: Source) -> str:
        """Returns the path of an included file; raises ConfigError as `find_file` does."""
        # `beside` is the folder of the including file, "" the current one.
        if found := shipped_file(file, included_at):
            self._allow_quotes(os.path.dirname(found))
            return found
        first = os.path.join(beside, file)
        if os.path.isabs(file):
            return first
        places = [first, *(os.path.join(each, file) for each in ["", *self._search_paths])]
        return _only(places, first, included_at)

    def _allow_quotes(self, folder: str) -> None:
        """Allows messages to quote the files below a folder; "" is the current one."""
        if "\0" not in folder:  # no folder has such a name, and realpath would raise ValueError
            self._quotable.append(os.path.realpath(folder or "."))

    def _may_quote(self, file: str) -> bool:
        """Returns whether the command names a folder above a file, with links followed first."""
        real = os.path.realpath(file)
        return any(os.path.commonpath([real, folder]) == folder for folder in self._quotable)


class LauncherSetting(NamedTuple):
    """A value and where it was given: a value of YAML, or the text of the command line."""

    value: Any
    source: Source

    def text(self, key: str) -> str:
        """Returns a string or a number as text; raises ConfigError for another value."""
        if isinstance(self.value, bool) or not isinstance(self.value, str | int | float):
            why = f"must be a string or a number, got {describe(self.value)}."
            raise ConfigError(f"The value of {key} {why}", self.source)
        return str(self.value)


def read_settings(
    option: str,
    file: str | None,
    texts: Sequence[str],
    named: Callable[[str, Source], str],
    example: tuple[str, str],
) -> dict[str, LauncherSetting]:
    """Reads the settings of a launcher: a YAML file, and those of the command line over it."""
    # `option` is that of the command line, such as "--slurm". `named` takes a key and its source,
    # and returns the name of the setting. `example` is a key with a value. Raises ConfigError if
    # the file cannot be read or is no mapping, a text is not KEY=VALUE, or `named` does.
    values: dict[str, LauncherSetting] = {}
    if file is not None:
        from trainer.config import yaml_reader

        content, _ = read_text(file, None)
        root = yaml_reader.read(content, Source(file, 1))
        if root is None or not isinstance(root.value, dict):
            why = f"This must be a mapping, such as {': '.join(example)}."
            raise ConfigError(why, Source(file, 1))
        for key, node in root.value.items():
            if (name := named(str(key), node.argument_source)) in values:
                raise ConfigError(f"{key} is given twice. Remove one.", node.argument_source)
            values[name] = LauncherSetting(plain(node), node.source)
    for text in texts:
        source = Source(f"{option} {text}")
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"A setting is KEY=VALUE, such as {'='.join(example)}.", source)
        values[named(key, source)] = LauncherSetting(value, source)
    return values
