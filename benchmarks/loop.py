"""Measures a run as a user starts it over the bare compiled step in a tight loop.

    python -m benchmarks.loop [--rounds=3] [--only=evaluation,by_hand,perceptron,vit]

A run reads batches, logs, evaluates and saves checkpoints, all by its defaults; the other side
calls the compiled step with one batch again and again, and waits at the end. Both are timed
alternately in one process, after everything is compiled and the first block is computed.

The evaluation of the 360 test digits by the perceptron, in batches of 32, is compared with one
jitted call by hand that takes all of them at once: CPU time of the process. A run of 2,000 steps of
batches of 32, by its defaults, is compared with a jitted step by hand that is called with shuffled
batches, without logs, evaluations and checkpoints: CPU time too.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.interleave import interleave, report
from trainer import config
from trainer.engine.program import Program, load_located
from trainer.train import runtime
from trainer.train.run import Run
from trainer.train.signals import StopSignals

PERCEPTRON = """
model: !models.mlp {width: 64, depth: 2}
data: !data.digits {batch_size: 128}
loss: !losses.softmax_cross_entropy {}
optimizer: !optax.adamw {learning_rate: 3.0e-3}
metrics: {accuracy: !metrics.accuracy {}}
steps: 1
"""


class Side:
    """A config, run by the trainer and by a tight loop.

    Args:
        name: for the report.
        file: the config.
        sets: edits of the config.
        rounds: how many times both sides are timed.
    """

    def __init__(self, name: str, file: str, sets: Sequence[str], rounds: int):
        self.name, self.rounds = name, rounds
        read = config.load([file], [], sets)
        program = load_located(read)
        self.program = program
        self.steps = program.experiment.steps
        self.run = Run(read, program, StopSignals(), lambda line: None)
        self.batch = program.feed.to_devices(next(program.feed.batches(0)))

    def ours(self, clock: Callable[[], float] = time.perf_counter) -> float:
        """Runs the trainer, and returns the seconds per step after the first block."""
        began: list[tuple[int, float]] = []

        def observe(step: int, batches: Any, state: Any) -> None:
            if not began:
                jax.block_until_ready(state)
                began.append((step, clock()))

        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            code = self.run.start(str(Path(folder) / "run"), observe=observe)
        (step, start) = began[0]
        assert code == 0, code
        return (clock() - start) / (self.steps - step)

    def bare(self) -> float:
        """Calls the compiled step again and again, and returns the seconds per step."""
        state, metrics = self.program.step(self.program.init(), self.batch)
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for _ in range(self.steps):
            state, metrics = self.program.step(state, self.batch)
        jax.block_until_ready((state, metrics))
        return (time.perf_counter() - start) / self.steps

    def measure(self, target: float) -> None:
        """Times both sides and prints the ratio."""
        times = alternate([self.ours, self.bare], self.rounds, 1e6)
        report(self.name, *times, target=target, unit="us a step", other="the bare step")


def alternate(sides: Sequence[Callable[[], float]], rounds: int, scale: float) -> list[list[float]]:
    """Returns what functions return in each round, scaled; a round before warms up.

    Args:
        sides: the functions, which are called in an order that is reversed every round.
        rounds: the number of rounds.
        scale: multiplies the numbers.
    """
    found: list[list[float]] = [[] for _ in sides]
    pairs = list(zip(sides, found, strict=True))
    for number in range(rounds + 1):
        for side, values in pairs if number % 2 else pairs[::-1]:
            value = scale * side()
            if number:
                values.append(value)
    return found


def logits_by_hand(params: Any, image: jax.Array) -> jax.Array:
    """Computes the perceptron of this benchmark in jax alone."""

    def dense(params: Any, x: jax.Array) -> jax.Array:
        return x @ params["kernel"] + params["bias"]

    x = jax.nn.relu(dense(params["embed"], image.reshape(len(image), -1)))
    block = jax.tree.map(lambda x: x[0], params["blocks"]["linear"])
    return dense(params["head"], jax.nn.relu(dense(block, x)))


def run_by_hand(program: Program) -> Callable[[], float]:
    """Returns a function that trains by a loop in jax and optax, and returns the CPU time a step.

    The steps are those of the program: its model, data, batch size and number of steps.
    """
    experiment = program.experiment
    size, data = experiment.data.batch_size, experiment.data
    batches = [next(iter(data.train(n, 0))) for n in range(data.num_examples // size)]
    image, label = (np.concatenate([each[name] for each in batches]) for name in ("image", "label"))
    tx = optax.adamw(3e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, image: jax.Array, label: jax.Array) -> Any:
        def mean_loss(params: Any) -> jax.Array:
            logits = logits_by_hand(params, image)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run() -> float:
        params, draw = program.init().params, np.random.default_rng(0)
        state = tx.init(params)
        params, state, loss = step(params, state, image[:size], label[:size])
        jax.block_until_ready(loss)
        start, order = time.process_time(), np.arange(0)
        for _ in range(experiment.steps - 1):
            if len(order) < size:
                order = draw.permutation(len(label))
            chosen, order = order[:size], order[size:]
            params, state, loss = step(params, state, image[chosen], label[chosen])
        jax.block_until_ready((params, state, loss))
        return (time.process_time() - start) / (experiment.steps - 1)

    return run


def measure_by_hand(file: Path, rounds: int) -> None:
    """Times runs by the trainer and by hand, and prints the ratio."""
    side = Side("a run", str(file), ["data.batch_size=32", "steps=2000"], rounds)
    ours = partial(side.ours, time.process_time)
    times = alternate([ours, run_by_hand(side.program)], 3 * rounds, 1e6)
    report("2,000 steps of batches of 32", *times, target=0.7, unit="us of CPU a step")


def evaluation_by_hand(program: Program) -> Callable[[Any], Any]:
    """Returns a function of the parameters that computes loss and accuracy on all test digits.

    It is written in jax alone, for the perceptron of this benchmark.
    """
    batches = list(program.experiment.data.evaluate("test"))
    batch = {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}
    kept = {name: x[batch["mask"] == 1] for name, x in batch.items()}

    @jax.jit
    def evaluate(params: Any, image: jax.Array, label: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = logits_by_hand(params, image)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return losses.mean(), (logits.argmax(-1) == label).mean()

    return lambda params: jax.device_get(evaluate(params, kept["image"], kept["label"]))


def measure_evaluation(file: Path, rounds: int) -> None:
    """Times evaluations by a program of the trainer and by hand, and prints the ratio."""
    program = load_located(config.load([file], [], ["data.batch_size=32", "steps=1000"]))
    state = program.init()
    program.compile(state)
    by_hand = evaluation_by_hand(program)
    found = program.evaluation.run_splits(state)
    np.testing.assert_allclose(list(found.values()), by_hand(state.params), rtol=1e-5)

    def ours() -> None:
        for _ in range(50):
            program.evaluation.run_splits(state)

    def theirs() -> None:
        for _ in range(50):
            by_hand(state.params)

    sides = interleave([ours, theirs], 10 * rounds, time.process_time)
    times = [[1e3 * x / 50 for x in side] for side in sides]
    report("an evaluation of 360 digits", *times, target=2, unit="ms", other="one call by hand")


def main() -> None:
    """Times the evaluation and both configs, and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vit_steps", type=int, default=1000)
    parser.add_argument("--mlp_steps", type=int, default=10_000)
    parser.add_argument("--only", default="evaluation,by_hand,perceptron,vit")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    runtime.keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        perceptron = Path(folder) / "mlp.yaml"
        perceptron.write_text(PERCEPTRON)
        if "evaluation" in only:
            measure_evaluation(perceptron, arguments.rounds)
        if "by_hand" in only:
            measure_by_hand(perceptron, arguments.rounds)
        for name, title, file, steps, target in (
            ("perceptron", "perceptron of 9k parameters", perceptron, arguments.mlp_steps, 0.5),
            ("vit", "configs/muon_vit.gin", "configs/muon_vit.gin", arguments.vit_steps, 1.03),
        ):
            if name in only:
                Side(title, str(file), [f"steps={steps}"], arguments.rounds).measure(target)


if __name__ == "__main__":
    main()
