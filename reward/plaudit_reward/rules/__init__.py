"""Score by built-in rules: plain functions of one sample, with the names and results of verl's default scorers."""
