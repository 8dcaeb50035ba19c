"""Continuing texts: `generate`, the command `sample` and the hook `hooks.samples`."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from trainer.engine.generation import (
    Continuation,
    Sampling,
    check_prompt,
    draw,
    encode_prompt,
    generate,
)
from trainer.models.model import LanguageModel

VOCAB = 7


def trigram_language(max_length=32, vocab=VOCAB):
    """A model whose logits depend on the last two tokens, which its cache holds.

    `params` is a table [vocabulary + 1, vocabulary, vocabulary]; its last row is for no token.
    """

    def empty_cache(params, batch, length):
        # As long as the sequences, as keys and values are; position `length` says how many.
        return {"tokens": jnp.full((batch, length), vocab, jnp.int32), "length": jnp.int32(0)}

    def decode(params, model_state, tokens, cache):
        held = jax.lax.dynamic_update_slice(cache["tokens"], tokens, (0, cache["length"]))
        padded = jnp.pad(held, ((0, 0), (1, 0)), constant_values=vocab)
        before = jax.lax.dynamic_slice_in_dim(padded, cache["length"], tokens.shape[1], axis=1)
        cache = {"tokens": held, "length": cache["length"] + tokens.shape[1]}
        return params["table"][before, tokens] + model_state["bias"], cache

    return LanguageModel(vocab, max_length, empty_cache, decode)


def trigram_params(vocab=VOCAB, seed=0):
    table = np.random.default_rng(seed).normal(0, 2, (vocab + 1, vocab, vocab))
    return {"table": jnp.asarray(table, jnp.float32)}, {"bias": jnp.arange(vocab) * 0.1}


def brute_force(params, model_state, prompt, keys, sampling):
    """Continues each sequence by a loop that reads the whole sequence again for every token."""
    continued = []
    for row, key in zip(np.asarray(prompt).tolist(), keys, strict=True):
        new = []
        for index in range(sampling.length):
            before, last = [VOCAB, *row][-2:]
            logits = params["table"][before, last] + model_state["bias"]
            if sampling.temperature == 0:
                token = int(np.argmax(logits))
            else:
                values, tokens = logits, np.arange(VOCAB)
                if sampling.top_k is not None:
                    values, tokens = jax.lax.top_k(logits, sampling.top_k)
                drawn = jax.random.categorical(
                    jax.random.fold_in(key, index), values / sampling.temperature
                )
                token = int(tokens[drawn])
            new.append(token)
            row = [*row, token]
            if token == sampling.end:
                break
        continued.append(new + [sampling.end] * (sampling.length - len(new)))
    return continued


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12, temperature=0),
        Sampling(12),
        Sampling(12, temperature=0.5, top_k=3),
        Sampling(12, end=2),
        Sampling(1),
    ],
)
def test_the_tokens_are_those_of_a_loop_without_a_cache(sampling):
    params, state = trigram_params()
    prompt = jnp.asarray([[1, 2, 3], [6, 5, 4], [0, 0, 0]], jnp.int32)
    keys = jax.random.split(jax.random.key(3), 3)
    program = jax.jit(partial(generate, trigram_language(), sampling=sampling))
    tokens = program(params, state, prompt, keys)
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == brute_force(params, state, prompt, keys, sampling)


def test_the_cache_is_only_as_long_as_the_tokens_that_are_read():
    lengths = []
    language = trigram_language()
    noting = language._replace(
        empty_cache=lambda p, b, n: lengths.append((b, n)) or language.empty_cache(p, b, n)
    )
    keys = jax.random.split(jax.random.key(0), 2)
    generate(noting, *trigram_params(), jnp.zeros((2, 3), jnp.int32), keys, Sampling(5))
    assert lengths == [(2, 3 + 5 - 1)]  # the last token is not read


def test_the_loop_ends_when_all_sequences_have_ended():
    calls = []
    language = trigram_language()

    def decode(*arguments):
        jax.debug.callback(lambda: calls.append(1))
        return language.decode(*arguments)

    params, state = trigram_params()
    params = {"table": jnp.zeros_like(params["table"]).at[:, :, 4].set(100.0)}
    keys = jax.random.split(jax.random.key(0), 2)
    prompt = jnp.zeros((2, 3), jnp.int32)
    noting = language._replace(decode=decode)
    tokens = generate(noting, params, state, prompt, keys, Sampling(20, end=4))
    jax.effects_barrier()
    assert tokens.tolist() == [[4] * 20] * 2 and len(calls) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "vocab_size"), [(None, None), (3, None), (None, 5), (50, 6)])
def test_tokens_have_the_probabilities_of_temperature_and_top_k(temperature, top_k, vocab_size):
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.2])
    sampling = Sampling(1, temperature, top_k, vocab_size)
    number = 20_000
    keys = jax.random.split(jax.random.key(7), number)
    tokens = jax.vmap(lambda key: draw(jnp.asarray(logits), key, sampling))(keys)
    kept = logits[:vocab_size]
    allowed = np.argsort(-kept)[:top_k]
    wanted = np.zeros(VOCAB)
    wanted[allowed] = scipy.special.softmax(kept[allowed] / temperature)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    chosen = wanted > 0
    assert scipy.stats.chisquare(counts[chosen], number * wanted[chosen]).pvalue > 0.001


def test_of_equal_logits_no_more_than_k_are_drawn():
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda key: draw(jnp.zeros(VOCAB), key, Sampling(1, top_k=2)))(keys)
    assert len(set(np.asarray(drawn).tolist())) == 2


class Letters:
    """A toy tokenizer: a to f are 1 to 6, and 0 is the end of a text."""

    vocab_size, end_of_text = 7, 0

    def encode(self, text):
        if bad := [letter for letter in text if letter not in "abcdef"]:
            raise ValueError(f"The letter {bad[0]!r} has no token; there are a to f.")
        return ["abcdef".index(letter) + 1 for letter in text]

    def decode(self, tokens):
        return "".join("?abcdef"[token] for token in tokens)


def continuation(prompt="abc", sampling=None, language=None, **more):
    sampling = sampling or Sampling(8, temperature=2.0)
    tokens = encode_prompt(Letters(), prompt)
    return Continuation(language or trigram_language(), Letters(), tokens, sampling, **more)


def test_a_seed_gives_the_same_text_and_the_first_samples_do_not_depend_on_their_number():
    params, state = trigram_params()
    one = continuation().sample(params, state, seed=5)
    three = continuation().sample(params, state, seed=5, samples=3)
    assert three[:1] == one and len(set(three)) == 3
    assert continuation().sample(params, state, seed=6) != one
    assert all(len(text) == 8 for text in three)


def test_a_text_ends_before_end_of_text_and_has_only_tokens_of_the_tokenizer():
    vocab = 9  # the model knows two tokens more than the tokenizer
    language = trigram_language(vocab=vocab)
    table = jnp.zeros((vocab + 1, vocab, vocab)).at[:, :, 7:].set(50.0)
    for token, following in pairwise([0, 1, 3, 5, 0]):
        table = table.at[:, token, following].set(20.0)
    sampling = Sampling(10, temperature=0, end=0)
    made = continuation("", sampling, language)
    assert made.prompt == [0]
    assert made.sample({"table": table}, {"bias": jnp.zeros(vocab)}, 0) == ["ace"]


def test_the_parameters_have_the_precision_of_the_experiment():
    seen = []
    language = trigram_language()

    def decode(params, *rest):
        seen.append(params["table"].dtype)
        return language.decode(params, *rest)

    for precision in ("float32", "bfloat16", "mixed"):
        made = continuation(language=language._replace(decode=decode), precision=precision)
        made.sample(*trigram_params(), seed=0)
        assert set(seen) == {jnp.dtype("float32" if precision == "float32" else "bfloat16")}
        seen.clear()


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        (Sampling(0), "length must be at least 1 token, got 0"),
        (Sampling(5, temperature=-0.1), "temperature must be at least 0 and finite, got -0.1"),
        (Sampling(5, temperature=float("nan")), "temperature must be at least 0"),
        (Sampling(5, top_k=0), "top_k must be at least 1, got 0"),
        (Sampling(29), "4 tokens, end_of_text included, and 29 are to be added.* 32 positions"),
    ],
)
def test_what_cannot_be_sampled_is_refused(sampling, text):
    with pytest.raises(ValueError, match=text):
        continuation(sampling=sampling)


def test_a_prompt_with_unknown_tokens_is_refused():
    with pytest.raises(ValueError, match="'ab!'.*The letter '!' has no token"):
        encode_prompt(Letters(), "ab!")
    with pytest.raises(ValueError, match="the token 7, and the model knows the tokens 0 to 6"):
        check_prompt(trigram_language(), [1, 7], 3)
