"""The models a config can name: each function returns a `Model`, a pair of pure functions."""

from trainer.models.convnet import convnet
from trainer.models.gpt import gpt
from trainer.models.linen_model import from_linen
from trainer.models.mlp import mlp
from trainer.models.model import Model
from trainer.models.nnx_model import from_nnx
from trainer.models.vit import vit

__all__ = ["Model", "convnet", "from_linen", "from_nnx", "gpt", "mlp", "vit"]
