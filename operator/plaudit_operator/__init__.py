"""The Kubernetes operator that reconciles RLJobs. It may import every other part; none imports it."""
