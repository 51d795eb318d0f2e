"""SageMaker's and Vertex AI's variables as torchrun's; what is unclear is refused by name and value."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dtrain.distributed.services import check_gpus, join_service
from dtrain.errors import ConfigError
from tests.refusals import refused

SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-3"}
POOLS = {
    "workerpool0": ["job-workerpool0-0:2222"],
    "workerpool1": ["job-workerpool1-0:2222", "job-workerpool1-1:2222"],
    "workerpool3": ["job-workerpool3-0:2222"],  # an evaluator
}


def vertex(pool: str = "workerpool0", index: Any = 0, **pools: list[str]) -> dict[str, str]:
    task = {"type": pool, "index": index, "trial": ""}
    return {"CLUSTER_SPEC": json.dumps({"cluster": pools or POOLS, "environment": "cloud", "task": task})}


def joined(environment: dict[str, str]) -> dict[str, str]:
    """What ``join_service`` sets."""
    after = dict(environment)
    join_service(after)
    assert environment.items() <= after.items()
    return {name: value for name, value in after.items() if name not in environment}


def machines(number: int, place: int, host: str, port: str) -> dict[str, str]:
    named = {"PET_NNODES": str(number), "PET_NODE_RANK": str(place)}
    return named | {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port}


def test_the_hosts_of_sagemaker_are_machines() -> None:
    assert joined(SAGEMAKER) == machines(3, 2, "algo-1", "29500")
    one = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    assert joined(one) == machines(1, 0, "algo-1", "29500")


@pytest.mark.parametrize(
    ("pool", "index", "place"), [("workerpool0", 0, 0), ("workerpool1", 0, 1), ("workerpool1", 1, 2)]
)
def test_the_first_two_pools_of_vertex_ai_are_machines(pool: str, index: int, place: int) -> None:
    assert joined(vertex(pool, index)) == machines(3, place, "job-workerpool0-0", "2222")
    assert joined(vertex("workerpool0", "0", workerpool0=["a:1"])) == machines(1, 0, "a", "1")


def test_variables_of_torchrun_come_first() -> None:
    assert joined(SAGEMAKER | {"PET_NNODES": "2"}) == {}
    assert joined(vertex() | {"RANK": "1", "LOCAL_RANK": "0"}) == {}  # a process of torchrun
    assert joined({}) == {}
    port = {"PET_MASTER_PORT": "4000"}
    assert joined(SAGEMAKER | port) == {name: it for name, it in joined(SAGEMAKER).items() if name not in port}


@pytest.mark.parametrize("hosts", ["algo-1,algo-2", "", "[]", "[1, 2]", '{"hosts": ["algo-1"]}', '"algo-1"'])
def test_hosts_that_are_no_list_of_names_are_refused(hosts: str) -> None:
    with refused(ConfigError, "SM_HOSTS", hosts or "nothing", "JSON list", "PET_NNODES"):
        join_service({"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-1"})


@pytest.mark.parametrize("current", ["algo-9", ""])
def test_a_machine_that_is_not_among_the_hosts_is_refused(current: str) -> None:
    with refused(ConfigError, "SM_CURRENT_HOST", current or "nothing", SAGEMAKER["SM_HOSTS"]):
        join_service(SAGEMAKER | {"SM_CURRENT_HOST": current})


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "workerpool0",
        "{}",
        '{"cluster": ["a:1"], "task": {"type": "workerpool0", "index": 0}}',
        '{"cluster": {"workerpool0": ["a:1"]}}',
        '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": "first"}}',
        '{"cluster": {"workerpool0": [1]}, "task": {"type": "workerpool0", "index": 0}}',
    ],
)
def test_a_cluster_that_is_not_as_documented_is_refused(spec: str) -> None:
    with refused(ConfigError, "CLUSTER_SPEC", spec or "nothing", "workerpool0", "unset"):
        join_service({"CLUSTER_SPEC": spec})


@pytest.mark.parametrize(("pool", "index"), [("workerpool3", 0), ("workerpool1", 2), ("workerpool1", -1), ("chief", 0)])
def test_a_task_that_does_not_train_is_refused(pool: str, index: int) -> None:
    environment = vertex(pool, index)
    with refused(ConfigError, "CLUSTER_SPEC", environment["CLUSTER_SPEC"], "workerpool0 or workerpool1"):
        join_service(environment)


def test_gpus_that_torch_does_not_see_are_refused_unless_they_are_hidden() -> None:
    with refused(ConfigError, "SM_NUM_GPUS", "8", "no GPUs", "CUDA_VISIBLE_DEVICES="):
        check_gpus(0, {"SM_NUM_GPUS": "8"})
    with refused(ConfigError, "SM_NUM_GPUS", "8", "1 GPU."):
        check_gpus(1, {"SM_NUM_GPUS": "8"})
    assert check_gpus(0, {"SM_NUM_GPUS": "8", "CUDA_VISIBLE_DEVICES": ""}) == 0
    assert check_gpus(8, {"SM_NUM_GPUS": "8"}) == check_gpus(8, {}) == check_gpus(8, {"SM_NUM_GPUS": "0"}) == 8
