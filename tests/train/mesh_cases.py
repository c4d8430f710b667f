"""What a rank of a gang says of its mesh."""

import torch

from hone.train.mesh import make_mesh


def timeouts():
    """Seconds that collectives of each group wait."""
    cpu = torch.device("cpu")
    mesh = make_mesh(cpu, tensor_parallel=2)
    groups = [*mesh.samples.get_all_groups(), mesh.sharding.get_group(), mesh.tensor.get_group()]
    return {group._get_backend(cpu).options._timeout.total_seconds() for group in groups}
