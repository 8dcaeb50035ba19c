"""Images of any size: the law of the crops, the stream by step, records of TFDS."""

import contextlib
import importlib
import io
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from tests import photos_builder, runs, short
from trainer import data
from trainer.data import folders, images, prepare
from trainer.data.arrays import choose_validation
from trainer.data.folders import prepare_aside
from trainer.data.images import Pixels
from trainer.data.order import random_words
from trainer.data.tfds_images import ImageStream
from trainer.messages import UserError

# `trainer.data` has a function of this name.
tfds_images = importlib.import_module("trainer.data.tfds_images")

# Crops.


def boxes(width: int, height: int, count: int, min_area: float = 0.08) -> np.ndarray:
    words = random_words(0, 0, 1, count * images.WORDS).reshape(count, images.WORDS).tolist()
    return np.array([images.random_box(each, width, height, min_area) for each in words])


def drawn(width: int, height: int, count: int) -> np.ndarray:
    """The shares of the area of Inception's crops, drawn from their definition."""
    rng, found = np.random.default_rng(1), []
    while len(found) < count:
        area = rng.uniform(0.08, 1) * width * height
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        if math.sqrt(area * ratio) <= width and math.sqrt(area / ratio) <= height:
            found.append(area / width / height)
    return np.array(found)


def test_crops_have_inceptions_distribution():
    left, top, right, bottom = boxes(2000, 1500, 4000).T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 2000 and bottom.max() <= 1500
    wide, tall = right - left, bottom - top
    share, ratio = wide * tall / 3e6, np.log(wide / tall)
    assert stats.ks_2samp(share, drawn(2000, 1500, 4000)).pvalue > 0.01
    # No such crop is too large for the image: it is as it was drawn.
    small = share < 0.5
    assert stats.kstest(share[small], stats.uniform(0.08, 0.42).cdf).pvalue > 0.01
    edges = math.log(3 / 4), 2 * math.log(4 / 3)
    assert stats.kstest(ratio[small], stats.uniform(*edges).cdf).pvalue > 0.01
    for offset, most in ((left, 2000 - wide), (top, 1500 - tall)):
        place = (offset + 0.5) / (most + 1)
        assert stats.kstest(place[small], "uniform").pvalue > 0.01
    assert abs(stats.pearsonr(left[small] / (2000 - wide[small]), share[small])[0]) < 0.06


def test_the_smallest_area_is_that_of_the_argument():
    left, top, right, bottom = boxes(1000, 1000, 500, min_area=0.6).T
    assert ((right - left) * (bottom - top)).min() > 0.59e6


@pytest.mark.parametrize(
    ("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))]
)
def test_an_image_that_no_crop_fits_is_cropped_at_its_center(size: tuple, box: tuple):
    assert (boxes(*size, 20) == box).all()


def test_a_training_image_is_a_resized_part_and_mirrored_by_the_first_word():
    image = Image.fromarray(photos_builder.picture(3))
    words = random_words(5, 0, 1, images.WORDS).tolist()
    part = image.crop(images.random_box(words, *image.size, 0.08)).resize((16, 16), 2)
    for first, flip, mirrored in (
        (2**63, True, True),
        (2**63 - 1, True, False),
        (-1, False, False),
    ):
        found = np.asarray(images.crop_at_random(image, [first, *words[1:]], 16, 0.08, flip))
        expected = np.asarray(part)[:, ::-1] if mirrored else np.asarray(part)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (256, 256), (60, 300)])
def test_an_evaluation_image_is_the_center_of_the_resized_one(size: tuple[int, int]):
    x, y = np.meshgrid(np.linspace(0, 255, size[0]), np.linspace(0, 255, size[1]))
    image = Image.fromarray(np.uint8(np.stack([x, y, (x + y) / 2], -1)))
    short = min(size)
    resized = image.resize((256 * size[0] // short, 256 * size[1] // short), 2)
    left, top = (resized.width - 224) // 2, (resized.height - 224) // 2
    found = images.crop_center(image, 224)
    assert found.size == (224, 224)
    np.testing.assert_array_equal(found, np.asarray(resized)[top : top + 224, left : left + 224])
    # The center of the image stays in the center.
    assert np.abs(np.asarray(found)[110:114, 110:114, :2].mean() - 127.5) < 2


# The stream.


class Pictures:
    """Pictures in memory, whose labels are their numbers."""

    def __init__(self, count: int, split: str = "train", replaced: bytes | None = None):
        self._pictures = [photos_builder.encoded(number, split)[0] for number in range(count)]
        self._pictures[-1] = replaced or self._pictures[-1]
        self.fingerprint = f"{split} {count}"
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self._pictures)

    def read(self, indices: Sequence[int]) -> list[tuple[bytes, int]]:
        self.reads += indices
        return [(self._pictures[index], index) for index in indices]


def stream(train: Any = None, tests: int = 7, batch_size: int = 4, **options: Any) -> ImageStream:
    train = train or Pictures(10)
    crops = images.Crops(options.pop("size", 8), options.pop("min_area", 0.08))
    pixels = options.pop("pixels", Pixels(mean=0.5, std=0.5, name="data.s"))
    if (share := options.pop("validation", None)) is not None:
        seed = options.pop("validation_seed", 0)
        options["held_out"] = choose_validation(share, seed, len(train), "data.s")
    tested = Pictures(tests, "validation")
    return ImageStream(train, tested, crops, pixels, batch_size=batch_size, **options)


def first(count: int, dataset: ImageStream, index: int = 0, seed: int = 0) -> list[dict]:
    return list(itertools.islice(dataset.train(index, seed), count))


def assert_equal(some: list[dict], others: list[dict]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])


