"""GPUs and TPUs that are not here, for which XLA's compilers compile programs all the same.

The compilers are packages for the version of jax that is used, in a folder of their own: beside jax
itself, the plugin for NVIDIA GPUs prints a traceback wherever there is none.
`make targets` has pip install there what `packages` returns.

The peak rates of accelerators follow, for the utilization of a device.
"""

import importlib.metadata
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.config.wording import is_the_users, known_names
from trainer.engine.repeatable import add_flag, use_deterministic_operations
from trainer.messages import UserError, table

if TYPE_CHECKING:
    from trainer.engine.explanation import Elsewhere

FOLDER = "LOCKSTEP_TARGETS"
"""The environment variable that names the folder with the compilers."""


class Gpu(NamedTuple):
    """A GPU by NVIDIA, by what its compiler asks for, mostly as data sheets give it."""

    name: str
    memory: int  # bytes
    capability: str  # what CUDA calls the version of the architecture, such as "9.0"
    cores: int  # streaming multiprocessors
    units: int  # of each core, for float32
    clock: float  # GHz
    terabytes: float  # that the memory moves a second
    cache: int  # MiB, of level 2
    shared: int  # KiB of each core that its threads share
    one, devices, example = "1", 1, "8"  # as of a TPU

    @property
    def described(self) -> str:
        """The text that the compiler reads."""
        text = Path(__file__).with_name("gpu.txtpb").read_text(encoding="utf-8")
        major, minor = self.capability.split(".")
        numbers = {"major": major, "minor": minor, "speed": f"{self.terabytes * 1e12:.0f}"}
        sizes = {"l2": self.cache * 2**20, "all": self.shared * 2**10}
        most = (self.shared - 1) * 2**10
        return Template(text).substitute(self._asdict(), **numbers, **sizes, most=most)


class Tpu(NamedTuple):
    """A TPU by Google."""

    name: str
    memory: int  # bytes of a device's memory that its compiler gives to a program
    one: str  # the shape of a single chip
    devices: int  # of a chip

    @property
    def example(self) -> str:
        """The shape of a slice."""
        return self.one.replace("1", "4")


_GIB = 2**30
# Of GPUs what data sheets say, and the memory that drivers report; of TPUs what their compiler says
# when a program is too large.
KINDS: Mapping[str, Gpu | Tpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", 85 * 10**9, "8.0", 108, 64, 1.41, 2.04, 40, 164),
    "h100": Gpu("NVIDIA H100 80GB HBM3", 85 * 10**9, "9.0", 132, 128, 1.98, 3.35, 50, 228),
    "h200": Gpu("NVIDIA H200", 150 * 10**9, "9.0", 132, 128, 1.98, 4.8, 50, 228),
    "b200": Gpu("NVIDIA B200", 191 * 10**9, "10.0", 148, 128, 1.96, 8.0, 126, 228),
    "v2": Tpu("TPU v2", int(7.48 * _GIB), "1x1", 2),
    "v3": Tpu("TPU v3", int(15.48 * _GIB), "1x1", 2),
    "v4": Tpu("TPU v4", int(15.25 * _GIB), "1x1x1", 2),
    "v5e": Tpu("TPU v5e", int(15.75 * _GIB), "1x1", 1),
    "v5p": Tpu("TPU v5p", int(95.74 * _GIB), "1x1x1", 1),
    "v6e": Tpu("TPU v6e", int(31.25 * _GIB), "1x1", 1),
    "tpu7x": Tpu("TPU7x", int(94.75 * _GIB), "1x1x1", 2),
}
"""The kinds of devices, by the name that a target begins with."""


@dataclass(frozen=True)
class Target:
    """Devices that are not here, such as those of "h100:8" or "v5e:4x4"."""

    kind: str  # a key of `KINDS`
    shape: str  # of GPUs their number; of TPUs the numbers of chips in each direction: "4x4"

    @property
    def count(self) -> int:
        """The number of devices."""
        return math.prod(map(int, self.shape.split("x"))) * KINDS[self.kind].devices

    @property
    def limit(self) -> int:
        """The bytes of a device that a program may use."""
        device = KINDS[self.kind]
        if not isinstance(device, Gpu):
            return device.memory
        # The share that jax takes when it starts: 0.75, or what the user has set.
        names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        share = next((os.environ[name] for name in names if os.environ.get(name)), 0.75)
        return int(device.memory * float(share))


