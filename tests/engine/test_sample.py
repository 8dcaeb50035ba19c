"""Continuing texts: `generate`, the command `sample` and the hook `hooks.samples`."""

import io
import json
import os
import shutil
import types
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from tests import runs, short
from trainer import checkpoint
from trainer.__main__ import main
from trainer.data.tokenizer import ByteTokenizer, train_bpe
from trainer.engine.generation import (
    PromptContinuation,
    Sampling,
    check_prompt,
    draw_token,
    encode_prompt,
    generate,
)
from trainer.hooks import HookContext, samples
from trainer.models.model import LanguageModel
from trainer.sweep.wave import Wave
from trainer.writers.summary import Summary

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


@short.parametrize(
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


@pytest.mark.long
def test_the_cache_is_only_as_long_as_the_tokens_that_are_read():
    lengths = []
    language = trigram_language()
    noting = language._replace(
        empty_cache=lambda p, b, n: lengths.append((b, n)) or language.empty_cache(p, b, n)
    )
    keys = jax.random.split(jax.random.key(0), 2)
    generate(noting, *trigram_params(), jnp.zeros((2, 3), jnp.int32), keys, Sampling(5))
    assert lengths == [(2, 3 + 5 - 1)]  # the last token is not read


@pytest.mark.long
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
@short.parametrize(("top_k", "vocab_size"), [(None, None), (3, None), (None, 5), (50, 6)])
def test_tokens_have_the_probabilities_of_temperature_and_top_k(temperature, top_k, vocab_size):
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.1, 0.7, -0.2])
    sampling = Sampling(1, temperature, top_k, vocab_size)
    number = 20_000
    keys = jax.random.split(jax.random.key(7), number)
    tokens = jax.vmap(lambda key: draw_token(jnp.asarray(logits), key, sampling))(keys)
    kept = logits[:vocab_size]
    allowed = np.argsort(-kept)[:top_k]
    wanted = np.zeros(VOCAB)
    wanted[allowed] = scipy.special.softmax(kept[allowed] / temperature)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    assert counts[wanted == 0].sum() == 0
    chosen = wanted > 0
    assert scipy.stats.chisquare(counts[chosen], number * wanted[chosen]).pvalue > 0.001


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_smallest_temperatures_take_the_most_probable_token(top_k):
    logits = jnp.array([0.3, -1.0, 2.0, -jnp.inf, 1.9, 0.7, -0.2])
    keys = jax.random.split(jax.random.key(0), 50)
    for temperature in (1e-30, 1e-37, 1e-38, 1e-39, 1e-44, 1e-46, 5e-324):
        sampling = Sampling(1, temperature, top_k)
        for shift in (0.0, -50.0, 50.0):
            tokens = jax.vmap(lambda key, s=sampling, x=logits + shift: draw_token(x, key, s))(keys)
            assert set(np.asarray(tokens).tolist()) == {2}, (temperature, shift)


def test_the_largest_temperatures_draw_all_tokens():
    keys = jax.random.split(jax.random.key(0), 200)
    for temperature in (1e30, 1e39, 1e308):
        sampling = Sampling(1, temperature)
        tokens = jax.vmap(lambda key, s=sampling: draw_token(jnp.arange(7.0), key, s))(keys)
        assert set(np.asarray(tokens).tolist()) == set(range(7))


def test_of_equal_logits_no_more_than_k_are_drawn():
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lambda key: draw_token(jnp.zeros(VOCAB), key, Sampling(1, top_k=2)))(keys)
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
    return PromptContinuation(language or trigram_language(), Letters(), tokens, sampling, **more)


@pytest.mark.long
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


@pytest.mark.long
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
        (Sampling(29), "4 tokens, end_of_text included, and with 29 to be added .* 32 positions"),
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


# The command and the hook, with a small model of a text.

CONFIG = """
experiment:
  model        = @models.gpt()
  data         = @letters.text()
  loss         = @letters.loss
  optimizer    = @optax.adam()
  steps        = 30
  log_every    = 5
  eval_every   = 10
  save_every   = 7
  keep_latest  = 9
  ema_decay    = 0.5
  best_metric  = 'loss'
  best_mode    = 'min'
  writers      = []
models.gpt:
  vocab_size = 9
  width = 16
  depth = 1
  num_heads = 2
  max_length = 32
optax.adam.learning_rate = 0.03
"""
HOOK = """
experiment.hooks = [@hooks.samples()]
hooks.samples.length = 6
hooks.samples.temperature = 1.5
"""


