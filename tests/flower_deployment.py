# SPDX-License-Identifier: Apache-2.0
"""A deployment of Flower on the loopback: a link with TLS, nodes with keys, runs of an app.

The app is that of the page *Real clients*, with clients that write what they received, and that
fail as their node says.
"""

import datetime
import ipaddress
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "tutorials" / "flower.md"

APP = """
[project]
name = "digits"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "hospitals"

[tool.flwr.app.components]
serverapp = "digits.server:app"
clientapp = "digits.faults:app"

[tool.flwr.app.config]
"""

FAULTS = '''
"""The client of the page, which writes what it received, can be held, and fails by its node."""
import hashlib, pathlib, time
import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from digits.client import app as of_page

app = ClientApp()


@app.train()
def train(message, context):
    node, number = context.node_config, message.content["config"]["server-round"]
    model = message.content["arrays"].to_numpy_ndarrays()
    content = hashlib.sha256(b"".join(array.tobytes() for array in model)).hexdigest()[:12]
    seen = pathlib.Path(node["seen"]) / f"{number} {message.metadata.run_id} {node['client']}"
    seen.write_text(content)
    while (seen.parent.parent / "hold").exists():
        time.sleep(0.1)
    if node["client"] == 3:
        if number % 3 == 0:
            raise RuntimeError("a client fails")
        bad = [np.full_like(model[0], np.nan), model[1]] if number % 3 == 1 else [np.ones((2, 2))]
        return Message(RecordDict({"arrays": ArrayRecord(bad)}), reply_to=message)
    return of_page(message, context)
'''


def port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def certificate(folder):
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "link.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    write_key(folder / "link.key", key, serialization.PrivateFormat.PKCS8)


def write_key(path, key, form):
    nothing = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, nothing))


class Deployment:
    """The processes and files of a deployment in a folder."""

    def __init__(self, folder, clients, **settings):
        self.folder, self.processes, self.began = folder, {}, time.monotonic()
        for name in ("keys", "private", "seen", "home", "digits/digits"):
            (folder / name).mkdir(parents=True)
        certificate(folder)
        for client in range(clients):
            self.make_key(client)
        server, client = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]
        package = folder / "digits" / "digits"
        files = {"__init__.py": "", "server.py": server, "client.py": client, "faults.py": FAULTS}
        for name, text in files.items():
            (package / name).write_text(text)
        settings |= {"keys": f"{folder}/keys", "folder": f"{folder}/run"}
        lines = [f"{name} = {value!r}" for name, value in settings.items()]
        (folder / "digits" / "pyproject.toml").write_text(APP + "\n".join(lines) + "\n")
        self.port = port()
        (folder / "home" / "config.toml").write_text(
            '[superlink]\ndefault = "hospitals"\n\n[superlink.hospitals]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder}/link.pem"\n'
        )
        self.environment = {
            **os.environ,
            "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
            "FLWR_HOME": f"{folder}/home",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "JAX_NUM_CPU_DEVICES": "1",
            "PYTHONWARNINGS": "default",
        }

    def say(self, words):
        print(f"{time.monotonic() - self.began:6.1f} s  {words}", flush=True)

    def make_key(self, client):
        key = ec.generate_private_key(ec.SECP384R1())
        openssh = serialization.PublicFormat.OpenSSH
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, openssh)
        (self.folder / "keys" / f"{client}.pub").write_bytes(public)
        path = self.folder / "private" / str(client)
        write_key(path, key, serialization.PrivateFormat.OpenSSH)

    def begin(self, name, *command):
        log = (self.folder / f"{name}.log").open("a")
        self.processes[name] = subprocess.Popen(
            command, cwd=self.folder, env=self.environment, stdout=log, stderr=log
        )

    def begin_link(self):
        self.begin(
            "link",
            *("flower-superlink", "--host=127.0.0.1", f"--port={self.port}", "--database=link.db"),
            *("--ssl-certfile=link.pem", "--ssl-keyfile=link.key", "--ssl-ca-certfile=link.pem"),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        self.until(self.answers, "the link listens")

    def answers(self):
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0

    def begin_node(self, client, first, last):
        config = f'client={client} first={first} last={last} seen="{self.folder}/seen"'
        self.begin(
            f"node{client}",
            *("flower-supernode", f"--superlink=127.0.0.1:{self.port}", "--host=127.0.0.1"),
            *(f"--port={port()}", "--root-certificates=link.pem"),
            *(f"--auth-supernode-private-key=private/{client}", f"--node-config={config}"),
        )

    def flwr(self, *command):
        done = subprocess.run(
            ["flwr", *command],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, name):
        """Starts a run; its output goes to a log, until the run has ended."""
        self.begin(name, "flwr", "run", "digits", "hospitals", "--stream")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def hold(self):
        """Clients wait from their next message on, so a process can be killed in their round."""
        (self.folder / "hold").touch()

    def release(self):
        (self.folder / "hold").unlink()

    def until(self, holds, what, seconds=300):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"{what}: not within {seconds} s"
            time.sleep(0.2)
        self.say(what)

    def server_app(self):
        """The process of the server app, below the link."""
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                environment = (path.parent / "environ").read_bytes()
            except OSError:
                continue
            is_server = any(word.endswith(b"flwr-serverapp") for word in words)
            if is_server and str(self.folder).encode() in environment:
                return int(path.parent.name)
        return None

    def kill_server_app(self):
        os.kill(self.server_app(), signal.SIGKILL)

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def faults(self, rows):
        """Prints what each round lost and counted."""
        for row in rows:
            seen = row["private"]
            names = ("examples", "missing", "dropped")
            counts = ", ".join(f"{name} {seen[name]:.0f}" for name in names)
            self.say(f"round {row['step']}: epsilon {row['epsilon']:.2f}, {counts}")

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
