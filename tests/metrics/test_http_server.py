"""Connections that an HTTP server accepts."""

from __future__ import annotations

import socket

from plaudit_metrics.service.http_server import listening_socket


def test_accepted_connections_send_small_packets_at_once():
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
