"""A run's folder: its files, the lock of its writer, and the record of how the run was made."""
# ruff: noqa: F401  # what other packages import from here; users import lockstep

from trainer.workdir import code
from trainer.workdir.fingerprint import Change, common, fingerprint_differences, make_fingerprint
from trainer.workdir.folder import Provenance, Workdir, check_files, check_name
from trainer.writers.locks import WorkdirLock, WorkdirTakenOver
from trainer.writers.run_record import read_record
