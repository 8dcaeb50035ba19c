"""A GPT in PyTorch, written as in nanoGPT and modded-nanogpt, with which models.gpt is compared.

torch is an extra of the project: import this module only where it is installed.
"""

import importlib
from typing import Any

import numpy as np

torch: Any = importlib.import_module("torch")  # by name, so that pyright does not need it
F: Any = torch.nn.functional

EPSILON = 1e-6


class RmsNorm(torch.nn.Module):
    """Divides the last axis by its root mean square, and multiplies it by a scale.

    Unlike torch.nn.RMSNorm it is a fused kernel under autocast, too.

    Args:
        size: size of the last axis.
    """

    def __init__(self, size: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x: Any) -> Any:
        """Maps [..., size] to the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight.type_as(x), EPSILON)


class Block(torch.nn.Module):
    """A layer: attention and a two-layer perceptron, each of a norm and with a residual.

    Args:
        width: size of a token's vector.
        num_heads: number of heads of the queries.
        num_kv_heads: number of heads of the keys and values.
        mlp_dim: number of hidden units.
        activation: "relu2", "gelu" or "swiglu".
        qk_norm: whether queries and keys are normalized.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_dim: int,
        activation: str,
        qk_norm: bool,
    ):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.activation = num_heads, num_kv_heads, activation
        size = width // num_heads

        def linear(inputs: int, outputs: int) -> Any:
            return torch.nn.Linear(inputs, outputs, bias=False)

        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, num_kv_heads * size), linear(width, num_kv_heads * size)
        self.up, self.down = linear(width, mlp_dim), linear(mlp_dim, width)
        self.gate: Any = linear(width, mlp_dim) if activation == "swiglu" else None
        self.attn_norm = RmsNorm(width)
        self.mlp_norm = RmsNorm(width)
        self.q_norm = RmsNorm(size) if qk_norm else torch.nn.Identity()
        self.k_norm = RmsNorm(size) if qk_norm else torch.nn.Identity()

    def forward(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        """Maps [batch, length, width] to the same shape; `mask` as in `Gpt.forward`."""
        x = x + self.attend(self.attn_norm(x), cos, sin, mask)
        h = self.mlp_norm(x)
        if self.activation == "swiglu":
            return x + self.down(self.up(h) * F.silu(self.gate(h)))
        if self.activation == "gelu":
            return x + self.down(F.gelu(self.up(h), approximate="tanh"))
        return x + self.down(F.relu(self.up(h)).square())

    def attend(self, x: Any, cos: Any, sin: Any, mask: Any) -> Any:
        """Returns what attention adds to x, [batch, length, width]."""
        batch, length, width = x.shape
        # One product instead of three.
        weights = torch.cat([self.q.weight, self.k.weight, self.v.weight])
        heads = F.linear(x, weights).view(batch, length, -1, width // self.num_heads)
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = heads.split(sizes, dim=2)
        query = rotate(self.q_norm(query), cos, sin).transpose(1, 2)
        key = rotate(self.k_norm(key), cos, sin).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            query,
            key,
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Gpt(torch.nn.Module):
    """The model; the arguments are those of models.gpt.

    Args:
        vocab_size: number of tokens.
        width: size of a token's vector.
        depth: number of layers.
        num_heads: number of heads of the queries.
        num_kv_heads: number of heads of the keys and values; None for `num_heads`.
        mlp_dim: number of hidden units; None for 4 * `width`.
        activation: "relu2", "gelu" or "swiglu".
        qk_norm: whether queries and keys are normalized.
        rope_base: the base of the rotary positions.
        tied: whether the head is the embedding.
        soft_cap: bounds the logits; None does not.
        z_loss: the weight of the squared logarithm of the softmax's denominator in the loss.
    """

    def __init__(
        self,
        vocab_size: int = 257,
        width: int = 128,
        depth: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        mlp_dim: int | None = None,
        activation: str = "relu2",
        qk_norm: bool = True,
        rope_base: float = 10_000.0,
        tied: bool = False,
        soft_cap: float | None = None,
        z_loss: float = 0.0,
    ):
        super().__init__()
        self.soft_cap, self.z_loss, self.rope_base = soft_cap, z_loss, rope_base
        self.size = width // num_heads
        self.embed = torch.nn.Embedding(vocab_size, width)
        kinds = (num_kv_heads or num_heads, mlp_dim or 4 * width, activation, qk_norm)
        self.blocks = torch.nn.ModuleList(Block(width, num_heads, *kinds) for _ in range(depth))
        self.norm = RmsNorm(width)
        self.head = torch.nn.Linear(width, vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Any, documents: Any = None) -> Any:
        """Returns the logits, float32 [batch, length, vocab_size].

        Args:
            tokens: [batch, length].
            documents: [batch, length], the number of each token's document; None for one document.
        """
        length, mask = tokens.shape[1], None
        if documents is not None:
            same = documents[:, None, :, None] == documents[:, None, None, :]
            mask = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        x = self.embed(tokens)
        cos, sin = self.rotary(length, x.device)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = self.head(self.norm(x)).float()
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def rotary(self, length: int, device: Any) -> tuple[Any, Any]:
        """Returns cosines and sines, float32 [length, 1, size / 2]."""
        powers = torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size
        angles = torch.outer(torch.arange(length, device=device), self.rope_base**-powers)
        return angles.cos()[:, None], angles.sin()[:, None]

    def loss(self, tokens: Any, labels: Any, documents: Any = None) -> Any:
        """Returns the mean cross-entropy in nats a token, with the z-loss."""
        logits = self(tokens, documents)
        value = F.cross_entropy(logits.flatten(0, 1), labels.flatten().long())
        return value + self.z_loss * logits.logsumexp(-1).square().mean() if self.z_loss else value


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates queries or keys [batch, length, heads, size] by their positions."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


def to_torch(params: Any) -> dict[str, np.ndarray]:
    """Returns the parameters of models.gpt, or their gradients, under the names of `Gpt`.

    Args:
        params: the parameters of models.gpt with stacked layers.

    Returns:
        Name in `Gpt.named_parameters()` -> array, with matrices as [outputs, inputs].
    """
    found = {"embed.weight": params["embed"]["embedding"], "norm.weight": params["norm"]["scale"]}
    if "head" in params:
        found["head.weight"] = params["head"]["kernel"].T
    blocks = params["blocks"]
    attn = blocks["attn"]
    stacked = {"out": attn["out"]["kernel"]} | {n: k["kernel"] for n, k in blocks["mlp"].items()}
    if "qkv" in attn:
        stacked |= {name: attn["qkv"]["kernel"][:, i] for i, name in enumerate("qkv")}
    else:
        stacked |= {name: attn["kv"]["kernel"][:, i] for i, name in enumerate("kv")}
        stacked["q"] = attn["q"]["kernel"]
    norms = {name: blocks[name]["scale"] for name in ("attn_norm", "mlp_norm")}
    norms |= {name: attn[name]["scale"] for name in ("q_norm", "k_norm") if name in attn}
    for i in range(norms["attn_norm"].shape[0]):
        found |= {f"blocks.{i}.{name}.weight": x[i].T for name, x in stacked.items()}
        found |= {f"blocks.{i}.{name}.weight": x[i] for name, x in norms.items()}
    return {name: np.array(x) for name, x in found.items()}


def load(model: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Copies arrays into the parameters of a module, and returns it.

    Args:
        model: the module.
        arrays: name in `named_parameters()` -> array, from `to_torch`.

    Raises:
        ValueError: the module has other parameters.
    """
    own = dict(model.named_parameters())
    if set(arrays) != set(own):
        raise ValueError(f"Only one side has {sorted(set(arrays) ^ set(own))}.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(torch.from_numpy(arrays[name]))
    return model
