"""The HTTP front of a reward service: callers submit samples and get their scores; any replica serves any caller.

Below it are the sessions of the stream protocol: each caller (a token) has one session, which all replicas share. A
replica keeps nothing that a caller needs: after its death another one answers under the same ids.
"""
