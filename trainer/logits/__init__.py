"""The logits of a model with a large vocabulary, which are computed a chunk of rows at a time."""

from trainer.logits.chunked import ChunkedLogits

__all__ = ["ChunkedLogits"]
