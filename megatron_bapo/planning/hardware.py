"""Peak performance of GPUs and nodes from the vendors' data sheets, and the assumed efficiencies of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_bapo.config.fp8 import ComputeCapability

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of one GPU type."""

    memory_gib: float
    """Memory that the driver reports as usable; less than the advertised decimal gigabytes."""
    bf16_tflops: float
    """Dense peak in bfloat16, without sparsity."""
    fp8_tflops: float
    """Dense peak in FP8; 0 where the GPU has none."""
    capability: ComputeCapability
    memory_tb_s: float
    nvlink_gb_s: float
    """NVLink bandwidth in each direction."""
    network_gb_s: float
    """One GPU's share of its node's network adapters, in each direction."""
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
"""GPU type for each device name that the driver reports. H100 PCIe, H100 NVL, GH200 and MIG slices are left out: their
peak differs."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by its torch or NVML device name; None if the name is unknown."""
    name = DEVICE_NAMES.get(device_name)
    return None if name is None else GPUS[name].bf16_tflops * 1e12


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate that no configuration states.

    The plan prints each of them; the first ones are options of the `plan` command.
    """

    compute_efficiency: float = 0.55
    """Fraction of the dense peak that matrix products and attention reach, with the small kernels between them. Plain
    matrix products of the trainer's sizes reach 0.8 on an H200. Model FLOPs utilization (MFU) is lower."""
    fp8_efficiency: float = 0.4
    """Fraction of the dense FP8 peak that linear layers reach, quantization of activations and gradients included."""
    memory_efficiency: float = 0.65
    """Fraction of the memory bandwidth that an engine reaches while it decodes."""
    link_efficiency: float = 0.7
    """Fraction of the NVLink and network bandwidth that collectives reach."""
    overlap: float = 0.8
    """Fraction of the data-parallel communication that overlap_grad_reduce and overlap_param_gather hide."""
    mean_prompt_fraction: float = 0.25
    """Mean prompt length over data.max_prompt_length."""
    mean_response_fraction: float = 0.5
    """Mean response length over rollout.max_response_length."""
    square_over_mean: float = 4 / 3
    """Mean square of the lengths over the square of their mean; 4/3 for lengths uniform from 0."""
    packing_efficiency: float = 0.95
    """Fraction of a full micro-batch's tokens that are not padding."""
    expert_imbalance: float = 1.3
    """Ratio of the tokens of the busiest expert-parallel rank to the mean."""
    reserved_gib: float = 3.0
    """Memory on each GPU for the CUDA context, NCCL buffers and cuBLAS workspaces."""
    fragmentation: float = 0.05
    """Memory lost to allocator fragmentation, as a fraction of the activations."""
    engine_workspace_gib: float = 4.0
    """Memory of vLLM's activations, CUDA graphs and sampling, beside weights and KV cache."""
    sleeping_engine_gib: float = 1.5
    """GPU memory that a sleeping engine keeps for its CUDA context and graphs."""
    decode_overhead_ms: float = 4.0
    """Overhead of one decoding step for kernel launches, sampling and scheduling."""
    host_copy_gb_s: float = 20.0
    """Bandwidth between a GPU and pinned host memory."""
    store_gb_s: float = 3.3
    """Bandwidth at which one core writes to a weight store, checksums included; verifying is faster. Each trainer rank
    and engine rank has at least one core for it. Measured by bench.weight_transfer_between_hosts."""
    connection_gb_s: float = 1.8
    """Bandwidth of a transfer between weight stores over one TCP connection that the network does not limit; one core
    sends and one receives. Measured by bench.weight_transfer_between_hosts."""
    host_adam_gb_s: float = 25.0
    """Host memory bandwidth of one rank's offloaded Adam update, which moves 32 bytes per parameter."""
    process_gib: float = 6.0
    """Host memory of one trainer or engine process beside the state that the plan counts."""
    host_memory_gib: float = 1800.0
    """Host memory of one node; a DGX H100 has 2 TB."""
    gpus_per_node: int = 8
