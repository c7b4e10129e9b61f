"""The stream protocol: how samples travel between processes, so that none is lost silently and none is trained twice.

Read it in this order: ``plaudit_wire.names`` and ``messages`` (keys and records), ``transitions/lua`` (one script for
each transition; its header lists what it checks, changes and returns; ``lua/shared`` has the fields of a group's hash
and the completion rule), ``transitions/*.py`` (one typed function for each script; ``runner`` sends them), the sides:

- ``trainer``: ``groups`` (admit, release, close, announce), with ``fence``, ``ready`` and ``ledger``
- ``worker``: ``consumer`` (take, with ``lease``, ``server_time``, ``dead_letter``), ``producer`` and ``commits``
- ``sessions``: the clients of a scoring service

``connection`` opens a process's access, ``group_hash`` reads a group, ``volume`` stores what is too large for Redis.
"""