def test_every_epoch_serves_every_image_once_in_another_order():
    labels = np.concatenate([batch["label"] for batch in first(15, stream())]).reshape(6, 10)
    assert (np.sort(labels, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in labels.tolist()}) == 6


@short.parametrize("step", [1, 2, 7, 1000])
def test_training_may_begin_at_any_step_with_any_number_of_threads(step: int):
    batches = stream(threads=3).train(0, seed=9)
    for _ in range(step):
        next(batches)
    assert_equal(list(itertools.islice(batches, 4)), first(4, stream(threads=1), step, 9))


def test_crops_differ_by_batch_place_and_seed():
    same = Pictures(4)
    same._pictures = same._pictures[:1] * 4
    images = [batch["image"] for batch in first(3, stream(same))]
    images += [batch["image"] for batch in first(3, stream(same), seed=1)]
    flat = np.concatenate(images).reshape(24, -1)
    assert len(np.unique(flat, axis=0)) > 20  # of small pictures, two crops may be the same


def test_element_spec_and_scaling_are_those_of_the_batches():
    dataset = stream()
    batch = next(dataset.train(0, 0))
    spec = {key: (value.shape, value.dtype) for key, value in dataset.element_spec.items()}
    assert spec == {key: (value.shape, value.dtype) for key, value in batch.items()}
    assert spec["image"] == ((4, 8, 8, 3), np.float32)
    assert -1 <= batch["image"].min() < -0.5 and 0.5 < batch["image"].max() <= 1
    image = np.asarray(images.crop_center(Image.fromarray(photos_builder.picture(100)), 8))
    evaluated = next(dataset.evaluate())["image"][0]
    np.testing.assert_allclose(evaluated, image / 127.5 - 1, atol=1e-6)


@pytest.mark.parametrize(("size", "masks"), [(None, [4, 3]), (7, [7]), (2, [2, 2, 2, 1]), (9, [7])])
def test_evaluation_serves_the_test_split_in_order(size: int | None, masks: list[int]):
    batches = list(stream(eval_batch_size=size).evaluate())
    assert [batch["mask"].sum() for batch in batches] == masks
    assert {batch["mask"].dtype for batch in batches} == {np.dtype(np.float32)}
    assert {batch["image"].shape for batch in batches} == {(size or 4, 8, 8, 3)}
    real = [batch["label"][batch["mask"] == 1] for batch in batches]
    assert np.concatenate(real).tolist() == list(range(7))
    assert not any(batch["image"][batch["mask"] == 0].any() for batch in batches)


def test_validation_is_a_part_of_the_training_examples():
    dataset = stream(validation=0.3)
    assert dataset.splits == {"validation": 3, "test": 7} and dataset.num_examples == 7
    batches = list(dataset.evaluate("validation"))
    held_out = np.concatenate([batch["label"][batch["mask"] == 1] for batch in batches])
    trained = np.concatenate([batch["label"] for batch in first(7, dataset)])
    assert sorted({*held_out.tolist(), *trained.tolist()}) == list(range(10))
    assert not set(held_out.tolist()) & set(trained.tolist())
    other = list(stream(validation=0.3, validation_seed=1).evaluate("validation"))[0]
    assert sorted(other["label"][:3].tolist()) != sorted(held_out.tolist())


