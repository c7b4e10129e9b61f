"""Images of prompts: rows of data files, the run's stored files, decoding, the model's processor."""
