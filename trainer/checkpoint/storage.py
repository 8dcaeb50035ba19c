"""The step of a run of several processes: each writes its own shards, and reads what it needs.

The folder state/ of a step is one that orbax restores: arrays of zarr 3 in a database of
tensorstore. Each process writes a database of its own, and process 0 adds an index over all of
them. An array is divided into chunks, none of which lies in two shards. Each chunk is written by
one of the processes that have it, and has a CRC-32C, which is compared when it is read. The
manifest, beside the folder, is written last.
"""

import contextlib
import itertools
import json
import math
import re
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorstore as ts
from jax._src import distributed

from optim.paths import flatten
from trainer.checkpoint import bucket, integrity
from trainer.checkpoint.bucket import Place
from trainer.checkpoint.errors import CorruptCheckpoint, means_absent, one_line, system_error
from trainer.checkpoint.integrity import Spec, is_key, spec, storable
from trainer.writers.files import sync, sync_tree, temporary_beside

STATE = "state"  # the folder of the arrays
_INDEX = "manifest.ocdbt"  # in it: where each chunk is
_DESCRIPTION = "_METADATA"  # in it: the names of the arrays, for orbax

SMALL = 1 << 20  # bytes of a file that has a checksum as a whole, such as an index
_CHUNK = 1 << 24  # the most bytes of a chunk, which is read and compared whole
_AT_ONCE = 1 << 28  # bytes that are written or read at the same time
_KEYS = "lockstep/checkpoints"  # of the messages between processes
_PATIENCE = 3600  # seconds that a process waits for the others to write their shards

# Errors of tensorstore and Python after which the same files may be read later.
_BUSY = re.compile(
    "RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|can't start new thread"
)


Region = tuple[tuple[int, int], ...]  # (start, stop) along each axis of a leaf


class Shards(NamedTuple):
    """A leaf that is being saved: what this process writes of it."""

    spec: Spec
    stored: Spec  # with the dtype in which it is written
    chunk: tuple[int, ...]  # the shape of its chunks
    pieces: list[tuple[Region, np.ndarray]]  # the chunks that this process writes


def shards_to_host(tree: Any) -> dict[str, Shards]:
    """Fetches this process's part of every leaf, by path; raises ValueError as `to_host` does."""
    # All processes must call it with the same tree. Of the processes that have a chunk, that one
    # writes it which has the fewest bytes so far. The arrays stay valid when the state is donated
    # afterwards: see `to_host`.
    leaves = flatten(tree, verbatim=True)
    arrays = {name: jax.random.key_data(x) if is_key(x) else x for name, x in leaves.items()}
    written: dict[int, int] = defaultdict(int)  # process -> bytes
    divided = {name: _divided(spec(name, leaves[name]), x, written) for name, x in arrays.items()}
    # All transfers have started. NumPy copies no shard twice: jax keeps what it has fetched.
    return {
        name: leaf._replace(
            pieces=[(region, storable(np.asarray(data))[part]) for region, data, part in mine]
        )
        for name, (leaf, mine) in divided.items()
    }


def _divided(
    known: Spec, array: np.ndarray | jax.Array, written: dict[int, int]
) -> tuple[Shards, list[tuple[Region, Any, tuple[slice, ...]]]]:
    """Divides a leaf into chunks; also returns this process's: a region, a shard and its part."""
    here = jax.process_index()
    whole = everywhere(array.shape)
    if isinstance(array, jax.Array):
        shard_shape = array.sharding.shard_shape(array.shape)
        owners: dict[Region, set[int]] = defaultdict(set)
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            owners[region_of(index, array.shape)].add(device.process_index)
        local = {region_of(x.index, array.shape): x.data for x in array.addressable_shards}
    else:
        shard_shape, owners = array.shape, {whole: {0}}
        local = {whole: np.array(array)}  # copied, because its owner may write into it
    itemsize = array.dtype.itemsize
    chunk = chunk_shape(array.shape, shard_shape, itemsize)
    mine = []
    for shard, processes in owners.items():
        for piece in _pieces(shard, chunk):
            writer = min(processes, key=lambda process: (written[process], process))
            written[writer] += _items(piece) * itemsize
            if writer == here:
                begins = [start for start, _ in shard]
                part = (slice(a - b, z - b) for (a, z), b in zip(piece, begins, strict=True))
                mine.append((piece, local[shard], tuple(part)))
    for data in {id(data): data for _, data, _ in mine}.values():
        if isinstance(data, jax.Array):
            data.copy_to_host_async()
    stored = storable(np.empty(0, array.dtype)).dtype
    return Shards(known, Spec(array.shape, stored.name), chunk, []), mine


