"""A vision transformer in PyTorch that computes what models.vit does.

torch is an extra of the project: import this module only where it is installed.
"""

from typing import Any

import numpy as np

from benchmarks.torch_gpt import F, torch

EPSILON = 1e-6


class Block(torch.nn.Module):
    """A layer: attention and a two-layer perceptron with GELU, each of a norm.

    Args:
        width: size of a token.
        num_heads: number of attention heads.
    """

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (
            torch.nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up = torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
        self.attn_norm = torch.nn.LayerNorm(width, EPSILON, bias=False)
        self.mlp_norm = torch.nn.LayerNorm(width, EPSILON, bias=False)

    def forward(self, x: Any) -> Any:
        """Maps [batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        weights = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        heads = F.linear(self.attn_norm(x), weights)
        query, key, value = (
            part.view(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for part in heads.chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class Vit(torch.nn.Module):
    """The model, which averages its tokens.

    Args:
        width: size of a token.
        depth: number of layers.
        num_heads: number of attention heads.
        patch_size: side of a patch in pixels.
        image_size: side of an image in pixels.
        num_classes: number of classes.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        image_size: int,
        num_classes: int,
    ):
        super().__init__()
        self.patch_size = patch_size
        self.embed = torch.nn.Linear(3 * patch_size**2, width, bias=False)
        tokens = (image_size // patch_size) ** 2
        self.position = torch.nn.Parameter(torch.zeros(tokens, width))
        self.blocks = torch.nn.ModuleList(Block(width, num_heads) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width, EPSILON, bias=False)
        self.head = torch.nn.Linear(width, num_classes)

    def forward(self, images: Any) -> Any:
        """Maps images [batch, height, width, 3] to logits, float32 [batch, num_classes]."""
        size = self.patch_size
        batch, height, width, channels = images.shape
        x = images.view(batch, height // size, size, width // size, size, channels)
        x = self.embed(x.transpose(2, 3).reshape(batch, -1, channels * size**2)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1)).float()

    def loss(self, images: Any, labels: Any) -> Any:
        """Returns the mean cross-entropy in nats an image."""
        return F.cross_entropy(self(images), labels.long())


def to_torch(params: Any) -> dict[str, np.ndarray]:
    """Returns the parameters of models.vit under the names of `Vit`.

    Args:
        params: the parameters of models.vit with stacked layers.

    Returns:
        Name in `Vit.named_parameters()` -> array, with matrices as [outputs, inputs].
    """
    blocks = params["blocks"]
    attn, mlp = blocks["attn"], blocks["mlp"]
    matrices = {name: attn["qkv"]["kernel"][:, i] for i, name in enumerate("qkv")}
    matrices |= {"out": attn["out"]["kernel"]} | {n: k["kernel"] for n, k in mlp.items()}
    found = {
        "embed.weight": params["embed"]["kernel"].T,
        "position": params["embed"]["position"],
        "norm.weight": params["norm"]["scale"],
        "head.weight": params["head"]["kernel"].T,
        "head.bias": params["head"]["bias"],
    }
    for i in range(attn["out"]["kernel"].shape[0]):
        found |= {f"blocks.{i}.{name}.weight": x[i].T for name, x in matrices.items()}
        for name in ("attn_norm", "mlp_norm"):
            found[f"blocks.{i}.{name}.weight"] = blocks[name]["scale"][i]
    return {name: np.array(x) for name, x in found.items()}
