"""What NCCL and gloo are told about the network. What the user has set is left as it is; all of it is printed.

* NCCL finds the fast network by itself. ``NCCL_DEBUG=WARN`` makes it say what is wrong instead of hanging in silence.
* gloo takes the interface that this machine's own name stands for. Where that is the loopback, as on a Debian host, the
  other machines cannot connect to it, so that it is given the interface that leads to them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, MutableMapping

_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
_ANYWHERE = "192.0.2.1"  # RFC 5737: nobody has it, so the default route leads to it
_PORT = 9  # nothing is sent
_SIOCGIFADDR = 0x8915  # linux/sockios.h


def settle_network(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets what is not set, and prints all settings, once for each machine; nothing for the ranks of one machine.

    Call it before the process group is made.
    """
    if environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1"):
        return
    users = {name for name in environment if name.startswith(_SHOWN)}
    environment.setdefault("NCCL_DEBUG", "WARN")
    if "GLOO_SOCKET_IFNAME" not in environment and (interface := interface_for_gloo(environment)):
        environment["GLOO_SOCKET_IFNAME"] = interface
    if environment.get("LOCAL_RANK") == "0":
        print(f"network of {socket.gethostname()}: {describe(environment, users)}", flush=True)


def describe(environment: Mapping[str, str], users: set[str]) -> str:
    """``GLOO_SOCKET_IFNAME=eth0, NCCL_SOCKET_IFNAME=ib0 (yours)``."""
    return ", ".join(
        f"{name}={value}{' (yours)' if name in users else ''}"
        for name, value in sorted(environment.items())
        if name.startswith(_SHOWN)
    )


def interface_for_gloo(environment: Mapping[str, str]) -> str | None:
    """The interface towards the other machines; None where gloo finds one, or none can be told.

    Args:
        environment: In which ``MASTER_ADDR`` names one of them.
    """
    if not _is_loopback(_resolved(socket.gethostname()) or "127.0.0.1"):
        return None
    towards = (_resolved(environment.get("MASTER_ADDR", "")), _ANYWHERE)
    local = next((address for other in towards if other and (address := _source(other))), None)
    return _interface_of(local) if local else None


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name) if name else None
    except OSError:
        return None


def _source(other: str) -> str | None:
    """The address of this machine that packets to ``other`` have; None if it is the loopback, or there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, _PORT))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
    return None if _is_loopback(address) else address


def _interface_of(address: str) -> str | None:
    """The interface with this address; None where the system is not Linux."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
