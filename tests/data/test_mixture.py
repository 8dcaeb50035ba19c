"""Mixtures of texts: from which part each sequence comes, and how each part is measured."""

import itertools
import math
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests import runs, short
from trainer import checkpoint, data
from trainer.__main__ import main
from trainer.data.absent import DataAbsent
from trainer.data.mixture import MixtureDataset
from trainer.data.shards import TokenStream, write_shards
from trainer.data.tokens import KnownTokens, Sizes, TokenDataset

LENGTH, VOCABULARY = 4, 1000
module = sys.modules["trainer.data.mixture"]  # the package has a function of this name
STAGES = {0: {"code": 0.25, "web": 0.75}, 5: {"code": 0.6, "web": 0.4}}


def part(first: int = 0, examples: int = 40, **options: Any) -> TokenDataset:
    """Returns sequences of the tokens from `first` on: the first of each says which one it is."""
    stream = TokenStream.of_arrays([np.arange(first, first + LENGTH * examples + 1)])
    own = {key: options.pop(key) for key in KnownTokens._fields if key in options}
    known = KnownTokens(**{"size": options.pop("vocab_size", VOCABULARY), **own})
    chosen = {key: options.pop(key) for key in Sizes._fields if key in options}
    sizes = Sizes(**{"length": LENGTH, "batch_size": 6, **chosen})
    return TokenDataset(stream, {"validation": stream, "test": stream}, known, sizes, **options)


def mixed(weights: Any = None, batch_size: int = 6, **options: Any) -> MixtureDataset:
    parts = options.pop("parts", None) or {"web": part(), "code": part(500, examples=30)}
    chosen = {"web": 0.75, "code": 0.25} if weights is None else weights
    return data.mixture(parts, chosen, batch_size, **options)


def batches(dataset: Any, count: int, index: int = 0, seed: int = 0, **rank: int) -> list[dict]:
    return list(itertools.islice(dataset.train(index, seed, **rank), count))


def firsts(dataset: Any, count: int, index: int = 0, seed: int = 0) -> np.ndarray:
    """Returns the first token of each sequence of batches, by which it is known."""
    return np.concatenate([b["tokens"][:, 0] for b in batches(dataset, count, index, seed)])


def of_parts(weights: dict[str, float], count: int) -> list[str]:
    """Returns the names of the parts of the first sequences of a mixture."""
    parts = {name: part(100 * n, 24) for n, name in enumerate(sorted(weights))}
    batch_size = math.gcd(count, 64)
    found = firsts(data.mixture(parts, weights, batch_size), count // batch_size)
    return [sorted(weights)[token // 100] for token in found.tolist()]


# Which part each sequence comes from.


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        # Of two sequences in four a first one has to come at place 0 or 1, and a second at 2 or 3;
        # a single one anywhere. At equal last places, the first name comes first.
        ({"a": 0.5, "b": 0.25, "c": 0.25}, "abacabacabac"),
        # A share of 2/5 is due at places 0 to 2 and 2 to 4; 3/5 at 0 to 1, 1 to 3 and 3 to 4.
        ({"a": 0.4, "b": 0.6}, "babababbab"[:5] * 2),
        ({"a": 0, "b": 1}, "bbbbb"),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, "abcabc"),
    ],
)
def test_the_parts_of_a_tiny_mixture_are_those_computed_by_hand(weights: dict, wanted: str):
    assert "".join(of_parts(weights, len(wanted))) == wanted


weights_of_parts = st.lists(st.integers(0, 500), min_size=1, max_size=9).filter(any)


