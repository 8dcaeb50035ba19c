"""A tree that is written as Gin is read again as the same tree."""

import pytest

from tests.runs import ROOT
from trainer.config import Call, load
from trainer.config.gin_writer import dump_gin
from trainer.config.vocabulary import RUN, SWEEP

CONFIGS = sorted(
    path
    for folder in ("configs", "experiments")
    for suffix in ("yaml", "gin")
    for path in (ROOT / folder).rglob(f"*.{suffix}")
    if ROOT / "configs" / "new" not in path.parents  # which name a package of a user
)


def read(text, tmp_path, language=RUN):
    file = tmp_path / "written.gin"
    file.write_text(text)
    return load([file], language=language)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_shipped_config_is_read_again_as_it_was(path, tmp_path):
    language = SWEEP if path.name.startswith("sweep") else RUN
    root = load([path], language=language).root
    assert read(dump_gin(root), tmp_path, language).root == root


def test_calls_of_one_function_get_scopes_of_their_own(tmp_path):
    def chain(*inner):
        return Call("optax.chain", {"args": [*inner]})

    def sgd(rate):
        return Call("optax.sgd", {"learning_rate": rate})

    tree = Call(
        "experiment",
        {
            "loss": Call("losses.huber", {"delta": 2.0}, partial=True),
            "optimizer": chain(sgd(0.1), chain(sgd(0.2), sgd(0.3)), Call("optax.sgd", {})),
            "hooks": [{"0 odd key!": Call("optax.identity", {}), "flag": True, "none": None}],
            "name": 'it\'s "quoted"\n\\',
        },
    )
    config = read(dump_gin(tree), tmp_path)
    assert config.root == tree
    assert not config.unused
