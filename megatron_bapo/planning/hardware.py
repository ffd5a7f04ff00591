"""What GPUs and their nodes can do, from their makers' data sheets, and how much of it a run is assumed to get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_bapo.config.fp8 import ComputeCapability

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    memory_gib: float
    """What the driver reports as usable, less than the advertised decimal gigabytes."""
    bf16_tflops: float
    """Dense, without sparsity."""
    fp8_tflops: float
    """Dense; 0 where there is no FP8."""
    capability: ComputeCapability
    memory_tb_s: float
    nvlink_gb_s: float
    """Each direction."""
    network_gb_s: float
    """Each GPU's share of its node's adapters, each direction."""
    source: str


GpuName = Literal["A100", "H100", "H200", "B200"]
GPUS: dict[GpuName, Gpu] = {
    "A100": Gpu(79.2, 312, 0, (8, 0), 2.04, 300, 25, "NVIDIA A100 80GB SXM and DGX A100 data sheets"),
    "H100": Gpu(79.2, 989, 1979, (9, 0), 3.35, 450, 50, "NVIDIA H100 SXM and DGX H100 data sheets"),
    "H200": Gpu(139.8, 989, 1979, (9, 0), 4.8, 450, 50, "NVIDIA H200 SXM and DGX H200 data sheets"),
    "B200": Gpu(178.4, 2250, 4500, (10, 0), 7.7, 900, 50, "NVIDIA HGX B200 and DGX B200 data sheets"),
}
DEVICE_NAMES: dict[str, GpuName] = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}
"""Of the boards with this type's arithmetic, as their driver names them. Not of H100 PCIe, NVL and GH200 or of MIG
slices, which have another peak."""


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOPs a second of the GPU that torch and NVML call so; None of one that is not known."""
    name = DEVICE_NAMES.get(device_name)
    return None if name is None else GPUS[name].bf16_tflops * 1e12


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says. Each stands in the plan's output; the first ones are options of the command."""

    compute_efficiency: float = 0.55
    """Of the dense peak, in matrix products and attention, the small kernels between them included; plain matrix
    products of the trainer's sizes reach 0.8 on an H200. Model FLOPs utilisation comes out lower."""
    fp8_efficiency: float = 0.4
    """Of the dense FP8 peak, in matrix products with weights, quantising of activations and gradients included."""
    memory_efficiency: float = 0.65
    """Of the memory bandwidth, while an engine decodes."""
    link_efficiency: float = 0.7
    """Of NVLink's and the network's bandwidth, in collectives."""
    overlap: float = 0.8
    """Part of the data-parallel communication that overlap_grad_reduce and overlap_param_gather hide."""
    mean_prompt_fraction: float = 0.25
    """Mean prompt over data.max_prompt_length."""
    mean_response_fraction: float = 0.5
    """Mean answer over rollout.max_response_length."""
    square_over_mean: float = 4 / 3
    """Mean square of the lengths over the square of their mean; 4/3 where they are spread evenly from 0."""
    packing_efficiency: float = 0.95
    """Real tokens in a full micro-batch."""
    expert_imbalance: float = 1.3
    """Tokens of the busiest expert-parallel rank over the mean."""
    reserved_gib: float = 3.0
    """On each GPU for the CUDA context, NCCL's buffers and cuBLAS' workspaces."""
    fragmentation: float = 0.05
    """Part of the activations that the allocator loses between them."""
    engine_workspace_gib: float = 4.0
    """vLLM's activations, CUDA graphs and sampling, beside weights and KV cache."""
    sleeping_engine_gib: float = 1.5
    """What a sleeping engine keeps of its GPU: its context and graphs."""
    decode_overhead_ms: float = 4.0
    """Of each decoding step, for launching, sampling and scheduling."""
    host_copy_gb_s: float = 20.0
    """Between a GPU and pinned host memory."""
    store_gb_s: float = 10.0
    """Of one node, into its weight store or out of it, checksums included."""
    host_adam_gb_s: float = 25.0
    """Host memory bandwidth of one rank's offloaded Adam, which moves 32 bytes per parameter."""
    process_gib: float = 6.0
    """Host memory of one trainer or engine process beside everything named."""
    host_memory_gib: float = 1800.0
    """Of one node; a DGX H100 has 2 TB."""
    gpus_per_node: int = 8
