"""What Kubernetes runs: the operator that reconciles RLJobs. It may import every other part; none imports it."""