@settings(max_examples=short.examples(60), deadline=None)
@example(numbers=[990, 1, 1, 1, 1, 1, 1, 1, 3], start=7)
@example(numbers=[1, 499, 500], start=99_990)
@given(numbers=weights_of_parts, start=st.integers(0, 10**12))
def test_every_prefix_has_each_part_within_one_of_its_share(numbers: list[int], start: int):
    shares = np.array(numbers) / sum(numbers)
    if (0 < shares).any() and shares[shares > 0].min() < 1e-4:
        return
    names = [f"p{n}" for n in range(len(numbers))]
    weights = dict(zip(names, shares.tolist(), strict=True))
    stage = mixed(weights, parts={name: part() for name in names}, repeat=names).stages[0]
    count = 3000
    places = start + np.arange(count)
    owners = stage.owners(start, count)
    used = stage.used(start)
    # The shares are exact in a short period, and up to 1e-5 of the sequences in a long one.
    close = 1e-6 if sum(stage.counts) < 100_000 else 1e-5 * (start + count)
    for number, share in enumerate(shares.tolist()):
        own = np.array(used[number] + np.cumsum(owners == number), np.float64)
        assert abs(own - (places + 1) * share).max() < 1 + close, (number, share)
    assert used.sum() == start and (stage.used(start + count) - used).sum() == count
    # Any place is computed without the others.
    later = stage.owners(start + 1234, 99)
    assert later.tolist() == owners[1234:1333].tolist()


@pytest.mark.parametrize(
    ("weights", "close"),
    [
        ([0.12345, 0.87655], 1e-12),
        ([2e-5, 0.99998], 1e-12),
        ([0.333333, 0.333333, 0.333333], 1e-12),  # thirds: they sum to 1 within 1e-6
        ([math.pi / 4, 1 - math.pi / 4], 1e-5),
    ],
)
def test_weights_of_up_to_five_decimals_are_exact(weights: list[float], close: float):
    named = {f"p{n}": weight for n, weight in enumerate(weights)}
    (stage,) = mixed(named, parts={name: part() for name in named}).stages
    found = np.array(stage.counts) / sum(stage.counts)
    assert abs(found - np.array(weights) / sum(weights)).max() < close
    assert sum(stage.counts) <= 100_000


# Batches.


def test_a_part_yields_the_sequences_that_it_yields_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_TOGETHER", 20)
    read = mixed(STAGES, repeat=["web", "code"])
    found = firsts(read, 20, seed=3)
    for chosen, name in ((found < 500, "web"), (found >= 500, "code")):
        alone = firsts(read.parts[name], 20, seed=3)
        assert found[chosen].tolist() == alone[: chosen.sum()].tolist()
        assert chosen.sum() > 40  # more than an epoch
    fields = batches(read, 1)[0]
    assert set(fields) == {"tokens", "label"} and fields["tokens"].dtype == np.int32
    assert (fields["label"] == fields["tokens"] + 1).all()


def test_a_split_without_a_part_is_that_of_all_parts():
    read = mixed({"web": 0.5, "code": 0.5}, parts={"web": part(), "code": part(500)})
    for split, whole in (("test", read.evaluate()), ("validation", read.evaluate("validation"))):
        found = [batch["tokens"] for batch in whole]
        of_parts = [read.evaluate(f"{split}/{name}") for name in ("code", "web")]
        wanted = [batch["tokens"] for batches in of_parts for batch in batches]
        assert len(found) == len(wanted) > 2
        assert all((a == b).all() for a, b in zip(found, wanted, strict=True))


def test_a_mixture_of_one_part_has_its_batches():
    options = {"end_of_text": 7, "token_bytes": np.arange(VOCABULARY, dtype=np.int32)}
    alone = part(**options)
    other = part(500, **options)
    read = mixed({"web": 1.0, "code": 0}, parts={"web": alone, "code": other})
    for found, wanted in zip(batches(read, 9, 2, 5), batches(alone, 9, 2, 5), strict=True):
        assert set(found) == set(wanted) == {"tokens", "label", "documents", "bytes"}
        for key in wanted:
            np.testing.assert_array_equal(found[key], wanted[key])
    assert read.num_examples == alone.num_examples
    spec = {key: (x.shape, x.dtype) for key, x in read.element_spec.items()}
    assert spec == {key: (x.shape, x.dtype) for key, x in found.items()}


