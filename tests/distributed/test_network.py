from __future__ import annotations

import socket

import pytest

from dtrain.distributed.network import interface_for_gloo, settle_network

TWO_MACHINES = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_the_ranks_of_one_machine_are_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for environment in ({}, TWO_MACHINES | {"LOCAL_WORLD_SIZE": "4"}):
        before = dict(environment)
        settle_network(environment)
        assert environment == before
    assert capsys.readouterr().out == ""


def test_what_the_user_has_set_stays_and_all_of_it_is_printed_once_a_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    users = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}
    environment = TWO_MACHINES | users
    settle_network(environment)
    assert environment == TWO_MACHINES | users
    shown = "GLOO_SOCKET_IFNAME=eth7 (yours), NCCL_DEBUG=INFO (yours), NCCL_SOCKET_IFNAME=ib0 (yours)"
    assert capsys.readouterr().out == f"network of {socket.gethostname()}: {shown}\n"
    settle_network(environment | {"LOCAL_RANK": "1"})
    assert capsys.readouterr().out == ""


def test_nccl_says_what_is_wrong_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = TWO_MACHINES | {"GLOO_SOCKET_IFNAME": "eth0"}
    settle_network(environment)
    assert environment["NCCL_DEBUG"] == "WARN"


def test_gloo_finds_its_interface_itself_where_the_machines_name_leads_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) is None


def test_gloo_is_kept_off_the_loopback_that_a_machines_own_name_may_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a network nothing can be told, and nothing is set."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) in {None} | {name for _, name in socket.if_nameindex()} - {
        "lo"
    }


def test_names_that_nobody_knows_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert interface_for_gloo({"MASTER_ADDR": "elsewhere"}) != "lo"
