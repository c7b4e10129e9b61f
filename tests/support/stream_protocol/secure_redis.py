"""A Redis that speaks TLS, and the throw-away authority that signs its certificate."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from stream_protocol.own_redis import OwnRedis

PASSWORD = "word"


@dataclass(frozen=True)
class Authority:
    """Signs certificates, as files in one folder."""

    folder: Path

    def start(self) -> Authority:
        self.folder.mkdir()
        _openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout ca.key -out ca.pem -days 2 "
            "-subj /CN=authority",
            self.folder,
        )
        return self

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def sign(self, name: str, host: str, *, days: int = 1) -> tuple[str, str]:
        """Certificate and key for a host; with negative days one that has expired."""
        subject = f"DNS:{host}" if host[0].isalpha() else f"IP:{host}"
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
        _openssl(
            f"req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {name}.key -out {name}.csr "
            f"-subj /CN={name}",
            self.folder,
        )
        _openssl(
            f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out {name}.pem -days {days} "
            f"-extfile {name}.ext",
            self.folder,
        )
        return str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")


def _openssl(arguments: str, folder: Path) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)


def secure_redis(folder: Path, authority: Authority, certificate: tuple[str, str], *, asks: str) -> OwnRedis:
    """With a certificate and its key; ``asks`` for one of its clients, or not: ``yes``, ``no``."""
    file, key = certificate
    return OwnRedis(
        folder,
        "port 0",
        "tls-port {port}",
        f"tls-cert-file {file}",
        f"tls-key-file {key}",
        f"tls-ca-cert-file {authority.ca}",
        f"tls-auth-clients {asks}",
        f"requirepass {PASSWORD}",
    )
