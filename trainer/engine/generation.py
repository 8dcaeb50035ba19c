"""Continues texts with a language model, in one compiled program with a key-value cache."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trainer.config.wording import shorten
from trainer.engine.mesh import replicated
from trainer.engine.precision import in_precision
from trainer.messages import plural
from trainer.models.model import LanguageModel
from trainer.protocols import Tokenizer


class Sampling(NamedTuple):
    """How the next token is drawn from the logits of a language model."""

    length: int  # the most tokens to add, at least 1
    temperature: float = 1.0  # the logits are divided by it; 0 takes the most probable token
    top_k: int | None = None  # only so many of the most probable are drawn; None draws any
    # only tokens below it are drawn, if the model knows more than its tokenizer; None draws any
    vocab_size: int | None = None
    end: int | None = None  # the token after which a text has ended; None does not end it early

    def check(self) -> None:
        """Raises ValueError if a value is out of its range."""
        if self.length < 1:
            raise ValueError(f"length must be at least 1 token, got {self.length}.")
        if not 0 <= self.temperature < float("inf"):  # NaN is refused, too
            raise ValueError(
                f"temperature must be at least 0 and finite, got {self.temperature}. With 0 the "
                "most probable token is taken."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1, got {self.top_k}. Leave it out to draw any token."
            )


def draw_token(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token, an int32 scalar, from logits [vocabulary]."""
    logits = logits[: sampling.vocab_size].astype(jnp.float32)
    if sampling.temperature == 0:
        return logits.argmax().astype(jnp.int32)
    # The maximum is subtracted first, because quotients of a small temperature would overflow.
    temperature = max(sampling.temperature, float(np.finfo(np.float32).tiny))
    logits = (logits - logits.max()) / temperature
    if sampling.top_k is None or sampling.top_k >= logits.shape[0]:
        return jax.random.categorical(key, logits).astype(jnp.int32)
    # Of equal logits `top_k` takes the first ones, so that no more than k tokens are drawn.
    values, tokens = jax.lax.top_k(logits, sampling.top_k)
    return tokens[jax.random.categorical(key, values)].astype(jnp.int32)


def generate(
    language: LanguageModel,
    params: Any,
    model_state: Any,
    prompt: jax.Array,
    keys: jax.Array,
    sampling: Sampling,
) -> jax.Array:
    """Continues tokens [batch, positions]; returns the new ones, int32 [batch, length]."""
    # Jax traces it. The first call of the model computes the keys and values of the prompt, and
    # each later one those of one token; `sampling.end` fills what follows the first of it.
    # `prompt` is int32 with at least one position; with `sampling.length` it must fit into the
    # model's `max_length`. `keys` is a PRNG key for each sequence: what is drawn for one does not
    # depend on the others.
    batch, positions = prompt.shape
    choose = jax.vmap(partial(draw_token, sampling=sampling))

    def draw_next(index: Any, logits: jax.Array, tokens: jax.Array, ended: jax.Array) -> Any:
        now = choose(logits[:, -1], jax.vmap(jax.random.fold_in, (0, None))(keys, index))
        if sampling.end is not None:
            now = jnp.where(ended, sampling.end, now)
            ended = ended | (now == sampling.end)
        return tokens.at[:, index].set(now), ended

    def more(carry: Any) -> Any:
        index, _, ended, _ = carry
        return (index < sampling.length) & ~ended.all()

    def add(carry: Any) -> Any:
        index, tokens, ended, cache = carry
        before = jax.lax.dynamic_slice_in_dim(tokens, index - 1, 1, axis=1)
        logits, cache = language.decode(params, model_state, before, cache)
        return (index + 1, *draw_next(index, logits, tokens, ended), cache)

    # The last token is drawn and not read again.
    cache = language.empty_cache(params, batch, positions + sampling.length - 1)
    logits, cache = language.decode(params, model_state, prompt, cache)
    fill = 0 if sampling.end is None else sampling.end
    tokens = jnp.full((batch, sampling.length), fill, jnp.int32)
    tokens, ended = draw_next(jnp.int32(0), logits, tokens, jnp.zeros(batch, bool))
    return jax.lax.while_loop(more, add, (jnp.int32(1), tokens, ended, cache))[1]


