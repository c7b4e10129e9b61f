"""Score programs by test cases, in a sandbox of processes on this machine or on a Sandbox Fusion server."""
