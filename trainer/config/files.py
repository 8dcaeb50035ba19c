"""Reads files, bindings and settings into one config."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.config import hints
from trainer.config.edit import merge, override
from trainer.config.includes import EMPTY, Places, check_text, read_text, suffix_kind
from trainer.config.nodes import Node, check_argument, plain, to_config
from trainer.config.tree import Call, Config, ConfigError, ConfigFile, Source, Unused
from trainer.config.wording import describe

MAX_FILES = 100


def load(
    files: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str] = (),
    sets: Sequence[str] = (),
    search_paths: Sequence[str] = (),
) -> Config:
    """Reads a config; executes nothing, and knows no function by name.

    A file that another one includes is looked for in the folder of the including file, then in the
    current folder, then in the search paths.

    Args:
        files: Gin or YAML by their suffix, of one kind; a later one overrides an earlier one.
        bindings: Gin statements, for Gin files only; they override the files.
        sets: settings of the form path=value, the value in YAML; they override all else.
        search_paths: folders where files are looked for that are not found otherwise.

    Raises:
        ConfigError: anything is wrong with it.
    """
    paths = [os.fspath(file) for file in files]
    if not paths:
        raise ConfigError("No config is given: name one with --gin_file=configs/muon_vit.gin.")
    kinds = [suffix_kind(path, Source(path)) for path in paths]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"The files {', '.join(paths[:4])} are Gin and YAML: give files of one kind, and change"
            " single values with --set path=value, which both take."
        )
    places = Places(search_paths)
    paths = [places.of_command(path) for path in paths]
    reader = _Files(kinds[0], places)
    load_kind = _load_gin if kinds[0] == "gin" else _load_yaml
    root, unused = load_kind(reader, paths, bindings)
    for text in sets:
        check_text(text, Source("--set"))
    config = dataclasses.replace(to_config(root), files=tuple(reader.read), unused=tuple(unused))
    return override(config, sets)


def _load_yaml(
    reader: "_Files", paths: Sequence[str], bindings: Sequence[str]
) -> tuple[Node, list[Unused]]:
    if bindings:
        raise ConfigError(
            "Gin's bindings change Gin files, and this config is YAML: use --set path=value, as in"
            " --set optimizer.clip_norm=1.0.",
            _binding_source(bindings[0], 0),
        )
    root = reader.yaml(paths[0], None)
    for path in paths[1:]:
        root = merge(root, reader.yaml(path, None))
    return root, []


def _load_gin(
    reader: "_Files", paths: Sequence[str], bindings: Sequence[str]
) -> tuple[Node, list[Unused]]:
    from trainer.config import gin_scopes

    for path in paths:
        reader.gin(path, None)
    for text in bindings:
        source = _binding_source(text, 1 if "\n" in text.strip() else 0)
        check_text(text, source)
        reader.gin_text(text, source, "", named=None)
    return gin_scopes.resolve(reader.statements, Source(paths[0]))


def _binding_source(text: str, line: int) -> Source:
    shown = " ".join(text.split())
    return Source(f"--gin_bindings={shown[:40]}{'...' if len(shown) > 40 else ''}", line)


class _Files:
    """Reads files with what they include, each at its place.

    Attributes:
        statements: the Gin statements, in order.
        read: the files, in order.
    """

    def __init__(self, kind: str, places: Places):
        self._kind = kind
        self._places = places
        self._open: list[str] = []
        self._count = 0
        self._stretch = 0
        self.statements: list = []
        self.read: list[ConfigFile] = []

    def gin(self, path: str, named: Source | None) -> None:
        text = self._enter(path, named)
        with self._unquoted(path, named):
            self.gin_text(text, Source(path, 1), os.path.dirname(path), named)
        self._open.pop()

    def gin_text(self, text: str, source: Source, directory: str, named: Source | None) -> None:
        from trainer.config import gin_reader
        from trainer.config.gin_tables import Statement

        self._stretch += 1
        first: dict = {}
        for statement in gin_reader.read(text, source):
            if isinstance(statement, gin_reader.Include):
                at = statement.source
                if source.file.startswith("--"):  # the command line names it
                    self._places.trust(os.path.dirname(statement.file))
                self.gin(self._places.of_include(statement.file, directory, at), at)
                self._stretch += 1
                continue
            if isinstance(statement, gin_reader.Binding):
                if statement.key in first:
                    raise ConfigError(
                        f"This binds {statement} for the second time; the first is at"
                        f" {first[statement.key]}. Remove one.",
                        statement.source,
                    )
                first[statement.key] = statement.source
            self.statements.append(Statement(statement, self._stretch, named is not None))

    def yaml(self, path: str, named: Source | None) -> Node:
        text = self._enter(path, named)
        with self._unquoted(path, named):
            root, include = self._yaml_root(text, path)
            base: Node | None = None
            for name, at in _included(include):
                found = self._places.of_include(name, os.path.dirname(path), at)
                other = self.yaml(found, at)
                base = other if base is None else merge(base, other)
        self._open.pop()
        return root if base is None else merge(base, root)

    def _yaml_root(self, text: str, path: str) -> tuple[Node, Node | None]:
        """Returns the tree of a file, and what it includes."""
        from trainer.config import yaml_reader

        document = yaml_reader.read(text, Source(path, 1))
        if document is None or document.value is None:
            raise ConfigError(f"The file {EMPTY}.", Source(path))
        if not isinstance(document.value, dict):
            given = describe(plain(document))
            hint = hints.in_yaml(str(document.value))
            raise ConfigError(
                f"The root of a config is a mapping (model, data, steps, ...), and not {given}."
                f" {hint}".rstrip(),
                document.source,
            )
        items = dict(document.value)
        if "experiment" in items:
            raise ConfigError(
                "The root of a YAML config is the experiment itself: write model, data, steps and"
                " the rest without this key. If this is Gin, name the file .gin.",
                items["experiment"].argument_source,
            )
        include = items.pop("include", None)
        for key, item in items.items():
            check_argument(key, item.argument_source)
        return Node(Call("experiment", items), document.source), include

    def _enter(self, path: str, named: Source | None) -> str:
        """Returns the text of a file, which is then open until it is popped."""
        if named is not None and suffix_kind(path, named) != self._kind:
            raise ConfigError(f"A {self._kind} file includes no {path!r}: use one kind.", named)
        self._count += 1
        if self._count > MAX_FILES:
            raise ConfigError(f"The config includes more than {MAX_FILES} files.", named)
        real = os.path.realpath(path) if "\0" not in path else path
        if real in self._open:
            names = [os.path.basename(each) for each in [*self._open, real]]
            raise ConfigError(f"The files include each other: {' -> '.join(names[-6:])}.", named)
        if named is not None and not self._places.quotes(path):
            self._check_target(path, real, named)
        text, sha256 = read_text(path, named, self._places.searched() if named else "")
        self.read.append(ConfigFile(path, real, sha256, named is not None))
        self._open.append(real)
        return text

    def _check_target(self, path: str, real: str, named: Source) -> None:
        """Raises ConfigError for a symbolic link to a file elsewhere that is not a config."""
        try:
            is_config = suffix_kind(real, named) == self._kind
        except ConfigError:
            is_config = False
        if not is_config:
            raise ConfigError(
                f"The included file {path} is a symbolic link to {real}, whose name is not that of"
                f" a {self._kind} file. It is not read.",
                named,
            )

    @contextmanager
    def _unquoted(self, path: str, named: Source | None) -> Iterator[None]:
        """Keeps the text of an included file out of messages, unless the command names its folder.

        A config of somebody else's may include any file that its reader can read, and a message is
        copied into logs and mails.
        """
        try:
            yield
        except ConfigError as error:
            at = error.source
            if named is None or at is None or at.file != path or self._places.quotes(path):
                raise
            raise ConfigError(
                f"This cannot be read as {self._kind}. The file is {os.path.realpath(path)},"
                " outside of the folders of the files that the command names, so its text is not"
                " shown here. Open it to see what is wrong.",
                at,
            ) from None


def _included(include: Node | None) -> list[tuple[str, Source]]:
    if include is None:
        return []
    nodes = include.value if isinstance(include.value, list) else [include]
    for node in nodes:
        if not isinstance(node.value, str):
            given = describe(plain(node))
            raise ConfigError(f"include names a file or a list of files, not {given}.", node.source)
    return [(node.value, node.source) for node in nodes]
