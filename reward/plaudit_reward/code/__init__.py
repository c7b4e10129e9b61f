"""Scores programs: test cases, a sandbox of processes on this machine, a client for Sandbox Fusion."""
