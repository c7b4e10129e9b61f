"""``spec.reward``: scorers, workers and gateway, in an RLJob and in a RewardService alike."""
