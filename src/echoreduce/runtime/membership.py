"""A process group that this rank belongs to, or the reason why there is none; shared by all backends over real processes."""

from __future__ import annotations

import torch.distributed as dist

from echoreduce.errors import GroupError


def member_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group (None: the default one), if this rank is a member of it.

    Raises:
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise GroupError("torch.distributed is not initialized; call torch.distributed.init_process_group first")
    members = dist.group.WORLD if group is None else group
    if members is None or dist.get_rank(members) < 0:
        raise GroupError(f"global rank {dist.get_rank()} is not a member of the group that it was given")
    return members
