"""Continue a run that has lost a node with fewer data-parallel replicas (`recovery.allow_fewer_replicas`).

The run starts again in this process, on the nodes that are left, from the newest snapshot in memory, or from
its last checkpoint. Both can be loaded in any layout.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence

from megarl.cli.run.context import RunFailedError, locked_folders, run_elsewhere
from megarl.config.load import plain_values
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.controller.restarts import NodeLostError
from megarl.doctor.checks import load_for_run
from megarl.machine.errors import ConfigError

_log = logging.getLogger(__name__)


def on_fewer_nodes(config: RunConfig) -> list[str] | None:
    """Return the overrides with which a run fits on one node less, or on as many fewer as are needed.

    Every role with a layout of its own keeps its number of replicas per node. None if there is no such
    number of nodes.
    """
    num_nodes = config.placement.num_nodes
    sizes = {
        f"{role.parallel_key}.data_parallel_size": role.parallel.data_parallel_size
        for role in model_roles(config)
    }

    for fewer in range(num_nodes - 1, 0, -1):
        if all(size * fewer % num_nodes == 0 for size in sizes.values()):
            of_roles = {key: size * fewer // num_nodes for key, size in sizes.items()}
            return [f"placement.num_nodes={fewer}", *_overrides(config, of_roles)]

    return None


def _overrides(config: RunConfig, sizes: Mapping[str, int]) -> list[str]:
    """Return overrides that set these keys. The teachers of data sources are given as a whole list."""
    changed = [f"{key}={size}" for key, size in sizes.items() if not key.startswith("teachers[")]
    if len(changed) == len(sizes):
        return changed
    teachers = plain_values(config)["teachers"]
    for index, teacher in enumerate(teachers):
        key = f"teachers[{index}].parallel.data_parallel_size"
        teacher["parallel"]["data_parallel_size"] = sizes[key]
    return [*changed, f"teachers={json.dumps(teachers)}"]


def continues_on_fewer_nodes(config: RunConfig, error: BaseException | None) -> bool:
    """Return whether a run that ends with `error` starts again with fewer replicas."""
    is_allowed = config.recovery.enabled and config.recovery.allow_fewer_replicas
    return is_allowed and isinstance(error, NodeLostError) and on_fewer_nodes(config) is not None


def run_with_fewer_replicas[Run: RunConfig](
    schema: type[Run], source: str, overrides: Sequence[str], train: Callable[[Run], int]
) -> int:
    """Load a configuration and train, after the loss of a node with fewer replicas if that is allowed.

    Raises:
        ValueError: The configuration is invalid, or another process uses a folder of the run. Raised before
            anything is started or changed.
        RunFailedError: The run has failed for another reason, or its batch cannot be divided among fewer
            replicas.
    """
    config = load_for_run(schema, source, overrides)
    if elsewhere := run_elsewhere(source, config):
        _log.warning("%s", elsewhere)
    with locked_folders(config):
        while True:
            try:
                return train(config)
            except RunFailedError as failed:
                if not continues_on_fewer_nodes(config, failed.error):
                    raise
                smaller = on_fewer_nodes(config) or []
                overrides = [*overrides, *smaller]
                try:
                    config = load_for_run(schema, source, overrides)
                except ConfigError as error:
                    raise failed from error
                _log.warning("%s\nthe run continues with %s", failed.error, " ".join(smaller))
