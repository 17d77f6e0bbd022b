"""The ranks of a pipeline that has not all of them: a group, or one dimension of a device mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:  # its import is slow, and a caller with a mesh has imported it
    from torch.distributed.device_mesh import DeviceMesh


def members_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group of the ranks of a pipeline; None: all ranks.

    Raises:
        TypeError: not a mesh or group, such as torch's value for a rank that is in no group.
        ValueError: both were given, the mesh has several dimensions, or this rank is not in it.
    """
    if mesh is not None and group is not None:
        raise ValueError("mesh and group both say which ranks this pipeline has: give one of the two")
    if mesh is not None:
        return _of_mesh(mesh)
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed process group that this rank is in, not {group!r}"
        )
    return group


def _of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "get_group"):
        raise TypeError(
            f"mesh must be a torch.distributed.device_mesh.DeviceMesh, as device_mesh['pp'], not {mesh!r}"
        )
    if mesh.ndim != 1:
        which = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, by name"
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions ({', '.join(names) if names else 'without names'}), and a pipeline "
            f"takes the one along which its stages lie: pass it alone, such as {which}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in {mesh}: make its Pipeline with the mesh that it is in"
        )
    return mesh.get_group()


def whole_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` is a dimension of."""
    # Private, and the only way back: the tests run it under the oldest torch and the newest.
    return mesh._get_root_mesh()
