"""Prepares a data set of TFDS as array_record, by its unmodified builder."""

import contextlib
import importlib.util
import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.data.folders import prepare_aside
from trainer.data.tfds_arrays import read
from trainer.data.tfds_images import count_examples, images_differ

# Debian's package has the original files with another gzip header, without the name and the time.
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION_TIMES = {
    "train-images-idx3-ubyte": 1504176606,
    "train-labels-idx1-ubyte": 1504176606,
    "t10k-images-idx3-ubyte": 1504176627,
    "t10k-labels-idx1-ubyte": 1504176627,
}


def prepare(name: str, root: Path, files: Path | None = None) -> Path:
    """Prepares a data set by its unmodified TFDS builder; returns the version's folder."""
    # `files` is a directory with the files that the builder would download; None for the network,
    # or, for fashion_mnist, Debian's package dataset-fashion-mnist where it is installed. Raises
    # ValueError if the files can neither be found nor downloaded, or differ from the originals.
    import tensorflow_datasets
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

    if files is None and name == "fashion_mnist" and _DEBIAN.is_dir():
        files = _DEBIAN

    def build(aside: Path) -> Path:
        builder = tensorflow_datasets.builder(name, data_dir=aside, file_format="array_record")
        # Extracted files are named by plain file name: one directory for each data set.
        config = tensorflow_datasets.download.DownloadConfig(
            extract_dir=aside / "extracted",
            manual_dir=_manual_files(files, aside / "manual") if files else None,
            force_checksums_validation=True,
            try_download_gcs=False,
        )
        if files is None:
            _check_download(builder)
        tensorflow_datasets.display_progress_bar(sys.stderr.isatty())
        with _without_tensorflow(), contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(download_dir=aside / "downloads", download_config=config)
        # Before the move: raises for damaged records, and saves the arrays beside them.
        count(Path(builder.data_dir))
        return Path(builder.data_dir)

    try:
        return prepare_aside(root, build)
    except (NonMatchingChecksumError, tensorflow_datasets.download.DownloadError) as error:
        raise ValueError(str(error).splitlines()[0]) from error


def count(directory: Path) -> dict[str, int]:
    """Reads a prepared data set, and returns split -> number of examples."""
    # It reads all examples, or one a split if the images differ in size. Raises ValueError if the
    # data set cannot be read.
    if images_differ(directory):
        return count_examples(directory)
    return {split: len(arrays["label"]) for split, arrays in read(directory).items()}


def _manual_files(files: Path, directory: Path) -> Path:
    """Links downloaded files; copies those whose gzip headers Debian changed, with the original."""
    directory.mkdir()
    for file in sorted(files.iterdir()):
        time = _FASHION_TIMES.get(file.stem)
        if file.suffix != ".gz" or time is None:
            (directory / file.name).symlink_to(file.absolute())  # ImageNet has 145 GB
            continue
        content = file.read_bytes()
        if content[:4] == b"\x1f\x8b\x08\x00":
            # RFC 1952: magic, deflate, FNAME; the time; no extra flags, Unix. These are ten bytes,
            # and the name follows.
            header = b"\x1f\x8b\x08\x08" + struct.pack("<I", time) + b"\x00\x03"
            content = header + file.stem.encode() + b"\0" + content[10:]
        (directory / file.name).write_bytes(content)
    return directory


def _check_download(builder: Any) -> None:
    """Raises ValueError if files need a download by hand, or their server is unreachable."""
    # tfds would retry for minutes.
    import requests

    if said := builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        raise ValueError(
            f"TFDS does not download its files: {' '.join(said.split())} Name their directory by "
            "--files."
        )

    for url in list(builder.url_infos)[:1]:
        try:
            requests.head(url, timeout=15)
        except requests.RequestException as error:
            raise ValueError(
                f"{url} cannot be reached ({type(error).__name__}). Run this where there is a "
                "network, or name a directory that has the files by --files. For fashion_mnist, "
                "Debian's package has them: apt-get install dataset-fashion-mnist."
            ) from error


@contextlib.contextmanager
def _without_tensorflow() -> Iterator[None]:
    """Replaces TensorFlow's functions that the builder uses, if it is not installed."""
    # They open files, for extraction and for the data sets of the MNIST family, and encode images
    # as PNG, which is lossless.
    if importlib.util.find_spec("tensorflow"):
        yield
        return
    from PIL import Image
    from tensorflow_datasets.core.download import extractor
    from tensorflow_datasets.core.features import image_feature
    from tensorflow_datasets.image_classification import mnist

    def encode(self: Any, image: Any) -> bytes:
        if self.encoding_format != "png":
            raise ValueError(
                f"Encoding images as {self.encoding_format} needs TensorFlow, which is absent."
            )
        buffer = io.BytesIO()
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(buffer, format="png")
        return buffer.getvalue()

    tensorflow = SimpleNamespace(
        io=SimpleNamespace(gfile=SimpleNamespace(GFile=open)),
        compat=SimpleNamespace(as_text=str),
    )
    places = (
        (extractor, "tf", tensorflow),
        (mnist, "tf", tensorflow),
        (image_feature._ImageEncoder, "_encode_image", encode),
    )
    before = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            setattr(owner, name, value)
