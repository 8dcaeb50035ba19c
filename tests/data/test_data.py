"""Data sets: the stream by step, images, digits and Fashion-MNIST on disk."""

import gzip
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer import data
from trainer.data import arrays, order, prepare
from trainer.data.images import Pixels
from trainer.engine import mesh

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def toy(examples: int = 10, tests: int = 7, batch_size: int | None = 4, **options: Any) -> Any:
    def split(count: int, offset: int) -> dict[str, np.ndarray]:
        number = np.arange(count, dtype=np.int32) + offset
        image = np.arange(count * 12, dtype=np.uint8).reshape(count, 2, 3, 2)
        return {"image": image, "number": number}

    return arrays.ArrayDataset(
        split(examples, 0), split(tests, 100), batch_size=batch_size, **options
    )


def numbers(dataset: Any, count: int, batch_index: int = 0, seed: int = 0) -> np.ndarray:
    batches = itertools.islice(dataset.train(batch_index, seed), count)
    return np.stack([batch["number"] for batch in batches])


# Random words.


def philox(key: tuple[int, int], counter: int) -> list[int]:
    """Philox4x64-10, written from the paper (Salmon et al. 2011, figure 4 and table 2)."""
    word = 2**64
    x = [counter >> (64 * i) & (word - 1) for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * x[0], word)
        high1, low1 = divmod(0xCA5A826395121157 * x[2], word)
        x = [high1 ^ x[1] ^ k0, low1, high0 ^ x[3] ^ k1, low0]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % word, (k1 + 0xBB67AE8584CAA73B) % word
    return x


def test_random_words_are_those_of_philox():
    # The first known answer of the authors' library, Random123.
    known = "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"
    assert [f"{word:016x}" for word in philox((0, 0), 0)] == known.split()
    for seed, number, purpose in [(0, 0, 0), (7, 3, 1), (-1, 2**40, 5), (2**63, 0, 1)]:
        start = purpose << 192
        blocks = [philox((seed % 2**64, number), start + i) for i in (1, 2)]
        words = order.random_words(seed, number, purpose, 8)
        assert words.tolist() == blocks[0] + blocks[1]


def test_equal_random_words_keep_their_order(monkeypatch):
    words = np.random.default_rng(0).integers(0, 30, 500).astype(np.uint64)
    monkeypatch.setattr(order, "random_words", lambda *_: words)
    assert order.permutation(0, 0, 500).tolist() == sorted(range(500), key=lambda i: words[i])


def test_a_permutation_is_the_order_of_the_random_words():
    indices = order.permutation(3, 5, 100)
    assert sorted(indices.tolist()) == list(range(100))
    words = order.random_words(3, 5, 0, 100)
    assert (np.diff(words[indices].astype(object)) >= 0).all()


# The stream.


@pytest.mark.parametrize(("examples", "batch_size"), [(10, 4), (10, 5), (10, 9), (10, 10), (7, 1)])
def test_every_epoch_serves_every_example_once(examples: int, batch_size: int):
    stream = numbers(toy(examples, batch_size=batch_size), 6 * examples).ravel()
    epochs = stream[: 5 * examples].reshape(5, examples)
    assert (np.sort(epochs, axis=1) == np.arange(examples)).all()


def test_epochs_and_seeds_differ():
    stream = numbers(toy(50, batch_size=25), 4).reshape(2, 50)
    assert not np.array_equal(stream[0], stream[1])
    assert not np.array_equal(numbers(toy(50), 3, seed=1), numbers(toy(50), 3, seed=2))


@pytest.mark.parametrize("step", [0, 1, 2, 3, 7, 1000])
def test_training_data_may_begin_at_any_step(step: int):
    options = {"pixels": {"image": Pixels(crop=1, flip=True)}}
    stream = toy(**options).train(0, seed=9)
    for _ in range(step):
        next(stream)
    for late, fresh in zip(
        itertools.islice(stream, 4), toy(**options).train(step, 9), strict=False
    ):
        for key in late:
            np.testing.assert_array_equal(late[key], fresh[key])


def test_a_batch_of_all_examples_keeps_their_order():
    for dataset in (toy(batch_size=None), toy(batch_size=10)):
        assert (numbers(dataset, 3) == np.arange(10)).all()


