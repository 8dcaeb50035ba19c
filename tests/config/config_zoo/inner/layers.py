"""A module that is found by its name."""


def dense(width: int) -> int:
    return width
