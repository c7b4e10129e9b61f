"""Find a container engine and an image for tests. ``make cluster-build`` makes the image where there is no registry."""

from __future__ import annotations

from functools import cache

from plaudit_sandbox.container_engine import find_engine
from plaudit_wire.errors import ConfigurationError

IMAGE = "docker.io/library/python:3.11-slim"
"""With bash and python3; the base of the images of ``tests/e2e_cluster``."""


@cache  # seven files ask when they are collected
def why_none() -> str:
    """Return why containers cannot be tested here; empty if they can."""
    try:
        engine = find_engine()
    except ConfigurationError as error:
        return str(error)
    return "" if engine.has_image(IMAGE) else f"{engine.program} has no image {IMAGE}: make cluster-build makes one"
