"""The benchmarks of GPTs, small: all sides compute the same, and every row is there."""

import json
import sys

import jax
import pytest

from benchmarks import gpt, gpu
from benchmarks.gpt_sides import make_gpt


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_by_hand_give_our_parameters(optimizer):
    sides = gpt.make_sides(gpt.SHAPES["tiny"], optimizer, ["hand"])
    gpt.check_same(sides, optimizer)


def test_sides_that_compute_something_else_are_noticed():
    sides = gpt.make_sides(gpt.SHAPES["tiny"], "adamw", ["hand"])
    sides["hand"].steps(1)
    with pytest.raises(AssertionError, match="hand"):
        gpt.check_same(sides, "adamw")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_three_steps_of_torch_give_our_parameters(torch, optimizer):
    sides = gpt.make_sides(gpt.SHAPES["tiny"], optimizer, ["eager"])
    gpt.check_same(sides, optimizer)


def test_the_benchmark_of_accelerators_runs_small(monkeypatch, capsys):
    arguments = "gpu --small --json --rounds=2 --steps=1 --waves=1,2 --sides=ours,hand"
    monkeypatch.setattr(sys, "argv", arguments.split())
    gpu.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(row["workload"], row["optimizer"], row["side"]) for row in rows]
    sides = ["ours", "hand", "wave of 1", "wave of 2"]
    assert found == [(w, o, s) for w in ("gpt", "vit") for o in ("adamw", "muon") for s in sides]
    assert all(row["ms"] > 0 and row["per_second"] > 0 and row["mfu"] is None for row in rows)
    losses = [row["loss"] for row in rows if "loss" in row]
    for ours, hand in zip(losses[::2], losses[1::2], strict=True):
        assert abs(ours - hand) < 0.02 * ours  # in bfloat16


@pytest.mark.parametrize("workload", ["gpt", "vit"])
def test_torch_computes_the_losses_of_the_benchmark_of_accelerators(torch, workload):
    make = {"gpt": gpu.make_gpt_workload, "vit": gpu.make_vit_workload}[workload]
    rows = gpu.time_sides(make(True), "adamw", ["ours", "eager"], 1, 1)
    ours, theirs = [row["loss"] for row in rows]
    assert abs(ours - theirs) < 0.02 * ours


def test_the_large_gpt_has_124_million_parameters_and_its_operations():
    model, batch = make_gpt(gpu.GPT), gpu.GPT.batch()
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    kernels = 12 * 12 * 768**2 + 768 * 50_304
    assert gpu._kernels(params) == kernels  # the embedding is another 39 million, untied
    flops = gpu.make_gpt_workload(False).flops(params)
    assert flops == 32 * 1024 * (6 * kernels + 6 * 12 * 768 * 1024)
