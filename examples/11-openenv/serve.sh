#!/bin/sh
# Starts the server in an environment of its own: OpenEnv's packages are not those of Plaudit.
folder=$(dirname "$0")
exec "$folder/.venv/bin/python" "$folder/server.py"
