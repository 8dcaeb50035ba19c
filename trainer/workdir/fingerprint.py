"""The fingerprint of a process: what a run depends on besides its config.

These are versions, code, settings of jax, devices and cores. Differences between two processes of a
run are allowed or refused here, those of the config as well.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer import config as configs
from trainer.config.tree import Call
from trainer.config.wording import shorten
from trainer.messages import UserError
from trainer.workdir import code

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "optax", "flax", "orbax-checkpoint", "tensorstore", "clu"),
    *("gin-config", "scikit-learn", "tensorflow-datasets", "tensorboardX"),
)
# Flags of the processor on which the instructions of XLA's programs depend.
_ISA = ("avx", "avx2", "fma", "avx512", "amx", "asimd", "sve", "bf16", "sse4_2")

# Keys that determine the data or the program: a run resumes with another value only if
# --allow_changed permits it. All other keys can change bits at most, and a change is logged.
_PROGRAM = ("config", "code", "x64", "prng", "threefry_partitionable", "matmul_precision")
_DATA = ("seed", "data_seed", "batch_size", "data", "processes")
REFUSED = {**dict.fromkeys(_PROGRAM, "program"), **dict.fromkeys(_DATA, "data")}
# What belongs to a run, or to what a process has imported, and not to its environment.
_OF_A_RUN = ("config", "data", "seed", "data_seed", "batch_size", "code")
_OF_A_MACHINE = ("machine", "cpu", "isa", "cores", "openblas_threads")
# Keys that the first versions did not record: if they are absent, that is not a change. The data's
# key was "" then for a data set without an attribute `make_fingerprint`.
_ADDED = {"code", "data_seed", "data_shards"}
# What all processes of a run must have alike, and what an error calls it.
_COMMON = {
    "data": "data (by their fingerprint)",
    "x64": "JAX_ENABLE_X64",
    "prng": "JAX_DEFAULT_PRNG_IMPL",
    "threefry_partitionable": "JAX_THREEFRY_PARTITIONABLE",
    "matmul_precision": "JAX_DEFAULT_MATMUL_PRECISION",
    "lockstep": "version of Lockstep",
    "commit": "commit of Lockstep",
    "uncommitted": "changes of Lockstep's code",
    **{name: f"version of {name}" for name in _PACKAGES},
}


class Change(NamedTuple):
    """A key of the fingerprint with another value than before."""

    kind: str  # "program" or "data", which are refused, or "bits"
    key: str  # or a path of the config
    old: object  # values of JSON: of the previous process, and of this one
    new: object

    def __str__(self) -> str:
        old, new = self.old, self.new
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            texts = (x if isinstance(x, str) else json.dumps(x) for x in (old, new))
            return f"{self.key}: {' -> '.join(map(shorten, texts))}"
        # The files, functions and classes in which two codes differ.
        lines = [
            f"{name} {'is new' if name not in old else 'is gone' if name not in new else 'differs'}"
            for name in code.differing_files(old, new)
        ]
        more = [f"and {len(lines) - 3} more"] if len(lines) > 4 else []
        return f"{self.key}: {', '.join(lines[:3] + more if more else lines)}"


def make_fingerprint(
    *,
    config: str = "",
    data: str = "",
    seed: int | None = None,
    data_seed: int | None = None,
    batch_size: int | None = None,
    code: Mapping[str, str] | None = None,
    openblas_threads: int | None = None,
    data_shards: int = 1,
) -> dict[str, Any]:
    """Describes the machine, versions and settings of this process, as values of JSON."""
    # `config` is the digest of the resolved config, and `code` from `code.hashes`. Earlier versions
    # have no `openblas_threads`, which is None for the default of OpenBLAS.
    import jax

    settings: Any = jax.config  # its attributes are unknown to pyright
    kinds = Counter(f"{device.platform} {device.device_kind}" for device in jax.devices())
    return {
        "config": config,
        "data": data,
        "seed": seed,
        "data_seed": data_seed,
        "batch_size": batch_size,
        "code": dict(code or {}),
        "processes": jax.process_count(),
        "data_shards": data_shards,
        "x64": bool(settings.jax_enable_x64),
        "prng": str(settings.jax_default_prng_impl),
        "threefry_partitionable": bool(settings.jax_threefry_partitionable),
        "matmul_precision": settings.jax_default_matmul_precision,
        "devices": ", ".join(f"{count} x {name}" for name, count in kinds.items()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "openblas_threads": openblas_threads,
        **_versions(),
        **processor(),
        **_code(Path(__file__).resolve().parents[2]),
    }


def fingerprint_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the differences between two fingerprints, the refused ones first."""
    # A key that only one of them has counts as None in the other.
    changes = [
        Change(_kind(key, old, new), key, old.get(key), new.get(key))
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
        and (key in old or key not in _ADDED)
        and not (key == "data" and "" in (old.get(key), new.get(key)))
        and (key != "code" or code.differing_files(old.get(key) or {}, new.get(key) or {}))
    ]
    return sorted(changes, key=lambda change: change.kind == "bits")


