"""The folder in which tests plan sweeps."""

from pathlib import Path

import pytest

from tests.sweep.test_sweep_plan import BASE, BASE_GIN


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Has base.yaml and base.gin, the configs that the sweeps of a test vary."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "base.gin").write_text(BASE_GIN)
    return tmp_path