@pytest.mark.parametrize("examples", [3, 10, 41])
@pytest.mark.parametrize("batch_size", [1, 3, None])
def test_batches_do_not_depend_on_how_many_are_gathered_at_once(
    examples: int, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
):
    found = []
    for together in (0, 1 << 18):  # one by one, or an epoch
        monkeypatch.setattr(arrays, "_GATHERED_BYTES", together)
        dataset = toy(examples, tests=7, batch_size=batch_size, eval_batch_size=2)
        trained = [*itertools.islice(dataset.train(4, seed=1), 50)]
        found.append([*trained, *dataset.evaluate()])
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert np.array_equal(one[name], other[name]) and one[name].dtype == other[name].dtype


def test_a_field_without_elements_is_served():
    fields = {"x": np.arange(6, dtype=np.float32), "nothing": np.zeros((6, 0), np.float32)}
    dataset = data.ArrayDataset(fields, fields, batch_size=2, eval_batch_size=4)
    assert next(dataset.train())["nothing"].shape == (2, 0)
    assert [batch["nothing"].shape for batch in dataset.evaluate()] == [(4, 0), (4, 0)]


def test_a_data_set_may_change_our_batches_in_place():
    """The loop makes a batch read-only before the next one is asked for."""
    for stream in (toy().train(), toy(tests=20).evaluate()):
        for batch in itertools.islice(stream, 4):
            batch["number"] += 1
            mesh.make_read_only(batch)


def test_element_spec_describes_the_batches():
    dataset = toy(pixels={"image": Pixels()})
    batch = next(dataset.train(0, 0))
    spec = {key: (value.shape, value.dtype) for key, value in dataset.element_spec.items()}
    assert spec == {key: (value.shape, value.dtype) for key, value in batch.items()}
    assert spec["image"] == ((4, 2, 3, 2), np.float32) and spec["number"] == ((4,), np.int32)
    assert (dataset.num_examples, dataset.splits, dataset.batch_size) == (10, {"test": 7}, 4)


@pytest.mark.parametrize(("size", "masks"), [(None, [4, 3]), (7, [7]), (2, [2, 2, 2, 1]), (9, [7])])
def test_evaluation_serves_the_test_split_in_order(size: int | None, masks: list[int]):
    batches = list(toy(eval_batch_size=size).evaluate())
    assert [batch["mask"].sum() for batch in batches] == masks
    assert {batch["number"].shape for batch in batches} == {(size or 4,)}
    assert {batch["mask"].dtype for batch in batches} == {np.dtype(np.float32)}
    real = [batch["number"][batch["mask"] == 1] for batch in batches]
    assert np.concatenate(real).tolist() == list(range(100, 107))


def test_a_mask_of_positions_is_kept_in_training_and_zero_in_padding():
    mask = (np.arange(12).reshape(4, 3) % 5 > 0).astype(np.float32)
    arrays = {"number": np.arange(4), "mask": mask}
    dataset = data.ArrayDataset(arrays, arrays, batch_size=2, eval_batch_size=3)
    assert dataset.element_spec["mask"].shape == (2, 3)
    for _, batch in zip(range(5), dataset.train(0, 0), strict=False):
        np.testing.assert_array_equal(batch["mask"], mask[batch["number"]])
    seen = np.concatenate([batch["mask"] for batch in dataset.evaluate()])
    np.testing.assert_array_equal(seen, np.concatenate([mask, np.zeros((2, 3))]))


@pytest.mark.parametrize("asked", [True, False])
def test_a_batch_is_divided_into_parts(monkeypatch: pytest.MonkeyPatch, asked: bool):
    """Into those that are asked for, or else one for each process."""

    def dataset() -> Any:
        return toy(20, 7, 6, pixels={"image": Pixels(crop=1, flip=True)})

    whole = list(itertools.islice(dataset().train(3, 1), 5)), list(dataset().evaluate())
    parts = []
    monkeypatch.setattr("jax.process_count", lambda: 5 if asked else 3)
    for rank in range(3):
        monkeypatch.setattr("jax.process_index", lambda rank=rank: 4 if asked else rank)
        part = {"rank": rank, "size": 3} if asked else {}
        trained = list(itertools.islice(dataset().train(3, 1, **part), 5))
        parts.append((trained, list(dataset().evaluate(**part))))
        assert dataset().element_spec["number"].shape == (6,)
    for kind in (0, 1):
        for number, batch in enumerate(whole[kind]):
            for key in batch:
                shares = [part[kind][number][key] for part in parts]
                np.testing.assert_array_equal(np.concatenate(shares), batch[key])
    words = "among 3 parts, but" if asked else "among 3 processes, but"
    with pytest.raises(ValueError, match=words + " the batch size is 4"):
        next(toy().train(0, 0, **part))