@pytest.mark.parametrize("asked", [True, False])
def test_only_a_part_of_a_batch_is_decoded(monkeypatch: pytest.MonkeyPatch, asked: bool):
    """The part that is asked for, or else that of the process."""
    whole = first(5, stream(batch_size=6), 3, 1), list(stream(batch_size=6).evaluate())
    shares, reads = [], []
    monkeypatch.setattr("jax.process_count", lambda: 5 if asked else 3)
    for rank in range(3):
        monkeypatch.setattr("jax.process_index", lambda rank=rank: 4 if asked else rank)
        part = {"rank": rank, "size": 3} if asked else {}
        pictures = Pictures(10)
        dataset = stream(pictures, batch_size=6)
        trained = list(itertools.islice(dataset.train(3, 1, **part), 5))
        shares.append((trained, list(dataset.evaluate(**part))))
        reads.append(len(pictures.reads))
    for kind in (0, 1):
        joined = [
            {key: np.concatenate([part[kind][number][key] for part in shares]) for key in batch}
            for number, batch in enumerate(whole[kind])
        ]
        assert_equal(joined, whole[kind])
    assert max(reads) <= (5 + 2) * 2  # two batches are decoded ahead
    with pytest.raises(ValueError, match="among 3 .*, but the batch size is 4"):
        stream().train(0, 0, **part)


def test_the_next_batches_are_decoded_before_they_are_asked_for_and_no_more():
    pictures = Pictures(40)
    batches = stream(pictures, batch_size=4).train(0, 0)
    assert pictures.reads == []
    next(batches)
    for expected in (12, 20):  # that batch and two more, of four images each
        runs.wait_for(lambda expected=expected: len(pictures.reads) >= expected)
        time.sleep(0.1)
        assert len(pictures.reads) == expected
        next(batches)
        next(batches)
    batches.close()


def test_the_fingerprint_covers_splits_and_conversion():
    def changed(**options: Any) -> str:
        return stream(**options).fingerprint

    assert changed() == changed(batch_size=2, threads=1)
    others = {changed(tests=8), changed(train=Pictures(11)), changed(size=9)}
    others |= {changed(pixels=Pixels(mean=0.4)), changed()}
    assert len(others) == 5
    # Of ten examples, a share of 0.3 is as many as one of 0.32.
    held_out = [changed(validation=0.3, validation_seed=seed) for seed in (0, 1)]
    held_out += [changed(), changed(validation=0.4)]
    assert len(set(held_out)) == 4
    assert changed(validation=0.32) == changed(validation=0.3)


def gif() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(photos_builder.picture(0)).save(buffer, format="GIF")
    return buffer.getvalue()


@pytest.mark.parametrize(
    "replaced", [b"nothing", gif(), photos_builder.encoded(1, "train")[0][:200]]
)
def test_an_image_that_cannot_be_decoded_is_named(replaced: bytes):
    dataset = stream(Pictures(10, replaced=replaced), batch_size=10)
    said = "data.s cannot decode image {} of the {} examples as stored"
    with pytest.raises(UserError, match=said.format(9, "training")):
        next(dataset.train(0, 0))
    dataset = stream(Pictures(10, replaced=replaced), validation=0.9, batch_size=1)
    with pytest.raises(UserError, match=said.format(9, "training")):
        list(dataset.evaluate("validation"))
    dataset = ImageStream(
        Pictures(4),
        Pictures(10, replaced=replaced),
        images.Crops(8),
        Pixels(name="data.s"),
        batch_size=4,
    )
    with pytest.raises(UserError, match=said.format(9, "test")):
        list(dataset.evaluate())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 11}, ["10 training examples", "11"]),
        ({"batch_size": 0}, ["batch_size", "0"]),
        ({"eval_batch_size": 0}, ["eval_batch_size", "0"]),
        ({"size": 0}, ["size", "0"]),
        ({"threads": 0}, ["threads", "0"]),
        ({"min_area": 0.0}, ["min_area=0.0"]),
        ({"min_area": 1.5}, ["min_area=1.5"]),
        ({"validation": 1.0}, ["between 0 and 1"]),
    ],
)
def test_mistakes_are_named(options: dict, words: list[str]):
    with pytest.raises(ValueError) as raised:
        stream(**options)
    assert all(word in str(raised.value) for word in ["data.s", *words])