def region_of(index: Iterable[slice], shape: Iterable[int]) -> Region:
    """Returns the region that an index means, such as that of a shard in its array."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def everywhere(shape: Iterable[int]) -> Region:
    """Returns the region of a whole array."""
    return tuple((0, size) for size in shape)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(*bounds) for bounds in region)


def _items(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def _pieces(shard: Region, chunk: tuple[int, ...]) -> Iterator[Region]:
    """Yields the positions of the chunks of a shard in its leaf; none if the shard is empty."""
    along = (
        [(at, min(at + size, stop)) for at in range(start, stop, size)]
        for (start, stop), size in zip(shard, chunk, strict=True)
    )
    yield from itertools.product(*along)


def chunk_shape(
    shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int, most: int = _CHUNK
) -> tuple[int, ...]:
    """Divides a shard, along its first axes, into chunks of about `most` bytes."""
    # Along an axis that several shards divide, the size of a chunk divides that of a shard, so that
    # no chunk lies in two of them. A size without a fitting divisor, such as a prime number, is
    # divided less. `shape` is that of the leaf, `shard` that of each of its shards.
    chunk = [max(size, 1) for size in shard]
    for axis, size in enumerate(chunk):
        parts = min(size, math.ceil(math.prod(chunk) * itemsize / most))
        if size == shape[axis]:
            chunk[axis] = math.ceil(size / parts)
        else:
            fitting = next((n for n in range(parts, min(4 * parts, size) + 1) if size % n == 0), 1)
            chunk[axis] = size // fitting
    return tuple(chunk)


def save_shards(
    make: Callable[[], Path | Place],
    manifest: Mapping[str, Any],
    leaves: Mapping[str, Shards],
    commit: Callable[[Any, str], None],
) -> None:
    """Writes the leaves of a step with all processes of the run; raises OSError in all of them."""
    # Called in process 0: `make` makes a folder for the step, where all processes see it, and
    # `commit` makes it count when all is in it but the text of the manifest, which it is passed.
    # `manifest` is without its leaves.
    messages, first = _Messages(), jax.process_index() == 0
    if first:
        messages.post("made", lambda: str(make()))
    made = messages.wait_for("made")
    folder = Place(made) if "://" in made else Path(made)
    messages.post("written", lambda: _write_chunks(folder / STATE, leaves))

    def end() -> str:
        wrote = [i for i in range(jax.process_count()) if messages.wait_for("written", i)]
        messages.forget_the_last_save()
        _write_index(folder / STATE, wrote, leaves)
        commit(folder, _sealed_manifest(folder, manifest, leaves))
        return ""

    if first:
        messages.post("ended", end)
    messages.wait_for("ended")


def export_for_orbax(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a new folder that orbax restores, all of it or nothing; ValueError for its dtypes."""
    leaves = shards_to_host(arrays)
    for name, leaf in leaves.items():
        if leaf.stored != leaf.spec:
            raise ValueError(
                f"{name} has the dtype {leaf.spec.dtype}, which a checkpoint of orbax cannot have."
            )
    temporary = temporary_beside(path)
    try:
        temporary.mkdir()
        _write_chunks(temporary, leaves)
        _write_index(temporary, [0], leaves, dict(metadata))
        sync_tree(temporary)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


