"""Runs user functions in child processes that can be ended at any time without hurting anybody else's score."""
