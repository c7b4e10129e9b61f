"""How a process of a job ends by its own decision. Imports nothing: the operator, which has no Redis, says so too."""


class RefusedError(Exception):
    """The job or its surroundings are wrong; starting again would not help. The message says what to mend."""


class JobFailedError(Exception):
    """The job ran and failed for good (too many failed scores, restarts used up)."""


class StoppedError(Exception):
    """The process was stopped before it began its work."""