class _Messages:
    """Short messages of the processes of a run to each other about one save."""

    # They are exchanged in background threads, where no program may run over all devices, by the
    # service through which jax joined the processes.

    _saves = itertools.count()  # all processes save equally often

    def __init__(self) -> None:
        self._number = next(self._saves)
        self._client: Any = distributed.global_state.client or _Alone()

    def post(self, what: str, action: Callable[[], str]) -> None:
        """Runs an action, and posts what it returned, or what it raised."""
        try:
            said = [action(), ""]
        except BaseException as error:  # the others wait for the message
            said = ["", one_line(error)]
        self._client.key_value_set(self._key(what, jax.process_index()), json.dumps(said))

    def wait_for(self, what: str, process: int = 0) -> str:
        """Returns what an action of a process returned; OSError if it raised an error."""
        try:
            key = self._key(what, process)
            value, problem = json.loads(self._client.blocking_key_value_get(key, 1000 * _PATIENCE))
        except jax.errors.JaxRuntimeError as error:
            raise OSError(f"process {process} did not answer: {one_line(error)}") from error
        if problem:
            # A problem that process 0 passes on names its process already.
            named = jax.process_count() == 1 or problem.startswith("process ")
            raise OSError(problem if named else f"process {process}: {problem}")
        return value

    def forget_the_last_save(self) -> None:
        """Removes the messages of the save before, when all processes are past it."""
        if self._number:
            self._client.key_value_delete(f"{_KEYS}/{self._number - 1}")

    def _key(self, what: str, process: int) -> str:
        return f"{_KEYS}/{self._number}/{what}/{process}"


class _Alone(dict[str, str]):
    """Stands in for that service in a run of one process."""

    key_value_set = dict.__setitem__

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        return self[key]

    def key_value_delete(self, prefix: str) -> None:
        pass


def _write_chunks(directory: Path | Place, leaves: Mapping[str, Shards]) -> str:
    """Writes the chunks of this process; returns a text that is empty if there are none."""
    home = directory / _database(jax.process_index()) if isinstance(directory, Path) else directory
    context, transaction, waiting = ts.Context(), ts.Transaction(), 0
    for name, leaf in leaves.items():
        for region, data in leaf.pieces:
            if waiting + data.nbytes > _AT_ONCE:
                _commit(transaction, home)
                transaction, waiting = ts.Transaction(), 0
            opening = ts.open(
                _array(home, name, leaf, for_chunks=True), context=context, transaction=transaction
            )
            part = _result(opening, home)[_slices(region)]
            part.write(data, can_reference_source_data_indefinitely=True).copy.result()
            waiting += data.nbytes
    _commit(transaction, home)
    if isinstance(home, Path):
        if not home.exists():
            return ""
        # Tensorstore syncs the files and the folders that they are in, but not the names of these.
        sync_tree(home)
    return "some" if any(leaf.pieces for leaf in leaves.values()) else ""


def _commit(transaction: ts.Transaction, place: Path | Place) -> None:
    _result(transaction.commit_async(), place)


def _result(future: Any, place: Path | Place) -> Any:
    """Waits for an operation of tensorstore; with a deadline, if a server answers it."""
    if isinstance(place, Path):
        return future.result()
    try:
        return future.result(timeout=bucket.DATA_DEADLINE)
    except Exception as error:
        if explained := bucket.problem_of_server(place, error):
            raise OSError(explained) from error
        raise


def _database(process: int) -> str:
    return f"ocdbt.process_{process}"  # the name that orbax gives it


def _kvstore(directory: Path | Place, name: str = "") -> dict[str, Any]:
    """Returns tensorstore's specification of a database, or of an array in it."""
    # No database in a bucket: if the bucket vanishes, tensorstore 0.1.86 crashes in OCDBT's driver.
    if not isinstance(directory, Path):
        return (directory / name if name else directory).kvstore()
    base = {"driver": "file", "path": f"{directory.resolve()}/"}  # it refuses ".."
    return {"driver": "ocdbt", "base": base, "path": f"{name}/" if name else ""}


