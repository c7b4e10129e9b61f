"""The errors with which a process of a job ends itself. Imports nothing, because the operator raises them too."""


class RefusedError(Exception):
    """The job or its environment is wrong, and a restart would not help. The message names the remedy."""


class JobFailedError(Exception):
    """The job ran and failed for good (too many failed scores, restarts used up)."""


class StoppedError(Exception):
    """The process was stopped before it began its work."""
