"""Continues a text with the model of a run."""

import argparse
import sys
from pathlib import Path
from typing import Any

from trainer.cli.resolving import ignore_optimizer_warnings
from trainer.cli.terminal import show
from trainer.messages import DONE, UserError

_BETWEEN = "\n----\n"  # separates two samples


def run(arguments: argparse.Namespace) -> int:
    """Prints the prompt and its continuation; several of them are separated by a line "----"."""
    from trainer.data.tokenizer import SubwordTokenizer
    from trainer.engine.experiment import Experiment
    from trainer.engine.generation import (
        Continuation,
        Sampling,
        encode_prompt,
        fitting_length,
        length_warning,
    )
    from trainer.train.trained import (
        read_language,
        read_run,
        read_tokenizer,
        read_trained,
        trained_length,
    )

    prompt = _prompt(arguments)
    folder = Path(arguments.workdir)
    config = read_run(folder)
    ignore_optimizer_warnings()
    language = read_language(folder, config, arguments.vocabulary)
    tokenizer = read_tokenizer(folder, config, arguments.vocabulary)
    precision: Any = config.root.kwargs.get("precision", Experiment.precision)
    try:
        tokens, trained = encode_prompt(tokenizer, prompt), trained_length(folder)
        length = fitting_length(language, len(tokens), arguments.length, trained)
        sampling = Sampling(
            length, arguments.temperature, arguments.top_k, end=tokenizer.end_of_text
        )
        continuation = Continuation(language, tokenizer, tokens, sampling, precision)
    except ValueError as error:
        raise UserError(str(error)) from error
    found = read_trained(folder, arguments.step, arguments.vocabulary)
    texts = continuation.sample(
        found.params, found.model_state, arguments.seed, arguments.num_samples
    )
    if warning := length_warning(len(tokens), length, trained):
        show(f"warning: {warning}", sys.stderr)
    if prompt.endswith(" ") and isinstance(tokenizer, SubwordTokenizer):
        text = "The prompt ends in a space. Words begin with theirs, so that the model has"
        show(f"warning: {text} rarely read one alone: leave it out.", sys.stderr)
    show(f"step {found.step} of {folder}:", sys.stderr)
    show(_BETWEEN.join(prompt + text for text in texts))
    return DONE


def _prompt(arguments: argparse.Namespace) -> str:
    """Returns the prompt, without one newline at the end of a file or of stdin."""
    try:
        if arguments.prompt_file is not None:
            text = Path(arguments.prompt_file).read_text(encoding="utf-8")
        elif arguments.prompt == "-":
            text = sys.stdin.read()
        else:
            return arguments.prompt
    except (OSError, UnicodeError) as error:
        raise UserError(_unreadable(arguments.prompt_file, error)) from error
    return text.removesuffix("\n")


def _unreadable(file: str | None, error: OSError | UnicodeError) -> str:
    """Returns why a prompt cannot be read, and what to do; `file` is None for stdin."""
    where, name = ("stdin", "--prompt=-") if file is None else (file, f"--prompt_file={file}")
    if isinstance(error, FileNotFoundError):
        return f"The prompt cannot be read: there is no file {where}. Name a file of text."
    if isinstance(error, UnicodeDecodeError):
        return (
            f"The prompt in {where} is not text in UTF-8: its byte {error.start + 1} is "
            f"0x{error.object[error.start]:02x}. Convert it to UTF-8."
        )
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"The prompt of {name} cannot be read: {why}. Name a file of text that can be read."
