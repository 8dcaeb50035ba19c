"""What a model, a data set, a loss and a metric must be.

Nothing needs to inherit from these protocols: an object with these attributes and methods is a
model or a data set. `trainer.engine.contracts` checks them. In the shapes below, `batch` is the
number of examples of a batch and `positions` is the length of a sequence.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax

Batch = Mapping[str, Any]
"""Field name -> array [batch, ...] (numpy's, jax's or traced)."""


class Model(Protocol):
    """Two pure functions, which transformations of jax can trace.

    Two attributes are optional, and say how a mesh splits the parameters where the experiment's
    `sharding` has no rule for them. `sharding` is a sequence of pairs (pattern of paths, axes),
    such as ("blocks/mlp/up/kernel", "- tensor"). `heads` is a sequence of
    `trainer.models.model.Heads`: numbers that the axis "tensor" must divide where these rules split
    by it.

    An attribute `observations` is optional, too: name of what the model can observe in its forward
    pass -> what merges those of microbatches along `axis`, such as `jnp.max`, or a text that says
    why it cannot. `apply` of such a model takes the keyword `observe`, a tuple of these names, and
    returns a third value if it is not empty: name -> path of a parameter -> an array, such as the
    largest logit of the heads of each column of a kernel. Parts of optimizers read them, such as
    `parts.qk_clip`; without one that does, nothing is observed.
    """

    def init(self, key: jax.Array, batch: Batch) -> tuple[Any, Any]:
        """Returns (params, model_state), both nested dicts of arrays.

        Args:
            key: the PRNG key of the parameters.
            batch: a training batch, of which only shapes and dtypes matter.
        """
        ...

    def apply(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        """Returns (outputs, model_state); the outputs are what the loss and the metrics read.

        Args:
            params: as `init` returned them, in the dtype of the experiment's precision.
            model_state: as `init` or the last step returned it. With `train=False` it is returned
                unchanged.
            batch: a batch, whose floats have the dtype of the experiment's precision.
            key: the PRNG key of dropout; None if `train` is False.
            train: whether this is a training step, a Python bool.
        """
        ...


class Dataset(Protocol):
    """Batches to train on, and the batches of one or two splits to evaluate.

    An attribute `splits` is optional. It lists what `evaluate` takes, "validation", "test" or both,
    or is a dict from these names to numbers of examples. In the place of a split it may have named
    parts of it, such as "validation/code" and "validation/web": each has metrics of its own, as
    `validation/code/loss`, and `validation/loss` is that of all of them. `evaluate` of a data set
    without it is called without an argument, and yields the test split.

    An attribute `fingerprint` is optional, too: a text that changes when the data change, such as a
    sha256. A run is resumed with the data of its `fingerprint` only. That of a data set without it
    is a hash of `element_spec`, `num_examples`, `train(0, 0)`, one later batch of the first epoch
    (100 at most) and the first batch of every split: a change of other examples is not noticed.
    `train(0, 0)` is called twice, and must yield the same batch.

    A run of several processes divides each batch into parts. `train` and `evaluate` may take two
    more keywords: `rank`, the part to yield, from 0; and `size`, into how many equal parts a batch
    is divided. They are passed in every run, as `rank=0, size=1` in one of one process, and batches
    are functions of them, not of the process. Processes whose devices differ only along the axis
    "tensor" of the mesh get the same rank. Methods without these keywords must yield the part of
    `jax.process_index()` out of `jax.process_count()`, and the data set is refused where a mesh
    needs the same examples in several processes. The methods of `data.ArrayDataset` and the other
    data sets of Lockstep take them, and yield the part of the process if they are left out.

    An attribute `split_arrays` is optional: "train" and the names of the splits -> field -> array
    [examples, ...], in memory. Before the first step their values are looked at: for labels that
    are not classes, values that are not finite, examples of one split in another, and the like.
    Without it, the first batches are looked at.

    A method `for_steps(steps)` is optional. It returns the data set for a run of so many updates,
    and raises ValueError if there are not enough data for it.

    A data set of texts may have three more. `tokens_per_example` is the number of positions of an
    example: metrics then count tokens, and '1B tokens' is a number of steps. `vocab_size` is the
    number of different tokens. `tokenizer` is a `Tokenizer`, or None if it is not known.
    """

    @property
    def element_spec(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Field name -> shape [batch, ...] and dtype of a training batch, over all processes."""
        ...

    @property
    def batch_size(self) -> int:
        """Number of examples in a training batch, over all processes."""
        ...

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        ...

    def train(self, batch_index: int, seed: int) -> Iterator[Batch]:
        """Yields a part of each training batch, without end.

        A batch is a pure function of `seed` and its index; where it takes long, a thread makes it
        ahead. Its arrays [batch / size, ...] become read-only: do not reuse them. A field "mask",
        float32 [batch / size] or [batch / size, positions], is optional: 1 for what counts in the
        loss and the metrics, and 0 for what does not.

        Args:
            batch_index: the index of the first batch, from 0.
            seed: the experiment's `data_seed`, or its `seed`.
        """
        ...

    def evaluate(self, split: str) -> Iterator[Batch]:
        """Yields a part of each batch of a split, once, and equally many batches for every rank.

        The arrays are those of a training batch, and "mask", which is required: 0 for padding. A
        part may have any number of examples, the same for every rank. If it does not divide over
        the devices, the model also computes copies of its first example, which neither the loss nor
        a metric gets.

        Args:
            split: one of `splits`.
        """
        ...


