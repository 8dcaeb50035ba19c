"""The command optimizers: complete lists, true figures, configs and spaces to paste."""

import math
import re
from functools import partial
from pathlib import Path

import optax
import pytest

import optim
from optim import parts
from tests import laws_table, runs, short
from tests.laws_table import NOT_ROWS, ROWS
from trainer.__main__ import main
from trainer.cli import optimizer_facts, optimizer_families
from trainer.cli.optimizer_facts import Facts, families, find_optimizer
from trainer.cli.optimizer_families import FAMILIES, OUR_SPACES, PIECES, PUBLISHED_SPACES
from trainer.cli.optimizers import space_block
from trainer.config import Builder, gin_writer, load, yaml_writer
from trainer.config.schema import is_optimizer
from trainer.config.vocabulary import Vocabulary
from trainer.engine.flops import KERNEL, follows_schedules, measure_optimizer, measure_part
from trainer.messages import UserError

# Of optax itself: optimistic_adam is deprecated, and the seed that contrib.dpsgd takes.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")

M, N = KERNEL
LISTED = [*(name for names in FAMILIES.values() for name in names)]
LISTED += [f"parts.{name}" for name in parts.__all__]
PASTED = [*LISTED, *next(iter(PIECES.values()))]


def public_optimizers():
    """Returns what returns an optimizer by its annotation, or might by the tables of the laws."""
    found = Vocabulary()
    names = [name for root in ("optim", "optax", "optax.contrib") for name in found.names(root)]
    makes = {name for name in names if is_optimizer(found.function(name))}
    return makes | {name for name, _ in laws_table.factories() if name not in NOT_ROWS}


def tabled():
    return [name for table in (FAMILIES, PIECES) for names in table.values() for name in names]


# The tables.


def test_every_public_optimizer_is_in_one_family():
    # Functions of moments, which the table of laws knows; they make nothing.
    missing = public_optimizers() - set(tabled()) - {"optax.update_moment"}
    assert not missing, f"Put these into optim/families.yaml: {sorted(missing)}"
    assert len(tabled()) == len(set(tabled()))


def test_a_new_optimizer_of_optax_is_noticed(monkeypatch):
    def brand_new(learning_rate: float) -> optax.GradientTransformation:
        return optax.sgd(learning_rate)

    brand_new.__module__ = "optax._src.alias"
    monkeypatch.setattr(optax, "brand_new", brand_new, raising=False)
    assert "optax.brand_new" in public_optimizers() - set(tabled())


def test_every_name_in_a_table_exists():
    found = Vocabulary()
    spaces = {**PUBLISHED_SPACES, **OUR_SPACES}
    for name in {*tabled(), *optimizer_families.EXAMPLES, *optimizer_families.AFTER, *spaces}:
        assert found.function(name).name == name
    assert not set(PUBLISHED_SPACES) & set(OUR_SPACES)


# Figures.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("optax.sign_sgd", 0),
        ("optax.sgd", 4),  # one momentum in float32
        ("optax.adamw", 8),
        ("optax.amsgrad", 12),
        ("optim.muon", 4),
        ("optax.lookahead", 8 + 4),  # Adam's, and the slow weights
        # Two moments; L, R and their eigenvectors.
        ("optim.soap", 8 + 4 * 2 * (M * M + N * N) / (M * N)),
        # A mean square for each row and each column.
        ("optax.adafactor", 4 * (M + N) / (M * N)),
        # 10 differences of parameters and of gradients, the last of both, and that of the search.
        ("optax.lbfgs", 4 * (2 * 10 + 2 + 1)),
        ("parts.momentum", 4),
        ("parts.normalize", 4 * N / (M * N)),
    ],
)
def test_the_state_is_that_of_the_paper(name, expected):
    cost = find_optimizer(name)[0].cost
    assert cost is not None
    assert cost.state_bytes == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        # Counted by hand, each + - * / and root as one.
        (partial(optax.sgd, learning_rate=0.1), 2),  # -lr g; w + u
        (partial(optax.sgd, learning_rate=0.1, momentum=0.9), 4),  # and mu m + g
        # m 3, v 4, both corrected 2, + eps_root, root, + eps and / 4, decay 2, -lr, w + u.
        (partial(optax.adamw, learning_rate=0.1), 17),
    ],
)
def test_elementwise_operations_are_counted_as_by_hand(recipe, expected):
    assert measure_optimizer(recipe).flops == pytest.approx(expected, abs=1e-4)