@pytest.mark.parametrize("part", [{"rank": 1}, {"size": 2}, {"rank": 2, "size": 2}])
def test_a_part_that_does_not_exist_is_refused(part: dict[str, int]):
    with pytest.raises(ValueError, match=f"got rank={part.get('rank')} and size="):
        next(toy().train(0, 0, **part))
    with pytest.raises(ValueError, match="Give both"):
        next(toy().evaluate(**part))


def test_the_arrays_of_a_validation_split_are_evaluated_and_not_trained_on():
    held_out = {key: array[:3] for key, array in toy().split_arrays["test"].items()}
    dataset = toy(validation=held_out)
    assert dataset.splits == {"validation": 3, "test": 7} and dataset.num_examples == 10
    seen = [batch["number"][batch["mask"] > 0] for batch in dataset.evaluate("validation")]
    assert np.concatenate(seen).tolist() == held_out["number"].tolist()
    np.testing.assert_array_equal(numbers(dataset, 5), numbers(toy(), 5))
    assert dataset.fingerprint != toy().fingerprint


def test_the_fingerprint_covers_the_values_that_the_model_sees():
    def changed(**options: Any) -> str:
        return toy(**options).fingerprint

    assert changed() == changed(batch_size=3, eval_batch_size=2)
    assert len({changed(), changed(examples=11), changed(tests=8)}) == 3
    assert changed(pixels={"image": Pixels(mean=0.1)}) != changed(pixels={"image": Pixels()})
    moved = toy()
    moved._eval["test"]["number"][3] += 1
    assert moved.fingerprint != toy().fingerprint


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: toy(batch_size=11), ["10 training examples", "11", "None"]),
        (lambda: toy(batch_size=0), ["batch_size", "0"]),
        (lambda: toy(batch_size=-4), ["batch_size", "-4"]),
        (lambda: toy(eval_batch_size=0), ["eval_batch_size", "0"]),
        (lambda: toy(tests=0), ["test arrays", "image: 0"]),
        (lambda: Pixels(crop=-1), ["crop", "-1"]),
        (lambda: data.digits(crop=50), ["crop=50", "8 by 8", "fewer than 8"]),
        (lambda: data.digits(crop=8), ["crop=8", "8 by 8"]),
        (lambda: Pixels(std=0.0), ["std", "0.0"]),
        (lambda: data.digits(5000), ["data.digits", "1437", "5000"]),
        (lambda: data.ArrayDataset({}, {}, batch_size=1), ["no arrays"]),
        (
            lambda: data.ArrayDataset({"x": np.zeros(3)}, {"y": np.zeros(3)}, batch_size=1),
            ["same keys", "'x'", "'y'"],
        ),
        (
            lambda: toy(validation={"image": np.zeros((2, 2, 3, 2), np.uint8)}),
            ["validation arrays"],
        ),
        (lambda: toy(validation={"number": np.zeros(0)}), ["validation", "number: 0"]),
        (
            lambda: data.ArrayDataset({"mask": np.ones(3)}, {"mask": np.ones(3)}, batch_size=1),
            ["'mask', float64[3]", "another name"],
        ),
        (
            lambda: data.ArrayDataset({"mask": np.full(3, 0.5, "f4")}, {}, batch_size=1),
            ["'mask', float32[3]", "1 for what counts"],
        ),
    ],
)
def test_mistakes_are_named(make: Any, words: list[str], digits_dir: Path):
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


# Images.


def test_images_are_scaled_by_mean_and_deviation():
    images = np.array([0, 51, 255], np.uint8).reshape(3, 1, 1, 1)
    seen = Pixels(mean=0.5, std=0.25).gather(images, np.arange(3), None)
    np.testing.assert_allclose(seen.ravel(), [-2.0, -1.2, 2.0], rtol=1e-6)
    coloured = np.full((1, 1, 1, 3), 16, np.uint8)
    seen = Pixels(16, mean=[0, 1, 2], std=[1, 2, 4]).gather(coloured, np.zeros(1, int), None)
    np.testing.assert_allclose(seen.ravel(), [1.0, 0.0, -0.25], atol=1e-7)
    assert seen.dtype == np.float32 and seen.flags.c_contiguous


