"""Worker that only reports its location. Importing it costs a process nothing."""

from __future__ import annotations

import ray

from megarl.controller.worker import Worker, register


class WhereWorker(Worker):
    @register()
    def where(self) -> tuple[str, str]:
        """Return Ray's id of the node, and the GPUs that the process sees."""
        return ray.get_runtime_context().get_node_id(), self.visible_gpus()
