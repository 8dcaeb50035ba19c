"""Edits a resolved config: replaces values by path, and merges two trees."""

from collections.abc import Mapping, Sequence
from shlex import quote

from trainer.config import nodes
from trainer.config.nodes import Node, children, with_children
from trainer.config.tree import (
    Call,
    Config,
    ConfigError,
    Key,
    Source,
    Tree,
    join,
    longest_key,
    split_path,
    walk,
)
from trainer.config.wording import describe, known_names, listing, nearest, shorten


def override(config: Config, sets: Sequence[str], option: str = "--set") -> Config:
    """Returns a copy of a config with settings path=value, whose values are YAML; ConfigError.

    Example:
        >>> from trainer import config
        >>> read = config.load(["configs/muon_vit.yaml"])
        >>> override(read, ["model.width=32"]).at("model.width")
        32
    """
    # A path leads to an existing value, or to a new argument or key of an existing call or dict,
    # which is added at the end. If keys contain dots, the longest matching key is taken.
    if not sets:
        return config
    from trainer.config import yaml_reader

    root = nodes.to_node(config)
    for text in sets:
        source = Source(f"{option} {shorten(' '.join(text.splitlines()))}")
        path, _, value = text.partition("=")
        new = yaml_reader.read(value, source) if path.strip() and value.strip() else None
        if new is None:  # the value may be only a comment
            raise ConfigError("A setting has the form path=value, as in --set steps=100.", source)
        try:
            root = _replace(root, path.strip(), new, source, "")
        except ConfigError as error:
            hint = _hint_for_function_path(root, path.strip(), value.strip())
            raise ConfigError(hint, source) if hint else error from None
    return nodes.edited_config(config, root)


def replace(config: Config, values: Mapping[str, Tree], source: Source) -> Config:
    """Returns a copy of a config with the trees at some paths, as in `override`; ConfigError.

    Example:
        >>> from trainer import config
        >>> read = config.load(["configs/muon_vit.yaml"])
        >>> replace(read, {"steps": 5}, Source("a sweep")).at("steps")
        5
    """
    root = nodes.to_node(config)
    for path, value in values.items():
        root = _replace(root, path, _with_source(value, source), source, "")
    return nodes.edited_config(config, root)


def without(config: Config, path: str) -> Config:
    """Returns a copy of a config without the value at a path; KeyError if there is none.

    Example:
        >>> from trainer import config
        >>> read = config.load(["configs/muon_vit.yaml"])
        >>> "best_metric" in without(read, "best_metric").root.kwargs
        False
    """
    if not (keys := split_path(config.root, path)):
        raise KeyError(path)
    return nodes.edited_config(config, _without(nodes.to_node(config), keys))


def _without(node: Node, keys: Sequence[Key]) -> Node:
    items, key = dict(children(node)), keys[0]
    if len(keys) > 1:
        return with_children(node, {**items, key: _without(items[key], keys[1:])})
    return with_children(node, {each: item for each, item in items.items() if each != key})


def config_of_tree(root: Call, source: Source) -> Config:
    """Returns the config of a tree that was not read from a file; raises ConfigError."""
    return nodes.to_config(_with_source(root, source))


def _with_source(tree: Tree, source: Source) -> Node:
    node = Node(list(tree) if isinstance(tree, tuple) else tree, source)
    items = children(node)
    if isinstance(tree, Call | dict):
        check = nodes.check_argument if isinstance(tree, Call) else nodes.check_key
        for key in items:
            check(key, source)
    elif not isinstance(node.value, list):
        nodes.check_leaf(tree, source)
    return with_children(node, {key: _with_source(item, source) for key, item in items.items()})