# Records of TFDS.


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepares the pictures as `python -m trainer.data.prepare` does; returns the root."""
    root = tmp_path_factory.mktemp("photos")

    def build(aside: Path) -> Path:
        builder = photos_builder.TinyPhotos(data_dir=aside, file_format="array_record")
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
        assert prepare.count(Path(builder.data_dir)) == photos_builder.SIZES
        return Path(builder.data_dir)

    prepare_aside(root, build)
    return root


def test_the_records_of_tfds_are_served(photos: Path):
    dataset = data.tfds_images("tiny_photos", 5, 16, data_dir=str(photos))
    assert (dataset.num_examples, dataset.splits) == (20, {"test": 7})
    expected = {}
    for number in range(7):
        encoded, label = photos_builder.encoded(number, "validation")
        image = images.crop_center(Image.open(io.BytesIO(encoded)), 16)
        expected[(np.asarray(image, np.float32) * np.float32(1 / 127.5) - 1).tobytes()] = label
    found = {}
    for batch in dataset.evaluate():
        for image, label, mask in zip(batch["image"], batch["label"], batch["mask"], strict=True):
            if mask:
                found[image.tobytes()] = int(label)
    assert found == expected
    labels = [batch["label"] for batch in first(4, dataset)]
    assert np.bincount(np.concatenate(labels)).tolist() == [7, 7, 6]


def test_a_resumed_stream_of_records_is_the_same_in_a_copy_of_the_folder(
    photos: Path, tmp_path: Path
):
    (tmp_path / "tiny_photos").symlink_to(photos / "tiny_photos")
    some = data.tfds_images("tiny_photos", 6, 8, data_dir=str(photos))
    other = data.tfds_images("tiny_photos", 6, 8, data_dir=str(tmp_path), threads=1)
    assert_equal(first(6, some, seed=3)[2:], first(4, other, 2, seed=3))
    assert some.fingerprint == other.fingerprint
    assert (
        some.fingerprint != data.tfds_images("tiny_photos", 6, 9, data_dir=str(photos)).fingerprint
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "tiny_photos", "test_split": "test"}, ["'test'", "tiny_photos", "another split"]),
        ({"name": "no_such"}, ["'no_such'", "not prepared", "trainer.data.prepare no_such"]),
        (
            {"name": "sklearn_digits", "test_split": "test"},
            ["'image'", "sklearn_digits", "is Tensor(", "data.tfds reads images that are not"],
        ),
    ],
)
def test_what_cannot_be_served_is_named(options: dict, words: list[str], photos: Path):
    if options["name"] == "sklearn_digits":
        data.digits(data_dir=str(photos))
    with pytest.raises(ValueError) as raised:
        data.tfds_images(**options, data_dir=str(photos), batch_size=2)
    assert all(word in str(raised.value) for word in words)
    # What would help with damaged files only.
    assert ("prepare the data set again" in str(raised.value)) == ("another split" in words)


def test_images_that_differ_in_size_are_sent_to_the_other_function(photos: Path):
    with pytest.raises(ValueError, match=r"\(27, 34, 3\).*Use data.tfds_images, which") as raised:
        data.tfds("tiny_photos", test_split="validation", data_dir=str(photos))
    assert "again" not in str(raised.value)


def edited(photos: Path, folder: Path, file: str, edit: Callable[[Any], Any]) -> Path:
    """Copies the prepared pictures, edits a JSON file of theirs, and returns their folder."""
    shutil.copytree(photos / "tiny_photos", folder / "tiny_photos")
    directory = folder / "tiny_photos" / "1.0.0"
    content = json.loads((directory / file).read_text())
    (directory / file).write_text(json.dumps(edit(content)))
    return directory


@pytest.mark.parametrize(("other", "said"), [(None, "is absent"), ("file_name", r"is Text\(")])
def test_pictures_without_classes_are_refused(
    photos: Path, tmp_path: Path, other: str | None, said: str
):
    def edit(content: Any) -> Any:
        features = content["featuresDict"]["features"]
        del features["label"]
        if other is not None:
            features["label"] = features.pop(other)
        return content

    edited(photos, tmp_path, "features.json", edit)
    with pytest.raises(ValueError, match=f"'label' of .* {said}.*, but must be a class"):
        data.tfds_images("tiny_photos", 5, data_dir=str(tmp_path))


def test_a_folder_without_splits_is_not_counted(photos: Path, tmp_path: Path):
    directory = edited(photos, tmp_path, "dataset_info.json", lambda _: {})
    with pytest.raises(ValueError, match="cannot be read .* Remove that directory and prepare"):
        prepare.count(directory)


def test_a_folder_is_opened_once_for_all_splits(photos: Path, monkeypatch: pytest.MonkeyPatch):
    checked, check = [], folders.check_prepared
    monkeypatch.setattr(folders, "check_prepared", lambda x: [checked.append(x), check(x)])
    data.tfds_images("tiny_photos", 5, data_dir=str(photos))
    assert len(checked) == 1


def test_a_folder_of_images_is_checked_before_tfds_reads_it(photos: Path, tmp_path: Path):
    shutil.copytree(photos / "tiny_photos", tmp_path / "tiny_photos")
    file = tmp_path / "tiny_photos" / "1.0.0" / "features.json"
    file.write_text(file.read_text().replace("tensorflow_datasets.core", "elsewhere.core"))
    with pytest.raises(ValueError, match="which TFDS would import"):
        data.tfds_images("tiny_photos", 5, data_dir=str(tmp_path))
