"""A store whose network can be cut: ``StoreBehindProxy`` is a TCPStore and a TCP proxy in front of it that can freeze."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


class StoreBehindProxy:
    """A store in this process, which ranks reach directly or through a proxy.

    The proxy stops to answer, without closing a connection, when the file ``frozen`` exists: as a network that is cut, or a
    machine without power.

    Args:
        folder: For the file.
    """

    def __init__(self, folder: Path) -> None:
        self.frozen = folder / "frozen"
        self._store: dist.TCPStore | None = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._port = self._store.port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def join(self, *, through_proxy: bool = False) -> None:
        """Sets the environment of a rank, as torchrun's agents do."""
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ["MASTER_PORT"] = str(self._server.getsockname()[1] if through_proxy else self._port)

    def close(self) -> None:
        # Now: a process that is forked later would abort where it collects a server whose thread it does not have.
        self._store = None
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._server.accept()[0]
                store = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, store]
                for source, target in ((client, store), (store, client)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.frozen.exists():
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextmanager
def store_behind_proxy(folder: Path) -> Iterator[StoreBehindProxy]:
    """A store for the block."""
    store = StoreBehindProxy(folder)
    try:
        yield store
    finally:
        store.close()
