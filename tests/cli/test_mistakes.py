"""Every mistake of tests/mistakes.py gets a good answer before the first step."""

from pathlib import Path

import pytest

from tests.mistakes import MISTAKES, answer


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_before_the_first_step(name: str, tmp_path: Path):
    verdict, said = answer(MISTAKES[name], tmp_path)
    assert verdict == "good", said
