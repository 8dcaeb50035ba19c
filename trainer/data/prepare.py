"""Prepares a data set on disk: `python -m trainer.data.prepare fashion_mnist` or `... text FILES`.

The name of a data set of TFDS is prepared as array_record, and texts as shards of tokens.
"""

import argparse
import difflib
import sys
from pathlib import Path

from trainer.data.folders import data_root, prepare_aside, prepared_directory
from trainer.data.prepare_tfds import count, prepare
from trainer.data.text import SHARD_TOKENS, TextPlan, find_documents
from trainer.data.tokenizer import FILE, load_tokenizer
from trainer.messages import DONE, FAILED, MISTAKE, printable
from trainer.parser import Parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, with the arguments after the program's name; returns the exit code."""
    # None stands for the arguments of this process. The code is 0; 1 if the data set cannot be
    # prepared or read; or 2 if a text cannot be prepared as the command says, or written to its
    # folder.
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
    try:
        plan, out = _plan(options), options.out.expanduser().absolute()
        counts = _write(plan, out, options.shard_tokens)
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
        size = load_tokenizer(out / FILE, plan.end_of_text).vocab_size
        for warning in plan.too_few(size):
            print(warning)
    return DONE


def _plan(options: argparse.Namespace) -> TextPlan:
    if not 1 <= options.shard_tokens < 2**31:
        raise ValueError(
            f"--shard_tokens is {options.shard_tokens}, but a shard has from 1 to 2**31 - 1 tokens."
        )
    return TextPlan(
        documents=find_documents(options.files or None, options.separator),
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        validation=options.validation or None,
        test=options.test or None,
        split_seed=options.split_seed,
        end_of_text=options.end_of_text,
    )


def _write(plan: TextPlan, out: Path, shard_tokens: int) -> dict[str, int]:
    """Writes the shards, and returns the number of tokens of each split."""
    if out.exists():
        raise ValueError(f"{out} exists. Name a new folder as --out.")
    counts: dict[str, int] = {}

    def build(aside: Path) -> Path:
        (aside / out.name).mkdir()
        counts.update(plan.write(aside / out.name, shard_tokens))
        return aside / out.name

    prepare_aside(out.parent, build)
    return counts


def _prepare_tfds(options: argparse.Namespace) -> int:
    try:
        root = data_root(options.data_dir)
        directory = prepared_directory(options.name, root)
        if directory is None:
            print(printable(f"Preparing {options.name} in {root}."), flush=True)
            directory = prepare(options.name, root, options.files)
        splits = count(directory)
    except (ValueError, OSError) as error:
        print(printable(f"{options.name} was not prepared: {error}"), file=sys.stderr)
        return FAILED
    counts = ", ".join(f"{examples} {name}" for name, examples in splits.items())
    print(printable(f"{options.name} is ready in {directory}: {counts} examples."))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
