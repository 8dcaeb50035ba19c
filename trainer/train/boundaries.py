"""Says where a block of steps must end, and what follows it."""

from typing import NamedTuple

from trainer.engine.program import Program
from trainer.train.hooks import called_at
from trainer.train.rollback import RollbackLog


class Due(NamedTuple):
    """What follows a block.

    Attributes:
        log: a row of training metrics.
        hooks: the user's functions of log steps.
        evaluate: an evaluation.
        save: a checkpoint.
        rollback: the counters of a rollback replace those of the state.
        wait: whether all steps must be checked first.
    """

    log: bool
    hooks: bool
    evaluate: bool
    save: bool
    rollback: bool
    wait: bool

    @property
    def check(self) -> bool:
        """Whether to check the parameters after the block."""
        return self.log or self.evaluate or self.save


class Boundaries:
    """The steps after which the host does something.

    Args:
        program: the compiled experiment.
        rollback_log: the rollbacks to which the run comes.
        until: stop after this step; None for the last step.

    Attributes:
        end: the step to stop after.
    """

    def __init__(self, program: Program, rollback_log: RollbackLog, until: int | None = None):
        self._experiment = program.experiment
        self._rollback_log = rollback_log
        # The check of the parameters runs collectives, too, which must not be in flight with those
        # of the next steps.
        self._wait_for_logs = program.simulated
        self.end = min(self._experiment.steps, until or self._experiment.steps)

    def steps_to_next(self, step: int, most: int) -> int:
        """Returns the number of steps of the next block.

        Args:
            step: finished steps.
            most: the most steps of a block.
        """
        experiment = self._experiment
        every = (experiment.log_every, experiment.eval_every, experiment.save_every)
        ends = [step + most, self.end, *(step + n - step % n for n in every)]
        if (rollback := self._rollback_log.next_after(step)) is not None:
            ends.append(rollback)
        return min(ends) - step

    def due(self, step: int, save_now: bool = False) -> Due:
        """Returns what follows a block.

        Args:
            step: the last step of the block.
            save_now: whether to save although `save_every` does not ask for it.
        """
        experiment = self._experiment
        last = step == experiment.steps
        log = last or step % experiment.log_every == 0
        hooks = log and called_at(experiment.hooks, "log")
        evaluate = last or step % experiment.eval_every == 0
        save = save_now or last or step % experiment.save_every == 0 or step == self.end
        rollback = self._rollback_log.at(step) is not None
        wait = hooks or evaluate or save or rollback or (log and self._wait_for_logs)
        return Due(log, hooks, evaluate, save, rollback, wait)