def write(folder, *layers):
    """Writes the config and what overrides it, each layer the ones before it."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number}.gin" for number in range(len(layers) + 1)]
    for file, layer in zip(files, [CONFIG, *layers], strict=True):
        file.write_text(layer)
    return [f"--config={file}" for file in files]


def train(folder, *layers, until=None):
    options = ["--vocabulary=letters", f"--workdir={folder / 'run'}"]
    return main([*write(folder, *layers), *options, *([f"--until={until}"] if until else [])])


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    assert train(folder) == 0
    return folder / "run"


def sampled(capsys, run, *options, code=0):
    """Runs the command to an exit code; returns what it printed, on both streams."""
    try:
        found = main(["sample", str(run), "--vocabulary=letters", *options])
    except SystemExit as end:
        found = end.code
    assert found == code
    return capsys.readouterr()


def test_the_command_continues_a_prompt_with_what_the_model_learned(run, capsys):
    said = sampled(capsys, run, "--prompt=cde", "--temperature=0")
    assert said.out == "cdefgh\n"  # the text ends after h
    assert said.err == f"step 30 of {run}:\n"
    # The beginning of a text.
    assert sampled(capsys, run, "--temperature=0", "--length=3").out == "abc\n"


@pytest.mark.long
def test_the_command_reads_the_prompt_from_a_file_or_stdin(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "prompt").write_text("ab\n")
    said = sampled(capsys, run, f"--prompt_file={tmp_path / 'prompt'}", "--temperature=0")
    assert said.out == "abcdefgh\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n"))
    assert sampled(capsys, run, "--prompt=-", "--temperature=0").out == "abcdefgh\n"


@pytest.mark.long
def test_samples_depend_on_the_seed_and_not_on_their_number(run, capsys):
    hot = ["--prompt=a", "--temperature=5", "--length=12"]
    three = sampled(capsys, run, *hot, "--num_samples=3").out
    one = sampled(capsys, run, *hot).out
    texts = three.removesuffix("\n").split("\n----\n")
    assert texts[0] == one.removesuffix("\n") and len(set(texts)) == 3
    assert sampled(capsys, run, *hot, "--seed=1").out != one
    assert sampled(capsys, run, *hot, "--top_k=1").out == "abcdefgh\n"


@pytest.mark.long
def test_a_text_longer_than_those_of_the_training_is_a_warning(run, tmp_path, capsys):
    trained = "warning: The model was trained on sequences of 16 tokens, and the prompt of 3 "
    # The last token is drawn and not read: 3 and 14 tokens have 16 positions.
    for options, warned in (
        (["--length=14"], ""),
        (["--length=15"], trained + "tokens with 15 more is"),
    ):
        said = sampled(capsys, run, "--prompt=ab", *options).err
        assert ("warning" in said) is bool(warned) and warned in said
    assert "A length of at most 14 stays within it." in said
    said = sampled(capsys, run, f"--prompt={'abcdefgh' * 2}a", "--length=1").err
    assert "Shorten the prompt." in said
    # By default it is no longer, unless that is not known.
    hot = ["--temperature=9", "--seed=3", "--top_k=9"]
    default = sampled(capsys, run, "--prompt=ab", *hot)
    assert "warning" not in default.err
    assert sampled(capsys, run, "--prompt=ab", *hot, "--length=14").out == default.out
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert "warning" not in sampled(capsys, tmp_path / "run", "--prompt=ab", "--length=15").err


@pytest.mark.long
def test_the_hook_warns_of_texts_longer_than_those_of_the_training(lab, tmp_path, capsys):
    assert train(tmp_path, HOOK, "hooks.samples.length = 20\n", until=10) == 75
    said = capsys.readouterr().err
    assert said.count("warning: hooks.samples: The model was trained on sequences of 16") == 1
    assert "with 20 more is longer" in said


@pytest.mark.long
def test_the_step_may_be_named(run, capsys):
    steps = [info.step for info in checkpoint.ls(run)]
    assert steps[0] < 10
    said = sampled(capsys, run, f"--step={steps[0]}", "--temperature=0", "--prompt=a")
    assert said.err == f"step {steps[0]} of {run}:\n" and said.out != "abcdefgh\n"
    said = sampled(capsys, run, "--step=best", "--temperature=0", "--prompt=a")
    assert said.err == f"step 30 of {run}:\n"


def test_a_prompt_that_is_not_text_is_refused_with_its_first_such_byte(
    run, tmp_path, capsys, monkeypatch
):
    file = tmp_path / "prompt"
    file.write_bytes(b"ab\xaf\n")
    said = sampled(capsys, run, f"--prompt_file={file}", code=2).err
    assert f"The prompt in {file} is not text in UTF-8: its byte 3 is 0xaf. Convert" in said
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xaf"), encoding="utf-8"))
    said = sampled(capsys, run, "--prompt=-", code=2).err
    assert "The prompt in stdin is not text in UTF-8: its byte 1" in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--prompt=xyz"], "The prompt 'xyz' cannot be converted: The letter 'x' has no token"),
        (
            ["--length=32"],
            "The prompt has 1 token, end_of_text included, and with 32 to be added these are more "
            "than the 32 positions of the model (max_length). Ask for a length of at most 31, or "
            "shorten the prompt.",
        ),
        (
            ["--length=1", f"--prompt={'a' * 40}"],
            "The prompt has 41 tokens, end_of_text included, and with 1 to be added these are more "
            "than the 32 positions of the model (max_length). Shorten the prompt.",
        ),
        (["--length=0"], "length must be at least 1 token, got 0"),
        (["--temperature=-1"], "temperature must be at least 0 and finite, got -1.0"),
        (["--temperature=warm"], "'warm' is not a number"),
        (["--top_k=0"], "top_k must be at least 1, got 0"),
        (["--step=29"], "no checkpoint of step 29; there are 7, 14, 21, 28, 30"),
        (["--num_samples=0"], "it must be at least 1, got 0"),
        (["--seed=-1"], "'-1' is not a seed"),
        (["--prompt_file=/none/there"], "cannot be read: there is no file /none/there. Name a"),
        (["--prompt_file=/"], "The prompt of --prompt_file=/ cannot be read: Is a directory. Na"),
    ],
)
def test_what_the_command_cannot_do_is_said(run, options, text, capsys):
    said = sampled(capsys, run, "--length=5", *options, code=2)
    assert text in " ".join(said.err.split()) and said.out == ""


def test_only_a_run_of_a_language_model_with_a_tokenizer_is_sampled(lab, run, tmp_path, capsys):
    assert "There is no folder" in sampled(capsys, tmp_path / "none", code=2).err
    config = (run / "config.yaml").read_text()
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    said = " ".join(sampled(capsys, folder, "--length=5", code=2).err.split())
    told = f"There is no checkpoint in {folder}: the run has not saved yet, or its checkpoints"
    assert (
        told in said
        and "`save_every` steps" in said
        and said.endswith("or name the folder of another run.")
    )
    (folder / "config.yaml").write_text(config.replace("text {}", "text {tokenizer: false}"))
    said = " ".join(sampled(capsys, folder, code=2).err.split())
    assert "its data set has no tokenizer" in said and "Copy the tokenizer.json that made" in said
    (folder / "config.yaml").write_text("model: !models.mlp {}\ndata: !letters.text {}\n")
    said = " ".join(sampled(capsys, folder, code=2).err.split())
    assert "models.mlp, is not a language model" in said


# The hook.


def kept(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_hook_keeps_and_prints_the_texts_that_the_command_prints(lab, tmp_path, capsys):
    prompt = "hooks.samples.prompt = 'ab'\nexperiment.save_every = 10\n"
    assert train(tmp_path, HOOK, prompt) == 0
    said = capsys.readouterr().err
    rows = kept(tmp_path / "run")
    assert [row["step"] for row in rows] == [10, 20, 30]
    for row in rows:
        assert row["prompt"] == "ab" and f"sample at step {row['step']}: ab{row['text']}\n" in said
        hot = [f"--step={row['step']}", "--prompt=ab", "--length=6", "--temperature=1.5"]
        assert sampled(capsys, tmp_path / "run", *hot).out == f"ab{row['text']}\n"


@pytest.mark.long
def test_two_processes_that_divide_the_parameters_sample_the_text_of_one(lab, tmp_path, capsys):
    mesh = "experiment.mesh = {'fsdp': 2}\nexperiment.save_every = 10\nexperiment.steps = 20\n"
    options = ["--vocabulary=letters", f"--workdir={tmp_path / 'run'}"]
    every = runs.start_two([*write(tmp_path, HOOK, mesh), *options], tmp_path)
    assert runs.ends(every) == [0, 0], (tmp_path / "log0").read_text()
    rows = kept(tmp_path / "run")
    assert [row["step"] for row in rows] == [10, 20]
    assert [(tmp_path / f"log{index}").read_text().count("sample at") for index in (0, 1)] == [2, 0]
    for row in rows:
        hot = [f"--step={row['step']}", f"--prompt={row['prompt']}", "--length=6"]
        said = sampled(capsys, tmp_path / "run", *hot, "--temperature=1.5")
        assert said.out == f"{row['prompt']}{row['text']}\n"


@pytest.mark.long
def test_the_hook_begins_with_the_validation_split_and_changes_no_bit(lab, run, tmp_path):
    assert train(tmp_path, HOOK, "hooks.samples.temperature = 0\n") == 0
    rows = kept(tmp_path / "run")
    # The first window of the split, an end of a text and then two documents, with room for 6 more
    # in the 16 positions of the training.
    assert rows[-1]["prompt"] == "abcdefgha" and 0 < len(rows[-1]["text"]) <= 6
    assert runs.lines(tmp_path / "run") == runs.lines(run)
    assert checkpoint.diff_checkpoints(tmp_path / "run", 30, 30, other=run) == []


@pytest.mark.long
def test_a_resumed_run_has_each_sample_once(lab, tmp_path):
    assert train(tmp_path / "whole", HOOK) == 0
    assert train(tmp_path, HOOK, until=22) == 75
    workdir = tmp_path / "run"
    # As a process leaves it that was killed after later evaluations, and in the middle of a line.
    with open(workdir / "samples.jsonl", "a") as file:
        file.write('{"step": 30, "prompt": "", "text": "of a process that was killed"}\n{"st')
    assert train(tmp_path, HOOK) == 0
    assert kept(workdir) == kept(tmp_path / "whole" / "run")


@pytest.mark.long
def test_an_evaluation_that_is_repeated_has_its_sample_once(lab, tmp_path):
    assert train(tmp_path, HOOK, until=20) == 75
    workdir = tmp_path / "run"
    before = kept(workdir)
    assert [row["step"] for row in before] == [10, 20]
    # As if the process had been killed before it wrote the row of that evaluation.
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    last = {k: v for k, v in rows[-1].items() if not k.startswith("validation/")}
    (workdir / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert train(tmp_path, HOOK) == 0
    assert [row["step"] for row in kept(workdir)] == [10, 20, 30]
    assert kept(workdir)[:2] == before


@pytest.mark.long
def test_binding_the_hook_again_compiles_nothing_again(tmp_path):
    traced = []
    language = trigram_language()

    def empty_cache(*arguments):
        traced.append(arguments[1:])
        return language.empty_cache(*arguments)

    experiment: Any = types.SimpleNamespace(
        model=types.SimpleNamespace(language=language._replace(empty_cache=empty_cache)),
        data=types.SimpleNamespace(tokenizer=Letters()),
        precision="float32",
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    hook = samples("ab", length=6)

    def sample_at(folder, kept_until, experiment):
        context = HookContext(experiment, mesh, folder, kept_until, print, lambda: None)
        hook.bind(context)(kept_until + 5, {}, *trigram_params())

    for name in ("one trial", "another"):
        folder = tmp_path / name
        folder.mkdir()
        for kept_until in (0, 5):  # and after a rollback
            sample_at(folder, kept_until, experiment)
        assert [row["step"] for row in kept(folder)] == [5, 10]
    assert len(traced) == 1
    # Another precision is another program.
    other: Any = types.SimpleNamespace(**vars(experiment) | {"precision": "bfloat16"})
    sample_at(folder, 10, other)
    assert len(traced) == 2 and len(kept(folder)) == 3


def test_the_rows_and_samples_of_a_trial_are_on_the_disk_before_its_summary(tmp_path, monkeypatch):
    wave: Any = Wave.__new__(Wave)
    wave.path, wave.workdir = tmp_path, types.SimpleNamespace(check_fence=lambda: None)
    trial: Any = types.SimpleNamespace(folder="trials/a/0/0")
    folder = tmp_path / trial.folder
    folder.mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).write_text("{}\n")
    names = {(folder / name).stat().st_ino: name for name in os.listdir(folder)}
    synced = []

    def fsync(descriptor):
        synced.append(names.get(os.fstat(descriptor).st_ino))
        assert not (folder / "summary.json").exists() or synced[-1] is None
        return real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    wave.write_outcome(trial, Summary("done", 1, {}))
    assert {"metrics.jsonl", "samples.jsonl"} <= set(synced)
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("hooks.samples.prompt = 'xyz'", "hooks[0] does not fit: The prompt 'xyz' cannot be"),
        ("hooks.samples.length = 32", "more than the 32 positions"),
        ("hooks.samples.temperature = -1.0", "temperature must be at least 0"),
        ("hooks.samples.top_k = 0", "top_k must be at least 1"),
        ("hooks.samples.seed = -1", "seed must be between 0 and 2**32 - 1, got -1"),
        ("letters.text.tokenizer = False", "or the file that its argument `tokenizer` names; a"),
        (
            "experiment.model = @models.mlp()\nmodels.mlp.num_classes = 9",
            "the model is not a language model",
        ),
    ],
)
def test_a_hook_that_does_not_fit_is_refused_before_a_folder_is_made(
    lab, tmp_path, more, text, capsys
):
    assert train(tmp_path, HOOK, more) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_run_is_sampled_without_its_text(lab, tokenizer, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 200)
    data = f"""
