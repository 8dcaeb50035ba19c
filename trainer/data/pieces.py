"""Cuts long documents into pieces that a byte-level tokenizer converts as it does the whole."""

from collections.abc import Iterable, Iterator


class NotUtf8(ValueError):
    """A document that is not a text in UTF-8."""


def pieces_of(documents: Iterable[bytes], limit: int | None) -> Iterator[tuple[str, bool]]:
    """Yields pieces of documents as text, and whether each is the first of its document."""
    # `limit` is about how many bytes a piece has, at least; None does not cut documents. Raises
    # NotUtf8 if a document is not UTF-8.
    for document in documents:
        for piece, first in _cut(document, limit):
            try:
                yield piece.decode(), first
            except UnicodeDecodeError as error:
                raise NotUtf8(
                    f"The document that begins with {document[:60]!r} is not a text in UTF-8 "
                    f"({error.reason}: {error.object[error.start : error.end]!r}). Convert it, or "
                    "use the tokenizer 'bytes', which takes any file."
                ) from error


def _cut(document: bytes, limit: int | None) -> Iterator[tuple[bytes, bool]]:
    """Yields pieces of a document, and whether each is its first."""
    start = 0
    while limit is not None and len(document) - start > limit:
        end = start + limit
        # Only a cut between a letter and the end of its line is sure to divide no token.
        while end < len(document) and not (
            document[end] == 10 and document[end - 4 : end].decode(errors="ignore")[-1:].isalpha()
        ):
            found = document.find(b"\n", end + 1)
            end = len(document) if found < 0 else found
        yield document[start:end], start == 0
        start = end
    if start < len(document) or not start:
        yield document[start:], start == 0
