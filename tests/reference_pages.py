"""Writes the parts of the pages in docs/ that the code decides, and configs/schema.json.

`python -m tests.reference_pages` writes them: what is between `<!-- NAME: begin -->` and
`<!-- NAME: end -->` of a page. Tests compare them with the code.
"""

import argparse
import ast
import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests import compile_targets, laws_table
from trainer import protocols
from trainer.cli import options
from trainer.cli.optimizer_facts import COMPOSITIONS, Facts, families
from trainer.cli.optimizer_families import (
    OUR_SPACES,
    PIECES,
    PUBLISHED_SPACES,
    SearchSpace,
    published_entries,
)
from trainer.cli.optimizers import figures, needs_in_words
from trainer.config import Call, schema
from trainer.config.schema import argument_docs
from trainer.config.signatures import Function, Parameter, defining_module
from trainer.config.vocabulary import SWEEP, Vocabulary
from trainer.engine.experiment import Experiment
from trainer.sweep.ablation import Ablation
from trainer.sweep.branch import Branch
from trainer.sweep.definition import Arm, Claims, Final, Goal, Sweep
from trainer.sweep.ladder import Ladder

PAGES = Path(__file__).resolve().parent.parent / "docs"


def parts() -> dict[tuple[str, str], Callable[[], str]]:
    """Returns the parts: (page, name) -> what writes its Markdown."""
    return {
        ("commands.md", "list"): commands_list,
        ("commands.md", "commands"): commands,
        ("config_language.md", "experiment"): partial(keys, Experiment),
        ("config_language.md", "vocabulary"): vocabulary,
        ("groups.md", "compositions"): compositions,
        ("groups.md", "missing"): missing,
        ("laws.md", "laws"): laws_table.markdown,
        ("optimizers.md", "optimizers"): optimizer_families,
        ("optimizers.md", "search_spaces"): search_spaces,
        ("protocols.md", "protocols"): partial(quoted, protocols),
        ("sweeps.md", "sweep"): sweep_keys,
        ("sweeps.md", "spaces"): lambda: functions(listed("space", "method")),
        ("targets.md", "compiled"): compile_targets.markdown,
        ("targets.md", "slowest"): compile_targets.slowest,
    }


def bounds(text: str, name: str) -> tuple[int, int]:
    """Returns where the part of a page begins and ends, without its markers.

    Args:
        text: the page.
        name: the part.

    Raises:
        ValueError: the page has no such part.
    """
    begin = f"<!-- {name}: begin -->\n"
    return text.index(begin) + len(begin), text.index(f"<!-- {name}: end -->")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    Args:
        titles: the columns.
        rows: their cells, in Markdown.
    """
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """Returns a text of the code as Markdown in one line, in which no character is a mark.

    Args:
        text: a docstring or a help text.
    """
    text = re.sub(r":\w+:`~?([^`<]+?)(?: *<[^`]*>)?`_?", r"\1", " ".join(text.split()))
    spans = re.split(r"(``?[^`]+``?)", text)
    for index, span in enumerate(spans):
        if index % 2:
            code = span.strip("`").replace("|", "\\|")
            spans[index] = f"`{code}`"
        else:
            spans[index] = re.sub(r"([|<>*\[\]])", r"\\\1", span)
    return "".join(spans)


def code(text: str) -> str:
    """Returns a text as code in a cell of a table.

    Args:
        text: the code, without backticks.
    """
    return "`" + text.replace("|", "\\|") + "`"


# The commands.


def commands_list() -> str:
    """Writes what each command does, with the pages that show it in use."""
    shown: dict[str, list[str]] = {}
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        link = f"[{page.stem.replace('_', ' ')}]({page.name})"
        for name in dict.fromkeys(re.findall(r"python -m trainer (\w+|--config)", text)):
            name = "train" if name == "--config" else name
            shown.setdefault(name, []).append(link)
    rows = (
        (f"[{code(name)}](#{name})", plain(command.described), ", ".join(shown.get(name, [])))
        for name, command in _commands(options.parser())
        if " " not in name
    )
    return table(("command", "what it does", "in use"), rows)


def commands() -> str:
    """Writes the options of all commands, from the parsers themselves."""
    parser = options.parser()
    config = argparse.ArgumentParser(add_help=False)
    options._add(config, options._paragraphs()["@config"], vocabulary="")
    shared = {action.dest: action for action in _actions(config)}
    text = "## Options of a config\n\nThe commands that read a config take these options:\n\n"
    text += _options(config, shared.values())
    for name, command in _commands(parser):
        own = list(_actions(command.parser))
        takes_config = {action.dest for action in own} >= set(shared)
        if takes_config:
            own = [action for action in own if action.dest not in shared]
        text += f"\n## {name}\n\n{_sentence(command.described)}\n"
        if takes_config:
            text += "\nTakes the [options of a config](#options-of-a-config)"
            text += ", and:\n" if own else ".\n"
        text += f"\n{_options(command.parser, own)}" if own else ""
    return text


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: its parser, and what the list of commands says of it."""

    parser: argparse.ArgumentParser
    described: str


