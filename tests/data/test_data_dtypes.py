"""Arrays whose dtypes jax does not have, or whose values do not fit into its 32 bits."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import runs
from trainer import data
from trainer.__main__ import main
from trainer.engine.feed import stack

PACKAGE = '''
"""Arrays of many dtypes, as a function of data.ArrayDataset and as a data set of one's own."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def arrays(what="plain"):
    draw = np.random.default_rng(0)
    split = {
        "image": draw.normal(size=(32, 4, 4, 1)).astype(np.float32),
        "label": draw.integers(0, 3, 32).astype(np.int32),
        "id": np.arange(32, dtype=np.int32),
    }
    label, image = split["label"], split["image"]
    first, wide = np.arange(32) == 0, image.astype(np.float64)
    return split | {
        "plain": lambda: {},
        "fitting": lambda: {"id": np.arange(32), "image": wide},
        "ids": lambda: {"id": np.arange(32) + 2**40},
        "negative": lambda: {"id": np.arange(32) - 2**31 - 1},
        "unsigned": lambda: {"id": 2**32 - np.arange(32, dtype=np.uint64)},
        "pixels": lambda: {"image": np.where(first.reshape(-1, 1, 1, 1), 1e300, wide)},
        "waves": lambda: {"id": np.where(first, -1e300j, label)},
        "texts": lambda: {"label": np.array([f"class {x}" for x in label])},
        "objects": lambda: {"label": np.array([f"class {x}" for x in label], object)},
        "bytes": lambda: {"label": label.astype("S1")},
        "strings": lambda: {"label": label.astype(np.dtypes.StringDType())},
        "dates": lambda: {"id": np.arange(32).astype("datetime64[D]")},
        "records": lambda: {"id": np.zeros(32, [("run", "i4"), ("time", "f4")])},
        "long": lambda: {"image": image.astype(np.longdouble)},
        "swapped": lambda: {"label": label.astype(">i4")},
        "complex": lambda: {"image": image.astype(np.complex128)},
        "complex ids": lambda: {"id": np.full((32, 3), 1 + 1j, np.complex64)},
    }[what]()


class Own:
    """The same, in order; `eval_what` are the arrays of the test split."""

    batch_size, num_examples = 8, 32

    def __init__(self, what="plain", eval_what=None, plain_batches=0):
        self._arrays, self._eval = arrays(what), arrays(eval_what or what)
        self._plain_batches = plain_batches
        self.element_spec = {
            name: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype)
            for name, x in self._arrays.items()
        }

    def train(self, batch_index, seed):
        while True:
            rows = np.arange(batch_index * 8, batch_index * 8 + 8) % 32
            batch = {name: x[rows] for name, x in self._arrays.items()}
            if batch_index < self._plain_batches:
                batch = {k: x.astype(batch[k].dtype) for k, x in self._plain(rows).items()}
            yield batch
            batch_index += 1

    def _plain(self, rows):
        return {name: x[rows] for name, x in arrays().items()}

    def evaluate(self):
        for start in range(0, 32, 8):
            batch = {name: x[start : start + 8] for name, x in self._eval.items()}
            yield {**batch, "mask": np.ones(8, np.float32)}


class Named(Own):
    fingerprint = "named"


def ids():
    """A loss that is the field `id`."""
    return lambda outputs, batch: batch["id"].astype(float) + 0 * outputs.sum(-1)


def magnitude():
    """A loss of complex outputs."""
    return lambda outputs, batch: jnp.abs(outputs).sum(-1)


