"""``kind: judge``: an OpenAI-compatible endpoint that is asked for a score, within limits over the whole cluster."""
