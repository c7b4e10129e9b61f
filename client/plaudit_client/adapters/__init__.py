"""Adapters that let trainers get their rewards from a Plaudit service: one file each, importing the trainer lazily.

A failure is never a zero: each adapter reports a sample without a score in the trainer's own way (None, an
exception), and returns a number in its place only where the caller names one (``on_failure``).
"""
