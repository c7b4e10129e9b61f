"""Adapt trainers to a Plaudit service: one file for each trainer, which imports the trainer lazily.

A failure is never a zero: each adapter reports a sample without a score in the trainer's own way (None, an
exception), and returns a number in its place only where the caller names one (``on_failure``).
"""
