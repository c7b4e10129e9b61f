"""``agent.kind: endpoint``: any program that speaks OpenAI's API; its tokens are captured here."""
