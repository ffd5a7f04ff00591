"""Peak performance of GPUs and nodes from the vendors' data sheets, and the assumed efficiencies of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_bapo.config.cluster import GpuName
from megatron_bapo.config.fp8 import ComputeCapability

GIB = 2**30
Dispatcher = Literal["alltoall", "hybridep", "deepep"]


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
    """NVLink bandwidth in each direction, or PCIe's where there is no NVLink."""
    network_gb_s: float
    """One GPU's share of its node's network adapters, in each direction."""
    num_sms: int
    """Streaming multiprocessors, each of which computes one tile of a matrix product at a time."""
    source: str
    sustained: float = 1.0
    """Share of the peak that computation reaches over an H100's, whose power limit lowers the clocks further than that
    of an A100. An A100's is estimated from MosaicML's llm-foundry (scripts/train/benchmarking/README.md), which runs
    the same models with the same code on both: with it, 17 layouts on A100s and 44 on H100s with sequences of 2,048 to
    8,192 tokens are planned in 1.00 of the published seconds on average, and without it those on A100s in 1.23. An
    H20's is that of the largest product of torch, 10,240 rows, columns and inner elements: 142.3 of 148 TFLOP/s on an
    H20 and 719.7 of 989 on an H100 (zzc0721/torch-performance-test-data#77 and #79). Models have not been compared on
    the others."""

    @property
    def bf16_flops(self) -> float:
        """FLOP/s in bfloat16 of which computation reaches the assumed efficiencies."""
        return self.bf16_tflops * 1e12 * self.sustained

    @property
    def fp8_flops(self) -> float:
        """The same in FP8; 0 where the GPU has none."""
        return self.fp8_tflops * 1e12 * self.sustained


