"""The benchmarks of GPTs, small: all sides compute the same, and every row is there."""

import importlib.util
import json
import sys

import optax
import pytest

from benchmarks import gpt, gpu, jax_gpt, target_sides
from benchmarks.gpt_sides import available, make_sides
from benchmarks.targets import CASES
from benchmarks.workload import make_gpt_workload


def tiny(optimizer, *names):
    return make_sides(make_gpt_workload(gpt.SHAPES["tiny"]), optimizer, list(names))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_by_hand_give_our_parameters(optimizer):
    sides = tiny(optimizer, "ours", "hand")
    gpt.check_same(sides, optimizer)


@pytest.mark.long
def test_sides_that_compute_something_else_are_noticed():
    sides = tiny("adamw", "ours", "hand")
    sides["hand"].steps(1)
    with pytest.raises(AssertionError, match="hand"):
        gpt.check_same(sides, "adamw")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_of_torch_give_our_parameters(torch, optimizer):
    sides = tiny(optimizer, "ours", "eager")
    gpt.check_same(sides, optimizer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("workload", "optimizer", "waves"),
    [("gpt", "muon", [2]), ("vit", "adamw", [1, 2])],
)
def test_the_benchmark_of_accelerators_runs_small(workload, optimizer, waves, monkeypatch, capsys):
    arguments = "gpu --parts=sides --small --json --rounds=2 --steps=1 --sides=ours,hand"
    chosen = [
        f"--workloads={workload}",
        f"--optimizers={optimizer}",
        f"--waves={','.join(map(str, waves))}",
    ]
    monkeypatch.setattr(sys, "argv", [*arguments.split(), *chosen])
    gpu.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["workload"], row["optimizer"], row["side"]) for row in rows]
    sides = ["ours", "hand", *(f"wave of {width}" for width in waves)]
    assert found == [(workload, optimizer, side) for side in sides]
    assert all(row["ms"] > 0 and row["per_second"] > 0 and row["mfu"] is None for row in rows)
    ours, hand = [row["loss"] for row in rows if "loss" in row]
    assert abs(ours - hand) < 0.02 * ours  # in bfloat16


@pytest.mark.long
def test_what_a_gpu_is_asked_once_one_is_there_runs_small(monkeypatch, capsys):
    words = "gpu --parts=memory,attention,trials,training --small --json --workloads=gpt"
    words += " --rounds=2 --steps=1 --updates=60 --optimizers=adamw"
    monkeypatch.setattr(sys, "argv", words.split())
    gpu.main()
    rows = {row["side"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == [
        "memory",
        "after 60 updates",
        "cuDNN over XLA",
        "4 trials over one by one",
    ]
    assert rows["memory"]["planned_bytes"] > 10**5 and rows["memory"]["peak_bytes"] is None  # a CPU
    # Bytes drawn evenly from 256 would cost log(256) = 5.5; the frequencies of text are learned.
    assert rows["after 60 updates"]["loss"] < 4.5
    assert all(row["ms"] > 0 for row in rows.values())


WORKLOADS = {
    "gpt": lambda: make_gpt_workload(gpu.SMALL_GPT, bfloat16=True),
    "vit": lambda: gpu.make_vit_workload(True),
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_torch_computes_the_losses_of_the_benchmark_of_accelerators(torch, workload):
    rows = gpu.time_sides(WORKLOADS[workload](), "adamw", ["ours", "eager"], 1, 1)
    ours, theirs = [row["loss"] for row in rows]
    assert abs(ours - theirs) < 0.02 * ours


def test_the_utilization_does_not_depend_on_the_sides_that_are_timed(torch, monkeypatch):
    monkeypatch.setattr(gpu, "peak_flops", lambda device, precision: 1e12)
    workload = WORKLOADS["gpt"]()
    for row in gpu.time_sides(workload, "adamw", ["eager", "hand"], 1, 1):
        assert row["mfu"] == pytest.approx(workload.flops / row["ms"] / 1e9)


def test_without_torch_its_sides_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert available(["hand", "eager", "compiled"]) == ["hand"]
    assert "eager and compiled: torch is not installed" in capsys.readouterr().out
    assert available(["eager"]) == []


def test_no_sides_have_no_rows():
    assert gpu.time_sides(WORKLOADS["gpt"](), "adamw", [], 1, 1) == []


def test_the_operations_of_the_large_gpt():
    kernels = 12 * 12 * 768**2 + 768 * 50_304  # the embedding is another 39 million, untied
    flops = make_gpt_workload(gpu.GPT).flops
    assert flops == 32 * 1024 * (6 * kernels + 6 * 12 * 768 * 1024)


def test_the_operations_of_a_vit_count_its_head_once_for_each_image():
    kernels, head, attended = 3 * 8**2 * 32 + 2 * 12 * 32**2, 32 * 10, 12 * 2 * 32 * 4
    flops = gpu.make_vit_workload(True).flops  # 4 images of 4 tokens
    assert flops == 4 * (4 * (6 * kernels + attended) + 6 * head)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_sides_that_are_compiled_for_targets_compute_the_same(case):
    target_sides.check_same(CASES[case])


@pytest.mark.long
def test_sides_for_targets_that_differ_are_noticed(monkeypatch):
    monkeypatch.setattr(jax_gpt, "make_optimizer", lambda *_: optax.sgd(1.0))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        target_sides.check_same(CASES["gpt adamw"])


@pytest.mark.long
def test_what_a_compiler_says_of_both_sides_is_read():
    found = target_sides.compile_sides(CASES["vit adamw"], "xla", small=True)
    for figures in found.values():
        assert figures.kernels > 10 and figures.temporary > 10**5 and figures.cycles is None
        assert figures.exchanged == 0
    ours, hand = found.values()
    assert ours.flops == hand.flops  # one model, and the same optimizer
