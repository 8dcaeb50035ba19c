"""Reads a config from files, Gin bindings and `--set` options."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from trainer.config import hints
from trainer.config.edit import merge, override
from trainer.config.includes import EMPTY, SearchPath, check_text, read_text, suffix_kind
from trainer.config.languages import RUN, Language
from trainer.config.nodes import Node, check_argument, plain, to_config
from trainer.config.resolved import Config, ConfigFile, Unused
from trainer.config.tree import Call, ConfigError, Source
from trainer.config.wording import describe

# Cycles are refused, but files that include others twice each could still multiply.
MAX_FILES = 100


def load(
    files: Sequence[str | os.PathLike[str]],
    bindings: Sequence[str] = (),
    sets: Sequence[str] = (),
    search_paths: Sequence[str] = (),
    language: Language = RUN,
) -> Config:
    """Reads a config, without executing or importing anything that it names.

    An included file is looked up in the folder of the including file, then in the current folder,
    then in the search paths.

    Args:
        files: Gin or YAML files, recognized by their suffix, all of one format; later files
            override earlier ones.
        bindings: Gin statements that override the files; for Gin files only.
        sets: settings of the form path=value, with the value in YAML; they override all else.
        search_paths: folders for files that are not found otherwise.
        language: the kind of the config, of a run or of a sweep.

    Raises:
        ConfigError: a file cannot be read, or the config contains a mistake.

    Example:
        >>> config = load(["configs/muon_vit.gin"], sets=["steps=100"])
        >>> config.root.kwargs["steps"]
        100
    """
    paths = [os.fspath(file) for file in files]
    if not paths:
        raise ConfigError("No config is given: name one with --config=configs/muon_vit.gin.")
    kinds = [suffix_kind(path, Source(path)) for path in paths]
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"The files {', '.join(paths[:4])} are Gin and YAML: use files of one format, and"
            " change single values with --set path=value, which works for both."
        )
    places = SearchPath(search_paths)
    paths = [places.find_file(path) for path in paths]
    reader = _FileReader(kinds[0], places, language)
    load_kind = _load_gin if kinds[0] == "gin" else _load_yaml
    root, unused = load_kind(reader, paths, bindings)
    for text in sets:
        check_text(text, Source("--set"))
    config = dataclasses.replace(to_config(root), files=tuple(reader.read), unused=tuple(unused))
    # Last: settings change the resolved tree, from whichever file a value comes.
    return override(config, sets)


def _load_yaml(
    reader: "_FileReader", paths: Sequence[str], bindings: Sequence[str]
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
    reader: "_FileReader", paths: Sequence[str], bindings: Sequence[str]
) -> tuple[Node, list[Unused]]:
    from trainer.config import gin_scopes

    for path in paths:
        reader.gin(path, None)
    for text in bindings:
        source = _binding_source(text, 1 if "\n" in text.strip() else 0)
        check_text(text, source)
        reader.gin_text(text, source, "", included_at=None)
    return gin_scopes.resolve(reader.statements, Source(paths[0]), reader.language)


def _binding_source(text: str, line: int) -> Source:
    shown = " ".join(text.split())
    return Source(f"--gin_bindings={shown[:40]}{'...' if len(shown) > 40 else ''}", line)


class _FileReader:
    """Reads files and the files that they include.

    Attributes:
        language: the kind of the config.
        statements: the Gin statements, in order.
        read: the files, in order.
    """

    def __init__(self, kind: str, places: SearchPath, language: Language):
        self.language = language
        self._kind = kind
        self._places = places
        self._open: list[str] = []
        self._count = 0
        self._section = 0
        self.statements: list = []
        self.read: list[ConfigFile] = []

    def gin(self, path: str, included_at: Source | None) -> None:
        text = self._enter(path, included_at)
        with self._without_quotes(path, included_at):
            self.gin_text(text, Source(path, 1), os.path.dirname(path), included_at)
        self._open.pop()  # not in `finally`: an error ends the reading

    def gin_text(
        self, text: str, source: Source, directory: str, included_at: Source | None
    ) -> None:
        from trainer.config import gin_reader
        from trainer.config.gin_tables import Statement

        self._section += 1
        first: dict = {}
        for statement in gin_reader.read(text, source):
            if isinstance(statement, gin_reader.Include):
                at = statement.source
                if source.file.startswith("--"):  # the command line names it
                    self._places.allow_quotes(os.path.dirname(statement.file))
                self.gin(self._places.find_include(statement.file, directory, at), at)
                # Statements after an include may override it, so they are a section of their own.
                self._section += 1
                continue
            if isinstance(statement, gin_reader.Binding):
                # Within one file a second binding is a slip. Gin itself silently lets the last one
                # win.
                if statement.key in first:
                    raise ConfigError(
                        f"This binds {statement} for the second time; the first is at"
                        f" {first[statement.key]}. Remove one.",
                        statement.source,
                    )
                first[statement.key] = statement.source
            self.statements.append(Statement(statement, self._section, included_at is not None))

    def yaml(self, path: str, included_at: Source | None) -> Node:
        text = self._enter(path, included_at)
        with self._without_quotes(path, included_at):
            root, include = self._yaml_root(text, path)
            base: Node | None = None
            for name, at in _included(include):
                found = self._places.find_include(name, os.path.dirname(path), at)
                other = self.yaml(found, at)
                base = other if base is None else merge(base, other)
        self._open.pop()
        return root if base is None else merge(base, root)

    def _yaml_root(self, text: str, path: str) -> tuple[Node, Node | None]:
        """Returns the tree of a file, and the value of its key `include`."""
        from trainer.config import yaml_reader

        document = yaml_reader.read(text, Source(path, 1))
        if document is None or document.value is None:
            raise ConfigError(f"The file {EMPTY}.", Source(path))
        if not isinstance(document.value, dict):
            given = describe(plain(document))
            hint = hints.in_yaml(str(document.value))
            raise ConfigError(
                f"The root of a config must be a mapping ({self.language.keys}, ...), not {given}."
                f" {hint}".rstrip(),
                document.source,
            )
        items = dict(document.value)
        root = self.language.root
        if root in items:
            raise ConfigError(
                f"The root of a YAML config is the {root} itself: write {self.language.keys} and"
                " the rest without this key. If this is Gin, name the file .gin.",
                items[root].argument_source,
            )
        include = items.pop("include", None)
        for key, item in items.items():
            check_argument(key, item.argument_source)
        return Node(Call(root, items), document.source), include

    def _enter(self, path: str, included_at: Source | None) -> str:
        """Returns the text of a file, and adds it to `_open`; the caller removes it."""
        if included_at is not None and suffix_kind(path, included_at) != self._kind:
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
        if included_at is not None and not self._places.may_quote(path):
            self._check_target(path, real, included_at)
        text, sha256 = read_text(
            path, included_at, self._places.describe_search() if included_at else ""
        )
        self.read.append(ConfigFile(path, real, sha256, included_at is not None))
        self._open.append(real)
        return text

    def _check_target(self, path: str, real: str, included_at: Source) -> None:
        """Raises ConfigError for a symbolic link to a file elsewhere that is not a config."""
        try:
            is_config = suffix_kind(real, included_at) == self._kind
        except ConfigError:
            is_config = False
        if not is_config:
            raise ConfigError(
                f"The included file {path} is a symbolic link to {real}, whose name is not the name"
                f" of a {self._kind} file. It is not read.",
                included_at,
            )

    @contextmanager
    def _without_quotes(self, path: str, included_at: Source | None) -> Iterator[None]:
        """Keeps the text of an included file out of messages, unless the command names its folder.

        A config written by somebody else can include any file that the user can read, and messages
        are copied into logs and mails.
        """
        try:
            yield
        except ConfigError as error:
            at = error.source
            if included_at is None or at is None or at.file != path or self._places.may_quote(path):
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