def _array(
    directory: Path | Place, name: str, leaf: Shards, for_chunks: bool = False
) -> dict[str, Any]:
    """Returns tensorstore's specification of an array that is written."""
    # In a bucket, all processes write the chunks of one array, and process 0 then its metadata.
    assumed = for_chunks and not isinstance(directory, Path)
    return {
        "driver": "zarr3",
        "kvstore": _kvstore(directory, name),
        "metadata": {
            "shape": leaf.stored.shape,
            "data_type": leaf.stored.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": leaf.chunk}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        },
        "store_data_equal_to_fill_value": True,  # a chunk that is missing is then an error
        "create": not assumed,
        "open": True,
        "assume_metadata": assumed,
    }


def _write_index(
    directory: Path | Place,
    wrote: Collection[int],
    leaves: Mapping[str, Shards],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes, when all processes have written, what tensorstore and orbax need to read it."""
    # In a folder, that is where the chunks are in the databases of the processes. `metadata` is
    # what orbax calls custom metadata.
    local = isinstance(directory, Path)
    context, transaction = ts.Context(), ts.Transaction(atomic=local)
    names = [name for name, leaf in leaves.items() if 0 not in leaf.stored.shape]

    def opened(home: Path | Place) -> ts.KvStore:
        return _result(ts.KvStore.open(_kvstore(home), context=context), home)

    if local:
        index = opened(directory).with_transaction(transaction)
        for process in wrote:
            copying = opened(directory / _database(process)).experimental_copy_range_to(index)
            _result(copying, directory)
    else:
        arrays = (_array(directory, name, leaves[name]) for name in names)
        for opening in [ts.open(x, context=context, transaction=transaction) for x in arrays]:
            _result(opening, directory)
    _commit(transaction, directory)
    # Tensorstore encodes paths in UTF-8; under another encoding it writes to another folder.
    if names and local and not (directory / _INDEX).is_file():
        raise OSError(f"the index of its arrays, {STATE}/{_INDEX}, was not written to {directory}")
    file, described = directory / _DESCRIPTION, _described(names, local, metadata)
    (file.write_bytes if isinstance(file, Path) else file.write)(json.dumps(described).encode())


def _described(
    names: Iterable[str], in_database: bool, metadata: Mapping[str, str] | None
) -> dict[str, Any]:
    """Returns the content of the file by which orbax knows the arrays."""
    return {
        "tree_metadata": {
            str((name,)): {
                "key_metadata": [{"key": name, "key_type": 2}],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for name in names
        },
        "use_ocdbt": in_database,
        "use_zarr3": True,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": metadata,
    }


def _sealed_manifest(
    folder: Path | Place, manifest: Mapping[str, Any], leaves: Mapping[str, Shards]
) -> str:
    """Returns the text of the manifest of a step when all else was written."""
    sums = _checksums(folder / STATE)
    for name, leaf in leaves.items():
        parts = zip(leaf.stored.shape, leaf.chunk, strict=True)
        chunks = math.prod(math.ceil(size / part) for size, part in parts)
        if missing := chunks - len(sums.get(name, [])):
            raise OSError(f"{missing} of its {chunks} chunks of {name} disappeared from {folder}")
    whole = {
        **manifest,
        "format": integrity.SHARDS,
        "leaves": {
            name: integrity.entry(leaf.spec, leaf.stored) | {"crc32c": sums.get(name, [])}
            for name, leaf in leaves.items()
        },
        "files": _listing(folder),
        "saved": time.time(),
    }
    return integrity.seal(whole)


def _listing(step: Path | Place) -> dict[str, integrity.SizeAndCrc]:
    if isinstance(step, Path):
        return integrity.file_list(step, SMALL)
    return bucket.objects(step)


def _checksums(directory: Path | Place) -> dict[str, list[str]]:
    """Returns the checksums of the chunks of every leaf, in order, as they were stored."""
    sums: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    if not isinstance(directory, Path) or (directory / _INDEX).exists():
        index = _result(ts.KvStore.open(_kvstore(directory)), directory)
        for key in _result(index.list(), directory):
            # Such as b"params/kernel/c/0/1"; the last four bytes of the value are the checksum.
            if found := re.fullmatch(r"(.*)/c((?:/\d+)*)", key.decode(), re.DOTALL):
                number = tuple(map(int, found[2].split("/")[1:]))
                value = index.read(key, byte_range=slice(-4, None))
                sums.setdefault(found[1], []).append((number, value))
    return {
        name: [
            _result(value, directory).value.hex() for _, value in sorted(chunks, key=lambda x: x[0])
        ]
        for name, chunks in sums.items()
    }


def wrong_files(step_directory: Path | Place, manifest: Mapping[str, Any]) -> list[str]:
    """Returns a line for each file that is not as it was saved, or each leaf with other chunks."""
    problems = integrity.file_problems(_listing(step_directory), manifest["files"])
    if problems or jax.process_index() > 0:
        return problems
    # A chunk has its checksum beside it. So process 0 compares these with the manifest.
    with _errors_of(_INDEX):
        sums = _checksums(step_directory / STATE)
    return [
        f"{name}: its data do not have the checksum they were saved with"
        for name, entry in manifest["leaves"].items()
        if sums.get(name, []) != entry["crc32c"]
    ]


def read_regions(
    directory: Path | Place, manifest: Mapping[str, Any], wanted: Mapping[str, Collection[Region]]
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields leaves and the regions of them that are wanted, as they were stored."""
    # `directory` is state/ in a step of this format or of orbax's. Raises CorruptCheckpoint with
    # the leaf if data are damaged, and OSError if the disk cannot be read.
    old, context = manifest["format"] == integrity.ORBAX, ts.Context()
    reading: deque[tuple[str, list[Any], int]] = deque()

    def done() -> tuple[str, list[np.ndarray]]:
        name, futures, _ = reading.popleft()
        with _errors_of(name):
            return name, [_result(future, directory) for future in futures]

    for name, regions in wanted.items():
        entry = manifest["leaves"][name]
        stored = Spec(tuple(entry["stored_shape"]), entry["stored_dtype"])
        if 0 in stored.shape:  # it has no data, and is not stored
            empty = np.zeros(stored.shape, integrity.dtype(stored.dtype))
            yield name, [empty[_slices(region)] for region in regions]
            continue
        with _errors_of(name):
            opening = {
                "driver": "zarr" if old else "zarr3",
                "kvstore": _kvstore(directory, name),
                "fill_missing_data_reads": old,  # a file that is missing was found before
            }
            array = _result(ts.open(opening, open=True, context=context), directory)
            if (found := Spec(array.shape, array.dtype.name)) != stored:
                raise CorruptCheckpoint(f"{name}: {found} was read, not {stored}")
            futures = [array[_slices(region)].read() for region in regions]
        size = sum(map(_items, regions)) * array.dtype.numpy_dtype.itemsize
        reading.append((name, futures, size))
        while len(reading) > 1 and sum(size for _, _, size in reading) > _AT_ONCE:
            yield done()
    while reading:
        yield done()


@contextlib.contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Raises, for an error of tensorstore, CorruptCheckpoint with the leaf, or OSError."""
    try:
        yield
    except (MemoryError, CorruptCheckpoint):
        raise
    except Exception as error:  # of many types for damaged files
        # Errors of a busy or full system are no sign of damage, and must not set the step aside.
        if transient := _transient_error(error):
            raise transient from error
        raise CorruptCheckpoint(f"{name}: its data cannot be read: {one_line(error)}") from error


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