def _commands(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, Command]]:
    for group in parser._subparsers._group_actions if parser._subparsers else []:
        helps = {choice.dest: choice.help for choice in group._choices_actions}  # type: ignore[attr-defined]
        for name, command in (group.choices or {}).items():  # type: ignore[union-attr]
            full = f"{before}{name}"
            yield full, Command(command, helps[name])
            yield from _commands(command, f"{full} ")


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        hidden = action.help is argparse.SUPPRESS or action.dest in ("help", "version")
        if not hidden and not isinstance(action, argparse._SubParsersAction):
            yield action


def _options(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> str:
    expanded = parser._get_formatter()._expand_help  # "%%" is "%" in the text of --help

    def meaning(action: argparse.Action) -> str:
        required = action.option_strings and action.required
        return plain(expanded(action)) + ("; required" if required else "")

    return table(("option", "meaning"), ((_spelling(x), meaning(x)) for x in actions))


def _spelling(action: argparse.Action) -> str:
    names = list(action.option_strings) or [str(action.metavar)]
    if action.option_strings and action.nargs != 0:
        value = (
            "|".join(action.choices) if action.choices else action.metavar or action.dest.upper()
        )
        names = [f"{name}={value}" for name in names]
    if not action.option_strings and action.nargs in ("?", "*"):
        names = [f"[{names[0]}]"]
    if not action.option_strings and action.nargs == "+":
        names = [f"{names[0]}..."]
    return ", ".join(map(code, names))


def _sentence(text: str) -> str:
    return plain(f"{text[0].upper()}{text[1:]}") + "."


# The keys of the roots.


def keys(node: type) -> str:
    """Writes the table of the fields of a dataclass, which are the keys of a node of a config.

    Args:
        node: the dataclass, whose docstring describes each field under "Attributes".
    """
    described = argument_docs(node)
    fields = dataclasses.fields(node)
    assert [field.name for field in fields] == list(described), node
    rows = [(code(x.name), _field_default(x), plain(described[x.name])) for x in fields]
    return table(("key", "default", "meaning"), rows)


def sweep_keys() -> str:
    """Writes the tables of the nodes of a sweep."""
    text = keys(Sweep)
    for title, node in (
        ("An arm, one of `arms`; in Gin `@arm()`:", Arm),
        ("The `goal`:", Goal),
        ("The `final` runs; in Gin `@final()`:", Final),
        ("What runs keep for [claims](claims.md), below `claims`:", Claims),
        ("The `ladder`, if the arms are compared on [several rungs](ladders.md):", Ladder),
        ("The state of a run that a [branch](#branches) continues, below `branch`:", Branch),
        ("What an [ablation](#ablations) takes out, below `ablate`:", Ablation),
    ):
        text += f"\n{title}\n\n{keys(node)}"
    return text


def _field_default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return code(spelled(field.default_factory()))
    return "" if field.default is dataclasses.MISSING else code(spelled(field.default))


def spelled(value: Any) -> str:
    """Returns a default as a config in Gin or YAML writes it, or else a name.

    Args:
        value: the default.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__.lower()}()"
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        return "a function" if name == "<lambda>" else name
    if " at 0x" in repr(value):  # an object that holds functions
        return f"a {type(value).__name__}"
    return re.sub(r"\(.*\)", lambda tuple_: f"[{tuple_[0][1:-1].rstrip(',')}]", repr(value))


# What a config may name.


def vocabulary() -> str:
    """Writes the tables of what a config of a run may name."""
    text = ""
    for title, prefixes in (
        ("Models", ["models"]),
        ("Data", ["data"]),
        ("Losses", ["losses"]),
        ("Metrics", ["metrics"]),
        ("Hooks", ["hooks"]),
    ):
        text += f"### {title}\n\n{functions(listed(*prefixes))}\n"
    text += f"### Schedules\n\n{functions([*listed('schedules'), *_optax_schedules()])}\n"
    ours = listed("optim")
    nodes = [name for name in ours if name in ("optim.optimizer", "optim.group", "optim.frozen")]
    text += f"### Groups of optimizers\n\n{functions(nodes)}\n"
    text += f"### Parts of optimizers\n\n{functions(listed('parts'))}\n"
    optimizers = [*(name for name in ours if name not in nodes), *_optax_optimizers()]
    return f"{text}### Optimizers\n\n{functions(optimizers)}"


def listed(*prefixes: str) -> list[str]:
    """Returns the functions and classes that a config may name, of some modules.

    Args:
        prefixes: the names of the modules in a config, such as "models".
    """
    import importlib

    found = []
    for prefix in prefixes:
        module = importlib.import_module(SWEEP.modules[prefix])
        found += [
            f"{prefix}.{name}"
            for name in module.__all__
            if isinstance(getattr(module, name), types.FunctionType | type)
        ]
    return found


def _optax_optimizers() -> list[str]:
    """Returns the optimizers of optax in the table of laws that have a learning rate."""
    rows = [*laws_table.ROWS, *(row for row, _ in laws_table.REFUSED)]
    names = [re.match(r"optax(\.contrib)?\.\w+(?= \(|$)", row.name) for row in rows]
    found = dict.fromkeys(name[0] for name in names if name)
    return [name for name in found if _has_rate(Vocabulary().function(name))]


def _has_rate(function: Function) -> bool:
    return any("learning_rate" in name for name in function.parameters)


def _optax_schedules() -> list[str]:
    import optax

    return [
        f"optax.{name}"
        for name, value in sorted(vars(optax).items())
        if inspect.isfunction(value)
        and value.__module__.startswith("optax.schedules")
        and not name.startswith("inject")
    ]


def functions(names: Iterable[str]) -> str:
    """Writes a table of functions.

    Args:
        names: their names in a config.
    """
    found = Vocabulary(language=SWEEP)
    rows = (_row(found.function(name)) for name in names)
    return table(("name", "description and module", "arguments"), rows)


def _row(function: Function) -> tuple[str, str, str]:
    arguments = [_argument(*item) for item in function.parameters.items()]
    listing = ", ".join(map(code, arguments))
    # The modules of optax that define its functions are private.
    name, module = function.name, defining_module(function.call)
    public = name.rpartition(".")[0] if name.startswith("optax.") else module
    return code(name), f"{first_sentence(function.call)}<br>{code(public)}", listing


def _argument(name: str, parameter: Parameter) -> str:
    return name if parameter.required else f"{name}={_default(parameter)}"


def _default(parameter: Parameter) -> str:
    return "[]" if parameter.default is inspect.Parameter.empty else spelled(parameter.default)


def first_sentence(call: Callable[..., Any]) -> str:
    """Returns the first sentence of a docstring, in Markdown.

    Args:
        call: the function, or a partial of it.
    """
    call = getattr(call, "func", call)
    paragraph = " ".join((inspect.getdoc(call) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[\w)]\.) (?=[A-Z])", paragraph)[0]
    return plain(sentence if sentence.endswith(".") else f"{sentence}.")


# The optimizers.


def optimizer_families() -> str:
    """Writes the tables of optimizers, one for each family, and the names of their pieces."""
    text, unknown = "", {}
    for family, members in families().items():
        rows = []
        for facts in members:
            state, flops, why = figures(facts)
            rows.append((code(facts.name), state, flops, _needed(facts), _papers(facts)))
            unknown.setdefault(why, []).append(code(facts.name))
        titles = ("name", "state, bytes", "FLOPs", "needs", "papers")
        text += f"### {family}\n\n{table(titles, rows)}\n"
    text += "### Where FLOPs are not given\n\n"
    text += "".join(f"- {why}: {', '.join(names)}.\n" for why, names in unknown.items() if why)
    for title, names in PIECES.items():
        text += f"\n### {plain(title)}\n\n{', '.join(map(code, names))}.\n"
    return text


def _needed(facts: Facts) -> str:
    inside = [f"with {', '.join(map(code, facts.inside))}"] if facts.inside else []
    return "; ".join([*filter(None, [needs_in_words(facts)]), *inside])


def _papers(facts: Facts) -> str:
    found = []
    for each in facts.references:
        address = re.search(r"(?:https?://|www\.)[^\s,;]+", each.text)
        link = address[0].rstrip(".") if address else ""
        link = f"https://{link}" if link.startswith("www") else link
        found.append(f"[{plain(each.short)}]({link})" if link else plain(each.short))
    return "; ".join(found)


def compositions() -> str:
    """Writes the table of published names, with the parts of each and what it was compared with."""
    rows = []
    for facts in families()[COMPOSITIONS]:
        entry = facts.composition
        assert entry is not None
        given = {**entry.optimizer.kwargs}
        given.pop("learning_rate", None)
        is_chain = entry.optimizer.name == "optim.chain"
        before = given["before"] if is_chain else [given.get("lookahead", entry.optimizer)]
        cells = [
            ", ".join(code(_flow(x)) for x in found) for found in (before, given.get("after", []))
        ]
        remark = plain(entry.remark)
        compared = f"row {code(entry.compared)}" if entry.compared else ""
        rows.append(
            (
                f"{facts.name} ({_papers(facts)})",
                *cells,
                "; ".join(filter(None, (compared, remark))),
            )
        )
    return table(
        (
            "name",
            "`before`, or the call",
            "`after`",
            "compared in [references](references.md), and remarks",
        ),
        rows,
    )


def _flow(tree: Any) -> str:
    """Returns a tree on one line, and the name of a part without "parts."."""
    if isinstance(tree, Call):
        name = tree.name.removeprefix("parts.")
        return f"{name} {_flow(dict(tree.kwargs))}" if tree.kwargs else name
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key}: {_flow(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return f"[{', '.join(map(_flow, tree))}]"
    return str(tree).lower() if isinstance(tree, bool) else str(tree)


def missing() -> str:
    """Writes which published names Lockstep does not have, and why."""
    entries = [entry for entry in published_entries() if entry.missing]
    return "".join(f"- {x.name} ({plain(x.paper)}): {plain(x.missing)}.\n" for x in entries)


def search_spaces() -> str:
    """Writes the tables of search spaces: those of studies, and ours."""
    rows = [
        (code(name), _axes(space), plain("; ".join(filter(None, (space.source, space.remark)))))
        for name, spaces in PUBLISHED_SPACES.items()
        for space in spaces
    ]
    text = f"### Of studies\n\n{table(('optimizer', 'space', 'source'), rows)}\n"
    ours = [(code(name), _axes(space), plain(space.remark)) for name, space in OUR_SPACES.items()]
    return f"{text}### Ours\n\n{table(('optimizer', 'space', 'why'), ours)}"


def _axes(space: SearchSpace) -> str:
    lines = (f"{axis}: {text}" if axis else text for axis, text in space.axes.items())
    return "<br>".join(map(code, lines))


# The protocols.


def quoted(module: types.ModuleType) -> str:
    """Writes the classes of a module as they stand in its file.

    Args:
        module: the module.
    """
    source = inspect.getsource(module)
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    text = "\n\n\n".join(str(ast.get_source_segment(source, node)) for node in classes)
    return f"<!-- not run: a copy of {module.__name__} -->\n```python\n{text}\n```\n"


def _write(path: Path, text: str) -> None:
    if path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        print(f"changed: {path.relative_to(PAGES.parent)}")


if __name__ == "__main__":
    for (page, name), written in parts().items():
        whole = (PAGES / page).read_text(encoding="utf-8")
        begin, end = bounds(whole, name)
        _write(PAGES / page, whole[:begin] + written() + whole[end:])
    _write(PAGES.parent / "configs" / "schema.json", schema.schema_text())
