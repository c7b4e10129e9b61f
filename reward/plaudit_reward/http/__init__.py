"""One HTTP client for everything that scores over a network: judges, reward models, Sandbox Fusion."""
