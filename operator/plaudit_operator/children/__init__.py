"""The children of a job: plain manifests, made from a ``JobContext``."""
