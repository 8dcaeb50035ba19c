"""Imports what a run imports before its first step, and nothing else; see `benchmarks.start`."""

import jax

import trainer.cli.commands  # noqa: F401
import trainer.config.build  # noqa: F401
import trainer.data  # noqa: F401
import trainer.losses  # noqa: F401
import trainer.metrics  # noqa: F401
import trainer.models  # noqa: F401
import trainer.train.run  # noqa: F401


def main() -> None:
    """Says that it is ready, in the words of a run that has finished its first step."""
    jax.local_devices()
    print("First step: none, imports alone.", flush=True)


if __name__ == "__main__":
    main()
