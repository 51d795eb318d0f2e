"""The machines of a training job of SageMaker or Vertex AI: the service's variables as those of torchrun.

Such a service starts the same command on every machine and describes the machines in its own environment variables.
``join_service`` translates them into ``PET_*``, the variables from which torchrun takes its options, so that the rest of
dtrain, and torchrun itself, read only those:

* SageMaker: ``SM_HOSTS``, the names of all machines, and ``SM_CURRENT_HOST``, the name of this one.
* Vertex AI: ``CLUSTER_SPEC``, the machines of each worker pool and the place of this one. ``workerpool0`` and ``workerpool1``
  train; the service reserves the other pools for parameter servers, reduction servers and evaluators.

Imports nothing heavy: it runs before torchrun.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from dtrain.errors import ConfigError

_PORT = "29500"  # torchrun's default. SageMaker names no port
_POOLS = ("workerpool0", "workerpool1")


def join_service(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets ``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR`` and ``PET_MASTER_PORT`` on a machine of such a service.

    Args:
        environment: Of this process. Nothing is changed if ``PET_NNODES`` is set, or in a process that torchrun has started.
            ``PET_MASTER_PORT`` stays if set.

    Raises:
        ConfigError: If a variable of the service is not what the service documents; names it and its value.

    Example:
        >>> environment = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
        >>> join_service(environment)
        >>> environment["PET_NODE_RANK"], environment["PET_MASTER_ADDR"]
        ('1', 'algo-1')
    """
    if "PET_NNODES" in environment or "LOCAL_RANK" in environment:
        return
    if "SM_HOSTS" in environment:
        machines, place = _of_sagemaker(environment)
    elif "CLUSTER_SPEC" in environment:
        machines, place = _of_vertex(environment["CLUSTER_SPEC"])
    else:
        return
    host, _, port = machines[0].partition(":")
    environment.setdefault("PET_MASTER_PORT", port or _PORT)
    environment.update(PET_NNODES=str(len(machines)), PET_NODE_RANK=str(place), PET_MASTER_ADDR=host)


def check_gpus(found: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns ``found``, the number of GPUs that torch sees.

    Raises:
        ConfigError: If ``SM_NUM_GPUS`` says that the machine has more, and nobody has hidden them: a job on an expensive
            machine would train on its CPU.
    """
    promised = environment.get("SM_NUM_GPUS", "0")
    if promised.isdecimal() and int(promised) > found and "CUDA_VISIBLE_DEVICES" not in environment:
        raise ConfigError(
            f"SM_NUM_GPUS: got {promised}, but torch sees {found or 'no'} GPU{'' if found == 1 else 's'}. Use an image with a "
            "torch for the CUDA of this machine, or set CUDA_VISIBLE_DEVICES= to train on the CPU."
        )
    return found


def _of_sagemaker(environment: Mapping[str, str]) -> tuple[list[str], int]:
    """All machines, and the place of this one among them."""
    text = environment["SM_HOSTS"]
    hosts = _json(text)
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise _unclear("SM_HOSTS", text, 'a JSON list of names such as ["algo-1", "algo-2"]', "SageMaker")
    current = environment.get("SM_CURRENT_HOST", "")
    if current not in hosts:
        raise _unclear("SM_CURRENT_HOST", current, f"one of SM_HOSTS, {text}", "SageMaker")
    return hosts, hosts.index(current)


def _of_vertex(text: str) -> tuple[list[str], int]:
    """``HOST:PORT`` of all machines that train, and the place of this one among them."""
    spec = _json(text)
    try:
        pools: list[list[str]] = [list(spec["cluster"].get(pool, ())) for pool in _POOLS]
        pool, index = spec["task"]["type"], int(spec["task"]["index"])
        is_clear = all(isinstance(machine, str) and machine for pool in pools for machine in pool)
    except (KeyError, TypeError, ValueError, AttributeError):
        is_clear, pool, index, pools = False, "", 0, []
    wanted = 'JSON such as {"cluster": {"workerpool0": ["HOST:2222"]}, "task": {"type": "workerpool0", "index": 0}}'
    if not is_clear:
        raise _unclear("CLUSTER_SPEC", text, wanted, "Vertex AI")
    if pool not in _POOLS or not 0 <= index < len(pools[_POOLS.index(pool)]):
        raise _unclear("CLUSTER_SPEC", text, f"a task in {' or '.join(_POOLS)} that its cluster has", "Vertex AI")
    return [machine for pool in pools for machine in pool], index + (len(pools[0]) if pool == _POOLS[1] else 0)


def _json(text: str) -> Any:
    """The value; None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _unclear(name: str, got: str, want: str, service: str) -> ConfigError:
    return ConfigError(
        f"{name}: got {got or 'nothing'}, want {want}. {service} sets it; elsewhere, unset it, or set PET_NNODES and the other "
        "variables of torchrun yourself."
    )
