"""Keeps the loss and the metrics of a final run on each example of the test split."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from trainer.engine.contracts import Batch, ComponentError
from trainer.engine.program import Program
from trainer.engine.splits import split_sizes
from trainer.engine.step import State
from trainer.sweep.per_example_file import MOST_EXAMPLES, PER_EXAMPLE_FILE, encode
from trainer.writers.files import replace_file


def keep_examples(
    program: Program,
    state: State,
    folder: Path,
    fence: Callable[[], None],
    log: Callable[[str], None],
    watch: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes per_example.npz of a run that ended; nothing without a mean over test examples."""
    # A mistake in this pass over the test split, such as of a metric that cannot be computed so, is
    # logged only; UserError is raised if a file of the data set was changed. `state` is not
    # donated. `fence` is called before the file is written, `watch` before each batch.
    if "test" not in split_sizes(program.experiment.data):
        return

    def watched(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            watch("the evaluation of single test examples")
            yield batch

    try:
        batches = watched(program.evaluation.batches("test"))
        found = program.evaluation.run_examples(state, batches, MOST_EXAMPLES)
    except (ComponentError, MemoryError, jax.errors.JaxRuntimeError) as error:
        log(f"The results on single test examples are not kept. {error}")
        return
    if found.values:
        replace_file(folder / PER_EXAMPLE_FILE, encode(found), fence)