class Tokenizer(Protocol):
    """Converts text to tokens, which are numbers from 0 on, and back."""

    @property
    def vocab_size(self) -> int:
        """Number of different tokens, `end_of_text` included."""
        ...

    @property
    def end_of_text(self) -> int:
        """The token before the first token of every document."""
        ...

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without `end_of_text`.

        Args:
            text: any text.

        Raises:
            ValueError: a part of the text has no token.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; a part that is not valid UTF-8 becomes U+FFFD.

        Args:
            tokens: numbers from 0 to `vocab_size` - 1; `end_of_text` has no text.
        """
        ...


class Loss(Protocol):
    """A function, which transformations of jax can trace.

    Two attributes are optional. `class_labels` is the field of the batch that it reads as numbers
    of classes, if that is an integer field with the shape of the outputs without their last axis:
    a label that is none of them is an error before the first step. `ignore_label` is the label of
    examples, or positions, that count neither in the loss nor in the metrics, or None.
    """

    def __call__(
        self, outputs: Any, batch: Batch
    ) -> jax.Array | tuple[jax.Array, Mapping[str, jax.Array]]:
        """Returns the losses, or a pair (losses, aux).

        The losses are floats [batch] or [batch, positions]: do not average over the examples. The
        step averages them over all examples or positions whose mask is not 0. `aux` is a dict of
        scalars, which are logged as train/<name>, validation/<name> and eval/<name>; over
        microbatches and over the batches of a split they are averaged with the weights of the
        losses.

        Args:
            outputs: the model's outputs.
            batch: the batch, in its own dtypes.
        """
        ...


class Metric(Protocol):
    """A class of `clu.metrics`, whose objects hold sums over the batches that were added."""

    @classmethod
    def empty(cls) -> "Metric":
        """Returns the sums of no batch."""
        ...

    @classmethod
    def from_model_output(
        cls, *, outputs: Any, logits: Any, labels: Any, batch: Batch, loss: Any, mask: Any
    ) -> "Metric":
        """Returns the sums of one batch; a metric takes those of these keywords that it reads.

        Args:
            outputs: the model's outputs.
            logits: the model's outputs, under the name that classes of clu read.
            labels: the field "label" of the batch; None if there is no such field.
            batch: the batch.
            loss: float32 [batch] or [batch, positions], without the weights of the mask.
            mask: float32 [batch] or [batch, positions], 1 for what counts and 0 for padding.
        """
        ...

    def merge(self, other: Any) -> Any:
        """Returns the sums of both."""
        ...

    def compute(self) -> Any:
        """Returns the value of the metric, a scalar; for `train_metrics`, jax traces it."""
        ...


def members(protocol: type) -> str:
    """Names what a protocol requires, for errors: "batch_size, train(batch_index, seed)"."""
    names = []
    for name, member in vars(protocol).items():
        function = getattr(member, "__func__", member)  # of a classmethod
        if isinstance(member, property):
            names.append(name)
        elif inspect.isfunction(function) and not name.startswith("_"):
            taken = list(inspect.signature(function).parameters.values())[1:]
            bare = [each.replace(annotation=inspect.Parameter.empty) for each in taken]
            names.append(f"{name}{inspect.Signature(bare)}")
    return f"{', '.join(names[:-1])} and {names[-1]}"
