"""Alerts and recording rules as data: thresholds stand here once; the YAML files are generated (``__main__``)."""
