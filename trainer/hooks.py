"""Functions that a run calls while it trains, which a config may name as `hooks`.

A hook is a function, or an object with a method `bind`; see `HookContext`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from trainer.engine import generation
from trainer.engine.contracts import tokens_per_example
from trainer.engine.datasets import eval_batches, split_sizes
from trainer.engine.experiment import Experiment
from trainer.engine.generation import PromptContinuation, Sampling
from trainer.engine.mesh import data_shard
from trainer.models.model import LanguageModel
from trainer.protocols import Tokenizer
from trainer.writers import truncate_after
from trainer.writers.lines import SAMPLES_FILE, whole_lines
from trainer.writers.record_file import RecordFile

__all__ = ["samples"]

_PROMPT = 64  # tokens of the validation split


class HookContext(NamedTuple):
    """The run that `bind` of a hook gets.

    An object with a method `bind` is a hook, too. Before the first step of a process, and again
    after a rollback, `bind(context)` returns the function that the run calls, `function(step,
    metrics, params)`. With an attribute `at = "evaluation"` the run calls it after each evaluation
    instead of every `log_every` steps: `function(step, metrics, params, model_state)`, with the
    results of the evaluation, and the parameters and the state that were evaluated. If the object
    has a method `check(experiment)`, it is called before the run has a folder, and raises
    ValueError for a hook that does not fit the experiment.

    Attributes:
        experiment: the experiment.
        mesh: the devices of the parameters.
        folder: the folder of the run.
        kept: the last step whose results are kept; later steps are computed again.
        log: takes a line for the user.
        fence: called before a file in the folder is written; raises if another process has it.
    """

    experiment: Experiment
    mesh: Mesh
    folder: Path
    kept: int
    log: Callable[[str], None]
    fence: Callable[[], None]


def samples(
    prompt: str | None = None,
    length: int | None = None,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> "Samples":
    """Returns a hook that continues a prompt at every evaluation, and keeps the texts.

    The text is printed and added to samples.jsonl in the folder of the run: {"step": 100,
    "prompt": "...", "text": "..."}. It changes no bit of the run. With a prompt, it is the text of
    `python -m trainer sample` with the same arguments and the checkpoint of this step.

    Args:
        prompt: the beginning of a document; None for the beginning of the validation split, or of
            the test split if there is no other.
        length: the most tokens to add; a text may end before. None for 200, or as many as fit the
            model and the sequences that it is trained on. More of them are a warning.
        temperature: the logits are divided by it; 0 takes the most probable token.
        top_k: only so many of the most probable tokens are drawn; None draws any.
        seed: of the random numbers, the same at every evaluation.

    Raises:
        ValueError: an argument is out of its range.
    """
    sampling = Sampling(1 if length is None else length, temperature, top_k)
    sampling.check()
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be between 0 and 2**32 - 1, got {seed}.")
    return Samples(prompt, length, sampling, seed)


class Samples:
    """The hook that `samples` returns, whose arguments it has.

    `sampling` says how to draw; its length is replaced when the hook is bound.
    """

    at = "evaluation"

    def __init__(self, prompt: str | None, length: int | None, sampling: Sampling, seed: int):
        self._prompt, self._length, self._sampling, self._seed = prompt, length, sampling, seed
        # The arguments of the last Continuation, and itself, which compiles a program: the trials
        # of a sweep and a run after a rollback bind this hook again.
        self._made: tuple[tuple[Any, ...], PromptContinuation] | None = None

    def check(self, experiment: Experiment) -> None:
        """Raises ValueError if the experiment has no language model, or the prompt does not fit."""
        language, tokenizer = _parts(experiment)
        prompt = [tokenizer.end_of_text]
        if self._prompt is not None:
            prompt = generation.encode_prompt(tokenizer, self._prompt)
        trained = tokens_per_example(experiment.data)
        length = generation.fitting_length(language, len(prompt), self._length, trained)
        generation.check_prompt(language, prompt, length)

    def bind(self, context: HookContext) -> Callable[..., None]:
        """Returns the function that the run calls after each evaluation.

        Raises OSError if samples.jsonl cannot be read or cut off.
        """
        experiment = context.experiment
        language, tokenizer = _parts(experiment)
        trained = tokens_per_example(experiment.data)
        if self._prompt is None:
            most = generation.longest_text(language, trained)
            most -= self._length or most // 2
            if most < 1:  # longer than what the model was trained on: a warning says so below
                most = language.max_length - (self._length or 0)
            tokens = _first_tokens(experiment, context.mesh)[:most]
            shown = tokenizer.decode([token for token in tokens if token != tokenizer.end_of_text])
        else:
            tokens, shown = generation.encode_prompt(tokenizer, self._prompt), self._prompt
        length = generation.fitting_length(language, len(tokens), self._length, trained)
        if warning := generation.length_warning(len(tokens), length, trained):
            context.log(f"warning: hooks.samples: {warning}")
        sampling = self._sampling._replace(length=length, end=tokenizer.end_of_text)
        given = (language, tokenizer, tokens, sampling, experiment.precision, context.mesh)
        if self._made is None or self._made[0] != given:
            self._made = given, PromptContinuation(*given)
        continuation = self._made[1]
        file = RecordFile(context.folder / SAMPLES_FILE, whole_lines, context.log)
        writes, pending = jax.process_index() == 0, b""  # what a full disk did not take
        if writes:  # without the rows of steps that are computed again
            context.fence()
            truncate_after(file.path, context.kept, context.fence)

        def sample(step: int, metrics: Any, params: Any, model_state: Any) -> None:
            nonlocal pending
            # All processes call it, because each may have a share of the parameters.
            text = continuation.sample(params, model_state, self._seed)[0]
            if writes:
                context.log(f"sample at step {step:,}: {shown}{text}")
                row = json.dumps({"step": step, "prompt": shown, "text": text}, ensure_ascii=False)
                pending += row.encode(errors="replace") + b"\n"
                context.fence()
                pending = b"" if file.write(pending) else pending
                file.close()

        return sample


def _parts(experiment: Experiment) -> tuple[LanguageModel, Tokenizer]:
    """Returns the language model and the tokenizer of an experiment."""
    if (language := getattr(experiment.model, "language", None)) is None:
        raise ValueError(
            "hooks.samples continues a text, but the model is not a language model. Name one such "
            "as models.gpt, or remove the hook."
        )
    if (tokenizer := getattr(experiment.data, "tokenizer", None)) is None:
        raise ValueError(
            "hooks.samples needs a tokenizer, but the data set has none. data.tokens reads the "
            "tokenizer.json beside its shards, or the file that its argument `tokenizer` names; a "
            "data set of yours has it as an attribute `tokenizer`. Give it one, or remove the hook."
        )
    return language, tokenizer


def _first_tokens(experiment: Experiment, mesh: Mesh) -> list[int]:
    """Returns the first tokens of the first split that is evaluated, in all processes."""
    split = next(iter(split_sizes(experiment.data)))
    batch = next(eval_batches(experiment.data, split, data_shard(mesh)))
    if "tokens" not in batch:
        raise ValueError(
            f"The batches of the {split} split have {', '.join(batch)}, and no tokens with which a "
            "text could begin. Set the argument `prompt`."
        )
    tokens = np.asarray(batch["tokens"][0], np.int32)[:_PROMPT]
    if jax.process_count() > 1:
        tokens = np.asarray(multihost_utils.broadcast_one_to_all(tokens))
    return tokens.tolist()
