"""transformers' own sharding of a model in memory, whose signature has changed between versions."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """What `from_pretrained(distributed_config=...)` does to a model, on the ranks of a mesh of one dimension."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model._device_mesh = mesh
    model._tp_size = mesh.size()
    plan = signature(apply_tensor_parallelism).parameters.get("tp_plan")
    if plan is None or plan.default is not Parameter.empty:  # up to 5.22
        return apply_tensor_parallelism(model, mesh)
    return apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(dict(model.tp_plan)))
