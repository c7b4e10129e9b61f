"""Send HTTP requests for everything that scores over a network: judges, reward models, Sandbox Fusion."""
