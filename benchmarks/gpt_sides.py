"""The sides of the benchmarks of GPTs and ViTs: ours, jax by hand, and PyTorch, eager or compiled.

A side has `steps(count)`, which computes steps to their end and returns the loss of the last one,
and `params()`, its parameters on the host as models.gpt names them (PyTorch: as `Gpt` does).
"""

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optim
from benchmarks import jax_gpt
from benchmarks.by_hand import make_step
from benchmarks.jax_gpt import ADAMW, CLIP, MATRICES, MUON
from benchmarks.workload import Workload
from trainer import losses, models
from trainer.data.arrays import ArrayDataset
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program


def make_optimizer(name: str, ns_dtype: str | None = None) -> optim.Optimizer:
    """Returns the optimizer of `jax_gpt.make_optimizer` as a config would write it.

    Args:
        name: "adamw" or "muon".
        ns_dtype: the dtype of Muon's Newton-Schulz steps; None for float32.
    """
    rest = optim.group(".*", partial(optax.adamw, **ADAMW))
    muon = partial(optim.muon, **MUON, ns_dtype=ns_dtype)
    matrices = {"matrices": optim.group(MATRICES, muon)}
    return optim.optimizer({**(matrices if name == "muon" else {}), "rest": rest}, clip_norm=CLIP)


def available(names: list[str]) -> list[str]:
    """Returns the sides that this machine can run, and prints which it cannot, and why.

    Args:
        names: some of "ours", "hand", "eager" and "compiled".
    """
    theirs = [name for name in names if name in ("eager", "compiled")]
    if not theirs:
        return names
    reason = ""
    if importlib.util.find_spec("torch") is None:
        reason = "torch is not installed; `make torch` adds it"
    elif jax.default_backend() != "cpu":
        from benchmarks.torch_gpt import torch

        reason = "" if torch.cuda.is_available() else "torch has no CUDA"
    if reason:
        print(f"Without {' and '.join(theirs)}: {reason}.")
    return [name for name in names if not reason or name not in theirs]


def make_sides(workload: Workload, optimizer: str, names: list[str]) -> dict[str, Any]:
    """Returns the sides by name, all with the same first parameters.

    Args:
        workload: the model and its batch.
        optimizer: "adamw" or "muon".
        names: some of "ours", "hand", "eager" and "compiled".
    """
    batch, bfloat16 = workload.batch, workload.bfloat16
    ours = Ours(make_program(workload.model, batch, optimizer, bfloat16))
    params, sides = ours.params(), {}
    device = "cpu" if jax.default_backend() == "cpu" else "cuda"
    for name in names:
        if name == "ours":
            sides[name] = ours
        elif name == "hand":
            sides[name] = ByHand(workload.loss, params, batch, optimizer, bfloat16)
        else:
            inputs, labels = batch.values()
            module, compiled = workload.module(params), name == "compiled"
            sides[name] = Torch(module, (inputs, labels), optimizer, compiled, bfloat16, device)
    return sides


def make_program(
    model: models.Model,
    batch: dict[str, np.ndarray],
    optimizer: str,
    bfloat16: bool = False,
    devices: Any = None,
    **settings: Any,
) -> Program:
    """Returns the program of a model, whose training batches are all the same.

    Args:
        model: the model.
        batch: field name -> array of a batch.
        optimizer: "adamw" or "muon".
        bfloat16: whether the products, and Muon's, are in bfloat16, and all else in float32.
        devices: those of a target; None for those that jax finds.
        **settings: more fields of the experiment.
    """
    own = {name: array.copy() for name, array in batch.items()}  # a data set makes them read-only
    experiment = Experiment(
        model=model,
        data=ArrayDataset(own, own, batch_size=None),
        loss=losses.softmax_cross_entropy(),
        optimizer=make_optimizer(optimizer, "bfloat16" if bfloat16 else None),
        precision="mixed" if bfloat16 else "float32",
        steps=10**6,
        log_every=10**6,
        eval_every=10**6,
        save_every=10**6,
        **settings,
    )
    return Program(experiment, devices=devices)


class Ours:
    """Steps of a program of ours.

    Args:
        program: the program, which is compiled here.
    """

    def __init__(self, program: Program):
        self.program, self.state = program, program.init()
        self.batch = next(program.experiment.data.train(0, 0))

    def steps(self, count: int) -> float:
        """Computes steps, each of a batch that is sent to the device."""
        metrics: Any = None
        for _ in range(count):
            batch = self.program.feed.to_devices(self.batch)
            self.state, metrics = self.program.step(self.state, batch)
        return float(metrics["train/loss"])

    def params(self) -> Any:
        """Returns a copy of the parameters on the host."""
        return jax.tree.map(np.array, self.state.params)


