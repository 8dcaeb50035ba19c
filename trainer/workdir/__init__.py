"""A run's folder: what is in it, who may write, and what it was made by."""

from trainer.workdir import code
from trainer.workdir.fingerprint import Change, compare, fingerprint
from trainer.workdir.folder import Workdir
from trainer.workdir.lock import Fenced, Lock
from trainer.workdir.place import check_name
from trainer.workdir.record import read_record
from trainer.workdir.regular import check_files

__all__ = [
    "Change",
    "Fenced",
    "Lock",
    "Workdir",
    "check_files",
    "check_name",
    "code",
    "compare",
    "fingerprint",
    "read_record",
]