class PromptContinuation:
    """Continues one prompt with one compiled program, for any parameters of a model."""

    # `prompt` has at least one token; the `vocab_size` of `sampling` becomes that of the tokenizer;
    # the model computes in `precision`; `mesh` None is one device.

    def __init__(
        self,
        language: LanguageModel,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        sampling: Sampling,
        precision: str | Mapping[str, Any] = "float32",
        mesh: Mesh | None = None,
    ):
        sampling.check()
        check_prompt(language, prompt, sampling.length)
        self.prompt = list(prompt)
        self._tokenizer, self._language = tokenizer, language
        self._precision = precision
        known = min(language.vocab_size, tokenizer.vocab_size)
        self._sampling = sampling._replace(vocab_size=known)
        self._whole = None if mesh is None else replicated(mesh)
        self._generate = jax.jit(self._compute, out_shardings=self._whole)

    def sample(self, params: Any, model_state: Any, seed: int, samples: int = 1) -> list[str]:
        """Continues the prompt, and returns the texts after it, up to a document's end."""
        # Equal seeds give equal texts, and the same first ones for any number of `samples`.
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(np.arange(samples))
        prompt = np.tile(np.asarray(self.prompt, np.int32), (samples, 1))
        # As key data: an argument from the host is replicated over the devices of all processes.
        data = np.asarray(jax.random.key_data(keys))
        drawn = np.asarray(self._generate(params, model_state, prompt, data))
        end, decode = self._sampling.end, self._tokenizer.decode
        return [decode(row[: row.index(end)] if end in row else row) for row in drawn.tolist()]

    def _compute(self, params: Any, model_state: Any, prompt: Any, data: Any) -> jax.Array:
        params = in_precision(params, self._precision)
        if self._whole is not None:
            # Divided parameters are gathered once, not for each token.
            params = jax.lax.with_sharding_constraint(params, self._whole)
        keys = jax.random.wrap_key_data(data)
        return generate(self._language, params, model_state, prompt, keys, self._sampling)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of a prompt: `end_of_text`, with which documents begin, and the text."""
    try:
        return [tokenizer.end_of_text, *tokenizer.encode(text)]
    except ValueError as error:
        raise ValueError(
            f"The prompt {shorten(text, 40)!r} cannot be converted: {error}"
        ) from error


def fitting_length(
    language: LanguageModel, positions: int, length: int | None, trained: int | None
) -> int:
    """Returns how many tokens to add to a prompt of `positions` tokens."""
    # `length` is what was asked for; None for 200, or as many as `longest_text` leaves.
    if length is not None:
        return length
    return max(1, min(200, longest_text(language, trained) - positions))


def longest_text(language: LanguageModel, trained: int | None) -> int:
    """Returns how many tokens a text may have to be like the training data."""
    # The text is a prompt and its continuation; `trained` is the number of tokens of the sequences
    # that the model was trained on, None if it is not known.

    # The last token is drawn at the last position, and not read.
    return language.max_length if trained is None else min(language.max_length, trained + 1)


def length_warning(positions: int, length: int, trained: int | None) -> str:
    """Returns a warning for a text that is longer than those of the training; "" for none."""
    if trained is None or positions + length <= trained + 1:
        return ""
    room = trained + 1 - positions
    advice = f"A length of at most {room:,} stays within it." if room > 0 else "Shorten the prompt."
    return (
        f"The model was trained on sequences of {plural(trained, 'token')}, and the prompt of "
        f"{plural(positions, 'token')} with {length:,} more is longer: the model has learned "
        f"nothing about the positions behind them. {advice}"
    )


def check_prompt(language: LanguageModel, tokens: Sequence[int], length: int) -> None:
    """Raises ValueError if a prompt and `length` more tokens do not fit a language model."""
    unknown = next((token for token in tokens if not 0 <= token < language.vocab_size), None)
    if unknown is not None:
        raise ValueError(
            f"The prompt has the token {unknown}, and the model knows the tokens 0 to "
            f"{language.vocab_size - 1}. Its tokenizer is not the one the model was made for: "
            "compare the model's vocab_size with that of the data."
        )
    most = language.max_length
    room = most - len(tokens)
    if length > room:
        advice = f"Ask for a length of at most {room}, or shorten" if room > 0 else "Shorten"
        raise ValueError(
            f"The prompt has {plural(len(tokens), 'token')}, end_of_text included, and with "
            f"{length:,} to be added these are more than the {plural(most, 'position')} of the "
            f"model (max_length). {advice} the prompt."
        )
