"""A private module."""


def secret() -> int:
    return 1
