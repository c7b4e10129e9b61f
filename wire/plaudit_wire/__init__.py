"""Names, messages and records that all parts of Plaudit share."""

VERSION = "0.1.0"