def test_the_order_of_a_stream_is_kept():
    parts = {"web": part(order="stream", batch_size=2), "code": part(500, examples=30)}
    found = firsts(mixed(parts=parts), 4, seed=8)
    assert found[found < 500].tolist() == list(range(0, 18 * LENGTH, LENGTH))


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 6, 11, 1000])
def test_training_may_begin_at_any_batch(index: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_TOGETHER", 20)
    read = mixed(STAGES, repeat=["web", "code"])
    whole = batches(read, index + 8, seed=4)[index:] if index < 100 else None
    monkeypatch.setattr(module, "_TOGETHER", 70)
    late = batches(read, 8, index, seed=4)
    if whole is None:  # in two ways that are both late
        whole = [*batches(read, 5, index, seed=4), *batches(read, 3, index + 5, seed=4)]
    for one, other in zip(whole, late, strict=True):
        np.testing.assert_array_equal(one["tokens"], other["tokens"])


@pytest.mark.parametrize("size", [2, 3, 6])
def test_a_batch_is_divided_into_parts_for_processes(size: int):
    read = mixed(STAGES, repeat=["web", "code"])
    divided = [batches(read, 8, 2, rank=rank, size=size) for rank in range(size)]
    for number, batch in enumerate(batches(read, 8, 2)):
        for key in batch:
            parts = [own[number][key] for own in divided]
            np.testing.assert_array_equal(np.concatenate(parts), batch[key])
    for split in read.splits:
        whole = list(read.evaluate(split))
        own = [list(read.evaluate(split, rank=rank, size=size)) for rank in range(size)]
        for number, batch in enumerate(whole):
            for key in batch:
                joined = np.concatenate([each[number][key] for each in own])
                np.testing.assert_array_equal(joined, batch[key])
    with pytest.raises(ValueError, match="data.mixture divides a batch among 4 .* size is 6"):
        batches(read, 1, rank=0, size=4)


def test_a_seed_decides_the_sequences_and_not_their_parts():
    read = mixed(STAGES, repeat=["web", "code"])
    one, other = firsts(read, 10, seed=1), firsts(read, 10, seed=2)
    assert one.tolist() != other.tolist()
    assert ((one < 500) == (other < 500)).all()


@pytest.mark.parametrize("key", [5, "5 steps", "50%", "30 examples", "120 tokens"])
def test_weights_change_at_a_step(key: Any):
    read = mixed({0: STAGES[0], key: STAGES[5]}, repeat=["web", "code"]).for_steps(10)
    assert [stage.first for stage in read.stages] == [0, 30]
    is_web = firsts(read, 10) < 500
    for own, share in ((is_web[:30], 0.75), (is_web[30:], 0.4)):
        counts = np.cumsum(own)
        assert abs(counts - share * np.arange(1, 31)).max() < 1
    assert [line for line in read.plan_lines if "mixture" in line] == [
        "mixture from step 0 on: code 0.25, web 0.75",
        "mixture from step 5 on: code 0.6, web 0.4",
    ]
    longer = mixed({0: STAGES[0], key: STAGES[5]}, repeat=["web", "code"]).for_steps(20)
    assert (longer.fingerprint == read.fingerprint) is (key != "50%")


def test_the_fingerprint_covers_the_parts_and_their_shares():
    def changed(weights: Any = None, parts: Any = None, **options: Any) -> str:
        return mixed(weights, parts=parts, **options).fingerprint

    turned = {"code": part(500, examples=30), "web": part()}
    assert changed() == changed(parts=turned) == changed(repeat=["web"])
    assert changed() == changed({"code": 0.25, "web": 0.75}) == changed(batch_size=3)
    others = [
        changed({"web": 0.7, "code": 0.3}),
        changed(STAGES),
        changed({0: STAGES[0], 6: STAGES[5]}),
        changed(STAGES, batch_size=3),
        changed(parts={"web": part(), "code": part(501, examples=30)}),
        changed(parts={"web": part(), "code": part(500, examples=31)}),
        changed({"web": 0.75, "text": 0.25}, {"web": part(), "text": part(500, examples=30)}),
    ]
    assert len({changed(), *others}) == 8


def test_a_mixture_has_the_sizes_of_its_parts():
    read = mixed({"web": 1, "code": 0})
    assert read.num_examples == 40 and mixed().num_examples == 70
    assert read.splits == {
        "validation/code": 30,
        "test/code": 30,
        "validation/web": 40,
        "test/web": 40,
    }
    assert (read.tokens_per_example, read.vocab_size, read.batch_size) == (LENGTH, VOCABULARY, 6)
    same = {"web": part(), "code": part(500, examples=30)}
    assert data.mixture(same, {"web": 0.5, "code": 0.5}).batch_size == 6
    found = next(read.evaluate("test/code"))
    np.testing.assert_array_equal(found["tokens"], next(same["code"].evaluate("test"))["tokens"])


# Mistakes.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": {"web": 0.8, "code": 0.3}}, ["sum to 1.1, not to 1", "code 0.272727"]),
        ({"weights": {"web": 0.8, "code": 0.200002}}, ["weights that sum to 1.000002"]),
        ({"weights": {"web": 0, "code": 0}}, ["sum to 0"]),
        ({"weights": {"web": 1.5, "code": -0.5}}, ["has 1.5 for 'web'", "from 2e-05 to 1"]),
        ({"weights": {"web": math.nan, "code": 1}}, ["has nan for 'web'"]),
        ({"weights": {"web": 1 - 1e-6, "code": 1e-6}}, ["has 1e-06 for 'code'"]),
        ({"weights": {"web": 1}}, ["the parts code, web", "0 if it is only evaluated"]),
        ({"weights": {}}, ["the parts code, web"]),
        ({"weights": {"web": 0.8, "cde": 0.2}}, ["the parts code, web", "'cde': 0.2"]),
        ({"weights": {0: STAGES[0], "5 stepz": STAGES[5]}}, ["'5 stepz'", "80%"]),
        ({"weights": {0: STAGES[0], 3: 0.5}}, ["3: 0.5 in weights"]),
        ({"weights": {0: STAGES[0], "web": 0.5}}, ["'web': 0.5 in weights"]),
        ({"weights": {0: STAGES[0], -3: STAGES[5]}}, ["-3: {"]),
        (
            {"weights": {0: STAGES[0], 5: {"web": 0.5, "code": 0.1}}},
            ["weights from 5 that sum to 0.6"],
        ),
        ({"weights": {1: STAGES[0]}}, ["weights from 1 (step 1)", "the first at 0"]),
        (
            {"weights": {0: STAGES[0], 5: STAGES[5], "25%": STAGES[0]}},
            ["5 (step 5), '25%' (step 5)", "at different steps"],
        ),
        ({"repeat": ["cde"]}, ["repeat=['cde']", "code, web"]),
        ({"batch_size": 0}, ["batch_size to be at least 1, but got 0"]),
        ({"parts": {"web": part(batch_size=6)}, "batch_size": None}, ["the parts web"]),
        (
            {"parts": {"web": part(), "code": part(500, batch_size=5)}, "batch_size": None},
            ["batch sizes code 5, web 6", "batch_size"],
        ),
        ({"parts": {"we b": part(), "code": part()}}, ["the part 'we b' of the type TokenDataset"]),
        ({"parts": {"web": part(), "code": 3}}, ["the part 'code' of the type int", "data.tokens"]),
        (
            {"parts": {"web": part(), "code": part(500, length=5)}},
            ["length is 5 of 'code', and 4 of 'web'"],
        ),
        (
            {"parts": {"web": part(), "code": part(500, vocab_size=999)}},
            ["vocab_size is 999 of 'code', and 1000 of 'web'"],
        ),
        (
            {"parts": {"web": part(end_of_text=3), "code": part(500, end_of_text=4)}},
            ["end_of_text is 4 of 'code', and 3 of 'web'"],
        ),
        (
            {"parts": {"web": part(end_of_text=3), "code": part(end_of_text=3, documents=False)}},
            ["fields is tokens, label of 'code', and tokens, label, documents of 'web'"],
        ),
    ],
)
def test_mistakes_are_named(options: dict, words: list[str]):
    with pytest.raises(ValueError) as caught:
        mixed(**options).for_steps(20)
    for word in ["data.mixture", *words]:
        assert word in str(caught.value)


