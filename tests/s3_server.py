"""A small server of S3's requests that tensorstore makes, with the faults of real ones."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Server:
    """Buckets in memory; `fault` is asked about each request, and names what becomes of it."""

    # A fault is None, "503", "403", "cut" (the connection ends within the answer) or "silent".

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, bytes]] = {"lab": {}}
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.url = ""


@contextmanager
def serving() -> Iterator[Server]:
    """Serves until the block ends."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def handle_request(self) -> None:
            url = urlsplit(self.path)
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server.requests.append((self.command, url.path))
            fault = server.fault(self.command, url.path)
            if fault == "silent":
                time.sleep(60)
            if fault in ("silent", "cut"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx")
                self.close_connection = True
            elif fault is not None:
                self.answer(int(fault), b"<Error><Code>AccessDenied</Code></Error>")
            else:
                self.answer_for(unquote(url.path), parse_qs(url.query), content)

        def answer_for(self, path: str, query: dict[str, list[str]], content: bytes) -> None:
            _, name, *rest = path.split("/", 2)
            key = rest[0] if rest else ""
            if (bucket := server.buckets.get(name)) is None:
                return self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
            if self.command == "PUT":
                bucket[key] = content
            elif self.command == "DELETE":
                bucket.pop(key, None)
                return self.answer(204)
            elif not key and self.command == "GET":
                return self.answer(200, self.listed(bucket, query.get("prefix", [""])[0]))
            elif key and key not in bucket:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            found = bucket.get(key, b"")
            etag = f'"{hashlib.md5(found).hexdigest()}"'
            if self.command != "GET":
                return self.answer(200, ETag=etag)
            first, last, size = 0, len(found) - 1, len(found)
            if given := self.headers.get("Range"):
                start, _, end = given.removeprefix("bytes=").partition("-")
                first = int(start) if start else size - int(end)
                last = min(int(end), last) if start and end else last
            place = {"Content-Range": f"bytes {first}-{last}/{size}"} if given else {}
            self.answer(206 if given else 200, found[first : last + 1], ETag=etag, **place)

        def listed(self, bucket: dict[str, bytes], prefix: str) -> bytes:
            keys = sorted(key for key in bucket if key.startswith(prefix))
            contents = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(bucket[key])}</Size></Contents>"
                for key in keys
            )
            return (
                f"<ListBucketResult><KeyCount>{len(keys)}</KeyCount>"
                f"<IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
            ).encode()

        do_GET = do_HEAD = do_PUT = do_DELETE = handle_request  # noqa: N815

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads, listening.block_on_close = True, False
    server.url = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, args=[0.02], daemon=True).start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
