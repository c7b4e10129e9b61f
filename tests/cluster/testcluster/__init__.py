"""A real Kubernetes on one Linux machine: programs built from source modules, every node in its own network."""
