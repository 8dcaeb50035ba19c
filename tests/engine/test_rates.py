"""What rows of metrics say about speed: tokens, utilization, the wait for data, memory."""

import itertools
import json
import math
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import runs
from trainer import config as configs
from trainer.engine.contracts import ComponentError, tokens_per_example
from trainer.engine.flops import count_flops
from trainer.engine.plan import make_plan
from trainer.engine.program import load_located
from trainer.engine.targets import peak_flops
from trainer.train import batch_prefetcher as supply_module
from trainer.train import rows
from trainer.train.batch_prefetcher import BatchPrefetcher
from trainer.train.rows import Clock, Stopwatch, Utilization, memory_peak
from trainer.writers.summary import read_summary

COUNTED = "experiment.data = @unruly.counted()\n"
SLEEPY = (
    "experiment.data = @unruly.sleepy()\nunruly.sleepy.every = True\nunruly.sleepy.seconds = 0.03\n"
)

pytestmark = pytest.mark.usefixtures("lab")


@pytest.fixture
def config(tmp_path):
    return runs.write_config(tmp_path)


def program(tmp_path, more="", *sets):
    config = runs.write_config(tmp_path, more)
    files = [each.removeprefix("--gin_file=") for each in runs.files(config)]
    return load_located(configs.load(files, [], list(sets)), ["unruly"])


def rows_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


# Tokens.


@pytest.mark.long
def test_rows_count_the_tokens_of_a_data_set_that_has_them(tmp_path, config, capsys):
    counted = tmp_path / "counted"
    assert runs.train(runs.write_config(tmp_path, COUNTED), counted) == 0
    rows = rows_of(counted)
    assert [row["tokens"] for row in rows] == [800 * row["step"] for row in rows]
    for row in rows:
        if "perf/steps_per_second" in row:
            speed = row["perf/steps_per_second"]
            assert row["perf/tokens_per_second"] == pytest.approx(800 * speed)
    found = read_summary(counted)
    assert found is not None and found.tokens == 16_000 and "tokens" not in found.metrics
    assert runs.main(["plot", str(counted), "--x=tokens"]) == 0
    assert "train/loss by tokens" in capsys.readouterr().out
    # All else is as without tokens.
    plain = tmp_path / "plain"
    (tmp_path / "run.gin").write_text("")
    assert runs.train(tmp_path / "run.gin", plain) == 0
    for row in rows_of(plain):
        assert not any("tokens" in name or "mfu" in name for name in row)
    assert "tokens" not in json.loads((plain / "summary.json").read_text())
    without = [{k: v for k, v in row.items() if k != "tokens"} for row in runs.lines(counted)]
    assert without == runs.lines(plain)


def test_steps_may_be_counted_in_tokens(tmp_path):
    more = COUNTED + "schedules.warmup_cosine.warmup_steps = '1.6K tokens'\n"
    more += "experiment.steps = '8_001 tokens'\nexperiment.eval_every = '50%'\n"
    experiment = program(tmp_path, more).experiment
    assert (experiment.steps, experiment.eval_every) == (11, 6)


def test_steps_may_be_counted_in_tokens_for_each_parameter(tmp_path):
    """Of the model as the data set makes it, whose classes its head has; known by hand."""
    more = COUNTED + "experiment.steps = '20 tokens/parameter'\nexperiment.eval_every = '50%'\n"
    more += "experiment.model = @models.mlp()\nmodels.mlp.width = 16\nmodels.mlp.depth = 2\n"
    more += "models.mlp.num_classes = 10\n"
    made = program(tmp_path, more)
    sizes = 2 * (16 * 16 + 16) + (16 * 10 + 10)  # of 16 pixels
    assert made.experiment.steps == math.ceil(20 * sizes / 800)
    assert made.experiment.eval_every == round(made.experiment.steps / 2 + 0.01)


