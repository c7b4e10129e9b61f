"""Publish what changed between two versions of the weights: encode → folders → restore.

Written by the trainer's ranks, applied by rollouts and ``plaudit export``.
"""
