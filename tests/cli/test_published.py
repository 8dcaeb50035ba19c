"""Published names: what they paste runs, and is what the tests compared with other programs."""

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import optax
import optax.contrib
import pytest
import yaml

import optim
from tests import runs, short
from tests.cli.test_optimizers import pasted
from tests.runs import ROOT
from trainer.__main__ import main
from trainer.cli.optimizer_facts import COMPOSITIONS, calls, families, find_optimizer
from trainer.cli.optimizer_families import Published, published_entries
from trainer.config import Builder, Call
from trainer.config.vocabulary import Vocabulary
from trainer.messages import UserError

HELD = {entry.name: entry for entry in published_entries() if not entry.missing}
COMPARED = [name for name, entry in HELD.items() if entry.compared]
# Of a wrapper of all groups, a row of docs/references.md has what wraps them.
GROUPS = ("optim.optimizer", "optim.group", "optax.adamw", "optim.muon")
# W - learning_rate * (U + rate * W), whether it is added to U or to the step.
DECAYS = ("parts.decay", "optax.add_decayed_weights")


def rows() -> Iterator[list[str]]:
    """Yields the cells of each row of the tables of docs/references.md."""
    for line in (ROOT / "docs/references.md").read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def made_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the calls of a Python expression, with their words and switches by argument."""
    found = []
    for node in ast.walk(ast.parse(text, mode="eval")):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        function = eval(name, {"optim": optim, "optax": optax})  # noqa: S307
        given = inspect.signature(function).bind_partial(
            *node.args, **{word.arg: word.value for word in node.keywords if word.arg}
        )
        found.append((name.replace("optim.parts.", "parts."), _words(given.arguments, function)))
    return found


def _words(arguments: dict[str, Any], function: Any) -> dict[str, Any]:
    """Keeps what is no number and no default."""
    defaults = inspect.signature(function).parameters
    values = {
        name: value.value if isinstance(value, ast.Constant) else value
        for name, value in arguments.items()
    }
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | str) and value != defaults[name].default
    }


def of_entry(entry: Published) -> list[tuple[str, dict[str, Any]]]:
    vocabulary = Vocabulary()
    return [
        (call.name, _words(dict(call.kwargs), vocabulary.function(call.name).call))
        for _, call in calls(entry.optimizer)
    ]


def in_order(found: list[tuple[str, dict[str, Any]]], without: tuple[str, ...]) -> list[Any]:
    kept = [(name, sorted(words.items())) for name, words in found if name not in without]
    return sorted(kept, key=repr)


@pytest.mark.parametrize("name", COMPARED)
def test_it_is_what_was_compared_with_another_program(name):
    entry = HELD[name]
    found = [cells[0].strip("`") for cells in rows() if entry.compared in cells[1:3]]
    assert found, f"docs/references.md has no row {entry.compared!r}."
    groups = GROUPS if entry.optimizer.name == "optim.optimizer" else ()
    ours = in_order(of_entry(entry), (*groups, *DECAYS))
    assert ours in [in_order(made_of(text), (*groups, *DECAYS)) for text in found]


def test_another_word_is_noticed():
    text = "optim.chain(rate, [optim.parts.polar([2.0, -1.5, 0.5], 12, norm='gram')])"
    assert made_of(text) == [("optim.chain", {}), ("parts.polar", {"norm": "gram"})]
    assert made_of(text.replace("gram", "frobenius"))[1] == ("parts.polar", {})
    assert made_of("optim.parts.momentum(0.9, False)") == [("parts.momentum", {"nesterov": False})]


@short.parametrize("name", HELD, lambda name: HELD[name].optimizer.name)
def test_what_is_pasted_runs_in_both_languages_and_can_be_searched(name, tmp_path, capsys):
    facts, others = find_optimizer(name)
    assert facts.name == name and not others and facts.config is not None
    assert main(["explain", f"--config={pasted(facts, tmp_path)}"]) == 0, capsys.readouterr().err
    (space,) = facts.spaces
    assert isinstance(facts.config.at(f"{facts.path}.{next(iter(space.axes))}"), float)


@pytest.mark.parametrize("name", HELD)
def test_its_arguments_are_those_of_the_functions(name):
    facts, _ = find_optimizer(name)
    assert facts.config is not None
    Builder(facts.config).check()


def test_no_published_name_hides_a_function():
    for entry in published_entries():
        assert published_only(entry.name), f"{entry.name} is found as a function."
        assert bool(entry.missing) != bool(entry.optimizer.name), entry.name
        assert entry.paper and not (entry.missing or entry.summary).endswith("."), entry.name


def published_only(name: str) -> bool:
    try:
        return find_optimizer(name)[0].composition is not None
    except UserError as error:
        return str(error).startswith(f"{name} (")


@pytest.mark.parametrize("given", ["normuon", "NORMUON", "Nor-Muon", "nor_muon"])
def test_case_and_punctuation_do_not_matter(given, capsys):
    text = runs.printed(capsys, "optimizers", given)
    assert "row 'normuon.py of zichongli5/NorMuon at d45c9a42' of" in " ".join(text.split())
    assert text.startswith("NorMuon: Muon whose updates are divided")
    for words in (
        "https://arxiv.org/abs/2510.05491",
        "  parts.normalize: Divides each output's updates",
        "            - !parts.normalize\n",
        "  before = [@parts.momentum(), @parts.polar(), @parts.normalize()]",
        "optimizer.groups.matrices.optimizer.learning_rate: !space.log_uniform {low: 0.006,",
    ):
        assert words in text, words


def test_what_is_missing_says_why(capsys):
    error = " ".join(runs.refused(capsys, "optimizers", "circuit muon").split())
    assert error.startswith("error: Circuit-Muon (result 41 of modded")
    assert "no part that couples values" in error


def test_a_near_name_is_suggested(capsys):
    assert "Did you mean 'NorMuon'?" in runs.refused(capsys, "optimizers", "normuno")


def test_the_list_has_a_section_of_them():
    assert [facts.name for facts in families()[COMPOSITIONS]] == list(HELD)


def test_the_study_of_contenders_compares_what_was_published():
    arms = yaml.load((ROOT / "experiments/contenders_gpt/sweep.yaml").read_text(), _Loader)["arms"]
    for arm in ("normuon", "muonh", "soap_h"):
        before = arms[arm]["set"]["optimizer.groups.matrices.optimizer"].kwargs["before"]
        composition = find_optimizer(arm)[0].composition
        assert composition is not None
        ours = Published("", "", optimizer=Call("optim.chain", {"before": before}))
        theirs = Call("optim.chain", {"before": composition.optimizer.kwargs["before"]})
        assert of_entry(ours) == of_entry(composition._replace(optimizer=theirs))


class _Loader(yaml.SafeLoader):
    """Reads a file of a sweep with its calls."""


def _call(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> Call:
    items = loader.construct_mapping(node, deep=True) if isinstance(node, yaml.MappingNode) else {}
    return Call(suffix, items)


_Loader.add_multi_constructor("!", _call)
