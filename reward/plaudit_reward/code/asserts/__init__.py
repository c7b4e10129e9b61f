"""Evaluate ``assert_case``: the program computes plain values, another process evaluates the assert on them."""
