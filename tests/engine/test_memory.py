"""What a run must hold is compared with the memory of the machine."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.engine import memory
from trainer.engine.step import State


def on(*shape, dtype=jnp.float32):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("data",)), PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


PARAMS = {"embed": {"kernel": on(8, 1_000_000)}, "head": {"bias": on(5, dtype=jnp.bfloat16)}}
STATE = State(on(dtype=jnp.int32), PARAMS, {}, {"mu": PARAMS}, {}, {}, {})
BYTES = 2 * (8 * 1_000_000 * 4 + 5 * 2) + 4  # by hand
BATCH = {"image": on(100, 1000)}
BATCH_BYTES = 400_000


def test_a_state_one_byte_too_large_is_reported(monkeypatch):
    devices = jax.devices()[:1]
    monkeypatch.setattr(memory, "host_memory", lambda: BYTES + BATCH_BYTES)
    assert memory.too_large(STATE, BATCH, memory.memory_of(devices)) is None
    monkeypatch.setattr(memory, "host_memory", lambda: BYTES + BATCH_BYTES - 1)
    told = memory.too_large(STATE, BATCH, memory.memory_of(devices))
    assert told is not None
    for words in ("take 64 MB, ", "a batch takes 400,000 bytes", "this machine has 64.4 MB of"):
        assert words in told
    assert "each with its state, are embed/kernel (64 MB), head/bias (20 bytes)." in told
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    assert memory.too_large(STATE, BATCH, memory.memory_of(devices)) is None


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: BYTES + BATCH_BYTES)
    assert memory.too_large(STATE, BATCH, memory.memory_of(jax.devices()[:1] * 2)) is not None


def test_the_memory_that_a_device_reports_is_used(monkeypatch):
    class Device:
        platform, device_kind = "gpu", "H200"

        def memory_stats(self):
            return {"bytes_limit": 10**7}

    told = memory.too_large(STATE, BATCH, memory.memory_of([Device()] * 4))
    assert told is not None and "a device (H200) has 10 MB of memory" in told
    assert "take 64 MB on a device" in told
    said = memory.StepMemory(10**7, 0, 0, 0).describe(memory.memory_of([Device()] * 4))
    assert said.endswith("; a device (H200) has 10 MB") and said.startswith("memory of a device: ")


def test_a_compiled_step_that_does_not_fit_is_said_to(monkeypatch):
    step, devices = memory.StepMemory(6 * 10**7, 0, 4 * 10**7, 0), jax.devices()[:1] * 2
    advice = ". The temporary memory is smaller with --set microbatches=N, which splits a batch"
    for limit, words in ((2 * 10**8, "has 200 MB"), (2 * 10**8 - 1, f"has only 200 MB{advice}")):
        monkeypatch.setattr(memory, "host_memory", lambda limit=limit: limit)
        said = step.describe(memory.memory_of(devices))
        assert f"; this machine {words}" in said and (advice in said) == ("only" in words)
        assert said.startswith("memory for each of 2 devices on this CPU: 100 MB")
    assert step.describe(memory.memory_of(devices[:1])).startswith("memory on this CPU: 100 MB")
    monkeypatch.setattr(memory, "host_memory", lambda: None)
    assert step.describe(memory.memory_of(devices)).endswith(
        "(state and batch 60 MB, temporary 40 MB, results 0 bytes, code 0 bytes)"
    )


def test_planned_devices_have_their_own_memory_and_not_that_of_this_machine(monkeypatch):
    monkeypatch.setattr(memory, "host_memory", lambda: 1)
    assert memory.too_large(STATE, BATCH, memory.planned_memory(None)) is None
    assert memory.too_large(STATE, BATCH, memory.planned_memory(BYTES + BATCH_BYTES)) is None
    told = memory.too_large(STATE, BATCH, memory.planned_memory(BYTES + BATCH_BYTES - 1))
    assert told is not None and "and a device has 64.4 MB of memory" in told
    said = memory.StepMemory(10**7, 0, 10**7, 0).describe(memory.planned_memory(10**7))
    assert said.startswith("memory of a device, as a CPU's compiler plans it: 20 MB (")
    assert "; a device has only 10 MB." in said


@pytest.mark.parametrize(("text", "wanted"), [("12345\n", 12345), ("max\n", None), (None, None)])
def test_a_container_may_have_less_than_the_machine(text, wanted, tmp_path, monkeypatch):
    file = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_GROUPS", (file,))
    whole = memory.host_memory()
    if text is not None:
        file.write_text(text)
    assert memory.host_memory() == (wanted or whole)
    assert whole is not None and whole > 10**8


@pytest.mark.parametrize(
    ("platform", "peak", "temporary"),
    [("tpu", 810, 700), ("tpu", 1200, 900), ("gpu", 810, 900), ("cpu", 110, 900)],
)
def test_the_temporary_memory_of_a_tpu_is_at_most_the_peak(platform, peak, temporary):
    # As libtpu 0.0.42 reports it: temporary arrays that are not in use at the same time are added,
    # and the peak has arrays on the chip.
    figures = SimpleNamespace(
        argument_size_in_bytes=100,
        output_size_in_bytes=90,
        alias_size_in_bytes=80,
        temp_size_in_bytes=900,
        generated_code_size_in_bytes=5,
        peak_memory_in_bytes=peak,
    )
    place = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    compiled = SimpleNamespace(memory_analysis=lambda: figures, input_shardings=[place])
    found = memory.compiled_memory(compiled)
    assert found == memory.StepMemory(arguments=100, results=10, temporary=temporary, code=5)