@pytest.mark.parametrize(("crop", "flip"), [(0, True), (1, False), (2, True)])
def test_crops_and_flips_equal_those_of_a_plain_loop(crop: int, flip: bool):
    images = np.random.default_rng(0).integers(1, 256, size=(30, 5, 4, 3)).astype(np.uint8)
    indices = np.random.default_rng(1).integers(30, size=400)
    words = order.random_words(1, 2, 3, 400)
    seen = Pixels(unit=1.0, crop=crop, flip=flip).gather(images, indices, words)
    assert seen.flags.c_contiguous  # or jax copies it once more
    places, mirrored = set(), 0
    for number, (index, word) in enumerate(zip(indices, words.tolist(), strict=True)):
        down, right = word % (2 * crop + 1), (word >> 16) % (2 * crop + 1)
        padded = np.pad(images[index], ((crop, crop), (crop, crop), (0, 0)))
        expected = padded[down : down + 5, right : right + 4]
        if flip and word >> 63:
            expected, mirrored = expected[:, ::-1], mirrored + 1
        places.add((down, right))
        np.testing.assert_array_equal(seen[number], expected)
    assert len(places) == (2 * crop + 1) ** 2  # all of them happen
    assert mirrored == 0 if not flip else 150 < mirrored < 250


def test_augmentation_leaves_the_data_and_the_test_split_alone():
    plain, moved = toy(), toy(pixels={"image": Pixels(unit=1.0, crop=1, flip=True)})
    before = moved.fingerprint
    list(itertools.islice(moved.train(0, 0), 10))
    moved.__dict__.pop("fingerprint")
    assert moved.fingerprint == before
    for one, two in zip(plain.evaluate(), moved.evaluate(), strict=True):
        np.testing.assert_array_equal(one["image"], two["image"])


# Digits.


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the digits were prepared once."""
    root = tmp_path_factory.mktemp("data")
    data.digits(data_dir=str(root))
    return root


@pytest.fixture
def digits_dir(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that directory for one test; data sets are looked for there."""
    root = tmp_path / "data"
    shutil.copytree(prepared, root)
    monkeypatch.setenv("LOCKSTEP_DATA_DIR", str(root))
    return root


def place(root: Path) -> Path:
    return root / "sklearn_digits" / "1.0.0"