def _kind(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Returns the kind of a change of a key; see `Change`."""
    if key == "processes":
        # Measured on CPUs: a run of 2 processes with 2 devices each had the bits of one of 4
        # processes with a device each, and one process with 4 devices had other bits.
        alike = all(key in old and old[key] == new.get(key) for key in ("data_shards", "devices"))
        if alike and min(old[key], new[key]) > 1:
            return "bits"
    return REFUSED.get(key, "bits")


def common(print_: Mapping[str, Any]) -> dict[str, str]:
    """Returns what all processes of a run must have alike, as texts: name in errors -> value."""
    texts = {name: str(print_.get(key)) for key, name in _COMMON.items()}
    if print_.get("data", "").startswith("batches "):  # each process has hashed its own shards
        del texts[_COMMON["data"]]
    return texts


def environment(print_: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions, settings, devices and cores of a fingerprint, as texts."""
    return {key: str(value) for key, value in print_.items() if key not in _OF_A_RUN}


def program_conditions(print_: Mapping[str, Any]) -> dict[str, str]:
    """Returns what the text of a program depends on, besides config, code and data."""
    return {k: x for k, x in environment(print_).items() if k not in _OF_A_MACHINE}


def fingerprint_digest(print_: Mapping[str, Any]) -> str:
    """Returns the first 16 hex digits of the SHA-256 of a fingerprint."""
    # Sorted, because the order of the keys does not count.
    return hashlib.sha256(json.dumps(print_, sort_keys=True).encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    # XLA's compiler for GPUs is in these packages.
    plugins = (f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt"))
    names = {each: each for each in (*_PACKAGES, *plugins)}
    # The key stays "lockstep", the former name of the distribution, for the runs recorded then.
    for key, name in {"lockstep": "lockstep-jax", **names}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[key] = importlib.metadata.version(name)
    return found


def processor() -> dict[str, str | int | None]:
    """Returns what is known of this machine's processor."""
    model, flags = platform.processor(), ""
    with contextlib.suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
                break  # the next processors are listed in the same way
    isa = [flag for flag in flags.split() if flag.startswith(_ISA)]
    # The cores that this process may use: results have other bits on one core than on two.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "isa": " ".join(sorted(isa)),
        "cores": cores,
    }


def _code(root: Path) -> dict[str, str]:
    """Returns commit and hash of uncommitted changes; empty if this code is not in a checkout."""
    if not (root / ".git").exists():
        return {}
    commit, changes = code.head(root), code.changes(root)
    if commit is None or changes is None:
        return {}
    diff = hashlib.sha256(changes).hexdigest()[:16] if changes else "none"
    return {"commit": commit, "uncommitted": diff}


# Which differences between two processes of a run are allowed, and the errors about others.

_PROCESSES = (
    "With another number of processes, sums over devices may be rounded otherwise, and a data set "
    "of yours may yield other batches; those of Lockstep yield the same.\n"
)
_SAME_CODE = "The config and your code are the same. "
NOT_SEEDED = (
    "If no file of the data changed, the data set draws random numbers without a seed, and every "
    "process has other data: draw them from np.random.default_rng(seed), with an argument `seed`, "
    "and begin in another --workdir. "
    "--allow_changed=data would go on with other data.\n"
)
_SHOWN = 4  # lines of differences in an error


class RunChanged(UserError):
    """Raised if a process would change the program or the data of a run."""

    # `changes` are lines that say what would change, `advice` is what the user can do, and `keys`
    # are those of the fingerprint that differ.

    def __init__(self, changes: str, advice: str, keys: Sequence[str]):
        super().__init__(changes + advice)
        self.changes = changes
        self.keys = tuple(keys)


def is_allowed(path: str, allowed: Sequence[str]) -> bool:
    """Returns whether `allowed` names a path of the config, one of its parents or its last key."""
    # `allowed` has the values of --allow_changed, and a path is such as
    # "optimizer.groups.hidden.b2".
    return any(
        path == name or path.startswith((f"{name}.", f"{name}[")) or path.endswith(f".{name}")
        for name in allowed
    )


def path_of(line: str) -> str:
    """Returns the path of a difference such as "steps: 10 -> 20"; a path may have a colon in it."""
    return line.partition(": ")[0]


def refuse_config(path: Path, lines: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises UserError if a difference between two configs of a run is not allowed."""
    refused = [line for line in lines if not is_allowed(path_of(line), allowed)]
    if refused and "config" not in allowed and "program" not in allowed:
        raise UserError(
            f"The workdir {path} has another config. The differences, old -> new:\n"
            + indented(refused)
            + "Choose another --workdir, or resume with --allow_changed="
            + ",".join(dict.fromkeys(map(path_of, refused[:3])))
            + ",..." * (len(refused) > 3)
            + "."
        )


def refuse_changes(
    path: Path, changes: Sequence[Change], allowed: Sequence[str], same_step: bool | None = None
) -> None:
    """Raises RunChanged if --allow_changed does not allow a change to the program or the data."""
    # `changes` has all differences of the fingerprint; that of the config is not refused here.
    # `same_step` says whether the program of a training step is the same; None if it is not known.
    refused = [
        change
        for change in changes
        # Changes that can affect bits at most are logged, and never refused.
        if change.kind != "bits"
        and change.key != "config"
        and change.kind not in allowed
        and not any(name == change.key or name.endswith(f".{change.key}") for name in allowed)
    ]
    if refused:
        keys = [change.key for change in refused]
        note = _PROCESSES if "processes" in keys else ""
        if f"code: {code.STEP} differs" in map(str, refused):
            note += code.STEP_ALONE
        elif "code" in keys and same_step is not None:
            data = "" if "data" in keys else ", and so are the data"
            note += "The program of a training step is " + (
                f"the same{data}; evaluation was not compared.\n"
                if same_step
                else "another one, too.\n"
            )
        if [change.key for change in changes if change.kind != "bits"] == ["data"]:
            note += _SAME_CODE + NOT_SEEDED
        kinds = " and the ".join(dict.fromkeys(change.kind for change in refused))
        raise RunChanged(
            f"This process would change the {kinds} of the run in {path}:\n"
            + indented([str(change) for change in refused]),
            f"{note}Restore the old value, choose another --workdir, or resume with "
            f"--allow_changed={','.join(keys)}.",
            keys,
        )


def step_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], differing: Sequence[Change], steps: Sequence
) -> list[Change]:
    """Returns the change of a step's program, unless another one that is recorded explains it."""
    # `old` and `new` are fingerprints, `differing` has all differences, those of the config as
    # well, and `steps` the digests of the two programs.
    explained = any(change.kind != "bits" for change in differing)
    if explained or program_conditions(old) != program_conditions(new):
        return []
    return [Change("program", "code", *({code.STEP: digest} for digest in steps))]


def config_changes(file: Path, config: Call) -> list[str]:
    """Returns how `config` differs from a run's config.yaml, such as "steps: 10 -> 20"."""
    # Keys that do not change what is computed are ignored.
    return configs.diff(configs.computed(configs.load([file]).root), configs.computed(config))


def indented(lines: Sequence[str]) -> str:
    """Indents lines for an error; of more than four, shows three and the number of the others."""
    shown = list(lines if len(lines) <= _SHOWN else lines[: _SHOWN - 1])
    if len(lines) > len(shown):
        shown.append(f"... and {len(lines) - len(shown)} more")
    return "".join(f"  {line}\n" for line in shown)


def check_allowed(allowed: Sequence[str], config: Call, fingerprint: Mapping[str, Any]) -> None:
    """Raises UserError if a name in --allow_changed is in neither config nor fingerprint."""
    # The names are paths of the config, keys of the fingerprint, and "program" and "data", which
    # stand for several keys.
    paths = [path for path, _ in configs.leaves(config)]
    known = {*REFUSED, *REFUSED.values(), *fingerprint}
    for name in allowed:
        if name not in known and not any(is_allowed(path, [name]) for path in paths):
            raise UserError(
                f"--allow_changed={name} names nothing that can change. There are "
                f"{', '.join(sorted(REFUSED))}, and the paths of the config, such as steps."
            )
