"""What the service scores besides the built-in rule."""


def brevity(sample, limit):
    """1 for an answer of at most ``limit`` characters, less for longer ones."""
    return min(1.0, limit / max(len(sample.response), 1))
