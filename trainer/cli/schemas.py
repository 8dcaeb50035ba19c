"""The command schema: prints what an editor needs to complete and check configs in YAML."""

import argparse

from trainer.cli.terminal import show
from trainer.messages import DONE


def run(arguments: argparse.Namespace) -> int:
    """Prints the JSON schema of YAML configs, or the list of tags."""
    from trainer.config import schema

    made = schema.custom_tags if arguments.custom_tags else schema.text
    show(made(arguments.vocabulary).rstrip("\n"))
    return DONE
