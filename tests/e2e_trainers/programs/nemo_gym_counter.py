"""Serve NeMo Gym's own example of sessions (``example_session_state_mgmt``) on the port that is given."""

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

if __name__ == "__main__":
    settings = StatefulCounterResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="counter")
    server = StatefulCounterResourcesServer(config=settings, server_client=MagicMock(spec=ServerClient))
    uvicorn.run(server.setup_webserver(), port=int(sys.argv[1]), log_level="warning")
