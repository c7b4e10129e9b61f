"""Run users' agents and tools: one process for each sample, forked from a process that has loaded the user's files."""
