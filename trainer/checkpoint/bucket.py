"""The steps of a run in a bucket of Google Cloud Storage or S3.

They are there with `checkpoints: gs://BUCKET/PATH` in a config, or `s3://`. A bucket cannot rename:
a step is written where it stays, below a name that no other save has, such as 1000-5b2f0c91/, and
counts as soon as its manifest is there, which is one object. All objects are read and written by
tensorstore; credentials come from the environment. No operation waits longer than its deadline.
"""

import contextlib
import functools
import os
import re
import secrets
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import tensorstore as ts

from trainer.checkpoint import integrity
from trainer.checkpoint.errors import CheckpointError, one_line
from trainer.checkpoint.folder import Fence

DEADLINE = 60.0  # seconds of a request of a few bytes, with all of its repetitions
DATA_DEADLINE = 900.0  # seconds of the requests for up to 256 MB
_LOOK = 10.0  # seconds until a server must answer whether it has a bucket

_SET_ASIDE = "damaged.json"  # the name that the manifest of a damaged step is given
_ENDED = {integrity.MANIFEST, _SET_ASIDE}  # one of them is in each save that was committed
_HINTS = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or those of gcloud or of the virtual machine",
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or those of ~/.aws or of the machine",
}


class Place(NamedTuple):
    """A folder or an object in a bucket: what this package needs of a path."""

    url: str  # such as s3://bucket/runs/a/1000-5b2f0c91, without a slash at its end

    def __truediv__(self, name: str) -> "Place":
        return Place(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def kvstore(self, below: str = "/") -> dict[str, Any]:
        """Returns tensorstore's specification of all objects below this folder, or of this one."""
        scheme, bucket, path = _parts(self.url)
        spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path + below}
        if scheme == "gs":  # not gcs_grpc, which crashes without credentials
            return spec | {"driver": "gcs"}
        if endpoint := _s3_endpoint():
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
            spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
        if "AWS_ACCESS_KEY_ID" in os.environ:  # else the files of ~/.aws, and the machine's own
            spec["aws_credentials"] = {"type": "environment"}
        return spec

    def keys(self) -> list[str]:
        """Returns the names of all objects below this folder, relative to it, in order."""
        with _store(self, "/") as store:
            return sorted(key.decode() for key in store.list().result(timeout=DEADLINE))

    def read(self) -> bytes:
        """Returns the content of an object; raises FileNotFoundError or another OSError."""
        with _store(self) as store:
            found = store.read("").result(timeout=DEADLINE)
        if found.state != "value":
            raise FileNotFoundError(f"{self} does not exist")
        return found.value

    def write(self, content: bytes | None) -> None:
        """Writes or replaces an object, all of it or nothing; None deletes it."""
        with _store(self) as store:
            store.write("", content).result(timeout=DEADLINE)

    def delete(self) -> None:
        """Deletes all objects below a folder."""
        with _store(self, "/") as store:
            store.delete_range(ts.KvStore.KeyRange()).result(timeout=DATA_DEADLINE)


def objects(step: Place) -> dict[str, integrity.SizeAndCrc]:
    """Returns the objects of a step as `integrity.file_list` does the files of a folder."""
    # Chunks, such as state/params/kernel/c/0/1, have checksums of their own, and are not read.
    found: dict[str, integrity.SizeAndCrc] = {}
    keys = [key for key in step.keys() if key not in _ENDED]
    with _store(step, "/") as store:
        small = {key: store.read(key) for key in keys if not re.search(r"/c(/\d+)*$", key)}
        for key in keys:
            content = small[key].result(timeout=DEADLINE).value if key in small else b""
            found[key] = len(content), f"{zlib.crc32(content):08x}" if key in small else ""
    return found


