"""Access to an endpoint that others run: limits, circuit breaker, typed refusals, usage. Below judges and HTTP scorers."""
