"""Sections that Kubernetes knows by the same names: metadata, pods and their environment, scheduling, lifecycle."""
