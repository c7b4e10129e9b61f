"""Choose the environment variables for the processes of user functions by an allow-list, so that no key leaks."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

FURTHER = "PLAUDIT_FUNCTION_ENVIRONMENT"
"""Variable of the worker: names that user functions get besides, separated by commas; ``MY_*`` stands for many."""

_SECRET = ("PLAUDIT_SECRET*", "PLAUDIT_REDIS*")
"""Passwords and keys of the job, and the files that hold them: no name in ``FURTHER`` lets these through."""

_ALLOWED = (
    # the user, the system and Python
    "PATH HOME USER LOGNAME SHELL PWD HOSTNAME TERM LANG LANGUAGE LC_* TZ TMPDIR TMP TEMP XDG_*",
    "VIRTUAL_ENV LD_LIBRARY_PATH LD_PRELOAD PYTHON* MALLOC_*",
    # the network
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy",
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    # threads, devices and caches of numerical libraries
    "OMP_* KMP_* GOMP_* MKL_* OPENBLAS_* NUMEXPR_* CUDA_* NVIDIA_* NCCL_* TORCH* PYTORCH_*",
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE",
    "TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM NLTK_DATA MPLCONFIGDIR",
    # what a function may want to write beside its output
    "PLAUDIT_RUN PLAUDIT_WORKER",
    # the URLs of the job's environments
    "PLAUDIT_ENVIRONMENT_*",
)


def function_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that runs user functions.

    Args:
        environment: of the worker. ``HF_TOKEN``, ``AWS_…``, ``OPENAI_API_KEY`` and the like stay there unless
            ``PLAUDIT_FUNCTION_ENVIRONMENT`` in it names them.
    """
    further = [name.strip() for name in environment.get(FURTHER, "").split(",") if name.strip()]
    allowed = [*" ".join(_ALLOWED).split(), *further]
    return {
        name: value for name, value in environment.items() if _matches(name, allowed) and not _matches(name, _SECRET)
    }


def _matches(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