def test_a_mixture_without_parts_is_refused():
    with pytest.raises(ValueError, match="has no parts. Its parts are data sets of data.tokens"):
        data.mixture({}, {})


def test_tokenizers_that_differ_are_refused():
    class Tokenizer:
        end_of_text = 3

        def __init__(self, first: int):
            self.token_bytes = np.arange(first, first + VOCABULARY, dtype=np.int32)

    options: Any = [
        {"tokenizer": Tokenizer(n), "token_bytes": Tokenizer(n).token_bytes} for n in (1, 1, 2)
    ]
    same = {"web": part(**options[0]), "code": part(**options[1])}
    assert mixed(parts=same).tokenizer is same["code"].tokenizer
    with pytest.raises(ValueError, match="the hash of the tokenizer is [0-9a-f]{8} of 'code', and"):
        mixed(parts={"web": part(**options[0]), "code": part(**options[2])})


@pytest.mark.parametrize(("steps", "fits"), [(20, True), (21, False)])
def test_a_part_that_ends_before_its_share_is_refused_when_a_run_is_planned(steps: int, fits: bool):
    # Of batches of 6, 0.25 are code: 30 sequences in 20 steps, which are all there are.
    read = mixed(repeat=["web"])
    if fits:
        lines = read.for_steps(steps).plan_lines
        assert "  code: 120 of 120 training tokens, 1 epochs" in lines
        assert "  web: 360 of 160 training tokens, 2.25 epochs" in lines
        return
    with pytest.raises(ValueError) as caught:
        read.for_steps(steps)
    said = "The part 'code' of data.mixture ends before its share: it has 120 tokens to train on, "
    said += "30 sequences of 4, and 21 steps ask for 124. Give it more text or less weight, or let "
    said += "it be read again, 1.03 times in all: repeat: [code]."
    assert str(caught.value) == said
    assert mixed(repeat=["web", "code"]).for_steps(steps).fingerprint == read.fingerprint


