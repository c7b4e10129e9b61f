"""The shapes of reward endpoints: one file each, listed in ``registry``."""
