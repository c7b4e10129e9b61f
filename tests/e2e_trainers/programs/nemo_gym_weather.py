"""Serve NeMo Gym's own example of a tool (``example_single_tool_call``) on the port that is given."""

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_single_tool_call.app import (
    SimpleWeatherResourcesServer,
    SimpleWeatherResourcesServerConfig,
)

if __name__ == "__main__":
    settings = SimpleWeatherResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="weather")
    server = SimpleWeatherResourcesServer(config=settings, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), port=int(sys.argv[1]), log_level="warning")
