"""Control access to an endpoint: limits, circuit breaker, typed refusals, usage. For judges and scorers over HTTP."""
