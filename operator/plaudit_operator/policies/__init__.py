"""Policies, one per file: pure functions from observed objects to decisions."""