def test_tokens_need_a_data_set_that_has_them(tmp_path, capsys):
    config = runs.write_config(tmp_path, "experiment.steps = '1B tokens'\n")
    message = runs.said(capsys, config, tmp_path / "run", code=2)
    assert "run.gin:1: '1B tokens' is a number of tokens, and the data set does not say" in message
    assert not (tmp_path / "run").exists()
    for wrong in (0, -1, 1.5, "128", True):
        with pytest.raises(ComponentError, match="an integer of at least 1, or None."):
            tokens_per_example(types.SimpleNamespace(tokens_per_example=wrong))
    found = tokens_per_example(types.SimpleNamespace(tokens_per_example=np.int64(128)))
    assert (found, type(found)) == (128, int)
    config.write_text(COUNTED + "unruly.counted.tokens_per_example = 0\n")
    assert runs.train(config, tmp_path / "run") == 2
    assert "tokens_per_example of the data set is 0." in capsys.readouterr().err


# Utilization.


@pytest.mark.parametrize(
    ("kind", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "float32", 156e12),
        ("NVIDIA H100 80GB HBM3", "mixed", 989.4e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H200", "float32", 494.7e12),
        ("NVIDIA H200 NVL", "bfloat16", 835.5e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362.05e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("TPU v3", "bfloat16", 61.5e12),
        ("TPU v5 lite", "float32", 197e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v6 lite", "bfloat16", 918e12),
        ("cpu", "float32", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 D", "bfloat16", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_datasheet(kind, precision, peak):
    assert peak_flops(kind, precision) == peak


def test_the_utilization_is_that_of_the_formula(tmp_path, monkeypatch):
    class Device:
        device_kind = "NVIDIA H200"

    real = rows.peak_of
    monkeypatch.setattr(rows, "peak_of", lambda devices, precision: real([Device] * 2, precision))
    made = program(tmp_path, COUNTED, "precision=mixed")
    row = Utilization(made).row(5.0)
    # The perceptron has layers of 16 x 8 and 8 x 3 with biases. A step computes 8 examples:
    # forward, the gradients of all kernels, and those of all inputs but the first.
    products = 2 * 8 * (3 * (16 * 8 + 8 * 3) - 16 * 8)
    assert made.flops == make_plan(made).flops == products
    peak = 2 * 989.4e12
    assert row["perf/mfu"] == pytest.approx(products * 5 / peak, rel=1e-12)
    size = 16 * 8 + 8 + 8 * 3 + 3
    assert row["perf/mfu_6nd"] == pytest.approx(6 * size * 800 * 5 / peak, rel=1e-12)
    assert row["perf/tokens_per_second"] == 4000
    plain = Utilization(program(tmp_path)).row(5.0)
    assert plain.keys() == {"perf/mfu", "perf/memory_peak_bytes"}
    monkeypatch.setattr(rows, "peak_of", real)
    assert Utilization(made).row(5.0).keys() == {"perf/tokens_per_second", "perf/memory_peak_bytes"}


def test_what_is_computed_again_counts_again():
    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    shapes = jnp.ones((4, 8)), jnp.ones((8, 8))
    plain = count_flops(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes))
    again = count_flops(jax.make_jaxpr(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(*shapes))
    assert plain == 2 * 3 * 2 * 4 * 8 * 8
    assert again >= plain + 2 * 4 * 8 * 8


@pytest.mark.parametrize("layout", [0, 1])
def test_the_attention_of_cudnn_counts_as_its_products(layout):
    def equation(name, query, key):
        aval = [
            types.SimpleNamespace(aval=jax.ShapeDtypeStruct(x, jnp.bfloat16)) for x in (query, key)
        ]
        primitive = types.SimpleNamespace(name=name)
        params = {"layout": layout}
        return types.SimpleNamespace(primitive=primitive, invars=aval, outvars=[], params=params)

    batch, queries, keys, heads, width = 2, 6, 10, 4, 8
    query, key = (batch, queries, heads, width), (batch, keys, heads, width)
    if layout == 1:
        query, key = ((x[0], x[2], x[1], x[3]) for x in (query, key))
    product = 2 * batch * heads * queries * keys * width
    for name, count in (("fwd", 2), ("bwd", 4)):
        called = equation(f"dot_product_attention_{name}_wrapper", query, key)
        assert count_flops(types.SimpleNamespace(eqns=[called])) == count * product


def test_the_memory_is_that_of_the_fullest_device():
    def device(stats):
        return types.SimpleNamespace(memory_stats=lambda: stats)

    full, empty = {"peak_bytes_in_use": 7}, {"peak_bytes_in_use": 5}
    assert memory_peak([device(empty), device(full)]) == 7


def test_the_memory_of_a_device_that_cannot_say_it_is_that_of_the_process():
    def fail():
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: GetAllocatorStats")

    assert memory_peak([types.SimpleNamespace(memory_stats=fail)]) > 2**20


IN_A_PROCESS = """
import numpy as np
from trainer.train.rows import memory_peak

class Device:
    def memory_stats(self):
        return None

before = memory_peak([Device()])
held = np.ones(2**25)  # 256 MiB
print(before, memory_peak([Device()]) - before, held.sum())
"""


@pytest.mark.long
def test_the_memory_of_a_process_counts_what_it_holds_and_not_what_another_held():
    assert np.ones(2**26).sum() == 2**26  # 512 MiB, which are freed: a peak never falls
    before, grown = map(int, runs.python("-c", IN_A_PROCESS).split()[:2])
    assert before < 2**29 and grown > 2**27


# The wait for data.


class Ticking:
    """Time that passes when a batch is made, and devices that compute one second per batch."""

    def __init__(self, makes):
        self.now, self.free_at, self.makes = 0.0, 0.0, makes

    def batches(self):
        for number in itertools.count():
            self.now += self.makes
            yield {"number": number}

    def busy(self):
        return self.now < self.free_at

    def compute(self, count):
        self.free_at = max(self.now, self.free_at) + count


@pytest.mark.parametrize(("makes", "share"), [(0.5, 0.0), (4.0, 1.0)])
def test_a_lap_says_which_share_of_it_waited_for_data(makes, share):
    ticking = Ticking(makes)
    data = types.SimpleNamespace(batch_size=8, num_examples=80)
    stopwatch = Stopwatch(0, data, clock=Clock(now=lambda: ticking.now))
    supply = BatchPrefetcher(0, ticking.busy, lambda: ticking.now)
    supply.start(ticking.batches())
    taken, shares = [], []
    for lap in range(1, 4):
        for _ in range(10):
            taken += supply.take(2)
            ticking.compute(2)
        stopwatch.lap(20 * lap, supply.waited)
        shares.append(stopwatch.row(20 * lap)["perf/data_wait"])
    # The first block always waits for its batches.
    assert shares == pytest.approx([max(share, 0.1), share, share])
    assert [batch["number"] for batch in taken] == list(range(60))
    unknown = Stopwatch(0, data)
    unknown.lap(3)
    assert "perf/data_wait" not in unknown.row(3)


def threads():
    return [each for each in threading.enumerate() if each.name == "batches"]


def slow(count, seconds=0.004):
    for number in range(count):
        time.sleep(seconds)
        yield {"number": number}
    raise OSError("the disk of the lab is on fire")


def test_slow_batches_are_made_by_a_thread_in_their_order_and_errors_are_raised():
    supply = BatchPrefetcher(4, lambda: True)
    supply.start(slow(40))
    taken = []
    for count in itertools.cycle((1, 4)):
        if len(taken) == 40:
            break
        taken += supply.take(count)
        if len(taken) == 30:
            assert len(threads()) == 1
    assert [batch["number"] for batch in taken] == list(range(40))
    for _ in range(2):
        with pytest.raises(OSError, match="on fire") as caught:
            supply.take(1)
    assert "slow" in {entry.name for entry in caught.traceback}  # the line of the data set
    supply.close()
    assert not threads()


def test_a_thread_is_only_so_far_ahead_and_ends_when_it_reads_no_more():
    made = []

    def noted(batches):
        for batch in batches:
            made.append(batch["number"])
            yield batch

    supply = BatchPrefetcher(3, lambda: True)
    supply.start(noted(slow(1000)))
    while not threads():
        supply.take(1)
    last = supply.take(1)[0]["number"]
    while len(made) < last + 1 + 3:
        time.sleep(0.001)
    time.sleep(0.05)
    assert made == list(range(last + 1 + 3))
    supply.start(slow(1000))  # as after a rollback
    assert not threads()
    assert supply.take(1) == [{"number": 0}]
    supply.close()


def test_a_thread_that_is_left_behind_adds_nothing_to_the_next_batches(monkeypatch):
    monkeypatch.setattr(supply_module, "_PATIENCE", 0.01)
    goes_on = threading.Event()

    def stuck():
        yield from itertools.islice(slow(1000), 5)
        assert goes_on.wait(runs.LONG)
        yield {"number": "of before"}

    supply = BatchPrefetcher(3, lambda: True)
    supply.start(stuck())
    taken = [supply.take(1)[0]["number"] for _ in range(5)]
    assert taken == list(range(5))
    (left,) = threads()
    supply.start(slow(1000))  # as after a rollback
    taken = [supply.take(1)[0]["number"] for _ in range(5)]
    goes_on.set()
    left.join(runs.LONG)
    taken += [supply.take(1)[0]["number"] for _ in range(25)]
    assert taken == list(range(30))
    assert not left.is_alive() and len(threads()) == 1
    supply.close()


def test_a_thread_waits_only_where_the_devices_do():
    supply = BatchPrefetcher(2, lambda: True)  # they have enough to do
    supply.start(slow(1000))
    for _ in range(30):
        supply.take(1)
    assert supply.waited == 0 and threads()
    supply._busy = lambda: False
    before, began = supply.waited, time.perf_counter()
    for _ in range(30):
        supply.take(1)
    assert supply.waited - before >= 0.7 * (time.perf_counter() - began)
    supply.close()


def test_quick_batches_need_no_thread():
    supply = BatchPrefetcher(4, lambda: True)
    supply.start({"number": number} for number in itertools.count())
    assert [batch["number"] for _ in range(200) for batch in supply.take(2)] == list(range(400))
    assert not threads()


@pytest.mark.long
def test_a_slow_data_set_is_waited_for_and_changes_no_bit(tmp_path, config):
    slowly, quickly = tmp_path / "slowly", tmp_path / "quickly"
    more = ["--set=steps=40", "--set=log_every=10", "--set=eval_every=40", "--set=save_every=40"]
    assert runs.train(config, quickly, *more) == 0
    assert runs.train(runs.write_config(tmp_path, SLEEPY), slowly, *more) == 0
    assert not threads()
    waits = {
        folder: [row["perf/data_wait"] for row in rows_of(folder) if "perf/data_wait" in row]
        for folder in (slowly, quickly)
    }
    assert [len(each) for each in waits.values()] == [4, 4]
    assert min(waits[slowly]) > 0.8
    assert all(0 <= share <= 1 for share in waits[quickly])
    assert runs.lines(slowly) == runs.lines(quickly)
    # A run that a thread reads ahead for resumes exactly.
    resumed = tmp_path / "resumed"
    assert runs.train(config, resumed, *more, "--until=17") == 75
    assert runs.train(config, resumed, *more) == 0
    assert runs.lines(resumed) == runs.lines(quickly)


@pytest.mark.long
def test_a_quick_data_set_is_not_waited_for(tmp_path, config):
    # A step takes far longer than a batch, and than the thread that makes batches waits for a core
    # where other processes have them all.
    more = ["--set=model.width=2048", "--set=model.depth=2", "--set=log_every=5"]
    more.append("--set=eval_every=20")
    assert runs.train(config, tmp_path / "run", *more) == 0
    waits = [
        row["perf/data_wait"] for row in rows_of(tmp_path / "run") if "perf/steps_per_second" in row
    ]
    assert len(waits) == 4 and max(waits[1:]) < 0.25
