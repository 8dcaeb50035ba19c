"""Divided work on eight simulated devices, for test_division.py.

`python -m tests.division_cases` prints one line of JSON a case: {"case": name, ...}.
"""

# First, because it sets XLA's flags before jax looks for devices.
from benchmarks import division as benchmark  # isort: skip

import collections
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import optim
from optim.division import assign_to_devices, divide
from optim.newton_schulz import flops, orthogonalize_all, polynomials
from tests.runs import mesh_name
from trainer import data, losses, models
from trainer.engine.experiment import Experiment
from trainer.engine.flops import count_flops
from trainer.engine.mesh import make_mesh
from trainer.engine.program import Program

MUON_WIDTH, SOAP_WIDTH = 64, 16
TENSOR = benchmark.TENSOR


def say(case: str, **found: Any) -> None:
    print(json.dumps({"case": case, **found}), flush=True)


def programs() -> None:
    """What the devices compute and receive, by the compiled program."""
    for name in benchmark.RECIPES:
        width = MUON_WIDTH if name in ("muon", "scion") else SOAP_WIDTH
        params = benchmark.kernels(12, width, stacked=name != "muon")
        size = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
        for axes in (*benchmark.MESHES, TENSOR) if name == "muon" else benchmark.MESHES[-1:]:
            for divided in (True, False) if name == "muon" and axes != TENSOR else (True,):
                found = benchmark.measure(name, params, axes, divided)
                case = f"{name} {'divided' if divided else 'replicated'} {mesh_name(axes)}"
                say(case, work=found.work, received=sum(found.received.values()) / size)


def answers() -> None:
    """Whether three divided updates are those of one device, where 8 divides no number, too."""
    for name in benchmark.RECIPES:
        for layers in (3, 8):
            kernels = partial(benchmark.kernels, stacked=layers == 8)
            for axes in benchmark.MESHES if name == "muon" else benchmark.MESHES[-1:]:
                worst = compare(name, kernels, layers, axes)
                say(f"{name} of {layers} layers over {mesh_name(axes)}", worst=worst)


def compare(name: str, kernels: Any, layers: int, axes: dict[str, int]) -> float:
    """Returns the largest relative difference of three divided updates to those of one device."""
    params = kernels(layers, 16)
    alone = jax.jit(benchmark.RECIPES[name]().update)
    several, (_, state, spread) = benchmark.compile_update(
        benchmark.RECIPES[name], params, axes, divided=True
    )
    placed = jax.tree.map(lambda x: x.sharding, spread)
    wanted_state, worst = jax.device_get(state), 0.0
    for seed in range(3):
        grads = kernels(layers, 16, seed=seed)
        here = jax.device_put(grads, placed)
        found, state = jax.block_until_ready(several(here, state, spread))
        wanted, wanted_state = alone(grads, wanted_state, params)
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)))
    return worst


def split_in_two_ways() -> None:
    """The kernels of models.gpt, whose square matrices are split in two ways."""
    for name in ("muon", "scion"):
        params = benchmark.gpt_kernels(8, MUON_WIDTH)
        size = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
        for told in (True, False):
            found = benchmark.measure(name, params, TENSOR, divided=True, told=told)
            case = f"{name} {'told' if told else 'not told'}"
            say(case, work=found.work, received=sum(found.received.values()) / size)
        worst = compare(name, benchmark.gpt_kernels, layers=3, axes=TENSOR)
        say(f"{name} of models.gpt", worst=worst)


def rows_of_one() -> None:
    """Single matrices whose rows several devices compute, where whole ones leave some idle."""
    triples = polynomials("jordan", 5)
    kinds = {"12 of 256": [(256, 256)] * 12, "9 of 64 x 256": [(64, 256)] * 9}
    # Of the last kind the rows do not divide: its matrices are computed whole.
    kinds["3 of 64, 9 of 10"] = [(64, 64)] * 3 + [(10, 24)] * 9
    for axes in ({"data": 8}, TENSOR):
        for kind, shapes in kinds.items():
            draw = np.random.default_rng(0)
            matrices = [draw.normal(size=(1, *shape)).astype(np.float32) for shape in shapes]
            with jax.set_mesh(make_mesh(axes)):
                update = jax.jit(partial(orthogonalize_all, triples=triples))
                compiled = update.lower(matrices).compile()
                found = jax.block_until_ready(compiled(matrices))
            wanted = [five_steps(x) for x in matrices]
            worst = max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True))
            ideal = sum(flops(*shape, len(triples), 4) for shape in shapes) / 8
            work = benchmark.work_of(compiled)[0] / ideal
            say(f"rows: {kind} over {mesh_name(axes)}", work=work, worst=float(worst))


