"""Several ranks on one GPU."""

import torch

from megatron_bapo.parallel.platform import has_gpu


def own_host(rank: int) -> dict[str, str]:
    """Return the environment in which NCCL takes a rank for a host of its own, reached through loopback.

    NCCL refuses two ranks of one host on the same GPU.
    """
    return {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """Return the environment of a rank on this machine, where ranks share a GPU if there are fewer GPUs than ranks."""
    if not has_gpu():
        return {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    num_gpus = torch.cuda.device_count()
    sharing = own_host(rank) if num_gpus < num_ranks else {}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % num_gpus), **sharing}
