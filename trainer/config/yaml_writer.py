"""Writes a tree as canonical YAML, and compares trees."""

import hashlib
from collections.abc import Iterator
from typing import Any

import yaml

from trainer.config.tree import Call, Tree, child_trees, functions, join, same
from trainer.config.vocabulary import LANGUAGES
from trainer.config.wording import brief
from trainer.config.yaml_reader import PARTIAL, Loader


class _Dumper(yaml.SafeDumper):
    """Quotes each string that this reader or a YAML 1.1 reader would not read as a string."""

    yaml_implicit_resolvers = {
        first: Loader.yaml_implicit_resolvers.get(first, [])
        + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*Loader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        # Equal trees must have equal text; anchors would depend on which objects they share.
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_call(dumper: _Dumper, call: Call) -> yaml.Node:
    tag = f"!{PARTIAL if call.partial else ''}{call.name}"
    return _mapping(dumper, tag, dict(sorted(call.kwargs.items())))


def _mapping(dumper: _Dumper, tag: str, items: dict) -> yaml.Node:
    pairs = [(dumper.represent_data(key), dumper.represent_data(items[key])) for key in items]
    return yaml.MappingNode(tag, pairs, flow_style=not pairs)


def _represent_list(dumper: _Dumper, items: list) -> yaml.Node:
    nodes = [dumper.represent_data(item) for item in items]
    flow = all(isinstance(node, yaml.ScalarNode) for node in nodes)
    return yaml.SequenceNode(dumper.DEFAULT_SEQUENCE_TAG, nodes, flow_style=flow)


def _represent_str(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML loses Unicode line breaks (\x85, \u2028) except in double quotes
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(dumper.DEFAULT_SCALAR_TAG, text, style)


_Dumper.add_representer(str, _represent_str)
_Dumper.add_representer(Call, _represent_call)
_Dumper.add_representer(dict, lambda dumper, x: _mapping(dumper, dumper.DEFAULT_MAPPING_TAG, x))
_Dumper.add_representer(list, _represent_list)


def dump(root: Call) -> str:
    """Returns the canonical YAML of a tree, equal for equal trees; loading it gives the tree.

    Example:
        >>> print(dump(Call("experiment", {"steps": 100, "loss": Call("losses.huber")})), end="")
        loss: !losses.huber {}
        steps: 100
    """
    bare = root.name in LANGUAGES and not root.partial
    tree = dict(sorted(root.kwargs.items())) if bare else root
    # The order of groups counts: no key is sorted. No line reaches the width: no string is folded.
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**30)


def file_text(root: Call) -> str:
    """Returns the config.yaml of a run: `dump`, below a comment that names packages of the user."""
    others = (x.split(".")[0] for x in functions(root) if not LANGUAGES[root.name].has(x))
    packages = ",".join(dict.fromkeys(others))
    head = "# Commands that use this config need the option --vocabulary="
    return f"{head}{packages}\n{dump(root)}" if packages else dump(root)


def scalar_text(value: Tree) -> str:
    """Returns a leaf as `dump` writes it behind its key.

    Example:
        >>> scalar_text(1e-5), scalar_text("no"), scalar_text(None)
        ('1.0e-05', "'no'", 'null')
    """
    return str(value) if type(value) is int else value_text(value)[1:-1]


def value_text(value: Tree) -> str:
    """Returns a tree as `dump` writes it behind its key, for a setting such as `--set path=VALUE`.

    Example:
        >>> print(value_text(Call("losses.huber", {"delta": 2.0})), end="")
         !losses.huber
          delta: 2.0
    """
    return dump(Call("value", {"": value})).partition(":")[2]


def computed(root: Call) -> Call:
    """Returns a tree without the arguments of its root that do not change what a run computes.

    Example:
        >>> computed(Call("experiment", {"steps": 100, "steps_per_call": 8})).kwargs
        {'steps': 100}
    """
    kept = {name: x for name, x in root.kwargs.items() if name not in _NOT_COMPUTED}
    return Call(root.name, kept, root.partial)


def digest(root: Call) -> str:
    """Returns the SHA-256 of the canonical YAML of `computed(root)`, in hexadecimal digits."""
    return hashlib.sha256(dump(computed(root)).encode()).hexdigest()


def diff(a: Call, b: Call) -> list[str]:
    """Lists the differences between two trees, a line per path.

    Example:
        >>> diff(Call("experiment", {"steps": 100}), Call("experiment", {"steps": 200, "seed": 1}))
        ['steps: 100 -> 200', 'seed: (absent) -> 1']
    """
    return list(_diff(a, b, ""))


# A run may change these when it continues.
_NOT_COMPUTED = ("steps_per_call",)

# Not None, which is a value of a config.
_ABSENT = object()


def _diff(a: Tree, b: Tree, path: str) -> Iterator[str]:
    if a is not _ABSENT and b is not _ABSENT and same(a, b):
        return
    if not isinstance(a, Call | dict) or _kind(a) != _kind(b):
        yield f"{path or 'experiment'}: {_shown(a)} -> {_shown(b)}"
        return
    old, new = child_trees(a), child_trees(b)
    for key in [*old, *(key for key in new if key not in old)]:
        yield from _diff(old.get(key, _ABSENT), new.get(key, _ABSENT), join(path, key))
    if isinstance(a, dict) and list(old) != list(new) and set(old) == set(new):
        yield f"{path}: the order {', '.join(map(str, old))} -> {', '.join(map(str, new))}"


def _kind(tree: Tree) -> Any:
    return (tree.name, tree.partial) if isinstance(tree, Call) else type(tree)


def _shown(tree: Tree) -> str:
    return "(absent)" if tree is _ABSENT else brief(tree)