def parse(text: str) -> Target:
    """Reads "h100:8", "v5e:4x4", or one chip as "h100"; raises UserError."""
    kind, _, shape = text.partition(":")
    if kind not in KINDS:
        raise UserError(
            f"{text!r} is no target. {known_names(kind, KINDS, 'There are')} After a colon stands "
            "the number of GPUs, as in h100:8, or the shape of a slice of TPUs, as in v5e:4x4; "
            "--target=list prints all with their memory."
        )
    device = KINDS[kind]
    shape = shape or device.one
    if not re.fullmatch(device.one.replace("1", "[1-9][0-9]{0,3}"), shape):
        what = "GPUs" if isinstance(device, Gpu) else "chips in each direction"
        raise UserError(
            f"The target {text!r} has no shape: write after {kind}: the number of {what}, as in"
            f" {kind}:{device.example}."
        )
    return Target(kind, shape)


def elsewhere_of(target: Target) -> "Elsewhere":
    """Returns the devices of a target, for which programs are compiled; raises UserError."""
    # Call it before jax is imported, which looks for cuDNN then.
    find_compilers(target)
    from trainer.engine.explanation import Elsewhere
    from trainer.engine.memory import Memory
    from trainer.engine.mesh import keep_to_cpu

    keep_to_cpu(1, "--target")
    device = KINDS[target.kind]
    _refuse_questions(device.name)
    part = target.limit / device.memory
    note = f", of which jax takes {part:.0%}" if part < 1 else ""
    memory = Memory(target.limit, 1, f"a device ({device.name}{note})", "of a device")
    return Elsewhere(target.count, f"{device.name} device", memory, _devices(target))


def _refuse_questions(target: str) -> None:
    """Has a user's function raise where it asks jax for devices while a program is traced."""
    import jax

    from trainer import constraints

    def refusing(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            asks = sys._getframe(1)
            root = str(asks.f_globals.get("__name__", "")).split(".")[0]
            if constraints.is_told() and is_the_users(root, Path(asks.f_code.co_filename)):
                raise ValueError(
                    f"jax.{name}() tells of this machine, and the program is for {target}: call"
                    " trainer.constraints.device(), which is what will compute it"
                )
            return answer(*args, **kwargs)

        return ask

    for name in ("devices", "local_devices", "default_backend", "device_count"):
        setattr(jax, name, refusing(name, getattr(jax, name)))


def _devices(target: Target) -> Sequence[Any]:
    import jax
    from jax.experimental.topologies import get_topology_desc

    device, count = KINDS[target.kind], target.count
    if isinstance(device, Gpu):
        hosts = 1 if count % 8 else count // 8
        shape = f"1x{hosts}x{count // hosts}"
        return get_topology_desc("", "cuda", target_config=device.described, topology=shape).devices
    # A host has four chips, or eight; a single chip is a host of its own.
    alone = {"chips_per_host_bounds": (1, 1, 1)} if target.shape == device.one else {}
    try:
        return get_topology_desc(f"{target.kind}:{target.shape}", "tpu", **alone).devices
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"The compiler knows no {target.kind} of the shape {target.shape}:"
            f" {str(error).splitlines()[0]}"
        ) from error


def listed() -> str:
    """Returns a table of the kinds of devices, with the memory of each."""
    head = "target", "device", "memory of a device, GiB"
    rows = [(f"{kind}:{x.example}", x.name, f"{x.memory / _GIB:.4g}") for kind, x in KINDS.items()]
    return "\n".join(table([head, *rows], right=(2,))) + "\n"


# The compilers.


def compilers_folder() -> Path:
    """Returns the folder with the compilers: the variable `FOLDER`, or .targets beside trainer/."""
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[2] / ".targets")


def packages() -> list[str]:
    """Returns what pip is to install for the version of jax that is used."""
    versions = {}
    for line in importlib.metadata.requires("jax") or []:
        if match := re.match(r"(libtpu|jax-cuda13-plugin)\b[^;]*?[>=]=(\d[\w.]*\*?)", line):
            versions[match[1]] = match[2]
    libtpu, plugin = versions["libtpu"], versions["jax-cuda13-plugin"]
    of_cuda = ["nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cudnn-cu13"]
    pinned = [f"jax-cuda13-plugin=={plugin}", f"jax-cuda13-pjrt=={plugin}"]
    return [f"libtpu=={libtpu}", *pinned, *of_cuda]


