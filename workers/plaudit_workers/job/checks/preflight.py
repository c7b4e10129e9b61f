"""Find everything that would make ``plaudit run`` refuse a job or fail later."""

from __future__ import annotations

from plaudit_workers.job.checks.files import check_files
from plaudit_workers.job.checks.functions import check_functions
from plaudit_workers.job.checks.losses import check_loss
from plaudit_workers.job.checks.support import unsupported
from plaudit_workers.job.loading.validation import Examination
from plaudit_workers.job.problem import Problem
from plaudit_workers.job.spec.rljob import RLJob


def preflight(job: RLJob, *, imports: bool = True) -> list[Problem]:
    """Check what this machine supports, the files that the job names, and the functions in them.

    Args:
        imports: import the files of rewards and loss, each in a process of its own; False where they run on other
            machines.
    """
    problems = [*unsupported(job), *check_files(job)]
    if not imports:
        return problems
    fields = {problem.field for problem in problems}
    return [*problems, *check_functions(job, fields), *check_loss(job, fields)]


def all_problems(examination: Examination, *, imports: bool = True) -> list[Problem]:
    """Return the problems of a file and, as far as its sound fields allow, those that ``preflight`` finds."""
    if examination.job is None:
        return examination.problems
    return examination.problems + examination.concerning(preflight(examination.job, imports=imports))
