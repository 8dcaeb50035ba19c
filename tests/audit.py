"""Calls everything that a config may name of ours and of optax, and notes what each of them does.

`python -m tests.audit DATA CACHE` prints JSON: for each name whether a call succeeded, and what
calls of it did to files, folders, sockets and processes. An audit hook of Python sees that. What
Python itself opens to import a module or to show a line of source does not count.
"""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from trainer.config import Builder, Units, load
from trainer.config.vocabulary import RUN, SWEEP, Vocabulary, _public_names
from trainer.sweep import methods, spaces

ACTS = ("open", "os.", "shutil.", "socket.", "subprocess.", "tempfile.", "glob.", "pathlib.")
ACTS += (
    "urllib.",
    "http.",
    "ftplib.",
    "webbrowser.",
    "signal.",
    "fcntl.",
    "mmap.",
    "ctypes.dlopen",
)
SGD = "!optax.sgd {learning_rate: 0.1}"
INTEGERS = "!space.integers {low: 1, high: 2}"

# What our functions are called with; a function that needs nothing may be called with nothing.
ARGUMENTS: dict[str, list[str]] = {
    "optim.GroupError": ["{message: no}"],
    "optim.Optimizer": ["{groups: {all: !optim.group {match: .*, optimizer: SGD}}}"],
    "optim.optimizer": ["{groups: {all: !optim.group {match: .*, optimizer: SGD}}}"],
    "optim.group": ["{match: .*, optimizer: SGD}"],
    "optim.cautious": ["{base_optimizer: SGD}"],
    "optim.grams": ["{base_optimizer: SGD}"],
    "optim.chain": ["{learning_rate: 0.1, before: [!parts.momentum {}]}"],
    "optim.outer_nesterov": ["{learning_rate: 0.5, momentum: 0.5, every: 2}"],
    "parts.soap": ["{}", "{b1: 0.9, every: 10, first: skip, length: free}"],
    "parts.trust_gate": ["{around: !parts.soap {}}"],
    "parts.momentum_mixture": ["{decays: [0.9, 0.99], weights: [0.5, 0.5]}"],
    "parts.adam": [
        "{}",
        "{bias_correction: false, nesterov: true}",
        "{b1: null, b2: 1.0, squares: gradient}",
    ],
    "parts.decay": ["{rate: 0.1}", "{rate: 0.1, peak: 0.02}"],
    "parts.prodigy": ["{}", "{bias_correction: true, safeguard_warmup: true, growth_rate: 1.02}"],
    "parts.shampoo": [
        "{}",
        "{eps: null, tolerance: 1e-6, exponent: 0.5, sides: shorter}",
        "{b1: 0.9, graft: !parts.adam {b1: null, squares: gradient}}",
    ],
    "parts.graft": ["{onto: !parts.adam {}, start: 2}"],
    "parts.psgd": [
        "{}",
        "{precond_lr: 0.1, init_scale: 1.0, whiten: gradient, seed: 1}",
        "{geometry: Q0.5EQ1.5, damping: 1e-6, bound_decay: 0.5}",
    ],
    "parts.cautious_decay": ["{rate: 0.1}", "{rate: 0.1, around: !parts.pin_radius {}}"],
    "optax.chain": ["{args: [SGD, SGD]}"],
    "optax.multi_transform": ["{transforms: {a: SGD}, param_labels: {w: a}}"],
    "optax.masked": ["{inner: SGD, mask: {w: true}}"],
    "optax.lookahead": ["{fast_optimizer: SGD, sync_period: 2, slow_step_size: 0.5}"],
    "optax.apply_if_finite": ["{inner: SGD, max_consecutive_errors: 2}"],
    "optax.MultiSteps": ["{opt: SGD, every_k_schedule: 2}"],
    "schedules.half_life": ["{peak_value: 0.999, warmup_steps: 10, init_value: 0.9}"],
    "schedules.piecewise": ["{values: [0.1, 0.2], boundaries: [2]}"],
    "models.Model": ["{init: !partial:optax.sgd {}, apply: !partial:optax.sgd {}}"],
    "models.from_linen": ["{module: !audited.Linen {}}"],
    "models.from_nnx": ["{constructor: !partial:audited.Nnx {}}"],
    "data.ArrayDataset": ["{train: !audited.arrays {}, test: !audited.arrays {}, batch_size: 2}"],
    "data.digits": ["{}", "{data_dir: DATA}", "{data_dir: DATA/empty}"],
    "data.fashion_mnist": ["{}", "{data_dir: DATA}"],
    "data.mixture": ["{parts: {web: !data.text {data_dir: DATA}}, weights: {web: 1.0}}"],
    "data.text": ["{}", "{data_dir: DATA}"],
    "data.tokens": [
        "{train: DATA/shards/train_*.bin, test: DATA/shards/test_000000.bin, length: 4}"
    ],
    "space.log_uniform": ["{low: 0.1, high: 1.0, points: 3}"],
    "space.uniform": ["{low: 0.1, high: 1.0, points: 3}"],
    "space.integers": ["{low: 1, high: 3}"],
    "space.zip": ["{spaces: {a: INTEGERS, b: INTEGERS}}"],
    "method.explicit": ["{trials: [{a: 1}]}"],
    "method.halving": ["{points: !method.grid {}, cuts: [1]}"],
    "data.tfds_images": ["{name: tiny_photos, batch_size: 4, size: 8}"],
    "data.tfds": ["{name: sklearn_digits}", "{name: sklearn_digits, data_dir: DATA}"],
}

