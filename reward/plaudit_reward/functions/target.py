"""Describe the user function of a scorer. Written by the job, read by the process that loads the file."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Scope = Literal["sample", "group", "combine", "answer", "answers"]
"""What one call of the function sees: a sample, the samples of a group, the values of one sample's scorers, a judge's
answer about one sample, or about the samples of a group."""

Isolation = Literal["process", "thread", "inline"]

CallingConvention = Literal["verl", "trl", "sample", "samples", "values", "combine", "answer", "answers"]
"""The calling convention of a function; see ``signature``."""


class ServedModel(msgspec.Struct, frozen=True):
    """The model that the job serves for a function, as verl serves its reward model."""

    source: str
    """Hub id or folder, with its tokenizer."""
    revision: str = "main"
    trust_remote_code: bool = False
    address: str = ""
    """``host:port`` of a server that speaks OpenAI's API; empty until it is known."""


class Target(msgspec.Struct, frozen=True):
    """A function in a user's file."""

    path: str
    function: str
    """Name of a function, of a class, or of a callable object in the file."""
    arguments: dict[str, Any] = {}
    """Keyword arguments from the job: to the class where its ``__init__`` names them, else to each call."""
    scope: Scope = "sample"
    isolation: Isolation | None = None
    """None: ``inline`` for an async function, ``process`` for any other."""
    served: ServedModel | None = None
    """The function gets its address and tokenizer, under verl's names (``served_model``)."""


class Description(msgspec.Struct, frozen=True):
    """The function as found in the file."""

    form: CallingConvention
    is_async: bool
    isolation: Isolation
    """The place where it runs, with the default applied."""
    post_processes: bool = False
    """Its class has ``post_process_scores``."""
