"""The version of Plaudit. Not read from the distributions' metadata: container images hold the packages alone."""

VERSION = "0.1.0"
