"""Files of kernels that another machine has built, and a web server that has such a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from service import identity
from service import kernels as service_kernels
from tests.support.machines import MEMBERS, Machine
from tuner.compile import Pack, kernels_file
from tuner.store import Store


def build(there: Machine, *packs: Pack) -> Path:
    """A file of kernels that the other machine wrote."""
    target = there.settings.packs.parent / "made.gskernels"
    manifests = dict(there.packs.manifests())
    held = {pack.hash: (pack.path, manifests[pack.hash]) for pack in packs}
    signer = identity.signer(there.settings)
    kernels_file.write(target, held, arch="sm90", signer=signer)
    return target


def install(machine: Machine, source: object) -> service_kernels.Installed:
    with Store.open(machine.settings.database) as store:
        return service_kernels.install(machine.settings, store, str(source))


def names(machine: Machine) -> set[str]:
    """The kernels whose packs lookups of this machine name."""
    with Store.open(machine.settings.database) as store:
        return {kernel.name for kernel in MEMBERS if store.pack_for(kernel.name)}


def files(machine: Machine) -> set[str]:
    return machine.files() if machine.settings.packs.exists() else set()


class Site:
    """A web server with a file; `sent` counts its bytes, `asked` has the requests' headers."""

    def __init__(self, content: bytes, answer: str = "file") -> None:
        self.sent, self.asked = 0, list[dict[str, str]]()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append({"path": self.path, **dict(self.headers)})
                if answer.startswith("http"):
                    self.send_response(302)
                    self.send_header("location", answer)
                    self.end_headers()
                    return
                self.send_response(404 if answer == "missing" else 200)
                self.send_header("content-length", str(len(content)))
                if answer == "gzip":
                    self.send_header("content-encoding", "gzip")
                self.end_headers()
                end = len(content) // 2 if answer in ("cut", "stalled") else len(content)
                for begin in range(0, end, 2**12):
                    self.wfile.write(piece := content[begin : min(begin + 2**12, end)])
                    site.sent += len(piece)
                    time.sleep(0.002 if answer == "slow" else 0)
                if answer == "stalled":
                    self.wfile.flush()
                    threading.Event().wait(2)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign,assignment]
        self.url = f"http://127.0.0.1:{self.server.server_port}/made.gskernels?version=1"


@contextmanager
def site(content: bytes, answer: str = "file") -> Iterator[Site]:
    made = Site(content, answer)
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        made.server.server_close()
        thread.join()