class Net(nn.Module):
    """A model that takes complex inputs, and returns complex outputs."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.reshape(len(x), -1))
'''

CONFIG = """
data: !lots.Own
model: !models.mlp {width: 8, depth: 1, num_classes: 3}
loss: !losses.softmax_cross_entropy
metrics: {accuracy: !metrics.accuracy }
optimizer: !optax.sgd {learning_rate: 1e-3}
steps: 4
eval_every: 4
steps_per_call: 1
writers: []
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Has the package `lots`."""
    (tmp_path / "lots.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("lots", None)


def train(folder: Path, what: str, kind: str = "Own", **settings: str) -> int:
    dataset = f"!lots.{kind} {{what: {what}}}"
    if kind == "ArrayDataset":
        split = f"!lots.arrays {{what: {what}}}"
        dataset = f"!data.ArrayDataset {{train: {split}, test: {split}, batch_size: 8}}"
    text = CONFIG
    for name, value in {"data": dataset, **settings}.items():
        text = "\n".join(
            f"{name}: {value}" if line.startswith(f"{name}:") else line for line in text.split("\n")
        )
    (folder / "run.yaml").write_text(text)
    config = f"--config={folder / 'run.yaml'}"
    return main([config, "--vocabulary=lots", f"--workdir={folder / 'run'}"])


def refused(folder: Path, capfd: pytest.CaptureFixture[str], line: int = 2) -> str:
    """Returns the message of a mistake in a line of the config."""
    said = capfd.readouterr().err
    (message,) = (each for each in said.splitlines() if each.startswith("error: "))
    assert f"run.yaml:{line}: " in message and "Traceback" not in said, said
    return message


@pytest.mark.parametrize("kind", ["ArrayDataset", "Own", "Named"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ids", ["'id', int64[", "2**32"]),
        ("negative", ["'id', int64[", " -2147483649, ", "int32", "JAX_ENABLE_X64=1"]),
        ("unsigned", ["'id', uint64[", " 4294967296, ", "uint32", "JAX_ENABLE_X64=1"]),
        ("pixels", ["'image', float64[", " 1e+300, ", "float32", "Scale the array"]),
        ("waves", ["'id', complex128[", " -1e+300, ", "complex64"]),
    ],
)
def test_a_value_that_does_not_fit_into_32_bits_is_refused(folder, capfd, kind, what, words):
    assert train(folder, what, kind) == 2
    message = refused(folder, capfd)
    for word in words:
        assert word in message, message
    if kind != "Named":
        assert not (folder / "run").exists()


def test_batches_are_stacked_in_the_types_of_jax_because_the_places_behind_them_are_undefined():
    for dtype, narrow in {"float64": "float32", "int64": "int32", "uint8": "uint8"}.items():
        stacked = stack([{"image": np.ones((8, 2), dtype)}] * 3, 4)["image"]
        assert (stacked.shape, stacked.dtype) == ((4, 8, 2), narrow)
        np.testing.assert_array_equal(stacked[:3], 1)


def test_64_bit_values_that_fit_are_trained_on_without_a_message(folder, capfd):
    for kind in ("ArrayDataset", "Own"):
        ids = {"loss": "!lots.ids", "metrics": "{}"}
        assert train(folder, "fitting", kind, steps="6", **ids) == 0
        said = capfd.readouterr()
        lines = (said.err + said.out).lower().splitlines()
        warned = [line for line in lines if "warning" in line]
        assert all("32 of 32 examples of the test split are equal" in line for line in warned)
        # The mean of 0, 1, ..., 31.
        assert runs.lines(folder / "run")[-1]["eval/loss"] == 15.5
        (folder / "run").rename(folder / f"run_{kind}")


@pytest.mark.long
def test_with_64_bits_in_jax_large_integers_are_trained_on(folder):
    with jax.enable_x64(True):
        assert train(folder, "ids", "ArrayDataset", loss="!lots.ids", metrics="{}") == 0
    (row,) = (each for each in runs.lines(folder / "run") if "eval/loss" in each)
    assert row["eval/loss"] == pytest.approx(2**40 + 15.5, rel=1e-6)  # losses are float32


def test_the_advice_for_identifiers_keeps_them():
    x = np.array([2**40 + 3, -(2**62) - 5, 2**63 - 1, 0])
    parts = {"high": (x >> 32).astype("int32"), "low": (x % 2**32).astype("uint32")}
    batch = next(data.ArrayDataset(parts, parts, batch_size=4).train())
    np.testing.assert_array_equal(batch["high"].astype(np.int64) * 2**32 + batch["low"], x)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of numpy, in jax
def test_a_later_batch_that_float32_cannot_hold_is_named_with_the_bad_step(folder, capfd):
    own = "!lots.Named {what: pixels, eval_what: fitting, plain_batches: 4}"
    # The first row of the data, which is in batch 0, is in batch 4 again.
    assert train(folder, "", data=own, steps="8") == 1
    said = capfd.readouterr().err
    assert "The field 'image' of its batch holds 16 of 128 values that do not fit into float32" in (
        said
    )
    assert "At step 5 " in said and " such as 1e+300. Correct the data or the model" in said


def test_the_first_batch_of_a_run_is_checked_if_the_data_have_a_fingerprint(folder, capfd):
    own = "!lots.Named {what: ids, eval_what: fitting}"
    assert train(folder, "", data=own) == 2
    assert "train() yielded 'id', int64[8], with the value 1099511627783, " in (
        refused(folder, capfd)
    )


def test_values_of_the_first_evaluation_batch_are_checked(folder, capfd):
    assert train(folder, "", data="!lots.Own {what: fitting, eval_what: ids}") == 2
    assert "evaluate() yielded 'id', int64[8], with the value 1099511627783, " in (
        refused(folder, capfd)
    )


@pytest.mark.parametrize("kind", ["ArrayDataset", "Own"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("texts", ["'label', <U7[", "numpy.unique(labels, return_inverse=True)"]),
        ("objects", ["'label', object[", "numpy.unique(labels, return_inverse=True)"]),
        ("bytes", ["'label', |S1[", "numpy.unique(labels, return_inverse=True)"]),
        ("strings", ["'label', StringDType()[", "numpy.unique"]),
        ("dates", ["'id', datetime64[D][", "numpy.timedelta64(1, 's')"]),
        ("records", ["'id', ", "'run', 'time'"]),
        ("long", ["'image', float128[", "x.astype('float32')"]),
        ("swapped", ["'label', >i4[", "x.astype('int32')"]),
    ],
)
def test_a_dtype_that_jax_does_not_have_is_refused_with_its_field(folder, capfd, kind, what, words):
    assert train(folder, what, kind) == 2
    message = refused(folder, capfd)
    for word in words:
        assert word in message, message
    assert not (folder / "run").exists()


def test_a_dtype_of_an_evaluation_batch_alone_is_refused(folder, capfd):
    assert train(folder, "", data="!lots.Own {what: plain, eval_what: texts}") == 2
    assert "evaluate() yielded 'label', <U7[8]" in refused(folder, capfd)


def test_small_dtypes_of_jax_are_taken():
    arrays = {"x": np.arange(4).astype(jax.numpy.bfloat16), "y": np.ones(4, jax.numpy.int4)}
    assert data.ArrayDataset(arrays, arrays, batch_size=2).element_spec["x"].dtype == "bfloat16"


NET = "!models.from_linen {module: !lots.Net }"


@pytest.mark.parametrize(
    ("what", "settings", "line", "words"),
    [
        ("complex", {}, 3, ["The model reads 'image'", "complex64[8, 4, 4, 1]", "real numbers"]),
        (
            "complex",
            {"model": NET},
            4,
            ["losses.softmax_cross_entropy", "the model returned complex64[8, 3]", "'image'"],
        ),
        (
            "complex",
            {"model": NET, "loss": "!lots.magnitude"},
            5,
            ["metrics.accuracy", "the model returned complex64[8, 3]", "'image'"],
        ),
        (
            "complex ids",
            {"loss": "!losses.squared_error {targets: id}", "metrics": "{}"},
            4,
            ["losses.squared_error", "'id'", "complex64[8, 3]"],
        ),
    ],
)
def test_complex_numbers_are_refused_where_their_imaginary_parts_would_be_lost(
    folder, capfd, what, settings, line, words
):
    assert train(folder, what, **settings) == 2
    message = refused(folder, capfd, line)
    for word in words:
        assert word in message, message
    assert not (folder / "run").exists()


def test_a_model_and_a_loss_of_ones_own_may_take_complex_numbers(folder):
    own = {"model": NET, "loss": "!lots.magnitude", "metrics": "{}"}
    assert train(folder, "complex", "ArrayDataset", **own) == 0
