"""The errors that a user's reward function raises; ``plaudit_reward`` has them too."""

from plaudit_wire.errors import DataError, InfrastructureError

__all__ = ["DataError", "InfrastructureError"]