def find_compilers(target: Target) -> None:
    """Puts the compilers on Python's path; raises UserError if they are not there."""
    gpu, wanted, folder = isinstance(KINDS[target.kind], Gpu), packages(), str(compilers_folder())
    there = {
        each.metadata["Name"].lower().replace("_", "-"): each.version
        for each in importlib.metadata.distributions(path=[folder])
    }
    for each in wanted[1:] if gpu else wanted[:1]:
        name, _, version = each.partition("==")
        if name not in there or not there[name].startswith(version.rstrip("*")):
            has = f"has {name} {there[name]}, not {each}" if name in there else f"has no {name}"
            pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
            raise UserError(
                f"The compiler for {KINDS[target.kind].name} is missing: {folder} {has}. Install"
                f" it with `make targets`, or with\n{shlex.join([*pip, folder, *wanted])}"
            )
    sys.path.append(folder)
    use_deterministic_operations()  # as a run on GPUs does
    # Without a GPU to time its kernels for products on, Triton finds none for some shapes.
    add_flag("--xla_gpu_enable_triton_gemm", "false")
    # libtpu would ask the network what it runs on, and keep a second process from loading it.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }


# Pattern of the whole `device_kind` -> peak of dense products, in TFLOPs a second: of bfloat16
# inputs with float32 sums, and of float32 inputs as jax computes them by default, which is TF32 on
# NVIDIA and one pass of bfloat16 on TPUs. Vendors often print the doubled numbers of structured
# sparsity. A part of a GPU (MIG) has no known peak: `_PART` in its name excludes it.
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet; all forms have the same peak.
    r"NVIDIA A100[ -].*": (312.0, 156.0),
    # NVIDIA A10, A30 and A40 GPU datasheets.
    r"NVIDIA A10": (125.0, 62.5),
    r"NVIDIA A30": (165.0, 82.5),
    r"NVIDIA A40": (149.7, 74.8),
    # NVIDIA RTX A6000 datasheet.
    r"NVIDIA RTX A6000": (154.8, 77.4),
    # NVIDIA L4, L40 and L40S GPU datasheets.
    r"NVIDIA L4": (121.0, 60.0),
    r"NVIDIA L40": (181.05, 90.5),
    r"NVIDIA L40S": (362.05, 183.0),
    # NVIDIA H100 Tensor Core GPU Architecture whitepaper (SXM5, PCIe); H100 and H200 datasheets.
    r"NVIDIA H100 80GB HBM3": (989.4, 494.7),
    r"NVIDIA H100 PCIe": (756.0, 378.0),
    r"NVIDIA H100 NVL": (835.5, 417.5),
    r"NVIDIA H200": (989.4, 494.7),
    r"NVIDIA H200 NVL": (835.5, 417.5),
    r"NVIDIA GH200 .*": (989.4, 494.7),
    # NVIDIA HGX B200 and GB200 NVL72 datasheets, divided by their 8 and 72 GPUs.
    r"NVIDIA B200": (2250.0, 1125.0),
    r"NVIDIA GB200": (2500.0, 1250.0),
    # NVIDIA Ampere GA102, Ada and RTX Blackwell GPU Architecture whitepapers.
    r"NVIDIA GeForce RTX 3080": (59.5, 29.8),
    r"NVIDIA GeForce RTX 3090": (71.0, 35.6),
    r"NVIDIA GeForce RTX 4080": (97.5, 48.7),
    r"NVIDIA GeForce RTX 4090": (165.2, 82.6),
    r"NVIDIA GeForce RTX 5090": (209.5, 104.8),
    # Google Cloud TPU documentation, system architecture of each version. The two cores of a chip
    # of v2 and v3 are devices of their own.
    r"TPU v2": (22.5, 22.5),
    r"TPU v3": (61.5, 61.5),
    r"TPU v4": (275.0, 275.0),
    r"TPU v5 lite|TPU v5e": (197.0, 197.0),
    r"TPU v5p?": (459.0, 459.0),
    r"TPU v6 lite|TPU v6e": (918.0, 918.0),
}
_PART = "MIG"


def peak_flops(kind: str, precision: str) -> float | None:
    """Returns the peak of a device, by its `device_kind`, in FLOPs a second; None if not known.

    Example:
        >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("cpu", "float32")
        (989400000000000.0, None)
    """
    found = next((x for name, x in _PEAKS.items() if re.fullmatch(name, kind)), None)
    if found is None or _PART in kind:
        return None
    return found[precision == "float32"] * 1e12


def peak_of(devices: Iterable[Any], precision: str) -> float | None:
    """Returns the sum of `peak_flops` over devices; None if one of them is not known."""
    peaks = [peak_flops(device.device_kind, precision) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None
