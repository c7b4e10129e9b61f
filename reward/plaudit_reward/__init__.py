"""Rewards: samples, scores, scorers of every kind, and the isolation in which they run."""

from plaudit_wire.errors import DataError as DataError
from plaudit_wire.errors import InfrastructureError as InfrastructureError