# What the required arguments of the others are tried with, until a call succeeds.
CANDIDATES = ["0.1", SGD, "!audited.array {}", "[0.1, 0.2]", "3", f"[{SGD}]", "{a: 0.1}"]
CANDIDATES += ["!partial:audited.array {}", "!optax.constant_schedule {value: 0.1}", "some/file"]


def modules(root: str, module: ModuleType) -> dict[str, ModuleType]:
    """Returns the modules that a config may reach, by the name that they have in a config."""
    found = {root: module}
    if root == "optax":
        for key, value in vars(module).items():
            if isinstance(value, ModuleType) and value.__name__ == f"optax.{key}":
                if not key.startswith("_"):
                    found[f"optax.{key}"] = value
    return found


def snippets(name: str, required: list[str], data: str) -> list[str]:
    """Returns the calls of a function to try, in YAML; of our own all must succeed."""
    if name in ARGUMENTS:
        given = [each.replace("DATA", data).replace("SGD", SGD) for each in ARGUMENTS[name]]
        given = [each.replace("INTEGERS", INTEGERS) for each in given]
        return [f"!{name} {arguments}" for arguments in given]
    tried = [f"!{name} {{{', '.join(f'{key}: {x}' for key in required)}}}" for x in CANDIDATES]
    return tried if required else tried[:1]


class Watch:
    """Notes what the process does, as the audit events of Python tell it."""

    def __init__(self) -> None:
        self.acts: list[list[str]] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.acts is None or not event.startswith(ACTS) or _importing():
            return
        act = [event, *(str(argument) for argument in arguments[:2])]
        if act not in self.acts:
            self.acts.append(act)


def _importing() -> bool:
    """Says whether Python imports a module, looks for a line of source, or is within a rmtree."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith("<frozen importlib") or file.endswith(("linecache.py", "tokenize.py")):
            return True
        if file.endswith("shutil.py") and function.startswith("_rmtree"):  # told by shutil.rmtree
            return True
        frame = frame.f_back
    return False


def configs(name: str, snippet: str) -> list[str]:
    """Returns the configs to try, each of one line, in which a call of a function is."""
    if name.startswith("space."):
        return [f"space: {{x: {snippet}}}\n"]
    if name.startswith("method."):
        return [f"method: {snippet}\n"]
    # As an optimizer, if it is one.
    return [f"data: !audited.hold {{optimizer: {snippet}}}\n", f"data: {snippet}\n"]


def build(builder: Builder) -> None:
    """Builds, then takes what a run takes of a data set, or begins with an optimizer."""
    (name,) = builder.config.root.kwargs
    built = builder.build(name, units=Units(100, 10, 50))
    if name == "space":
        assert built["x"].at(0.5) is not None
    if name == "method":
        axes = {name: spaces.integers(1, 3) for name in "xy"}
        space = {} if isinstance(built, methods.Explicit) else axes
        count = getattr(built, "first", 1)  # of those that choose the others by results
        assert len(built.points(space, count)) == count
    if hasattr(built, "evaluate") and hasattr(built, "train"):
        next(built.train(0, 0))
        next(iter(built.evaluate()))
        assert built.element_spec and built.fingerprint
    if hasattr(built, "eval_params"):
        built.init({"w": np.ones((2, 2), np.float32)})


def main(data: str, cache: str) -> None:
    """Prints what every call did."""
    os.environ["LOCKSTEP_DATA_DIR"] = cache
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(Path(__file__).parent / "lab"))
    jax.numpy.ones(2).block_until_ready()  # what jax reads of the machine when it starts
    vocabulary, watch = Vocabulary(language=SWEEP), Watch()
    file = Path(cache) / "call.yaml"
    names: dict[Any, list[str]] = {}
    for root, home in SWEEP.modules.items():
        for place, module in modules(root, importlib.import_module(home)).items():
            for last in _public_names(module):
                function = vocabulary.function(f"{place}.{last}")
                names.setdefault(function.call, []).append(function.name)
    report = {}
    for name, *others in names.values():
        parameters = vocabulary.function(name).parameters
        required = [key for key, parameter in parameters.items() if parameter.required]
        told: dict[str, Any] = {"called": False, "why": "", "acts": []}
        for snippet in snippets(name, required, data):
            for text in configs(name, snippet):
                file.write_text(text)
                language = SWEEP if text.startswith(("space", "method")) else RUN
                builder = Builder(load([file], language=language), ["audited"])
                watch.acts = told["acts"]
                try:
                    if name.startswith("data."):
                        build(builder)
                    else:
                        jax.eval_shape(lambda builder=builder: build(builder))  # compiles nothing
                    told["called"] = True
                    break
                except Exception as error:
                    told["why"] = str(error)
                finally:
                    watch.acts = None
            if told["called"] and name not in ARGUMENTS:
                break
        report |= dict.fromkeys([name, *others], told)
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
