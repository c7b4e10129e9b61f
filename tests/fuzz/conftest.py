"""The processes that the doors belong to: one set for the session."""

from fuzzed_house import commands, house, judge

__all__ = ["commands", "house", "judge"]