def run(code: str, **environment: str) -> subprocess.Popen:
    """Runs Python code in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_digits_are_scikit_learns_split_as_documented(digits_dir: Path):
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.argsort(labels, kind="stable")
    test = order[::5]
    train = np.setdiff1d(order, test)
    dataset = data.digits(None, eval_batch_size=360)
    for rows, batch in ((train, next(dataset.train())), (test, next(dataset.evaluate()))):
        images = np.rint(16 * (batch["image"] * 0.3762 + 0.3058)).reshape(len(rows), 64)
        ours = sorted((label, *image) for label, image in zip(batch["label"], images, strict=True))
        theirs = sorted((labels[row], *pixels[row]) for row in rows)
        np.testing.assert_array_equal(ours, theirs)
    batch = next(dataset.train())
    counts = [142, 146, 141, 147, 144, 146, 145, 143, 139, 144]  # as the docstring says
    assert np.bincount(batch["label"]).tolist() == counts
    assert abs(batch["image"].mean()) < 1e-3 and abs(batch["image"].std() - 1) < 1e-3
    assert (dataset.num_examples, dataset.splits) == (1437, {"test": 360})


def test_digits_are_prepared_as_array_record_by_tfds(prepared: Path):
    import tensorflow_datasets

    open_directory: Any = tensorflow_datasets.builder_from_directory
    builder = open_directory(place(prepared))
    source = builder.as_data_source("test")
    assert builder.info.file_format.value == "array_record"
    assert builder.info.splits["train"].num_examples == 1437 and len(source) == 360
    example, batch = source[17], next(data.digits(data_dir=str(prepared)).evaluate())
    np.testing.assert_allclose(
        example["image"] / 16, batch["image"][17] * 0.3762 + 0.3058, atol=1e-6
    )
    assert example["label"] == batch["label"][17]


LOAD = "import sys; from trainer import data; print(data.digits().fingerprint)"


@pytest.mark.long
def test_digits_need_no_tensorflow_and_no_tfds_once_prepared(tmp_path: Path, prepared: Path):
    """Importing is cheap, preparing needs no TensorFlow, reading not even tfds or jax."""
    heavy = {"tensorflow", "tensorflow_datasets", "sklearn", "jax"}
    report = f"; print(sorted({heavy} & set(sys.modules)))"
    code = "import sys; import trainer.data" + report + "; " + LOAD + report
    outputs = []
    for _ in range(2):
        process = run(code, LOCKSTEP_DATA_DIR=str(tmp_path))
        outputs.append(process.communicate()[0].splitlines())
        assert process.returncode == 0
    fingerprint = data.digits(data_dir=str(prepared)).fingerprint
    assert outputs[0] == ["[]", fingerprint, "['sklearn', 'tensorflow_datasets']"]
    assert outputs[1] == ["[]", fingerprint, "[]"]


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes(
        b"" if how == "empty" else content[: len(content) // 2] if how == "cut" else content
    )


@pytest.mark.parametrize("how", ["flipped", "cut", "empty"])
def test_damaged_arrays_are_read_again_from_the_records(digits_dir: Path, how: str):
    before = data.digits().fingerprint
    damage(place(digits_dir) / "arrays.npz", how)
    records = place(digits_dir) / "sklearn_digits-test.array_record-00000-of-00001"
    stamp = records.stat().st_ino
    assert data.digits().fingerprint == before
    assert records.stat().st_ino == stamp  # not prepared again
    assert np.load(place(digits_dir) / "arrays.npz")["test/label"].shape == (360,)


@pytest.mark.parametrize("how", ["cut", "empty", "info", "missing"])
def test_damaged_records_are_prepared_again(digits_dir: Path, how: str):
    before = data.digits().fingerprint
    (place(digits_dir) / "arrays.npz").unlink()
    records = place(digits_dir) / "sklearn_digits-train.array_record-00000-of-00001"
    if how == "info":
        (place(digits_dir) / "dataset_info.json").write_text("{}")
    elif how == "missing":
        records.unlink()
    else:
        damage(records, how)
    assert data.digits().fingerprint == before
    assert records.stat().st_size > 100_000
    assert not list(digits_dir.glob(".preparing*"))


def test_digits_files_with_other_contents_are_not_used(digits_dir: Path):
    before = data.digits().fingerprint
    stored = dict(np.load(place(digits_dir) / "arrays.npz"))
    stored["train/label"][0] ^= 1
    np.savez(place(digits_dir) / "arrays.npz", allow_pickle=False, **stored)
    assert data.digits().fingerprint == before


@pytest.mark.long
def test_several_processes_may_prepare_at_once(tmp_path: Path, prepared: Path):
    racing = [run(LOAD, LOCKSTEP_DATA_DIR=str(tmp_path / "new")) for _ in range(3)]
    results = [process.communicate() for process in racing]
    fingerprint = data.digits(data_dir=str(prepared)).fingerprint
    for process, (output, errors) in zip(racing, results, strict=True):
        assert (process.returncode, output.strip(), errors) == (0, fingerprint, "")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sklearn_digits"]
    assert [path.name for path in (tmp_path / "new" / "sklearn_digits").iterdir()] == ["1.0.0"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be prepared in .*file.*LOCKSTEP_DATA_DIR"):
        data.digits(data_dir=str(tmp_path / "file"))


# Any data set of TFDS, and Fashion-MNIST.


def test_tfds_serves_a_prepared_data_set(digits_dir: Path):
    dataset = data.tfds("sklearn_digits", batch_size=5, mean=0.0, std=1.0)
    ours, same = next(data.digits(5).train(3, 1)), next(dataset.train(3, 1))
    np.testing.assert_array_equal(ours["label"], same["label"])
    np.testing.assert_allclose(same["image"] * 255 / 16, ours["image"] * 0.3762 + 0.3058, atol=1e-6)
    older = place(digits_dir).with_name("0.9.0")
    shutil.copytree(place(digits_dir), older)
    assert prepare.prepared_directory("sklearn_digits", digits_dir) == place(digits_dir)
    assert prepare.prepared_directory("sklearn_digits:0.9.0", digits_dir) == older


def test_damaged_records_of_a_tfds_data_set_are_named(digits_dir: Path):
    (place(digits_dir) / "arrays.npz").unlink()
    damage(place(digits_dir) / "sklearn_digits-train.array_record-00000-of-00001", "empty")
    with pytest.raises(ValueError, match=r"1\.0\.0 cannot be read .* prepare the data set again"):
        data.tfds("sklearn_digits")


LEGACY = {
    "type": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
    "content": {
        "image": {"type": "evil_features.Evil", "content": {}},
        "type": {"type": "tensorflow_datasets.core.features.scalar.Scalar", "content": {}},
    },
}


def names_a_class(file: str, name: str, key: str = "pythonClassName") -> Callable[[Path], None]:
    """Puts a class into the features of a prepared data set."""

    def change(directory: Path) -> None:
        features = json.loads((directory / "features.json").read_text())
        image = features["featuresDict"]["features"]["image"]
        image.pop("pythonClassName")
        image[key] = name
        if file == "features.json":
            (directory / file).write_text(json.dumps(features))
        else:
            info = json.loads((directory / file).read_text())
            (directory / file).write_text(json.dumps({**info, "features": features}))

    return change


def changes_info(change: Callable[[dict], Any]) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        info = json.loads((directory / "dataset_info.json").read_text())
        change(info)
        (directory / "dataset_info.json").write_text(json.dumps(info))

    return write


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (names_a_class("features.json", "evil_features.Evil"), "names the class 'evil_features."),
        (names_a_class("features.json", "evil_features.Evil", "python_class_name"), "'evil_"),
        (names_a_class("dataset_info.json", "evil_features.Evil"), "names the class 'evil_"),
        (names_a_class("features.json", "tensorflow_datasets.evil_features.E"), "'tensorflow_data"),
        (names_a_class("features.json", "tensorflow_datasets.core.features..evil.E"), "names the"),
        (lambda d: (d / "features.json").write_text(json.dumps(LEGACY)), "'evil_features.Evil'"),
        (changes_info(lambda info: info.update(name="../x/sklearn_digits")), "names the files"),
        (changes_info(lambda info: info["splits"][0].update(name="../train")), "names the files"),
        (
            changes_info(lambda info: info["splits"][0].update(filepathTemplate="../{SPLIT}")),
            "names the files",
        ),
        (lambda directory: os.mkfifo(directory / "pipe"), "pipe is not a regular file"),
    ],
)
def test_a_prepared_folder_cannot_make_tfds_import_or_open_anything_else(
    digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, words: str
):
    harm = tmp_path / "harm"
    (tmp_path / "evil_features.py").write_text(f"open({str(harm)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    (place(digits_dir) / "arrays.npz").unlink()
    change(place(digits_dir))
    with pytest.raises(ValueError) as caught:
        data.tfds("sklearn_digits")
    assert words in str(caught.value)
    assert not harm.exists() and "evil_features" not in sys.modules
    assert data.digits().num_examples == 1437  # those are known, and prepared anew


@pytest.mark.parametrize("file", ["features.json", "dataset_info.json", "arrays.npz"])
def test_a_named_pipe_in_place_of_a_file_is_refused_without_waiting(digits_dir: Path, file: str):
    before = data.digits().fingerprint
    (place(digits_dir) / "arrays.npz").unlink()
    (place(digits_dir) / file).unlink(missing_ok=True)
    os.mkfifo(place(digits_dir) / file)
    if file == "arrays.npz":
        with pytest.raises(ValueError, match="arrays.npz is not a regular file"):
            data.tfds("sklearn_digits")
    else:
        with pytest.raises(ValueError):
            data.tfds("sklearn_digits")
    assert data.digits().fingerprint == before


@pytest.mark.parametrize(
    "nested", ['{"a":' * 100_000, "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200]
)
def test_features_that_nest_too_deeply_are_refused(digits_dir: Path, nested: str):
    (place(digits_dir) / "arrays.npz").unlink()
    (place(digits_dir) / "features.json").write_text(nested)
    with pytest.raises(ValueError, match="cannot be read"):
        data.tfds("sklearn_digits")


def test_what_the_command_prints_of_a_name_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert prepare.main(["a\x1b[2J", f"--data_dir={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("a\\x1b[2J was not prepared:") and "\x1b" not in said


NO_NAMES = ["/:**", "*", "sklearn_digits:*", "sklearn_digits:1.*.*", "../data/sklearn_digits", ""]
NO_NAMES += ["/etc", "sklearn_digits/..:1.0.0", "sklearn_digits/.", "a/b/c", "a:latest", "~", "a\0"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_is_not_valid_in_tfds_is_not_searched_for(
    digits_dir: Path, capsys: pytest.CaptureFixture[str], name: str
):
    with pytest.raises(ValueError, match="is not the name of a data set of TFDS"):
        data.tfds(name)
    assert prepare.main([name]) == 1
    assert "is not the name of a data set" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sklearn_digits", "sklearn_digits:1.0.0", "sklearn_digits/a.b-c"])
def test_a_name_may_have_config_and_version(digits_dir: Path, name: str):
    if "/" in name:
        shutil.copytree(place(digits_dir), digits_dir / name / "1.0.0")
    assert data.tfds(name).num_examples == 1437
    (digits_dir / "sklearn_digits" / "9.9.9").write_text("a file, and no version")
    assert data.tfds(name).num_examples == 1437


def test_a_data_dir_that_is_a_file_holds_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="'mnist' is not prepared"):
        data.tfds("mnist", data_dir=str(tmp_path / "file"))


def test_the_home_folder_of_an_unknown_user_is_refused_as_data_dir(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(ValueError, match="no directory '~nobody-here/x' for data sets"):
        data.tfds("mnist", data_dir="~nobody-here/x")
    assert prepare.main(["mnist", "--data_dir=~nobody-here/x"]) == 1
    assert "mnist was not prepared: There is no directory" in capsys.readouterr().err


def test_a_data_set_that_is_not_prepared_is_reported_at_once(tmp_path: Path):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"not prepared in .*`make fashion_mnist`"):
        data.fashion_mnist(data_dir=str(tmp_path))
    with pytest.raises(
        ValueError, match=r"'mnist' is not prepared .*trainer\.data\.prepare mnist`"
    ):
        data.tfds("mnist", data_dir=str(tmp_path))
    assert time.monotonic() - start < 60  # tfds by itself retries for minutes


def test_an_unknown_name_of_a_data_set_is_an_error_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert prepare.main(["fashion_minst", "--data_dir", str(tmp_path)]) == 1
    assert "fashion_minst was not prepared" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


needs_debian = pytest.mark.skipif(
    not DEBIAN.is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)


@pytest.fixture(scope="session")
def fashion_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fashion")
    assert prepare.main(["fashion_mnist", "--data_dir", str(root)]) == 0
    return root


@needs_debian
def test_fashion_mnist_equals_its_original_files(fashion_dir: Path):
    directory = fashion_dir / "fashion_mnist" / "3.0.1"
    assert json.loads((directory / "dataset_info.json").read_text())["fileFormat"] == "array_record"
    dataset = data.fashion_mnist(None, eval_batch_size=10_000, data_dir=str(fashion_dir))
    batches = (("train", next(dataset.train())), ("t10k", next(dataset.evaluate())))
    for name, batch in batches:
        images = gzip.decompress((DEBIAN / f"{name}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((DEBIAN / f"{name}-labels-idx1-ubyte.gz").read_bytes())[8:]
        count = len(labels)
        ours = np.rint(255 * (batch["image"] * 0.353 + 0.286)).astype(np.uint8).reshape(count, 784)
        pairs = np.concatenate([ours, batch["label"][:, None].astype(np.uint8)], axis=1)
        theirs = np.frombuffer(images, np.uint8).reshape(count, 784)
        known = np.concatenate([theirs, np.frombuffer(labels, np.uint8)[:, None]], axis=1)
        assert digests(pairs) == digests(known)
        if name == "train":
            assert abs(batch["image"].mean()) < 1e-3 and abs(batch["image"].std() - 1) < 1e-3


def digests(rows: np.ndarray) -> list[bytes]:
    return sorted(hashlib.md5(row.tobytes()).digest() for row in rows)


@needs_debian
def test_files_that_are_not_the_original_ones_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = tmp_path / "files"
    shutil.copytree(DEBIAN, files)
    damage(files / "train-labels-idx1-ubyte.gz", "flipped")
    root = tmp_path / "data"
    assert prepare.main(["fashion_mnist", "--data_dir", str(root), "--files", str(files)]) == 1
    assert "train-labels-idx1-ubyte.gz" in capsys.readouterr().err
    assert not list(root.iterdir())
