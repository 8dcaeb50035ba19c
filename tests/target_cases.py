"""Programs for GPUs and TPUs that are not here, for tests/engine/test_targets.py.

`python -m tests.target_cases CASE` prints what it finds as one line of JSON. Each case needs a
process of its own, and the compilers that `make targets` installs.
"""

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer.__main__ import main
from trainer.engine import targets

MLP = """
model: !models.mlp {width: 64}
data: !data.digits {batch_size: 64, crop: 0, validation: 0.1}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
mesh: {data: 2, fsdp: -1}
steps: 4
"""
# Kept for the backward pass are 2 GiB for each layer of all examples.
LARGE = """
model: !models.gpt {vocab_size: 64, width: 1024, depth: 2, num_heads: 8, max_length: 1024}
data: !data.tokens
  {train: no/*.bin, validation: no/*.bin, train_tokens: 10000000, vocab_size: 64, length: 1024,
   batch_size: 256, eval_batch_size: 16, eval_tokens: 100000}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
precision: mixed
steps: 4
"""
SWEEP = """
base: config.yaml
arms: {adamw: {space: {optimizer.learning_rate: !space.values {values: [1e-3, 2e-3]}}}}
goal: {metric: loss}
method: !method.grid
"""
ASKING = """
import jax
import jax.numpy as jnp
def loss():
    def squares(outputs, batch):
        scale = 2.0 if jax.default_backend() == "gpu" else 1.0
        return scale * jnp.square(outputs[:, 0] - batch["label"])
    return squares
"""
EXPLAINED = {
    "gpus": (MLP, "--target=h100:8", "--compile"),
    "hosts of tpus": (MLP, "--target=v5e:4x4", "--compile"),
    "one tpu": (MLP, "--target=v6e", "--compile", "--set=mesh=null"),
    "too large": (LARGE, "--target=v5e", "--compile"),
    "uneven": (MLP, "--target=h100:8", "--set=mesh={data: -1, fsdp: 3}"),
    "sweep": (MLP.replace("mesh: {data: 2, fsdp: -1}", ""), "--target=h100", "--dry_run"),
    "sweep too large": (LARGE, "--target=v5e", "--dry_run"),
    "asking": (
        *(MLP.replace("!losses.softmax_cross_entropy", "!asking.loss"), "--target=h100:2"),
        "--vocabulary=asking",
    ),
    "no such shape": (MLP, "--target=v5e:3x3"),
}


def explained(config: str, *options: str) -> dict[str, Any]:
    """Explains a config, or a sweep of it; returns the exit code, and what was printed."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config)
        (Path(folder) / "asking.py").write_text(ASKING)
        sys.path.insert(0, folder)
        command = "explain"
        if "--dry_run" in options:
            command, file = "sweep", file.with_name("sweep.yaml")
            file.write_text(SWEEP)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([command, f"--config={file}", *options])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


ATTENTION = {
    "float32": (4, 4, 128, "float32", {"data": 1}, "cudnn"),
    "bfloat16": (4, 4, 128, "bfloat16", {"data": 1}, "cudnn"),
    "chosen": (4, 4, 128, "bfloat16", {"data": 1}, "auto"),
    "grouped": (8, 2, 128, "bfloat16", {"data": 1}, "auto"),
    "odd": (4, 4, 127, "bfloat16", {"data": 1}, "auto"),
    "heads divided": (8, 4, 128, "bfloat16", {"tensor": 2}, "auto"),
    "keys whole": (8, 1, 128, "bfloat16", {"tensor": 2}, "auto"),
}


def attention() -> dict[str, Any]:
    """Compiles attention and its gradient for H100; returns the calls of cuDNN by case."""
    devices = targets.elsewhere_of(targets.parse("h100:2")).devices
    return {name: attended(devices, *case) for name, case in ATTENTION.items()}


def attended(
    devices: Any, heads: int, kv_heads: int, tokens: int, dtype: str, axes: Any, chosen: str
) -> dict[str, Any]:
    """Returns the number of calls of cuDNN, and the shapes of results and gradients."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from trainer.engine.mesh import ambient, make_mesh
    from trainer.models.attention import attend

    mesh = make_mesh(axes, devices)

    def loss(query: Any, key: Any, value: Any, how: str) -> Any:
        out = attend(query, key, value, None, 0.125, how)
        return out.astype(jnp.float32).sum(), out

    def shape(count: int) -> Any:
        split = "tensor" if "tensor" in axes and count > 1 else None
        place = NamedSharding(mesh, PartitionSpec(None, None, split))
        return jax.ShapeDtypeStruct((2, tokens, count, 64), dtype, sharding=place)

    shapes = shape(heads), shape(kv_heads), shape(kv_heads)
    differentiated = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    with ambient(mesh):
        step = jax.jit(differentiated, static_argnums=3).lower(*shapes, chosen)
        plain = jax.eval_shape(lambda *x: differentiated(*x, "plain"), *shapes)

    def described(tree: Any) -> str:
        return str(jax.tree.map(lambda x: (x.shape, x.dtype.name), tree))

    return {
        "calls": step.compile().as_text().count('custom_call_target="__cudnn$fmha'),
        "shapes": described(step.out_info),
        "plain": described(plain),
    }


def collectives(text: str) -> list[Any]:
    """Compiles one collective of each kind for eight devices, one of them in a loop too."""
    devices = targets.elsewhere_of(targets.parse(text)).devices
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from trainer.engine.collectives import find_traffic
    from trainer.engine.mesh import make_mesh

    mesh = make_mesh({"data": 2, "fsdp": 4}, devices)
    place = PartitionSpec(("data", "fsdp"))

    def exchange(x: jax.Array) -> tuple[Any, ...]:  # float32 [8, 16] on a device
        whole = jax.lax.all_gather(x, "fsdp", tiled=True)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return (
            whole.sum() + jax.lax.psum(x, ("data", "fsdp")).sum(),
            jax.lax.psum_scatter(whole, "fsdp", tiled=True),
            jax.lax.all_to_all(x, "fsdp", 1, 0, tiled=True),
            jax.lax.ppermute(x, "fsdp", ring),
            jax.lax.fori_loop(
                0, 5, lambda _, y: jnp.sin(jax.lax.all_gather(y, "fsdp", tiled=True))[:8], x * 2
            ),
        )

    outs = (PartitionSpec(), place, place, place, place)
    step = jax.shard_map(exchange, mesh=mesh, in_specs=place, out_specs=outs, check_vma=False)
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, place))
    return find_traffic(jax.jit(step).lower(x).compile().as_text(), mesh.shape)


if __name__ == "__main__":
    (case,) = sys.argv[1:]
    if case == "attention":
        print(json.dumps(attention()))
    else:
        print(json.dumps(explained(*EXPLAINED[case]) if case in EXPLAINED else collectives(case)))
