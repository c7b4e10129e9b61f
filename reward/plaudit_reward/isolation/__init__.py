"""Run user functions in child processes that can be killed at any time without affecting other scores."""