GPUS: dict[GpuName, Gpu] = {
    "A100": Gpu(79.2, 312, 0, (8, 0), 2.04, 300, 25, 108, "NVIDIA A100 80GB SXM and DGX A100 data sheets", 1.25),
    "H100": Gpu(79.2, 989, 1979, (9, 0), 3.35, 450, 50, 132, "NVIDIA H100 SXM and DGX H100 data sheets"),
    "H200": Gpu(139.8, 989, 1979, (9, 0), 4.8, 450, 50, 132, "NVIDIA H200 SXM and DGX H200 data sheets"),
    "B200": Gpu(178.4, 2250, 4500, (10, 0), 7.7, 900, 50, 148, "NVIDIA HGX B200 and DGX B200 data sheets"),
    "H20": Gpu(95.0, 148, 296, (9, 0), 4.0, 450, 50, 78, "NVIDIA H20 and HGX H20 data sheets", 1.3),
    "L40S": Gpu(44.4, 362, 733, (8, 9), 0.864, 32, 25, 142, "NVIDIA L40S data sheet, 200 Gbit/s of network for each"),
}
DEVICE_NAMES: dict[str, GpuName] = {
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA H20": "H20",
    "NVIDIA L40S": "L40S",
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

    compute_efficiency: float = 0.6
    """Fraction of the dense bfloat16 peak that a large matrix product reaches in a training run on an H100, whose power
    limit lowers the clocks; estimated over all published runs. `Gpu.sustained` multiplies it for other GPUs. Tiles and
    waves lower it further (`layer_time.Kernels`)."""
    fp8_efficiency: float = 0.6
    """The same of the dense FP8 peak. Quantization counts apart."""
    attention_efficiency: float = 0.5
    """Fraction of the dense bfloat16 peak that fused attention reaches, forward and backward."""
    tile_us: float = 2.2
    """Time of a tile's start and end in a matrix product, whatever its speed: 256 elements of the inner dimension on an
    H100 in bfloat16. It is estimated from experts, whose products are short, against dense models."""
    memory_efficiency: float = 0.65
    """Fraction of the memory bandwidth that an engine reaches while it decodes, and that the trainer's element-wise
    kernels reach."""
    link_efficiency: float = 0.7
    """Fraction of the NVLink and network bandwidth that collectives reach."""
    overlap: float = 0.8
    """Fraction of a communication that computation hides where the two overlap: that of data parallelism with
    overlap_grad_reduce and overlap_param_gather, of ring attention, and of interleaved pipelines."""
    mean_prompt_fraction: float = 0.25
    """Mean prompt length over data.max_prompt_length."""
    mean_response_fraction: float = 0.5
    """Mean response length over rollout.max_response_length."""
    length_sigma: float = 1.0
    """Sigma of the lognormal distribution of response lengths, which is clipped to rollout.max_response_length."""
    expert_imbalance: float = 1.4
    """Ratio of the tokens of the busiest expert-parallel rank to the mean. With natural routing a pretraining step of
    Qwen3-30B-A3B takes 1.23 times as long as with balanced experts (Megatron-Bridge's verification card)."""
    reserved_gib: float = 3.0
    """Memory on each GPU for the CUDA context, NCCL buffers and cuBLAS workspaces."""
    fragmentation: float = 0.05
    """Memory lost to allocator fragmentation, as a fraction of the activations."""
    engine_workspace_gib: float = 4.0
    """Memory of vLLM's activations, CUDA graphs and sampling, beside weights and KV cache."""
    sleeping_engine_gib: float = 1.5
    """GPU memory that a sleeping engine keeps for its CUDA context and graphs."""
    decode_overhead_ms: float = 2.3
    """Time of the host for one decoding step: scheduling, and the launch of its CUDA graph. Measured by
    bench.gpu_generation with one H200 and vLLM 0.26."""
    decode_layer_ms: float = 0.35
    """Time in which the host launches the kernels of one layer for a decoding step with rollout.enforce_eager. CUDA
    graphs speed up the generation of Llama-3.1-8B by 3% (NVIDIA-NeMo/RL#498) or 10 to 15% (NVIDIA-NeMo/RL#116). A token
    of a model with 28 layers takes 10 ms (pytorch/torchtitan#2373) or, on a shared server, 22 ms
    (vllm-project/vllm-omni#7960) without them, which is 0.2 and 0.6 ms a layer."""
    decode_expert_layer_ms: float = 0.7
    """The same for a layer with experts: a token of Qwen3-30B-A3B, whose 48 layers all have experts, takes 33.9 ms
    without CUDA graphs and 10.0 ms with them, on four GPUs (vllm-project/vllm#45709)."""
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
    engine_gpus_per_node: int | None = None
    """GPUs of a node of separate engines; null: they have nodes like the trainer's, and may share them."""
    engine_host_memory_gib: float | None = None
    """Host memory of a node of separate engines; null: that of the trainer's nodes."""
    host_layer_ms: float = 5.7
    """Time in which the host launches the kernels of one dense layer, forward and backward, for one micro-batch; the
    GPU waits if it is faster. A virtual machine with an H200 took 8.2 ms in FP8, where a layer has 139 kernels, which
    is 5.7 ms for the 96 of bfloat16. With 5.7 ms a published FP8 step of Llama-3-70B with 8-way tensor parallelism,
    which waits for the host, is planned at 1.08 of its time. bench.gpu_train_step measures it."""
    host_expert_layer_ms: float = 10.0
    """The same for a layer with experts, whose dispatcher waits for the routed tokens' counts."""
    host_expert_tensor_us: float = 30.0
    """Time in which the host launches the quantization of one expert's tensor in FP8; a layer has four for each expert
    of a rank. With 16 experts a rank, a step of Qwen3-235B-A22B on B200 that waits for the host takes 20.1 s in MXFP8
    and 17.2 s in bfloat16, 1.9 ms a layer (NVIDIA-NeMo/Megatron-Bridge#1760)."""
    decode_sequence_us: float = 47.0
    """Time of the host for one sequence in one decoding step: scheduling, sampling and log-probs. Measured as
    `decode_overhead_ms`."""
    between_phases_s: float = 3.0
    """Seconds of one step for batching, rewards and moving the batch between processes. NeMo-RL's step has 3 s beside
    its phases (NVIDIA-NeMo/RL#959), and a log of its phases lists 4 s of such work (NVIDIA-NeMo/RL#1052)."""

    # Properties of other trainers, whose published runs bench.published_runs plans; the defaults are this trainer's.
    engine_waits: bool = False
    """Whether the host prepares a decoding step only when the one before has ended, as vLLM did before version 0.14
    (vllm-project/vllm#27614) and does with Ray's executor. Such engines are planned with a `decode_overhead_ms` of 4,
    which was estimated from published synchronous runs."""
    gradient_bytes: int = 4
    """Bytes of a gradient element; 2 with Megatron's grad_reduce_in_fp32=false."""
    moment_bytes: int = 4
    """Bytes of each Adam moment of a parameter; 2 with Megatron's precision-aware optimizer in bfloat16."""
    reference_on_host: bool = False
    """Whether the reference model and the teacher are in host memory except while they score. The policy's parameters
    are then copied out, the reference model's in, and the policy's back (NeMo-RL's `use_reference_model`)."""
    unpinned_gb_s: float | None = None
    """Bandwidth at which the optimizer's state is copied to newly allocated host memory that is not pinned; null:
    `host_copy_gb_s`. A module that is moved by `.to("cpu")` reaches 2.8 GB/s on an H200 (sgl-project/sglang#32032)."""
    pads_pipelines: bool = False
    """Whether pipelines pad every micro-batch to the token budget."""
    balances_stages: bool = False
    """Whether the pipeline's split of layers accounts for the output layer."""
    dispatcher: Dispatcher = "alltoall"
    """Token dispatcher of expert parallelism: `alltoall` sends each token once per expert; `hybridep` and `deepep` once
    per host over the network and once per rank within a host, and permute and pad in their own kernels. `hybridep` is
    captured in CUDA graphs, which halves the time of the host. Without them its time stays, as with `deepep`: a step of
    Qwen3-235B-A22B that waits for the host takes 29.0 s with DeepEP, for 256 micro-batches of 12 layers a stage
    (yanring/Megatron-MoE-ModelZoo, best_practice/qwen3), and a faster one has 276 TFLOP/s without and 320 with
    graphs."""
    captures_graphs: bool = False
    """Whether attention, router and preprocessing of layers with experts are CUDA graphs beside `alltoall`, too."""
    broadcasts_weights: bool = False
    """Whether a weight transfer without a store gathers full tensors and broadcasts them from one rank per pipeline
    stage, instead of sending every shard to the ranks that need it. Engines then copy the tensors into their weights
    one by one, and need no room for a layer."""
    engines_receive_parts: bool = False
    """Whether an engine rank then receives only its own part of each gathered tensor (miles' p2p mode)."""
    broadcast_gb_s: float = 10.0
    """Bandwidth of such a broadcast per pipeline stage, the gathering and loading of tensors included. Published ones
    reach 2.6 to 23 GB/s. All stages together deliver no more than one GPU's network adapter receives."""
    tensor_overlap: float = 0.0
    """Fraction of tensor parallelism's collectives that computation hides (Megatron's tp_comm_overlap)."""
    expert_overlap: float = 0.0
    """Fraction of the expert dispatch that computation hides (Megatron's overlap_moe_expert_parallel_comm)."""

    @property
    def of_engine_nodes(self) -> Assumptions:
        """The assumptions with the nodes of separate engines as the nodes."""
        return replace(
            self,
            gpus_per_node=self.engine_gpus_per_node or self.gpus_per_node,
            host_memory_gib=self.engine_host_memory_gib or self.host_memory_gib,
        )
