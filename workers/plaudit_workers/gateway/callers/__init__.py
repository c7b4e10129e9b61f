"""Who calls: tokens and names, the session that all gateways of a caller share, its samples that wait, its results."""