def five_steps(x: np.ndarray) -> np.ndarray:
    """Computes five of Keller Jordan's steps by a singular value decomposition, in float64."""
    u, values, v = np.linalg.svd(x.astype(float), full_matrices=False)
    values = values / np.linalg.norm(x)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ (values[..., None] * v)


def matrices_computed() -> None:
    """How many matrices each device computes, counted while the program runs."""
    seen: collections.Counter[tuple[int, int]] = collections.Counter()

    def count(device: Any, number: Any, size: Any) -> None:
        seen[int(device), int(size)] += int(number)

    def function(x: Any) -> Any:
        device = jax.lax.axis_index(("fsdp", "data"))
        jax.debug.callback(count, device, x.shape[0], x.shape[-1])
        return 2 * x

    batches = [np.full((n, m, m), n, np.float32) for n, m in ((5, 4), (3, 8), (2, 4), (9, 2))]
    with jax.set_mesh(make_mesh({"data": 2, "fsdp": 4})):
        found = jax.jit(lambda x: divide(function, x))(batches)
        jax.effects_barrier()
    right = all(np.array_equal(a, 2 * b) for a, b in zip(found, batches, strict=True))
    shares = assign_to_devices([7, 3, 9], [64.0, 512.0, 8.0], 8)
    wanted = {(d, m): int(s[d]) for m, s in zip((4, 8, 2), shares, strict=True) for d in range(8)}
    say("computed", right=right, same={k: v for k, v in wanted.items() if v} == dict(seen))


def transformations() -> None:
    """Scan, vmap and shard_map of an update under a mesh."""
    tx = optim.muon(0.02)
    params = benchmark.kernels(3, 8, stacked=False)
    state = tx.init(params)

    def several(grads: Any, state: Any) -> Any:
        def body(state: Any, _: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(body, state, None, length=2)[1]

    def over_trials(grads: Any, state: Any) -> Any:
        batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), grads)
        return jax.vmap(lambda g: tx.update(g, state, params)[0])(batch)

    mesh = make_mesh({"data": 8})

    def mapped(grads: Any, state: Any) -> Any:
        whole = PartitionSpec()
        run = jax.shard_map(
            lambda g, s: tx.update(g, s, params)[0], in_specs=whole, out_specs=whole, mesh=mesh
        )
        return run(grads, state)

    for name, function in (("scan", several), ("vmap", over_trials), ("shard_map", mapped)):
        plain = several if name == "scan" else over_trials
        if name == "shard_map":
            plain = lambda g, s: tx.update(g, s, params)[0]  # noqa: E731
        wanted = jax.jit(plain)(params, state)
        with jax.set_mesh(mesh):
            traced = jax.jit(function).trace(params, state)
            found = jax.block_until_ready(traced.lower().compile()(params, state))
        worst = max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max())
            for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
        )
        say(name, worst=worst, maps=str(traced.jaxpr).count("shard_map"))


def training() -> None:
    """A run's own step divides the work, and the plan's FLOPs are those of one device."""
    groups = {
        "matrices": optim.group("blocks/.*/kernel", partial(optim.muon, learning_rate=0.02)),
        "rest": optim.group(".*", optim.frozen()),
    }
    steps = {}
    for devices in (1, 8):
        program = Program(
            Experiment(
                model=models.mlp(width=16, depth=9),
                data=data.digits(batch_size=32, crop=0),
                loss=losses.softmax_cross_entropy(),
                optimizer=optim.optimizer(groups),
                steps=10,
                log_every=5,
                eval_every=5,
                save_every=5,
                mesh={"data": devices},
            )
        )
        steps[devices] = program.trace(program.abstract_state()).jaxpr
    flops = {devices: count_flops(jaxpr) for devices, jaxpr in steps.items()}
    maps = {devices: str(jaxpr).count("shard_map") for devices, jaxpr in steps.items()}
    say("training", maps_alone=maps[1], maps=maps[8], flops=flops[8] / flops[1])


def main() -> None:
    programs()
    answers()
    split_in_two_ways()
    rows_of_one()
    matrices_computed()
    transformations()
    training()


if __name__ == "__main__":
    main()
