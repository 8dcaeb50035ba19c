"""The options of the commands about checkpoints of a run. Imports nothing that takes long."""

import argparse

from trainer.cli import values


def add_checkpoint(checkpoint: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the actions of `checkpoint` and their options.

    Args:
        checkpoint: the parser of the command.

    Returns:
        The parser of `checkpoint export`, which still lacks --vocabulary.
    """
    actions = checkpoint.add_subparsers(dest="action", metavar="action", required=True)
    listing = actions.add_parser("ls", help="list the checkpoints of a run")
    check = actions.add_parser("check", help="read every leaf and compare its checksum")
    check.add_argument(
        "--step", type=values.step, metavar="N", help="only the checkpoint of this step"
    )
    diff = actions.add_parser("diff", help="name the leaves in which two checkpoints differ")
    export = actions.add_parser("export", help="write parameters as a safetensors file")
    for action in (listing, check, diff, export):
        action.add_argument("workdir", type=values.folder, metavar="WORKDIR", help="a run's folder")
    diff.add_argument(
        "other", nargs="?", type=values.folder, metavar="OTHER", help="default the same WORKDIR"
    )
    diff.add_argument(
        "--step", type=values.step, metavar="N", help="in WORKDIR; default the newest"
    )
    diff.add_argument(
        "--other_step",
        type=values.step,
        metavar="N",
        help="in OTHER; default the newest there, or in WORKDIR the one before",
    )
    export.add_argument("file", metavar="FILE.safetensors", help="the config becomes FILE.yaml")
    _step(export)
    export.add_argument(
        "--raw",
        action="store_true",
        help="the parameters that are trained, and not their averages, which are evaluated",
    )
    export.add_argument("--force", action="store_true", help="replace files that exist")
    return export


def _step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step",
        type=values.checkpoint_step,
        default="latest",
        metavar="best|latest|N",
        help="which checkpoint; best by the best_metric of the config; default latest",
    )


def add_sample(sample: argparse.ArgumentParser) -> None:
    """Adds the options of `sample`.

    Args:
        sample: the parser of the command.
    """
    sample.add_argument("workdir", type=values.folder, metavar="RUN", help="a run's folder")
    text = sample.add_mutually_exclusive_group()
    text.add_argument(
        "--prompt",
        default="",
        help="the beginning of the text; - reads it from stdin, without one newline at its end; "
        "default ''",
    )
    text.add_argument(
        "--prompt_file",
        metavar="FILE",
        help="reads the prompt from a file in UTF-8, without one newline at its end",
    )
    sample.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="the most tokens to add; a text may end before; default 200, or as many as fit"
        " the model and the sequences that it was trained on",
    )
    sample.add_argument(
        "--temperature",
        type=values.number,
        default=0.8,
        metavar="T",
        help="divides the logits; 0 takes the most probable token; default 0.8",
    )
    sample.add_argument(
        "--top_k", type=int, metavar="K", help="draw from the K most probable tokens; default all"
    )
    sample.add_argument("--seed", type=values.seed, default=0, metavar="N", help="default 0")
    sample.add_argument(
        "--num_samples",
        type=values.positive,
        default=1,
        metavar="N",
        help="how many texts; default 1",
    )
    _step(sample)