def gram(steps):
    """Two products with the matrix; of a step four of m x m, without the first Q and last R."""
    return 2 * 2 * M * M * N + (4 * steps - 3) * 2 * M**3


@pytest.mark.parametrize(
    ("recipe", "products"),
    [
        # Each step of Newton-Schulz: X X^T, its square, and the product with X.
        (partial(optax.contrib.muon, learning_rate=0.1), 5 * (2 * 2 * M * M * N + 2 * M**3)),
        (
            partial(optax.contrib.muon, learning_rate=0.1, ns_steps=2),
            2 * (4 * M * M * N + 2 * M**3),
        ),
        (partial(optim.muon, learning_rate=0.1), gram(5)),
        (partial(optim.muon, learning_rate=0.1, ns_steps=3), gram(3)),
    ],
    ids=["optax", "optax, 2 steps", "ours", "ours, 3 steps"],
)
def test_matrix_products_of_muon_are_those_of_its_formula(recipe, products):
    flops = measure_optimizer(recipe).flops
    assert flops is not None
    elementwise = flops - products / (M * N)
    assert 5 < elementwise < 40


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("optim.soap", r"eigh, qr"),
        ("optim.shampoo", r"eigh"),
        ("optax.contrib.galore", r"svd"),
        ("optax.lbfgs", "value_fn"),
        ("optax.contrib.sophia", "obj_fn"),
        ("optax.contrib.sam", "grad_fn"),
        ("optax.contrib.dpsgd", "examples of a batch"),
        ("optax.noisy_sgd", "random"),
        ("optax.MultiSteps", "more in some steps"),
    ],
)
def test_flops_that_cannot_be_counted_are_not_given(name, why):
    cost = find_optimizer(name)[0].cost
    assert cost is not None and cost.flops is None
    assert re.search(why, cost.why)


def test_a_loop_of_unknown_length_is_not_counted():
    import jax

    def looped():
        def update(updates, state, params=None):
            del params
            again = lambda x: jax.tree.map(lambda u: 0.5 * u, x)  # noqa: E731
            large = lambda x: sum(map(abs, map(lambda u: u.sum(), x.values()))) > 1.0  # noqa: E731
            return jax.lax.while_loop(large, again, updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    cost = measure_part(partial(looped))
    assert cost.flops is None and "loop" in cost.why


# Integers, keys and elements of tuples, to which the laws give no schedule.
NOT_IN_THE_LAWS = {
    "optax.noisy_sgd": ["key"],
    "optax.lookahead": ["sync_period"],
    "optax.contrib.dog": ["init_step"],
    "optax.contrib.muon": ["ns_coeffs"],
}


@short.parametrize("row", ROWS, lambda row: row.family, ids=lambda row: row.name)
def test_needs_and_schedules_are_those_of_the_table_of_laws(row):
    if row.params == "complex":
        pytest.skip("the kernel is real")
    needs = measure_optimizer(row.recipe).needs
    assert ("matrices" in needs) == (row.params == "matrices")
    assert ("at least one axis" in needs) == (row.params == "no scalar")
    assert ("gradients of single examples" in needs) == row.per_example
    extras = ("value", "value_fn", "obj_fn", "grad_fn", "observations")
    assert set(needs) & {*extras} == set(row.needs) - {"grad"}
    if not row.name.startswith(("optax.chain", "optim.chain")):
        follows = follows_schedules(row.recipe, row.recipe.func)
        cannot = {name for name, able in follows.items() if not able}
        assert cannot == {*row.fixed, *NOT_IN_THE_LAWS.get(row.name, ())}


# What can be pasted.


def pasted(facts: Facts, folder: Path) -> Path:
    """Writes a config to paste in both languages, which say the same; returns the file in Gin."""
    assert facts.config is not None
    files = folder / "pasted.yaml", folder / "pasted.gin"
    files[0].write_text(yaml_writer.dump(facts.config.root))
    files[1].write_text(gin_writer.dump_gin(facts.config.root))
    in_yaml, in_gin = (load([file]) for file in files)
    assert in_yaml.root == in_gin.root == facts.config.root
    return files[1]


@short.parametrize("name", PASTED, laws_table.family_of)
def test_the_config_to_paste_runs_in_both_languages(name, tmp_path, capsys):
    facts, _ = find_optimizer(name)
    assert facts.name == name
    file = pasted(facts, tmp_path)
    assert name in file.with_suffix(".yaml").read_text()
    if name in LISTED:
        assert main(["explain", f"--config={file}"]) == 0, capsys.readouterr().err
    else:
        Builder(load([file])).check()


@short.parametrize("name", sorted({*PUBLISHED_SPACES, *OUR_SPACES}), laws_table.family_of)
def test_the_space_to_paste_fits_the_config_to_paste(name, tmp_path, capsys):
    facts, _ = find_optimizer(name)
    assert facts.config is not None and facts.spaces
    (tmp_path / "base.yaml").write_text(yaml_writer.dump(facts.config.root))
    for space in facts.spaces:
        block = "\n".join(f"  {line}" for line in space_block(facts, space))
        (tmp_path / "sweep.yaml").write_text(
            f"base: base.yaml\nset: {{data.validation: 0.2}}\narms:\n  one:\n{block}\n"
            "trials: 2\nmethod: !method.random {}\ngoal: {metric: loss, mode: min}\n"
        )
        code = main(["sweep", f"--config={tmp_path / 'sweep.yaml'}", "--check"])
        assert code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "axis", "low", "high"),
    # The ends of one_minus_beta1 in the file that is the source.
    [
        ("optax.adamw", "b1", 0.02, 0.5),
        ("optax.nadamw", "b1", 0.004, 0.1),
        ("optax.lamb", "b1", 0.05, 0.3),
        ("optim.shampoo", "b1", 0.01, 0.15),
        ("optax.contrib.sam", "optimizer.b1", 0.05, 0.43),
        ("optax.sgd", "momentum", 0.005, 0.3),
    ],
)
def test_momentums_have_equal_ratios_between_the_ends_of_the_source(name, axis, low, high):
    text = PUBLISHED_SPACES[name][0].axes[axis]
    values = [float(each) for each in re.findall(r"\d\.\d+", text)]
    expected = [1 - high * (low / high) ** (n / 4) for n in range(5)]
    assert values == pytest.approx(expected, abs=6e-4)


