"""``kind: http``: an endpoint of somebody else that scores samples, in one of the shapes that trainers use."""
