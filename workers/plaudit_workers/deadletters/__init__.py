"""Dead letters of a live run: entries that several workers were lost with, or that could not be read."""
