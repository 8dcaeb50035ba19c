"""What a config can name of this package: `!my_lab.sign_momentum`."""

from my_lab.optimizer import sign_momentum

__all__ = ["sign_momentum"]
