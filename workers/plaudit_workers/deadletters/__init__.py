"""Dead letters of a live run: entries that killed several workers, or that could not be read."""
