"""Every mistake in a config is told with its place, what was given, what exists and what to do."""

import re
from pathlib import Path

import pytest

from trainer.config import Builder, ConfigError, load

GIN = """\
experiment:
  model = @models.mlp()
  data = @data.digits()
  loss = @losses.softmax_cross_entropy()
  optimizer = @optim.optimizer()
  steps = 100
optim.optimizer.groups = {
    'matrices': @matrices/optim.group(),
    'rest': @rest/optim.group(),
}
matrices/optim.group:
  match = '.*kernel'
  optimizer = @optax.contrib.muon()
rest/optim.group:
  match = '.*'
  optimizer = @optax.adamw()
matrices/optax.contrib.muon.learning_rate = 0.02
rest/optax.adamw.learning_rate = 1e-3
"""
YAML = """\
model: !models.mlp
data: !data.digits
loss: !losses.softmax_cross_entropy
steps: 100
optimizer: !optim.optimizer
  groups:
    matrices: !optim.group
      match: .*kernel
      optimizer: !optax.contrib.muon
        learning_rate: 0.02
    rest: !optim.group
      match: .*
      optimizer: !optax.adamw
        learning_rate: 1e-3
"""
# name: (a change of the Gin text, or None; of the YAML text, or None; what the message says)
# A change is (old, new): where old is "", new is a line at the end.
MISTAKES = {
    "unknown function": (
        ("@optax.adamw()", "@optax.adamww()"),
        ("!optax.adamw", "!optax.adamww"),
        ["a:16: ", "a.yaml:13: "],
        "There is no function 'optax.adamww'. Did you mean 'optax.adamw'?",
    ),
}


def test_the_config_without_a_mistake_is_accepted(tmp_path):
    for name, text in {"a.gin": GIN, "a.yaml": YAML}.items():
        (tmp_path / name).write_text(text)
        Builder(load([tmp_path / name])).check()
