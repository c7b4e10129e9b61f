"""The stream protocol: how samples travel between processes, so that none is lost silently and none is trained twice.

To read it in one sitting: ``names`` and ``records`` (what there is), ``lua/`` (what may happen to it: one file a
transition, its header says what it checks, changes and returns; ``lua/shared`` holds the fields of a group's hash and
the completion rule), ``scripts`` and ``runner`` (how a transition travels), then the sides:

- trainer: ``groups`` (admit, release, close, announce), with ``fence``, ``limits``, ``ready`` and ``ledger``
- rollout: ``consumer`` (take, with ``lease`` and ``bury``) and ``producer`` (publish)
- reward worker: ``consumer`` and ``commits`` (commit, for a sample and for a group)

``connection`` is what a process opens first, ``group_hash`` reads a group, ``volume`` holds what Redis should not.
"""
