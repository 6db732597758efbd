"""The environment of a run's processes: the user's values come before megarl's, and all are documented."""

import re
from pathlib import Path

import psutil

from megarl.controller.environment import (
    SETTINGS,
    Where,
    daemon_settings,
    describe,
    fill_in,
    interface_of,
    users_settings,
    weight_group_settings,
)

DOCS = Path(__file__).parents[3] / "docs" / "launch.md"


def test_what_nobody_has_set_is_filled_in_and_nothing_else() -> None:
    environment = {"NCCL_DEBUG": "INFO", "PATH": "/bin"}
    fill_in(environment, "127.0.0.1", use_gpu=True)
    loopback = interface_of("127.0.0.1")
    assert environment == {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_SOCKET_IFNAME": loopback,
        "GLOO_SOCKET_IFNAME": loopback,
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1800",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment = {}
    fill_in(environment, "127.0.0.1", use_gpu=False)
    assert environment == {
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "LRU_CACHE_CAPACITY": "128",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_an_interface_is_the_one_with_the_address() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family.name == "AF_INET":
                assert entry.address in [
                    other.address for other in psutil.net_if_addrs()[interface_of(entry.address)]
                ], name
    assert interface_of("192.0.2.1") is None  # reserved for documentation


def test_an_unknown_interface_is_left_to_the_libraries() -> None:
    environment: dict[str, str] = {}
    fill_in(environment, "192.0.2.1", use_gpu=True)
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & environment.keys()


def test_what_the_user_set_goes_to_the_workers() -> None:
    environment = {
        "NCCL_IB_HCA": "mlx5",
        "OMP_NUM_THREADS": "4",
        "RAY_enable_worker_prestart": "1",
        "HOME": "/root",
    }
    assert users_settings(environment) == {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "4"}
    rows = {name: (value, by) for name, value, by in describe(False, list(Where), environment)}
    assert rows["NCCL_IB_HCA"] == ("mlx5", "yours")
    assert rows["OMP_NUM_THREADS"] == ("4", "yours")
    assert rows["RAY_USAGE_STATS_ENABLED"] == ("0", "megarl's")
    assert "NCCL_DEBUG" not in rows
    assert "RAY_USAGE_STATS_ENABLED" in daemon_settings()


def test_only_ranks_that_join_groups_with_engines_get_their_variables() -> None:
    assert weight_group_settings({}) == {"NCCL_CUMEM_ENABLE": "0"}
    assert weight_group_settings({"NCCL_CUMEM_ENABLE": "1"}) == {}
    with_groups = {name: value for name, value, _ in describe(True, list(Where), {})}
    assert with_groups["NCCL_CUMEM_ENABLE"] == "0"
    others = [where for where in Where if where is not Where.weight_group_workers]
    assert "NCCL_CUMEM_ENABLE" not in [name for name, _, _ in describe(True, others, {})]
    assert ("NCCL_CUMEM_ENABLE", "1", "yours") in describe(True, others, {"NCCL_CUMEM_ENABLE": "1"})
    assert "NCCL_CUMEM_ENABLE" not in [name for name, _, _ in describe(False, list(Where), {})]


def test_the_documentation_has_the_table() -> None:
    rows = re.findall(r"^\| `([A-Za-z_]+)` \| (.+?) \| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {name: (value.strip("`"), where, why) for name, value, where, why in rows}
    expected = {
        name: (setting.value or "the interface of the node's address", setting.where.value, setting.why)
        for name, setting in SETTINGS.items()
    }
    assert documented == expected