def test_a_space_of_ours_is_a_decade_around_its_point():
    for space in OUR_SPACES.values():
        ((axis, text),) = space.axes.items()
        low, high = (float(each) for each in re.findall(r"(?<=: )[\d.e-]+", text))
        assert axis and space.around is not None and not space.source
        assert math.log10(high / low) == pytest.approx(1, abs=0.05)
        assert low < space.around < high


# The command.


@pytest.mark.long
def test_the_list_has_every_optimizer_and_part(capsys):
    text = runs.printed(capsys, "optimizers")
    rows = {line.split()[0]: line.split() for line in text.split("\n") if line.startswith("  ")}
    assert set(LISTED) <= set(rows)
    assert rows["optax.adamw"][1:3] == ["8", "17"]
    assert rows["optim.soap"][1:4] == ["42", "-", "matrices;"]
    assert "Loshchilov et al. arXiv:1711.05101" in text
    assert all(piece in text for names in PIECES.values() for piece in names)


def test_a_page_has_what_a_user_needs(capsys):
    text = runs.printed(capsys, "optimizers", "muon")
    assert text.startswith("optim.muon: Updates matrices along their orthogonalized momentum")
    for words in (
        "Of the same name: optax.contrib.muon.",
        "Needs: kernels in a group of their own: it takes matrices only.",
        "State: 4 bytes for each element of a float32 kernel of 768x3072.",
        "    M <- momentum * M + (1 - momentum) * G",
        "  momentum: default 0.95; a float, for a sweep or a schedule",
        "  ns_steps: default 5\n",
        "      optimizer: !optim.muon\n",
        "  optim.muon.learning_rate = 0.032",
        "optimizer.groups.matrices.optimizer.learning_rate: !space.values",
        "marin-community/marin",
        "https://kellerjordan.github.io/posts/muon/",
    ):
        assert words in text, words


def test_a_float_that_sets_the_first_state_follows_no_schedule(capsys):
    text = runs.printed(capsys, "optimizers", "optax.contrib.prodigy")
    assert "estim_lr0: default 1.0e-06; a float, for a sweep; no schedule" in text
    assert "learning_rate: default 1.0; a float, for a sweep or a schedule" in text
    assert "ours: none is published" in text


