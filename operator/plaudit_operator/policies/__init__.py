"""One policy a file: pure functions from what is observed to what follows."""
