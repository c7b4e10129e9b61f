"""One file for each role of a job: its workload, Service and probes, out of a ``JobContext``."""
