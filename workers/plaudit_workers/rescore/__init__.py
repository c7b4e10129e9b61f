"""``plaudit rescore``: other scorers over the samples that a run has stored."""
