"""Writes and reads the checkpoints of several processes; the only module that imports orbax.

Orbax writes the arrays and the manifest into a temporary folder, which a function of the caller
commits. A run of one process writes one file (`leaf_file`), which takes a fraction of the time.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CorruptCheckpoint, means_absent, one_line, system_error
from trainer.checkpoint.integrity import ARRAYS, HostLeaf, manifest_entries
from trainer.writers.files import read_regular, sync

Commit = Callable[[Path, Path], None]

Result = TypeVar("Result")

# Errors of tensorstore and Python after which the same files may be read later.
_BUSY = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|can't start new thread"
)


@dataclasses.dataclass
class _ManifestSave(ocp.args.CheckpointArgs):
    manifest: dict[str, Any]
    leaves: Mapping[str, HostLeaf]


class _ManifestHandler(ocp.AsyncCheckpointHandler):
    """Computes the checksums in a separate thread, and writes the manifest into the step."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checksums")

    async def async_save(  # type: ignore[override]
        self, directory: epath.Path, args: _ManifestSave
    ) -> list[concurrent.futures.Future[None]]:
        return [self._pool.submit(self._write, Path(directory), args)]

    def save(self, directory: epath.Path, args: _ManifestSave) -> None:  # type: ignore[override]
        self._write(Path(directory), args)

    def restore(self, directory: epath.Path, args: object = None) -> dict[str, Any]:
        return integrity.unseal(read_regular(Path(directory) / integrity.MANIFEST).decode())

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, directory: Path, args: _ManifestSave) -> None:
        process = jax.process_index()
        leaves = args.leaves
        if process > 0:  # these add only the shards that process 0 cannot address
            leaves = {n: leaf for n, leaf in leaves.items() if isinstance(leaf.data, jax.Array)}
        entries = {"format": integrity.ORBAX, "leaves": manifest_entries(leaves)}
        name = integrity.MANIFEST if process == 0 else f"{integrity.MANIFEST}.{process}"
        (directory / name).write_text(integrity.seal({**args.manifest, **entries}))
        # Synced by the process that writes it: process 0, which commits, may be on another machine.
        sync(directory / name)


ocp.args.register_with_handler(_ManifestHandler, for_save=True)(_ManifestSave)

# Without orbax's log lines: its errors are raised, and this package logs them once.
logging.getLogger("absl").addFilter(lambda x: f"{os.sep}orbax{os.sep}" not in x.pathname)


class _HostArrays(ocp.type_handlers.NumpyHandler):
    """Waits for every leaf before it raises the error of one."""

    # Orbax's own handler raises at once. The tasks of the other leaves then find their event loop
    # closed, and each of them prints a traceback.

    async def _background_serialize(self, values: Any, infos: Any, args: Any = None) -> None:
        one = super()._background_serialize
        await _await_all(one([v], [i], [a]) for v, i, a in zip(values, infos, args, strict=True))

    async def deserialize(self, infos: Any, args: Any = None) -> list[np.ndarray]:
        one = super().deserialize
        read = await _await_all(one([i], [a]) for i, a in zip(infos, args, strict=True))
        return [array for (array,) in read]


async def _await_all(tasks: Iterable[Awaitable[Result]]) -> list[Result]:
    """Waits for all tasks, and then raises the first error of one."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    values = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


def _pytree_handler() -> ocp.PyTreeCheckpointHandler:
    # Host arrays are not copied again: jax keeps them valid. Parameters hardly compress, and zstd
    # would take the cores from the training step.
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _HostArrays(deepcopy_host_arrays=False)),
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


def open_manager(directory: Path, commit: Commit) -> ocp.CheckpointManager:
    """Opens orbax's manager on a directory, and removes the files that a killed save left."""
    # `commit` is called in orbax's thread, in process 0 only, when a step is written. It takes the
    # step's temporary folder and its final path. The manager removes no checkpoint: it would delete
    # file by file, and a kill would leave an incomplete one. Raises OSError if the directory cannot
    # be read or written.
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add("state", ocp.args.PyTreeSave, _pytree_handler())
    registry.add("integrity", _ManifestSave, _ManifestHandler())

    class Step(ocp.path.atomicity.AtomicRenameTemporaryPath):
        """A step that is being written; orbax's own commit renames it without syncing it."""

        async def finalize(self) -> None:
            if Path(self.get_final()).parent != directory:  # one item of a step
                return await super().finalize()
            if self._checkpoint_metadata_store is not None:  # writes in a separate thread
                self._checkpoint_metadata_store.wait_until_finished()
            commit(Path(self.get()), Path(self.get_final()))

    options = ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        save_root_metadata=False,  # which is a file beside the steps
        lightweight_initialize=True,  # does not read steps, which may be damaged
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        temporary_path_class=Step,
        file_options=ocp.options.FileOptions(path_permission_mode=0o700),  # as that of the workdir
    )
    return ocp.CheckpointManager(directory, options=options, handler_registry=registry)


def save_args(manifest: dict[str, Any], leaves: Mapping[str, HostLeaf]) -> ocp.args.Composite:
    """Returns the arguments of a save by orbax's manager; `manifest` is without its leaves."""
    # Empty leaves are left out, because orbax cannot store them.
    stored = {name: leaf.data for name, leaf in leaves.items() if 0 not in leaf.data.shape}
    stored = stored or {"nothing": np.zeros(1, np.uint8)}  # orbax refuses an item without leaves
    return ocp.args.Composite(
        state=ocp.args.PyTreeSave(stored),
        integrity=_ManifestSave(manifest, leaves),
    )


def load_step(
    directory: Path, names: Collection[str], wanted: Collection[str]
) -> dict[str, np.ndarray]:
    """Reads the leaves `wanted` of a step, whole; the others become placeholders."""
    # `names` must be the paths of all stored leaves. Raises CorruptCheckpoint if the arrays are
    # damaged, and OSError if the disk cannot be read.
    item = {name: np.empty(()) if name in wanted else ocp.PLACEHOLDER for name in names}
    handler = _pytree_handler()
    restore_args = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in item}
    try:
        if not (directory / ARRAYS).exists():
            raise CorruptCheckpoint("the index of its arrays is missing")
        return handler.restore(
            epath.Path(directory / "state"),
            args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args),
        )
    except (MemoryError, CorruptCheckpoint):
        raise
    except Exception as e:  # orbax and tensorstore raise many types for damaged files
        # Errors of a busy or full system are no sign of damage, and must not set the step aside.
        if transient := _transient_error(e):
            raise transient from e
        raise CorruptCheckpoint(f"its arrays cannot be read: {one_line(e)}") from e
    finally:
        handler.close()


def _transient_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError behind an error that does not mean that the files are damaged."""
    while error is not None:
        found = system_error(error)
        if found is not None and not means_absent(found):
            return found
        if _BUSY.search(str(error)):
            return OSError(str(error))
        error = error.__cause__ or error.__context__
    return None
