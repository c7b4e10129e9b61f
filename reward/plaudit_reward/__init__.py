"""What a reward is: samples, scores, scorers of every kind, and the isolation they run in."""
