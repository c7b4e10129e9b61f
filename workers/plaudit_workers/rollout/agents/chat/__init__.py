"""Render chat templates and parse tool calls: continue token ids with new messages, parse what the policy wrote."""
