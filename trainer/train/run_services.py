"""What a run needs besides its program, for all of its attempts in a process."""

from collections.abc import Callable
from typing import NamedTuple

from trainer.checkpoint import CheckpointError, Checkpoints
from trainer.config import wording
from trainer.engine.experiment import Experiment
from trainer.engine.program import Program
from trainer.messages import FAILED, MISTAKE, UserError
from trainer.train.autosave import AutosavePolicy, was_killed
from trainer.train.consensus import StopSaveConsensus
from trainer.train.nonfinite import NonFiniteLog
from trainer.train.rollback import RollbackLog
from trainer.train.rows import MetricsError, Rows
from trainer.train.services import Ended
from trainer.train.signals import StopSignals
from trainer.train.unmoved import Unmoved
from trainer.workdir import Workdir, WorkdirTakenOver
from trainer.writers import RunIdentity
from trainer.writers.summary import SUMMARY_FILE

# Errors whose text is a sentence for the user.
_EXPLAINED = (UserError, CheckpointError, MetricsError, WorkdirTakenOver)


class RunServices(NamedTuple):
    """What a run uses in its folder; the attributes are those of the loop."""

    folder: Workdir
    checkpoints: Checkpoints
    consensus: StopSaveConsensus
    nonfinite_log: NonFiniteLog
    rollback_log: RollbackLog
    rows: Rows
    unmoved: Unmoved
    experiment: Experiment
    log: Callable[[str], None]

    def summarize(self, ended: Ended) -> None:
        """Writes summary.json.

        Args:
            ended: how the run ended.
        """
        text = self.rows.results.summary(ended, self.experiment).text()
        try:
            self.folder.write(SUMMARY_FILE, text)
        except WorkdirTakenOver:  # another process continues the run
            pass
        except OSError as error:
            self.log(f"{SUMMARY_FILE} could not be written: {error}")

    def summarize_error(self, error: Exception) -> None:
        """Writes summary.json for a run that an exception ended.

        Args:
            error: the exception.
        """
        code = MISTAKE if isinstance(error, UserError) else FAILED
        explained = isinstance(error, _EXPLAINED)
        why = " ".join(str(error).split()) if explained else wording.cause(error)
        self.summarize(Ended("failed", code, self.rows.results.step, why))


def make_services(
    folder: Workdir,
    program: Program,
    signals: StopSignals,
    log: Callable[[str], None],
    identity: Callable[[], RunIdentity],
) -> RunServices:
    """Makes what a run needs in its folder.

    Args:
        folder: of the run, open.
        program: of the run.
        signals: reports when to stop.
        log: takes a line for the user.
        identity: returns what loggers call the run.
    """
    experiment = program.experiment
    return RunServices(
        folder=folder,
        checkpoints=Checkpoints(
            folder.checkpoints,
            keep_latest=experiment.keep_latest,
            keep_best=0 if experiment.best_metric is None else 1,
            best_mode=experiment.best_mode,
            # It cannot be computed again.
            keep_always=[] if experiment.warm_start is None else [0],
            log=log,
            fence=folder.check_fence,
            before_commit=folder.sync_metrics,
        ),
        consensus=StopSaveConsensus(
            signals, AutosavePolicy(after_kill=was_killed(folder.run_file))
        ),
        nonfinite_log=NonFiniteLog(folder.path, folder.write, experiment, log),
        rollback_log=RollbackLog(folder.path, folder.write, log),
        rows=Rows(folder, experiment, log, identity),
        unmoved=Unmoved(program, log),
        experiment=experiment,
        log=log,
    )
