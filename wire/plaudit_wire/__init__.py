"""Names, messages and records that all parts of Plaudit share."""

VERSION = "0.1.0"
"""Not read from the distributions' metadata: container images hold the packages alone."""
