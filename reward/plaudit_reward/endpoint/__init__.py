"""Access to an endpoint that others run: limits, circuit breaker, typed refusals, usage. For judges and HTTP scorers."""