# Runs.

CONFIG = """
model: !models.gpt {{vocab_size: 60, width: 8, depth: 1, num_heads: 1}}
data: !data.mixture
  parts:
    web: !data.tokens {{train: "{folder}/web_train_*.bin", test: "{folder}/web_test_*.bin",
      validation: "{folder}/web_validation_*.bin", length: 8, vocab_size: 60}}
    code: !data.tokens {{train: "{folder}/code_train_*.bin", test: "{folder}/code_test_*.bin",
      validation: "{folder}/code_validation_*.bin", length: 8, vocab_size: 60}}
  weights: {{0: {{web: 0.8, code: 0.2}}, 50%: {{web: 0.4, code: 0.6}}}}
  batch_size: 4
loss: !losses.softmax_cross_entropy {{}}
metrics: {{accuracy: !metrics.accuracy {{}}}}
optimizer: !optax.adamw {{learning_rate: 0.01}}
best_metric: code/loss
best_mode: min
steps: 12
log_every: 1
eval_every: 2
save_every: 3
writers: []
"""
SWEEP = """
base: run.yaml
space: {optimizer.learning_rate: !space.values {values: [0.01, 0.1]}}
goal: {metric: code/loss, mode: min}
final: null
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    random = np.random.default_rng(0)
    for name, size in (("web", 3000), ("code", 600)):
        for split, share in (("train", 1), ("validation", 10), ("test", 10)):
            tokens = random.integers(0, 60, size // share)
            write_shards(tmp_path, f"{name}_{split}", [tokens], np.dtype("<u2"), 10**6)
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(folder=tmp_path))
    monkeypatch.chdir(tmp_path)
    return file


def train(*words: str) -> int:
    return main(["--config=run.yaml", *words])


def state(workdir: Path, step: int) -> dict[str, np.ndarray]:
    return runs.leaves(checkpoint.load_params(workdir, step, "params"))


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_is_not(config: Path):
    assert train("--workdir=whole") == 0
    for step in (4, 7):  # in each stage
        assert train("--workdir=cut", f"--until={step}") == 75
    assert train("--workdir=cut") == 0
    rows, cut = runs.lines(Path("whole")), runs.lines(Path("cut"))
    evaluated = {row["step"]: row for row in rows if "eval/loss" in row}
    assert [*evaluated] == [2, 4, 6, 8, 10, 12]
    by_step = {row["step"]: row for row in cut}
    for row in rows:
        assert {key: by_step[row["step"]][key] for key in row} == row
    wanted, found = state(Path("whole"), 12), state(Path("cut"), 12)
    for path in wanted:
        np.testing.assert_array_equal(wanted[path], found[path])
    last = rows[-1]
    for split in ("validation", "eval"):
        # 299 predicted tokens of web, and 59 of code.
        for name in ("loss", "accuracy"):
            parts = [last[f"{split}/{part}/{name}"] for part in ("web", "code")]
            mean = np.average(parts, weights=[299, 59])
            assert last[f"{split}/{name}"] == pytest.approx(mean, rel=1e-5) and parts[0] != parts[1]
    kept = {info.step for info in checkpoint.ls(Path("whole"))}
    best = min(evaluated, key=lambda step: evaluated[step]["validation/code/loss"])
    assert best in kept or best % 3  # a checkpoint of every third step
    summary = (Path("whole") / "summary.json").read_text()
    assert '"validation/code/loss"' in summary


def test_a_part_without_a_split_is_trained_on_and_not_evaluated(config: Path, capsys: Any):
    splits = re.compile(r' test: "[^"]*",\s+validation: "[^"]*",')
    text = config.read_text().replace("code/loss", "loss")
    web, code = splits.findall(text)
    config.write_text(text.replace(code, ""))
    assert train("--workdir=web") == 0
    last = runs.lines(Path("web"))[-1]
    assert last["validation/loss"] == last["validation/web/loss"]
    assert "validation/code/loss" not in last
    config.write_text(text.replace(code, "").replace(web, ""))
    capsys.readouterr()
    assert train("--workdir=neither") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "run.yaml:" in said and "The data set has splits {}" in said
    assert "Every run needs a validation or a test split to evaluate: give data.tokens" in said


KILLING = """
import os, signal

