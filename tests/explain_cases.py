"""Plans for devices that are not here, and collectives, for test_planned_devices.py.

`python -m tests.explain_cases FOLDER` prints one line of JSON a case: {"case": name, ...}. A plan
writes its figures into the folder.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests import compiled_programs

os.environ["XLA_FLAGS"] = compiled_programs.xla_flags(2)  # --devices overrides it

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from trainer.__main__ import main
from trainer.engine import memory
from trainer.engine.collectives import find_traffic
from trainer.engine.mesh import make_mesh

MLP = """
model: !models.mlp {width: 8}
data: !data.digits {batch_size: 32, crop: 0}
loss: !losses.softmax_cross_entropy
optimizer: !optax.adamw {learning_rate: 1e-3}
mesh: {data: 2, fsdp: 4}
steps: 4
"""
SHAMPOO = (
    "!optim.optimizer {groups: {"
    "kernels: !optim.group {match: .*kernel, optimizer: !optim.shampoo {learning_rate: 0.1}},"
    "rest: !optim.group {match: .*, optimizer: !optax.sgd {learning_rate: 0.1}}}}"
)
CASES = {
    "plan": ["--devices=8", "--device_memory=1MB"],
    "compiled": ["--devices=8", "--compile", "--set=microbatches=2", "--set=precision=bfloat16"],
    "figure": ["--devices=8", "--device_memory=20MB", "--devices_figure=mesh.svg"],
    "bitmap": ["--devices=8", "--devices_figure=mesh.png"],
    "suffix": ["--devices=8", "--devices_figure=mesh.txt"],
    "small": ["--devices=8", "--device_memory=3.223kB"],
    "tight": ["--devices=8", "--device_memory=3.224kB"],
    "fewer": ["--devices=8", "--set=mesh={data: 2}"],
    "uneven": ["--devices=8", "--set=mesh={data: -1, fsdp: 3}"],
    "others": ["--devices=4"],
    "factors": ["--devices=8", f"--set=optimizer={SHAMPOO}"],
}


def explained(folder: Path, *options: str) -> dict[str, Any]:
    """Explains a config; returns the exit code, and what was printed."""
    (folder / "config.yaml").write_text(MLP)
    given = [each.replace("figure=", f"figure={folder}/") for each in options]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["explain", f"--config={folder}/config.yaml", *given])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def collectives() -> list[Any]:
    """Compiles one collective of each kind, and reads them."""
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})

    def local(x: jax.Array) -> tuple[Any, ...]:  # [4, 8] on a device
        def body(_: int, y: jax.Array) -> jax.Array:
            return jnp.sin(jax.lax.psum(y, "tensor"))

        repeated = jax.lax.fori_loop(0, 5, body, x)
        return (
            repeated,
            jax.lax.all_gather(repeated, "fsdp"),
            jax.lax.psum(jnp.cos(x[:2]), ("data", "tensor")),
            jax.lax.ppermute(jnp.sin(x), "data", [(0, 1), (1, 0)]),
            jax.lax.all_to_all(jnp.tan(x), "fsdp", 1, 0, tiled=True),
            jax.lax.psum_scatter(jnp.exp(x), "tensor", scatter_dimension=1, tiled=True),
        )

    whole = PartitionSpec("data", ("fsdp", "tensor"))
    outs = (whole, PartitionSpec(None, "data", ("fsdp", "tensor")), *[whole] * 4)
    split = jax.shard_map(local, mesh=mesh, in_specs=whole, out_specs=outs, check_vma=False)
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=NamedSharding(mesh, whole))
    text = jax.jit(split).lower(x).compile().as_text()
    return [list(each) for each in find_traffic(text, dict(mesh.shape))]


def run(folder: Path) -> None:
    """Prints what all cases find."""
    for name, options in CASES.items():
        if name == "others":
            print(json.dumps({"case": "collectives", "found": collectives()}))
        # A machine without memory: it must not refuse what is planned for others.
        memory.host_memory = lambda: 1
        print(json.dumps({"case": name, **explained(folder, *options)}))


if __name__ == "__main__":
    run(Path(sys.argv[1]))
