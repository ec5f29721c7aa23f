"""Real servers for the tests, each on a free port of this machine, with its own folder as home: MLflow in every form in which
it is set up, PostgreSQL, and the certificates of a private authority. Each is stopped by its own process id.
"""

import datetime as dt
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ADMIN, PASSWORD = "admin", "correct horse 1"
_SETTINGS = ("MLFLOW_", "SPOOL_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "REQUESTS_CA_BUNDLE", "PG")


def clean_environment(home: Path) -> dict[str, str]:
    """This process's environment without anybody's settings, at home in a folder of the test."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(_SETTINGS)}
    return kept | {
        "HOME": str(home),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_database(uri: str, folder: Path) -> None:
    """MLflow's tables, in an empty database."""
    program = f"from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore as S; S({uri!r}, './mlruns')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=clean_environment(folder), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


class Server:
    """`mlflow server`. Without `backend`, its database is `mlflow.db` in `folder`, which may be there already."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        backend: str | None = None,
        prefix: str = "",
        certificate: "Certificate | None" = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder, self.prefix, self.certificate = folder, prefix, certificate
        self.port = free_port()
        self.uri = f"{'https' if certificate else 'http'}://127.0.0.1:{self.port}{prefix}"
        self._environment = clean_environment(folder) | (environment or {})
        self._command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["--workers", "1", "--backend-store-uri", backend or f"sqlite:///{folder}/mlflow.db"]
        self._command += ["--artifacts-destination", str(folder / "artifacts"), *arguments]
        if prefix:
            self._command += ["--static-prefix", prefix]
        if certificate:
            options = f"--ssl-keyfile {certificate.key} --ssl-certfile {certificate.path}"
            self._command += ["--uvicorn-opts", options]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Server":
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        context = ssl.create_default_context(cafile=self.certificate.authority) if self.certificate else None
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        until = time.monotonic() + 90
        while True:
            try:
                direct.open(f"{self.uri}/health", timeout=5).close()
            except urllib.error.HTTPError:
                return self  # it answers
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                log_text = (self.folder / "server.log").read_text
                assert self.process.poll() is None, log_text()
                assert time.monotonic() < until, log_text()
                time.sleep(0.1)
            else:
                return self

    def kill(self) -> None:
        """SIGKILL to it and to the workers it started, which are a session of their own."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def running(server: Server) -> Iterator[Server]:
    try:
        yield server.start()
    finally:
        server.kill()


# --- PostgreSQL


def postgres_programs() -> Path | None:
    """Where `initdb` and `postgres` are: Debian keeps them out of PATH."""
    if (found := shutil.which("initdb")) and shutil.which("postgres"):
        return Path(found).parent
    return max(Path("/usr/lib/postgresql").glob("*/bin"), default=None, key=lambda path: float(path.parent.name))


class Postgres:
    """A cluster of its own in a folder of its own; as root it runs as the user `postgres`, since it refuses root."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._user = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        self.folder = Path(tempfile.mkdtemp(prefix="spool-postgres-"))  # its user must be able to walk there
        if self._user:
            shutil.chown(self.folder, "postgres", "postgres")
        self.port = free_port()
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LC_ALL": "C.UTF-8"}
        self._options = {"cwd": self.folder, "env": environment, **self._user}
        initdb = [
            programs / "initdb",
            "-D",
            self.folder / "data",
            "-U",
            "mlflow",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        done = subprocess.run(initdb, capture_output=True, check=False, **self._options)
        assert done.returncode == 0, done.stderr.decode()
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "max_connections": 50,
        }
        command = [programs / "postgres", "-D", self.folder / "data", "-p", str(self.port)]
        command += [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **self._options)
        until = time.monotonic() + 60
        while True:
            try:
                self.run("select 1")
            except AssertionError as error:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                if time.monotonic() > until:
                    raise AssertionError("PostgreSQL does not come up") from error
                time.sleep(0.1)
            else:
                return

    def run(self, statement: str, database: str = "postgres") -> str:
        command = [
            self._psql(),
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-U",
            "mlflow",
            "-d",
            database,
            "-Atc",
            statement,
        ]
        done = subprocess.run(command, capture_output=True, check=False, text=True, **self._options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _psql(self) -> str | Path:
        return self._programs / "psql" if (self._programs / "psql").exists() else "psql"

    def new_database(self, name: str, template: str = "template1") -> str:
        """Its address."""
        self.run(f"create database {name} template {template}")
        return f"postgresql+psycopg2://mlflow@127.0.0.1:{self.port}/{name}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)  # its "fast shutdown": ends what is open
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder)


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Skips where it is not installed."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    postgres = Postgres(programs)
    try:
        yield postgres
    finally:
        postgres.stop()


# --- TLS


@dataclass(frozen=True)
class Certificate:
    path: Path
    key: Path
    authority: Path


def make_certificate(folder: Path, *names: str) -> Certificate:
    """A server's certificate for 127.0.0.1 and `names`, signed by an authority that only `authority` knows."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = dt.datetime.now(dt.timezone.utc)
    authority_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())

    def signed(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = x509.CertificateBuilder(name("test authority"), name(subject), key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - dt.timedelta(days=1))
        builder = builder.not_valid_after(now + dt.timedelta(days=2))
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=None,
        decipher_only=None,
    )
    alternatives = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *(x509.DNSName(one) for one in names)]
    found = Certificate(folder / "server.pem", folder / "server.key", folder / "authority.pem")
    found.authority.write_bytes(
        signed(
            "test authority",
            authority_key,
            (x509.BasicConstraints(True, None), True),
            (usage, True),
            (identifier, False),
        )
    )
    found.path.write_bytes(
        signed(
            "server",
            server_key,
            (x509.SubjectAlternativeName(alternatives), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), False),
        )
    )
    private = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    found.key.write_bytes(server_key.private_bytes(*private))
    return found
