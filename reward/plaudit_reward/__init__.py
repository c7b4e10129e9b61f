"""Rewards: samples, scores, scorers of every kind, and the isolation in which they run."""