experiment:
  data = @data.text()
  steps = 60
  hooks = [@hooks.samples()]
hooks.samples.prompt = 'the '
hooks.samples.temperature = 0
models.gpt.vocab_size = 300
data.text:
  files = '{tmp_path / "text.txt"}'
  data_dir = '{tmp_path / "data"}'
  tokenizer = '{tokenizer}'
  vocab_size = {None if tokenizer == "bytes" else 270}
  length = 16
  batch_size = 8
  eval_tokens = 64
"""
    assert train(tmp_path, data) == 0
    run = tmp_path / "run"
    assert (run / "tokenizer.json").exists()
    (tmp_path / "text.txt").unlink()
    shutil.rmtree(tmp_path / "data")
    capsys.readouterr()
    printed, said = sampled(capsys, run, "--prompt=the ", "--temperature=0")
    assert printed == f"the {kept(run)[-1]['text']}\n" and len(printed) > 12
    assert ("warning: The prompt ends in a space. Words begin" in said) == (tokenizer == "bpe")
    assert "ends in a space" not in sampled(capsys, run, "--prompt=the", "--temperature=0").err
    assert train(tmp_path, data, "experiment.steps = 60") == 2  # the text itself is missing
    letters = bytes(range(32, 127)) * 9
    for size in (300, 257 if tokenizer == "bpe" else 270):
        other = ByteTokenizer() if size == 257 else train_bpe([letters], size)
        other.save(run / "tokenizer.json")
        said = " ".join(sampled(capsys, run, "--prompt=the ", code=2).err.split())
        assert "tokenizer.json is not the tokenizer of this run" in said


SWEEP = """
sweep:
  base = 'base.gin'
  space = {'optax.adam.learning_rate': @space.log_uniform()}
  trials = 2
  method = @method.random()
  goal = {'metric': 'loss', 'mode': 'min'}
  final = None
space.log_uniform.low = 0.01
space.log_uniform.high = 0.1
"""


@pytest.mark.long
def test_the_trials_of_a_sweep_have_their_samples(lab, tmp_path, capsys):
    (tmp_path / "base.gin").write_text(CONFIG + HOOK.replace("1.5", "5.0"))
    (tmp_path / "sweep.gin").write_text(SWEEP)
    options = [f"--config={tmp_path / 'sweep.gin'}", "--vocabulary=letters"]
    assert runs.sweep(*options, f"--workdir={tmp_path / 'sweep'}") == 0, capsys.readouterr()
    assert "sample at step" not in capsys.readouterr().err
    found = sorted((tmp_path / "sweep" / "trials").rglob("samples.jsonl"))
    assert [[row["step"] for row in kept(file.parent)] for file in found] == [[10, 20, 30]] * 2
    assert kept(found[0].parent) != kept(found[1].parent)