def kill():
    def hook(step, metrics, params):
        if step == int(os.environ["KILLED_AT"]):
            os.kill(os.getpid(), signal.SIGKILL)
    return hook
"""


@pytest.mark.long
def test_a_run_that_is_killed_goes_on_bit_for_bit(config: Path):
    (config.parent / "killing.py").write_text(KILLING)
    config.write_text(config.read_text() + "hooks: [!killing.kill {}]\n")
    words = ["-m", "trainer", f"--config={config}", "--vocabulary=killing"]

    def run(name: str, at: int) -> int:
        environment = runs.environment(KILLED_AT=str(at))
        environment["PYTHONPATH"] += f":{config.parent}"
        command = [sys.executable, *words, f"--workdir={config.parent / name}"]
        done = subprocess.run(command, env=environment, cwd=runs.ROOT, timeout=runs.LONG)
        return done.returncode

    assert [run("whole", -1), run("cut", 8), run("cut", -1)] == [0, -signal.SIGKILL, 0]
    rows = [{row["step"]: row for row in runs.lines(Path(name))} for name in ("whole", "cut")]
    assert rows[0] == rows[1] and len(rows[0]) == 12
    wanted, found = (state(Path(name), 12) for name in ("whole", "cut"))
    for path in wanted:
        np.testing.assert_array_equal(wanted[path], found[path])


def explained(capsys: pytest.CaptureFixture, *sets: str, code: int = 0) -> str:
    words = [word for each in sets for word in ("--set", each)]
    assert main(["explain", "--config=run.yaml", *words]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err if code else said.out


def test_explain_says_what_is_read_of_each_part(config: Path, capsys: pytest.CaptureFixture):
    said = explained(capsys)
    assert "12 steps of 4 examples of 8 tokens, 384 tokens in all" in said
    assert "train 448, validation/code 8, validation/web 38, test/code 8, test/web 38" in said
    assert (
        "mixture from step 0 on: code 0.2, web 0.8\nmixture from step 6 on: code 0.6, web 0.4\n"
        # Of 24 sequences the first stage has 5 of code, in the order web web web code web; of 24
        # the second has 15, in the order code web code code web.
        "  code: 160 of 592 training tokens, 0.27 epochs\n"
        "  web: 224 of 2,992 training tokens, 0.0749 epochs\n"
    ) in said
    assert "fingerprint of the data: that of the data set" in said


def test_steps_may_be_tokens_of_a_mixture_for_each_parameter(
    config: Path, capsys: pytest.CaptureFixture
):
    sets = ["steps=2 tokens/parameter", "data.repeat=[web, code]"]
    said = explained(capsys, *sets)
    parameters = int(re.search(r"([\d,]+) parameters;", said)[1].replace(",", ""))
    steps = math.ceil(2 * parameters / (4 * 8))
    assert f"{steps:,} steps of 4 examples of 8 tokens, {32 * steps:,} tokens in all" in said
    assert f"mixture from step {math.floor(steps / 2 + 0.5):,} on: code 0.6" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("steps=100", r"ends before its share: it has 592 tokens .*, 74 sequences of 8, and 100"),
        ("data.weights={web: 0.8, code: 0.3}", "--set data.weights=.*: data.mixture has weights"),
        ("data.parts.code.length=9", r"run.yaml:5: data.mixture .*length is 9 of 'code', and 8"),
        (
            "data.parts.code=!data.digits {}",
            "run.yaml:5: .*'code' of the type ArrayDataset",
        ),
        ("data.weights={0: {web: 1, code: 0}, 0%: {web: 1, code: 0}}", r"'0%' \(step 0\)"),
        ("best_metric=cod/loss", "validation/code/loss, validation/code/accuracy"),
        ("data.parts.web.batch_size=0", "data.tokens needs batch_size"),
    ],
)
def test_a_mistake_in_a_config_ends_with_a_sentence(
    config: Path, capsys: pytest.CaptureFixture, change: str, words: str
):
    assert re.search(words, explained(capsys, change, code=2))


def test_parts_that_are_not_here_are_planned(config: Path, capsys: pytest.CaptureFixture):
    there = explained(capsys, "data.parts.web.eval_tokens=200")
    for file in Path().glob("web_*.bin"):
        file.unlink()
    sets = ["data.parts.web.train_tokens=3000", "data.parts.web.eval_tokens=200"]
    said = explained(capsys, *sets)
    lines = said.splitlines()
    missing = [line for line in there.splitlines() if line not in lines]
    assert missing == ["fingerprint of the data: that of the data set"]
    (warning,) = [line for line in lines if line.startswith("warning:")]
    assert "declared shapes of data.mixture" in warning and "Part 'web': The shards of" in warning
    assert "ends before its share" in explained(capsys, *sets, "steps=1000", code=2)
    assert "matches no file" in explained(capsys, "data.parts.web.eval_tokens=200", code=2)
    assert main(["--config=run.yaml", "--workdir=run", "--set", sets[0]]) == 2
    assert "matches no file" in capsys.readouterr().err and not Path("run").exists()
    for file in Path().glob("code_*.bin"):
        file.unlink()
    both = explained(capsys, *sets, "data.parts.code.train_tokens=600")
    assert "Part 'code'" in both and "validation/code of unknown number" in both


def test_an_absent_part_is_an_error_in_python():
    with pytest.raises(DataAbsent):
        data.tokens("no.bin", test="no.bin", train_tokens=100, vocab_size=5, length=4, batch_size=2)


@pytest.mark.long
def test_the_goal_of_a_sweep_may_be_a_part(config: Path, capsys: pytest.CaptureFixture):
    Path("sweep.yaml").write_text(SWEEP)
    assert main(["sweep", "--config=sweep.yaml", "--check"]) == 0
    Path("sweep.yaml").write_text(SWEEP.replace("code/loss", "cod/loss"))
    capsys.readouterr()
    assert "never writes the metric 'cod/loss'. Did you mean 'code/loss'?" in runs.refused(
        capsys, "sweep", "--config=sweep.yaml", "--check"
    )
