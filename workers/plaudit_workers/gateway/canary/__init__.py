"""Compare a new version of the scorers with the present one on a share of the samples."""
