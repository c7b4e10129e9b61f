"""Load what a job's agent runs: functions, verl's tool classes, MCP servers, agent classes."""
