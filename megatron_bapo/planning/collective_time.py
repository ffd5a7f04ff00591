"""Seconds of a layer's collectives for one micro-batch (arXiv 2205.05198 for tensor and sequence parallelism)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import Config
from megatron_bapo.planning.collectives import (
    BLOCK_UNITS,
    attention_inputs,
    hidden_bytes,
    key_value_bytes,
    num_mlps,
    swapped_bytes,
)
from megatron_bapo.planning.hardware import Assumptions, Gpu
from megatron_bapo.planning.layer_time import ExpertSplit, reached
from megatron_bapo.planning.precision import DTYPE_BYTES

LATENCY_S = 12e-6
"""Latency of one small all-reduce within a node."""
NETWORK_LATENCY_S = 100e-6
"""Latency of one small collective between nodes, estimated from the published runs with engines on two nodes."""


@dataclass(frozen=True)
class Links:
    """Bandwidth in bytes per second and the hosts that a group of ranks spans."""

    gpu: Gpu
    assumptions: Assumptions
    ranks_per_node: int

    @classmethod
    def of_trainer(cls, config: Config, gpu: Gpu, assumptions: Assumptions) -> Self:
        """Return the links of trainer ranks, which are spread evenly over as few nodes as have enough GPUs."""
        world_size = config.parallel.world_size
        return cls(gpu, assumptions, world_size // -(-world_size // assumptions.gpus_per_node))

    @property
    def inside(self) -> float:
        return self.gpu.nvlink_gb_s * 1e9 * self.assumptions.link_efficiency

    @property
    def across(self) -> float:
        return self.gpu.network_gb_s * 1e9 * self.assumptions.link_efficiency

    def is_inside(self, span: int) -> bool:
        """Whether each group of `span` consecutive ranks is on one node, and none is on the border of two."""
        return self.ranks_per_node % span == 0

    def bandwidth(self, span: int) -> float:
        """Return the bandwidth of a ring over a group of `span` consecutive ranks."""
        return self.inside if self.is_inside(span) else self.across

    def latency(self, span: int) -> float:
        """Return the latency of one small collective of such a group, in seconds."""
        return LATENCY_S if self.is_inside(span) else NETWORK_LATENCY_S

    def seconds(self, num_bytes: float, span: int, num_messages: float = 1) -> float:
        """Return the time of a ring collective or a transfer of a group of `span` consecutive ranks."""
        return num_bytes / self.bandwidth(span) + num_messages * self.latency(span)


def tensor_seconds(config: Config, arch: Architecture, links: Links, tokens: float) -> float:
    """Return the exposed seconds of the mean layer's tensor parallelism in one pass.

    A forward pass gathers the hidden states before each block and scatters them behind it (or reduces them), and so
    does a backward pass.
    """
    tp, num_layers = config.parallel.tensor_model_parallel_size, arch.num_hidden_layers
    if tp == 1:
        return 0.0
    num_units = 1 + attention_inputs(arch) / arch.hidden_size
    num_units += BLOCK_UNITS * sum(num_mlps(arch, range(num_layers))) / num_layers
    num_bytes = num_units * hidden_bytes(arch, tokens, DTYPE_BYTES[config.model.dtype]) * (tp - 1) / tp
    return links.seconds(num_bytes, tp, num_messages=num_units) * (1 - links.assumptions.tensor_overlap)


def context_seconds(config: Config, arch: Architecture, links: Links, tokens: float, attention: float) -> float:
    """Return the exposed seconds of context parallelism in one forward pass through the mean layer.

    Attention exchanges keys and values. Ring attention exchanges the next part while it computes `attention` seconds;
    other kinds wait. A Gated DeltaNet exchanges tokens for heads.
    """
    parallel = config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    if cp == 1:
        return 0.0
    keys = key_value_bytes(arch, parallel, tokens, DTYPE_BYTES[config.model.dtype])
    seconds = links.seconds(keys * (cp - 1), tp * cp, num_messages=cp - 1)
    is_ring = parallel.cp_comm_type == "p2p" and config.model.transformer_impl == "transformer_engine"
    seconds = max(0.0, seconds - attention * links.assumptions.overlap) if is_ring else seconds
    if not arch.linear_share:
        return seconds
    swapped = swapped_bytes(arch, tp, tokens, DTYPE_BYTES[config.model.dtype]) * (cp - 1) / cp
    linear = links.seconds(swapped, tp * cp, num_messages=2)
    return seconds * (1 - arch.linear_share) + linear * arch.linear_share


def expert_seconds(config: Config, arch: Architecture, links: Links, tokens: float) -> float:
    """Return the exposed seconds of dispatching a layer's tokens to their experts and back, in one pass.

    Of `ep` expert-parallel ranks only those on other hosts are reached over the network: (ep - 8) / ep of the traffic
    with hosts of 8 GPUs. Both links work at the same time. `tokens` are those that the rank routes.
    """
    split, per_host = ExpertSplit.of(config.parallel), links.ranks_per_node
    ep, etp, chosen = split.expert, split.expert_tensor, arch.num_experts_per_tok
    if ep * etp == 1:
        return 0.0
    ranks_on_host = max(1.0, min(ep, per_host / etp))
    near, far = chosen * (ranks_on_host - 1) / ep, chosen * (ep - ranks_on_host) / ep
    if links.assumptions.dispatcher != "alltoall":
        hosts = ep / ranks_on_host
        far, near = (hosts - 1) * reached(arch, hosts), (ranks_on_host - 1) * reached(arch, ep)
    sent = hidden_bytes(arch, tokens, DTYPE_BYTES[config.model.dtype]) * links.assumptions.expert_imbalance
    seconds = 2 * max(sent * (near + chosen * (etp - 1)) / links.inside, sent * far / links.across)
    latency = NETWORK_LATENCY_S if far else LATENCY_S
    return (seconds + 2 * latency) * (1 - links.assumptions.expert_overlap)


def stage_seconds(config: Config, arch: Architecture, links: Links, tokens: float) -> float:
    """Return the exposed seconds in which a micro-batch passes to and from neighbouring stages, in one pass."""
    parallel = config.parallel
    pp, vpp = parallel.pipeline_model_parallel_size, parallel.virtual_pipeline_model_parallel_size
    if pp == 1:
        return 0.0
    split = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    num_bytes = hidden_bytes(arch, tokens / split, DTYPE_BYTES[config.model.dtype]) * vpp
    stage_ranks = parallel.world_size // pp  # they are consecutive
    span = 1 if stage_ranks < links.ranks_per_node else parallel.world_size
    seconds = links.seconds(num_bytes, span, num_messages=vpp)
    return seconds * (1 - links.assumptions.overlap) if vpp > 1 else seconds