def _replace(node: Node, path: str, new: Node, source: Source, above: str) -> Node:
    items = dict(children(node))
    key = longest_key(items, path)
    if path == f"{key}." or (key is None and path.startswith(".")):
        raise ConfigError(
            f"The path has an empty key below {above or 'the root'}: join keys by single dots.",
            source,
        )
    child = Node(new.value, source, source)
    if key is None:
        _check_new(node, path, source, above)
        # The keys of a path are text, and a dict such as boundaries_and_scales has integer keys.
        only_integers = items and all(isinstance(each, int) for each in items)
        key = int(path) if only_integers and path.isdecimal() else path
    elif rest := path[len(str(key)) + 1 :]:
        child = _replace(items[key], rest, new, source, join(above, key))
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
        shown = describe(nodes.plain(node))
        text = f"{above} is {shown}, which has no keys, so it has no {word!r}."
        if above == "base":  # the file of a sweep's base
            text += f" What all arms change in it stands below set: --set set={{{path}: ...}}."
        raise ConfigError(text, source)
    what = "the elements" if isinstance(node.value, list) else ""
    hint = known_names(word, known, f"It has {what}".strip())
    if isinstance(node.value, Call) and word.isidentifier() and nearest(word, known) is None:
        whole = join(above, word)
        # What does not look like a path is one key, such as a pattern of `sharding`.
        key = below.split(".")[0] if below.replace(".", "").isidentifier() else below
        shown = "[...]" if key.isdecimal() else f"{{{key}: ...}}" if key else "..."
        hint += f" To replace a default, set the whole value: --set {whole}={shown}."
    elif isinstance(node.value, dict) and below and above and nearest(word, known) is None:
        whole = f"--set {above}={{{path}: ...}}"
        hint += f" A path cannot add a key that contains dots: set the whole value, {whole}."
    raise ConfigError(f"{place} has no {word!r}. {hint}", source)


def _hint_for_function_path(root: Node, path: str, value: str) -> str:
    """Returns advice for a path that begins with the name of a function; "" for others."""
    from trainer.config.vocabulary import RUN

    path = path[path.rfind("/", 0, path.find(".")) + 1 :]  # the tree contains no scopes of Gin
    head, _, below = path.partition(".")
    calls = [(x.name, at) for at, x in walk(nodes.plain(root)) if isinstance(x, Call)]
    in_tree = head in children(root)
    message = f"A setting takes a path in the config tree, and {path!r} begins with a function."
    found: dict[str, str] = {}  # the right path -> the function that is called there
    for name, place in calls:
        parts = name.split(".")
        # A short name of a function, such as adamw, may be a key of the tree as well.
        for start in range(1 if in_tree else len(parts)):
            short = ".".join(parts[start:])
            if f"{path}.".startswith(f"{short}."):
                rest = path[len(short) + 1 :]
                found[join(place, rest) if rest else place] = name
    found.pop("", None)  # the root cannot be set
    if found:
        settings = [f"--set {quote(f'{each}={value[:60]}')}" for each in found]
        names, count = listing(list(dict.fromkeys(found.values()))), len(settings)
        if count == 1:
            return f"{message} This config calls {names} in one place: write {settings[0]}."
        shown = "\n  ".join(settings[:4] + [f"and {count - 4} more"] * (count > 4))
        return f"{message} This config calls {names} in {count} places; write one of:\n  {shown}"
    packages = {*RUN.modules, *(name.split(".")[0] for name, _ in calls)}
    packages -= {"data", "metrics"}  # also arguments of the root
    if below and not in_tree and head in packages:
        name = path.rpartition(".")[0]
        names = listing(sorted({name for name, _ in calls}))
        return f"{message} This config does not call {name}. It calls: {names}."
    return ""


def merge(base: Node, over: Node) -> Node:
    """Merges two trees; values of `over` replace those of `base`."""
    # Two dicts, two calls of one function, and a call in `base` with a dict in `over` are merged
    # key by key; all else is replaced. New keys come last. Each value keeps its source.
    old, new = base.value, over.value
    if isinstance(old, Call) and isinstance(new, Call):
        if (old.name, old.partial) != (new.name, new.partial):
            return over
    elif isinstance(new, Call) or not isinstance(new, dict) or not isinstance(old, Call | dict):
        return over
    items = dict(children(base))
    for key, node in children(over).items():
        items[key] = merge(items[key], node) if key in items else node
    # A dict over a call changes arguments of it; the call itself was written in the base.
    source = over if isinstance(old, Call) == isinstance(new, Call) else base
    return with_children(Node(old, source.source, source.key_source), items)