class ByHand:
    """Steps of a loss and an optimizer by hand.

    Args:
        loss: `loss(params, batch)`, the mean loss.
        params: the first parameters, of which it takes copies.
        batch: field name -> array of a batch.
        optimizer: "adamw" or "muon".
        bfloat16: whether Muon's products are in bfloat16; `loss` says what those of the model are.
    """

    def __init__(
        self,
        loss: Any,
        params: Any,
        batch: dict[str, np.ndarray],
        optimizer: str,
        bfloat16: bool = False,
    ):
        tx = jax_gpt.make_optimizer(optimizer, "bfloat16" if bfloat16 else None)
        self._step, self.batch = make_step(loss, tx), batch
        self._params = jax.tree.map(jnp.array, params)
        self._state = jax.jit(tx.init)(self._params)

    def steps(self, count: int) -> float:
        """Computes steps, each of a batch that is sent to the device."""
        value: Any = None
        for _ in range(count):
            self._params, self._state, value, _ = self._step(
                self._params, self._state, jax.device_put(self.batch)
            )
        return float(value)

    def params(self) -> Any:
        """Returns a copy of the parameters on the host."""
        return jax.tree.map(np.array, self._params)


class Torch:
    """Steps of a PyTorch module.

    Args:
        model: a module with `loss(inputs, labels)`, the mean loss.
        batch: the inputs and the labels.
        optimizer: "adamw" or "muon", which is torch.optim.Muon for the matrices of the blocks.
        compiled: whether torch.compile compiles the loss.
        bfloat16: whether the products are in bfloat16, by autocast.
        device: the device, such as "cpu" or "cuda".
    """

    def __init__(
        self,
        model: Any,
        batch: tuple[np.ndarray, np.ndarray],
        optimizer: str,
        compiled: bool = False,
        bfloat16: bool = False,
        device: str = "cpu",
    ):
        from benchmarks.torch_gpt import torch  # an extra of the project

        self._torch, self._device = torch, device
        self._batch = [x.copy() for x in batch]  # torch refuses read-only arrays
        self.model, self._bfloat16 = model.to(device), bfloat16
        self._loss = torch.compile(self.model.loss) if compiled else self.model.loss
        self._optimizers = torch_optimizers(self.model, optimizer)

    def steps(self, count: int) -> float:
        """Computes steps, each of a batch that is sent to the device."""
        torch, loss = self._torch, None
        for _ in range(count):
            inputs, labels = (torch.from_numpy(x).to(self._device) for x in self._batch)
            with torch.autocast(self._device, dtype=torch.bfloat16, enabled=self._bfloat16):
                loss = self._loss(inputs, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            for each in self._optimizers:
                each.step()
                each.zero_grad(set_to_none=True)
        assert loss is not None
        return float(loss.detach())

    def params(self) -> dict[str, np.ndarray]:
        """Returns a copy of the parameters on the host, by their names in the module."""
        named = self.model.named_parameters()
        return {name: p.detach().cpu().numpy().copy() for name, p in named}


def torch_optimizers(model: Any, name: str) -> list[Any]:
    """Returns the optimizers of PyTorch: AdamW, and with Muon one for the matrices of the blocks.

    Args:
        model: a module.
        name: "adamw" or "muon".
    """
    from benchmarks.torch_gpt import torch

    named = dict(model.named_parameters())
    is_matrix = lambda name: name.startswith("blocks") and named[name].ndim == 2  # noqa: E731
    matrices = [p for n, p in named.items() if name == "muon" and is_matrix(n)]
    rest = [p for n, p in named.items() if name != "muon" or not is_matrix(n)]
    adamw = torch.optim.AdamW(
        rest,
        ADAMW["learning_rate"],
        (ADAMW["b1"], ADAMW["b2"]),
        ADAMW["eps"],
        ADAMW["weight_decay"],
        fused=True,
    )
    if not matrices:
        return [adamw]
    lr, decay, momentum = (MUON[key] for key in ("learning_rate", "weight_decay", "momentum"))
    return [adamw, torch.optim.Muon(matrices, lr, decay, momentum)]