class Bucket:
    """The steps below a URL; has the methods of `folder.Folder`, and raises as they do."""

    def __init__(self, url: str) -> None:
        self.place = Place(url)
        self._was_found = False

    def __str__(self) -> str:
        return str(self.place)

    def steps(self) -> dict[int, Place]:
        """Returns step -> place of the committed steps, oldest first."""
        try:
            saves = self._saves()
        except OSError as e:
            raise CheckpointError(f"{self} cannot be listed: {one_line(e)}.") from e
        names = [name for name, files in saves.items() if integrity.MANIFEST in files]
        return dict(sorted((int(name.split("-")[0]), self.place / name) for name in names))

    def holds_results(self) -> bool:
        """Returns whether there is more than what an interrupted save left."""
        return any(files & _ENDED for files in self._saves().values())

    def damaged(self) -> str | None:
        """Returns where damaged steps are; None if there are none."""
        found = any(_SET_ASIDE in files for files in self._saves().values())
        return str(self) if found else None

    def begin(self, run: str) -> None:
        """Writes whose checkpoints these are; OSError if there is no bucket, or no permission."""
        self._look_up()
        (self.place / "run.txt").write(f"{run}\n".encode())

    def open(self) -> None:
        """Looks the bucket up, and deletes what killed saves and removals left."""
        self._was_found = False
        for name, files in self._saves().items():
            if not files & _ENDED:
                (self.place / name).delete()

    def make(self, step: int) -> Place:
        """Returns a place in which a step is written, which no other save has."""
        return self.place / f"{step}-{secrets.token_hex(8)}"

    def commit(
        self, place: Place, step: int, manifest: str, before: Callable[[], None], fence: Fence
    ) -> None:
        """Writes the manifest of a step, by which it counts."""
        before()
        fence()
        (place / integrity.MANIFEST).write(manifest.encode())

    def remove(self, steps: Collection[int], fence: Fence) -> None:
        """Removes steps, the newest first, each with its manifest first."""
        found = self.steps() if steps else {}
        for step in sorted(steps, reverse=True):
            fence()
            (found[step] / integrity.MANIFEST).write(None)
            found[step].delete()

    def set_aside(self, step: Any) -> str:
        """Renames the manifest of a damaged step, which then does not count."""
        try:
            with contextlib.suppress(FileNotFoundError):
                (step / _SET_ASIDE).write((step / integrity.MANIFEST).read())
            (step / integrity.MANIFEST).write(None)
        except OSError as e:
            raise CheckpointError(
                f"The damaged checkpoint {step} cannot be marked as such: {one_line(e)}. Remove "
                f"its {integrity.MANIFEST}, and start the same command again."
            ) from e
        return f"{step}/{_SET_ASIDE}"

    def _saves(self) -> dict[str, set[str]]:
        """Returns the names of the objects of each save, such as 1000-5b2f0c91; OSError."""
        if not self._was_found:
            self._look_up()
            self._was_found = True
        found: dict[str, set[str]] = {}
        for key in self.place.keys():
            save, _, name = key.partition("/")
            if _SAVE.fullmatch(save):
                found.setdefault(save, set()).add(name)
        return found

    def _look_up(self) -> None:
        """Raises OSError unless the server answers, and has the bucket."""
        # Tensorstore asks a missing one thousands of times, and waits long for a silent server.
        scheme, bucket, _ = _parts(self.place.url)
        url, method = f"{_s3_endpoint() or 'https://s3.amazonaws.com'}/{bucket}", "HEAD"
        if scheme == "gs":
            server = os.environ.get("TENSORSTORE_GCS_HTTP_URL", "https://storage.googleapis.com")
            url, method = f"{server}/storage/v1/b/{bucket}", "GET"
        request = urllib.request.Request(url, method=method)
        try:
            urllib.request.urlopen(request, timeout=_LOOK).close()
        except urllib.error.HTTPError as error:  # 301, 401 and 403 tell that there is one
            error.close()
            if error.code == 404:
                raise OSError(f"there is no bucket {bucket} ({scheme}://)") from error
            if error.code >= 500:
                raise OSError(f"the server of {self} answers {error}") from error
        except OSError as error:
            reason = getattr(error, "reason", error)  # of URLError
            why = one_line(reason if isinstance(reason, OSError) else error)
            raise OSError(f"the server of {self} cannot be reached: {why}") from error


_SAVE = re.compile(r"(0|[1-9][0-9]{0,17})-[0-9a-f]{16}")


def _parts(url: str) -> tuple[str, str, str]:
    """Returns scheme, bucket and path of a URL."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return scheme, bucket, path


def _s3_endpoint() -> str | None:
    """Returns the URL of an S3 server that is not Amazon's, by Amazon's own variables."""
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return found.rstrip("/") if found else None


@functools.cache
def _context() -> ts.Context:
    """Returns what all requests of a process share: the credentials, and connections."""
    return ts.Context()


@contextlib.contextmanager
def _store(place: Place, below: str = "") -> Iterator[ts.KvStore]:
    """Opens an object, or those below it; raises OSError for what tensorstore raises within."""
    try:
        yield ts.KvStore.open(place.kvstore(below), context=_context()).result(timeout=DEADLINE)
    except (ValueError, RuntimeError, TimeoutError) as error:
        raise OSError(problem_of_server(place, error) or f"{place}: {one_line(error)}") from error


_OF_SERVER = re.compile(
    "NoSuchBucket|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED|CURL|HTTP"
)
_DENIED = re.compile("PERMISSION_DENIED|UNAUTHENTICATED|AccessDenied|[Cc]redentials")


def problem_of_server(place: Place, error: BaseException) -> str:
    """Describes an error that is the server's and not that of the data; else an empty text."""
    scheme, bucket, _ = _parts(place.url)
    where, text = f"{scheme}://{bucket}", str(error)
    if isinstance(error, TimeoutError):
        return f"{where} did not answer in time"
    if _DENIED.search(text):
        return f"{where} denied access; credentials come from the environment: {_HINTS[scheme]}"
    # Such as "NOT_FOUND: NoSuchBucket: The specified bucket does not exist [http_response=...".
    return f"{where}: {text.split(' [')[0].strip()}" if _OF_SERVER.search(text) else ""
