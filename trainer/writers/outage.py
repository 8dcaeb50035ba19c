"""Reports an operation that fails, is tried again later, and may fail many times in a row."""

from __future__ import annotations

from collections.abc import Callable


class Outage:
    """Logs the first of several failures in a row, and the success that ends them.

    Args:
        log: takes a line for the user.

    Attributes:
        error: why the operation failed last, without a full stop; None after a success.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self.error: str | None = None
        self._log = log

    def failed(self, error: str, consequence: str) -> None:
        """Records a failure, and logs it unless the operation failed before as well.

        Args:
            error: what failed and why, without a full stop.
            consequence: sentences on what happens until the operation works again.
        """
        first, self.error = self.error is None, error
        if first:
            self._log(f"{error}. {consequence}")

    def ended(self, sentence: str | None = None) -> None:
        """Records a success.

        Args:
            sentence: logged if the operation failed before; None logs nothing.
        """
        failed_before, self.error = self.error is not None, None
        if failed_before and sentence is not None:
            self._log(sentence)
