"""Alerts and recording rules as data; ``plaudit_metrics.generate`` writes the YAML files."""
