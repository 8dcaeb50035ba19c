"""Trains what a config says: one plan, one compiled step, one loop."""


def __getattr__(name: str) -> str:
    """Returns `__version__`, the version of the installed package, read on first access."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("lockstep-jax")
