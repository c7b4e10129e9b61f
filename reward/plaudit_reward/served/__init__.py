"""Reach the servers of a model that the job serves: where they are, which one is asked next, one address for all."""
