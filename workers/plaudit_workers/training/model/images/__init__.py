"""Lay out images in packed rows: pixels, positions, and a check of both at the start."""
