"""The logits of a model with a large vocabulary, which are computed a chunk of rows at a time."""

from trainer.logits.chunked import ChunkedLogits
from trainer.logits.cross_entropy import SOFT_CAPS

__all__ = ["SOFT_CAPS", "ChunkedLogits"]
