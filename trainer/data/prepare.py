"""Prepares a data set on disk: `python -m trainer.data.prepare fashion_mnist` or `... text FILES`.

The name of a data set of TFDS is prepared as array_record, and texts as shards of tokens.
"""

import argparse
import contextlib
import difflib
import importlib.util
import io
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.data.folders import data_root, prepare_aside, prepared_directory
from trainer.data.text import SHARD_TOKENS, TextPlan, find_documents
from trainer.data.tfds_arrays import read_splits
from trainer.data.tfds_images import count_examples, images_differ
from trainer.data.tokenizer import FILE, load_tokenizer
from trainer.messages import DONE, FAILED, MISTAKE, printable
from trainer.parser import Parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, with the arguments after the program's name; returns the exit code."""
    # None stands for the arguments of this process. The code is 0; 1 if the data set cannot be
    # prepared or read; 2 if a text cannot be prepared as asked, or written to its folder.
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] != ["text"]:
        parser = _tfds_parser()
        if difflib.get_close_matches("text", arguments[:1], cutoff=0.75):
            parser.error(f"{arguments[0]!r} is no data set of TFDS. Did you mean text?")
        return _prepare_tfds(parser.parse_args(arguments))
    parser = _text_parser()
    options = parser.parse_args(arguments[1:])
    if options.out is None:
        parser.error("there is no --out. Name a new folder for the shards, as in --out=shards")
    return _prepare_text(options)


def _tfds_parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.data.prepare",
        description="Prepares a data set of TFDS as array_record, for data.tfds; or texts as "
        "shards of tokens, for data.tokens: `python -m trainer.data.prepare text --help`.",
    )
    parser.add_argument("name", help="its name in TFDS, such as fashion_mnist; or text")
    parser.add_argument("--data_dir", help="default: $LOCKSTEP_DATA_DIR or ~/.cache/lockstep/data")
    parser.add_argument("--files", type=Path, help="a directory with the files to download")
    return parser


def _text_parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.data.prepare text",
        description="Writes the tokens of texts as shards in the layout of llm.c, and their "
        "tokenizer.json, for data.tokens.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        help="files, folders or globs; a file is a document; none for the works of Shakespeare",
    )
    parser.add_argument("--out", type=Path, help="the folder to write, a new one")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, bpe or a tokenizer.json")
    parser.add_argument("--vocab_size", type=int, help="tokens of the BPE, 4096 by default")
    parser.add_argument("--separator", help="the text between two documents of a file")
    for split in ("validation", "test"):
        share = "share of the bytes, by document; 0 for no such split; default: 0.05"
        parser.add_argument(f"--{split}", type=float, default=0.05, help=share)
    parser.add_argument("--split_seed", type=int, default=0, help="which documents these are")
    parser.add_argument("--end_of_text", type=int, help="of a tokenizer.json, if not found by name")
    parser.add_argument(
        "--shard_tokens", type=int, default=SHARD_TOKENS, help=f"default: {SHARD_TOKENS}"
    )
    return parser


def _prepare_text(options: argparse.Namespace) -> int:
    counts: dict[str, int] = {}
    try:
        if not 1 <= options.shard_tokens < 2**31:
            raise ValueError(
                f"--shard_tokens is {options.shard_tokens}, but a shard has from 1 to 2**31 - 1 "
                "tokens."
            )
        documents = find_documents(options.files or None, options.separator)
        splits = (options.validation or None, options.test or None, options.split_seed)
        tokenizer = (options.tokenizer, options.vocab_size)
        plan = TextPlan(documents, *tokenizer, *splits, options.end_of_text)
        out = options.out.expanduser().absolute()
        if out.exists():
            raise ValueError(f"{out} exists. Name a new folder as --out.")

        def build(aside: Path) -> Path:
            (aside / out.name).mkdir()
            counts.update(plan.write(aside / out.name, options.shard_tokens))
            return aside / out.name

        prepare_aside(out.parent, build)
    except (ValueError, OSError) as error:
        said = str(error)
        if isinstance(error, OSError):
            why = error.strerror or said
            said = f"{options.out} cannot be written ({why}). Name another --out."
        print(f"The text was not prepared: {printable(said)}", file=sys.stderr)
        return MISTAKE
    said = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    print(printable(f"The text is ready in {options.out}: {said} tokens."))
    if options.tokenizer == "bpe":
        for warning in plan.too_few(load_tokenizer(out / FILE, plan.end_of_text).vocab_size):
            print(warning)
    return DONE


def _prepare_tfds(options: argparse.Namespace) -> int:
    try:
        root = data_root(options.data_dir)
        if (directory := prepared_directory(options.name, root)) is None:
            print(printable(f"Preparing {options.name} in {root}."), flush=True)
            directory = prepare(options.name, root, options.files)
        splits = count(directory)
    except (ValueError, OSError) as error:
        print(printable(f"{options.name} was not prepared: {error}"), file=sys.stderr)
        return FAILED
    counts = ", ".join(f"{examples} {name}" for name, examples in splits.items())
    print(printable(f"{options.name} is ready in {directory}: {counts} examples."))
    return DONE


# Preparing a data set of TFDS by its unmodified builder.

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
    return {split: len(arrays["label"]) for split, arrays in read_splits(directory).items()}


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
    with contextlib.ExitStack() as stack:
        for owner, name, value in places:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


if __name__ == "__main__":
    sys.exit(main())
