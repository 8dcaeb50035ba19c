"""Shakespeare's works in modern spelling, the text of `data.text()` if no files are given.

The works are in the public domain. shakespeare.txt.bz2 has all 42 `*_gut.txt` of the source package
`shakespeare` 0.6 of the Python package index, which are etexts of Project Gutenberg without their
headers, footers and licences. They were sorted by file name; spaces at the ends of lines, lines of
"@" alone, and empty lines at the ends of a work were removed. The works are joined by form feeds,
and compressed by bz2.
"""

import bz2
import functools
import hashlib
from pathlib import Path

_FILE = Path(__file__).with_name("shakespeare.txt.bz2")

SHA256 = "3602d9246fbf10222f168f74bf9622403d1dd98d6fb25dd2ae500e579bacd21b"
"""The hash of the whole text."""


@functools.cache  # called several times while tokens are made
def works() -> tuple[bytes, ...]:
    """Returns the plays and poems, 42 works and 5.05 MB of ASCII."""
    # Raises ValueError if the file of this package was changed.
    try:
        text = bz2.decompress(_FILE.read_bytes())
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{_FILE} cannot be read ({error}). Install Lockstep again.") from error
    if hashlib.sha256(text).hexdigest() != SHA256:
        raise ValueError(f"{_FILE} is not the file of this version. Install Lockstep again.")
    return tuple(text.split(b"\f"))
