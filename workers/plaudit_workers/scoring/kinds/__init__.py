"""Make a scorer of each kind: one file for each kind, listed in ``registry``."""
