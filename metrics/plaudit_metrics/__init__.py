"""What is measured: the event records, per-step statistics, the verdict, and the service that serves them."""
