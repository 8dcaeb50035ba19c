"""Edits a resolved config: settings by path, and one tree laid over another."""

import dataclasses
from collections.abc import Mapping, Sequence

from trainer.config.nodes import (
    Node,
    check_argument,
    check_key,
    check_leaf,
    children,
    plain,
    to_config,
    to_node,
    with_children,
)
from trainer.config.tree import Call, Config, ConfigError, Key, Source, Tree, fitting, join
from trainer.config.wording import describe, known_names, nearest


def override(config: Config, sets: Sequence[str]) -> Config:
    """Returns the config with some values replaced.

    A path is the keys from the root on, joined by dots; an element of a list goes by its index. A
    path names what is there, or a new argument of a function or a new key of a dict that is there,
    which comes last. Where a key holds dots itself, the longest key that fits is meant.

    Args:
        config: the config.
        sets: settings of the form path=value; the value is YAML, tags included.

    Raises:
        ConfigError: a setting has another form, its value is no YAML, or its path leads nowhere.
    """
    if not sets:
        return config
    from trainer.config import yaml_reader

    root = to_node(config)
    for text in sets:
        source = Source(f"--set {text[:60]}")
        path, sign, value = text.partition("=")
        if not sign or not path.strip() or not value.strip():
            raise ConfigError("A setting has the form path=value, as in --set steps=100.", source)
        new = yaml_reader.read(value, source)
        if new is None:
            raise ConfigError("A setting has the form path=value, as in --set steps=100.", source)
        root = _replace(root, path.strip(), new, source, "")
    return _edited(config, root)


def replace(config: Config, values: Mapping[str, Tree], source: Source) -> Config:
    """Returns the config with the trees at some paths replaced.

    Args:
        config: the config.
        values: trees by path; the paths are as in `override`.
        source: where the trees come from, for messages.

    Raises:
        ConfigError: a path leads nowhere, or a value is none that a config may hold.
    """
    root = to_node(config)
    for path, value in values.items():
        root = _replace(root, path, _sourced(value, source), source, "")
    return _edited(config, root)


def _edited(config: Config, root: Node) -> Config:
    """Returns the config of an edited tree, which was read from the same files."""
    return dataclasses.replace(to_config(root), files=config.files, unused=config.unused)


def _sourced(tree: Tree, source: Source) -> Node:
    if isinstance(tree, Call):
        for key in tree.kwargs:
            check_argument(key, source)
        kwargs = {key: _sourced(item, source) for key, item in tree.kwargs.items()}
        return Node(Call(tree.name, kwargs, tree.partial), source)
    if isinstance(tree, dict):
        for key in tree:
            check_key(key, source)
        return Node({key: _sourced(item, source) for key, item in tree.items()}, source)
    if isinstance(tree, list | tuple):
        return Node([_sourced(item, source) for item in tree], source)
    check_leaf(tree, source)
    return Node(tree, source)


def _replace(node: Node, path: str, new: Node, source: Source, above: str) -> Node:
    items = dict(children(node))
    key = fitting(items, path)
    if path.startswith(".") or path == f"{key}.":
        raise ConfigError(
            f"The path ends or goes on with an empty key below {above or 'the root'}: its keys are"
            " joined by single dots.",
            source,
        )
    if key is None:
        _check_new(node, path, source, above)
        only_integers = items and all(isinstance(each, int) for each in items)
        key = int(path) if only_integers and path.isdecimal() else path
        return with_children(node, {**items, key: Node(new.value, source, source)})
    rest = path[len(str(key)) + 1 :]
    if rest:
        child = _replace(items[key], rest, new, source, join(above, key))
    else:
        child = Node(new.value, new.source, source)
    return with_children(node, {**items, key: child})


def _check_new(node: Node, path: str, source: Source, above: str) -> None:
    known: list[Key] = list(children(node))
    word, _, below = path.partition(".")
    if isinstance(node.value, Call) and path.isidentifier():
        return
    if isinstance(node.value, dict) and word and not below and "." not in path:
        return
    place = above or "The root"
    if not isinstance(node.value, Call | dict | list):
        shown = describe(plain(node))
        raise ConfigError(f"{above} is {shown}, and has nothing below it, no {word!r}.", source)
    what = "the elements" if isinstance(node.value, list) else ""
    hint = known_names(word, known, f"It has {what}".strip())
    if isinstance(node.value, Call) and word.isidentifier() and nearest(word, known) is None:
        whole = join(above, word)
        key = below.split(".")[0]
        shown = "[...]" if key.isdecimal() else f"{{{key}: ...}}" if key else "..."
        hint += f" What has its default is set whole: --set {whole}={shown}."
    raise ConfigError(f"{place} has no {word!r}. {hint}", source)


def merge(base: Node, over: Node) -> Node:
    """Returns the tree of `base` with that of `over` laid over it.

    Mappings are merged key by key, and so are two calls of one function, and a call with a plain
    mapping laid over it; anything else is replaced. New keys come last.
    """
    old, new = base.value, over.value
    if isinstance(old, Call) and isinstance(new, Call):
        if (old.name, old.partial) != (new.name, new.partial):
            return over
    elif isinstance(new, Call) or not isinstance(new, dict) or not isinstance(old, Call | dict):
        return over
    items = dict(children(base))
    for key, node in children(over).items():
        items[key] = merge(items[key], node) if key in items else node
    source = over if isinstance(old, Call) == isinstance(new, Call) else base
    return with_children(Node(old, source.source, source.named), items)
