"""The processes of a job: rollout, scoring and training, the streams that join them, and what starts them."""
