"""Bring published weights from the trainer's ranks to the rollouts, and a checkpoint's state back to the ranks.

The trainer publishes a version in one of three ways, after which a rollout holds the same bytes:

- as files (``files``): each rank writes its file in a folder, the contract of which is ``published``;
- as deltas: each rank keeps an ``image`` of its file and writes what changed; ``deltas`` restores the whole files;
- from memory: each rank offers its part (``send``), and rollouts collect the parts of all (``receive``).

``index`` and ``files`` describe, write and read the state of checkpoints; ``parameters`` reads the files of the model
that a run starts from.
"""
