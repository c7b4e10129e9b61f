"""The children of an RLJob: one file for each kind of process, plain manifests out of a ``JobContext``."""