def test_a_default_that_is_an_object_is_named(capsys):
    text = runs.printed(capsys, "optimizers", "sophia")
    assert "hessian_diagonal_fn: default GradientTransformationExtraArgs\n" in text
    assert " at 0x" not in text
    assert "Needs: derivatives of the loss (obj_fn), which Lockstep passes on." in text


@pytest.mark.parametrize("name", [name for name in tabled() if name not in PASTED])
def test_a_piece_without_a_config_has_a_page(name, capsys):
    text = runs.printed(capsys, "optimizers", name)
    assert text.startswith(f"{name}: ") and "There is no config to paste" in text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("adamw", "optax.adamw"),
        ("optax.contrib.muon", "optax.contrib.muon"),
        ("contrib.muon", "optax.contrib.muon"),
        ("muon", "optim.muon"),
        ("floor", "parts.floor"),
        ("optim.parts.floor", "parts.floor"),
        ("scale_by_adam", "optax.scale_by_adam"),
    ],
)
def test_short_names_are_found(given, found):
    assert find_optimizer(given)[0].name == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("adamww", "There is no optimizer 'adamww'. Did you mean 'optax.adamw'?"),
        ("optax.muno", "There is no optimizer 'optax.muno'. Did you mean"),
        ("models.mlp", "models.mlp is a function that a config may name, but not an optimizer."),
        ("my_lab.qqqq", "add --vocabulary=PACKAGE to the command"),
    ],
)
def test_an_unknown_name_is_a_mistake_with_advice(given, words, capsys):
    error = runs.refused(capsys, "optimizers", given)
    assert words in error and "python -m trainer optimizers lists all" in error
    assert "Traceback" not in error and error.count("\n") <= 3


LAB = '''
"""Optimizers of a lab."""
import optax

def halved(learning_rate: float, share: float = 0.5) -> optax.GradientTransformation:
    """Halves the step of SGD.

    One step is

        W <- W - share * learning_rate * G

    Args:
        learning_rate: the rate.
        share: the factor.
    """
    return optax.sgd(learning_rate * share)

def chosen(kind: str) -> optax.GradientTransformation:
    return optax.sgd(0.1)

def unannotated(learning_rate):
    return optax.sgd(learning_rate)

def broken(learning_rate: float) -> optax.GradientTransformation:
    raise KeyError("no such rate")
'''


@pytest.mark.long
def test_a_function_of_a_package_of_the_user(tmp_path, monkeypatch, capsys):
    (tmp_path / "lab_of_optimizers.py").write_text(LAB)
    monkeypatch.syspath_prepend(str(tmp_path))
    option = "--vocabulary=lab_of_optimizers"
    text = runs.printed(capsys, "optimizers", "halved", option)
    assert "W <- W - share * learning_rate * G" in text
    assert "FLOPs: 3 " in text or "FLOPs: 2 " in text
    assert "optimizer: !lab_of_optimizers.halved" in text
    assert main(["optimizers", "lab_of_optimizers.chosen", option]) == 0
    assert "the values of kind are for you to choose" in capsys.readouterr().out
    assert main(["optimizers", "unannotated", option]) == 0
    (tmp_path / "lab_of_modules").mkdir()
    (tmp_path / "lab_of_modules" / "__init__.py").write_text("")
    text = runs.printed(capsys, "optimizers", option, "--vocabulary=lab_of_modules")
    assert "lab_of_optimizers.halved" in text and "lab_of_optimizers.chosen" in text
    assert "no such rate" in text
    assert "none at its top level; lab_of_modules.MODULE.NAME is" in text
    text = runs.printed(capsys, "optimizers", "broken", option)
    assert "There is no config to paste" in text and "no such rate" in text


def test_the_command_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "list what a config can name as an optimizer" in capsys.readouterr().out
    assert not [each for each in families() if each in PIECES]
    with pytest.raises(UserError, match="There is no optimizer"):
        find_optimizer("nothing_like_it")
    with pytest.raises(UserError, match="in a module of json, write json.MODULE.trust_sign"):
        find_optimizer("trust_sign", ["json"])
    assert isinstance(find_optimizer("sgd")[0], Facts) and optimizer_facts.PARTS in families()
