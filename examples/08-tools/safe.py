"""A tool in verl's form: it gets the secret of the data row, and returns it when the model opens the safe."""


class Safe:
    """A safe; each call creates, executes and releases it."""

    def __init__(self, config, tool_schema):
        self.secret = ""

    async def create(self, instance_id=None, **kwargs):
        """Take the secret of the row (``tools_kwargs``)."""
        self.secret = kwargs["create_kwargs"]["secret"]
        return instance_id or "safe", None

    async def execute(self, instance_id, parameters, **kwargs):
        """Open the safe."""
        return self.secret, 0.0, {}

    async def release(self, instance_id, **kwargs):
        """Forget the secret."""
        self.secret = ""
