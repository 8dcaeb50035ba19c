"""Step time of our compiled program over a step written by hand in jax and optax.

    python -m benchmarks.step [--rounds=40]

The same model, batch, groups and clip; both donate their state; timed in turn in one process.
"""

import argparse
from functools import partial

import jax
import optax

import optim
from benchmarks.interleave import interleave, report
from trainer import config, losses, models, runtime
from trainer.experiment import build_experiment
from trainer.program import Program


def by_hand(batch_shapes, seed=0):
    """Returns (step, params, opt_state) as a careful researcher writes them."""
    model = models.vit(width=64, depth=4)
    loss = losses.softmax_cross_entropy()
    schedule = partial(optax.warmup_cosine_decay_schedule, 0.0, warmup_steps=75, decay_steps=1500)

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "matrices" if name.startswith("blocks") and name.endswith("kernel") else "rest"

    zeros = {k: jax.numpy.zeros(x.shape, x.dtype) for k, x in batch_shapes.items()}
    params, _ = jax.jit(model.init)(jax.random.key(seed), zeros)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "matrices": optim.muon(schedule(0.02), weight_decay=0.05),
                "rest": optax.adamw(schedule(1e-3), weight_decay=0.05),
            },
            lambda params: jax.tree_util.tree_map_with_path(label, params),
        ),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        def mean_loss(params):
            outputs, _ = model.apply(params, {}, batch, key=None, train=True)
            return loss(outputs, batch).mean()

        value, grads = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(grads)

    return step, params, jax.jit(tx.init)(params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps a round")
    parser.add_argument("--set", dest="sets", action="append", default=[])
    arguments = parser.parse_args()
    runtime.keep_freed_memory()  # for both sides: they share the process

    read = config.load(["configs/muon_vit.gin"], [], ["steps=1500", *arguments.sets])
    experiment = build_experiment(read)
    program = Program(experiment)
    host = next(experiment.data.train(0, 0))
    step, params, opt_state = by_hand(experiment.data.element_spec)
    hand = {"params": params, "opt_state": opt_state}
    mine = {"state": program.init()}

    def ours() -> None:
        for _ in range(arguments.steps):
            mine["state"], metrics = program.step(mine["state"], program.put(host))
        jax.block_until_ready(metrics)

    def theirs() -> None:
        for _ in range(arguments.steps):
            p, s, value, _ = step(hand["params"], hand["opt_state"], jax.device_put(host))
            hand.update(params=p, opt_state=s)
        jax.block_until_ready(value)

    for warm_up in (ours, theirs):
        warm_up()
    seconds = interleave(ours, theirs, arguments.rounds)
    to_ms = [[1e3 * x / arguments.steps for x in side] for side in seconds]
    report(f"step, {jax.devices()[0].device_kind}", *to_ms, target=1.02, unit="ms")


if __name__ == "__main__":
    main()
