"""Define the stream protocol: samples travel between processes, none is lost silently and none is trained twice.

Read it in this order: ``plaudit_wire.names``, ``messages`` and ``records`` (keys and records), ``lua`` (one script for
each transition; its header lists what it checks, changes and returns; ``lua/shared`` has the fields of a group's hash
and the completion rule), ``calls`` (one typed function for each script), then the three sides:

- ``trainer``: admit, take, release, close and announce; the fence against a replaced trainer; the ledger
- ``consumer``: take work under a lease, publish samples, commit scores, move hopeless entries to the dead letters
- ``sessions``: the clients of a scoring service

``transport`` opens a process's access to Redis and sends the calls; ``libraries`` reads the Lua code as libraries of
functions. ``groups`` reads a group's hash, ``volume`` stores what is too large for Redis.
"""
