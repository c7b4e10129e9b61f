"""Chat templates and tool calls: continues token ids with new messages, parses what the policy wrote."""
