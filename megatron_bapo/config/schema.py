"""The configuration of a run: frozen sections with every default of the project, without torch.

Unknown keys are errors. Sizes are counted in trajectories or tokens, times in seconds. Derived values are properties.
The larger sections are in `algorithm.py`, `data.py`, `logging.py`, `model.py`, `optimizer.py`, `reward.py` and
`rollout.py`; rules that span sections are in `checks.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_bapo.config.algorithm import AlgorithmConfig
from megatron_bapo.config.data import DataConfig
from megatron_bapo.config.fp8 import Fp8Config
from megatron_bapo.config.logging import LoggingConfig
from megatron_bapo.config.model import ModelConfig
from megatron_bapo.config.optimizer import OptimizerConfig
from megatron_bapo.config.padding import PaddingRule, padding_rule, round_up
from megatron_bapo.config.reward import EnvironmentConfig, RewardConfig
from megatron_bapo.config.rollout import EvaluationConfig, RolloutConfig
from megatron_bapo.config.section import FunctionName, NonNegativeFloat, NonNegativeInt, Section, Seed

FLOAT32_LOG_PROB_NOISE = 1e-4
"""Largest root mean square, in nats, of the differences between two float32 implementations on the weight probe."""
BFLOAT16_LOG_PROB_NOISE = 0.2
"""The same in bfloat16. Up to 0.07 was measured with 4 layers, and rounding adds up over layers."""
FP8_LOG_PROB_NOISE = 0.5
"""The same if one side multiplies in FP8, whose 3 mantissa bits round a weight by up to 1/16."""


class ParallelConfig(Section):
    """The trainer's parallel layout; the keys have Megatron's names.

    The data parallel size is world_size / (tensor x pipeline x context parallel size)."""

    world_size: PositiveInt = 1
    """Number of trainer ranks, one per GPU (or per CPU core)."""
    tensor_model_parallel_size: PositiveInt = 1
    """Tensor parallelism: the number of ranks that each layer's weights are split over."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Pipeline parallelism: the number of stages that the layers are split into."""
    virtual_pipeline_model_parallel_size: PositiveInt = 1
    """Number of model chunks per pipeline stage; more than 1 selects the interleaved schedule."""
    pipeline_model_parallel_layout: Literal["auto"] | tuple[PositiveInt | None, ...] | None = None
    """Layers of the pipeline stages: as many in each (null), balanced by FLOPs including the output layer's (`auto`),
    or a list. Two numbers are the layers of the first and the last stage, null for as many as in those between, which
    share the rest evenly; pipeline x virtual size numbers are the layers of every model chunk in model order."""
    context_parallel_size: PositiveInt = 1
    """Context parallelism: the number of ranks that each sequence is split over. Each rank holds two of its
    2 x context_parallel_size chunks (zigzag)."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """Communication of context parallelism with transformer_engine: ring attention (`p2p`), an all-gather of keys and
    values, or an all-to-all between sequences and heads (`a2a`, Ulysses). `local` layers always all-gather."""
    expert_model_parallel_size: PositiveInt = 1
    """Expert parallelism: the number of ranks, among the data- and context-parallel ones, that each layer's experts are
    split over."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Tensor parallelism within an expert; null: tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Split the activations outside tensor-parallel layers along the sequence, over the tensor-parallel ranks."""
    use_distributed_optimizer: bool = True
    """Shard the fp32 parameters and Adam's moments over the data- and context-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradients over data-parallel ranks with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the all-gather of updated parameters with the next forward pass; needs use_distributed_optimizer and
    overlap_grad_reduce."""
    ddp_bucket_size: PositiveInt | None = None
    """Number of parameters per communication bucket when communication overlaps; null: Megatron's default of 40M or
    more."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation in the backward pass: of whole layers (`full`), of `recompute_modules` (`selective`), or
    none (null)."""
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = ("core_attn",)
    """Modules whose activations are recomputed with `recompute_granularity=selective`."""

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the policy and work on the same sequences."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def for_teacher(self) -> ParallelConfig:
        """The same layout for a model of another number of layers, which are divided by FLOPs."""
        return self.model_copy(update={"pipeline_model_parallel_layout": "auto"})

    @property
    def num_micro_batches_multiple(self) -> int:
        """Divisor of an update's number of micro-batches: an interleaved pipeline runs one per stage in each round."""
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size > 1 else 1

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.model_parallel_size


class WarmStartConfig(Section):
    """Supervised fine-tuning (SFT) on demonstrations for the training prompts, by the same trainer, before RL."""

    num_steps: PositiveInt
    """Number of supervised updates."""
    batch_size: PositiveInt = 128
    """Number of demonstrations per update."""
    lr: PositiveFloat = 1e-3
    """Learning rate of the supervised updates."""
    demonstration: FunctionName | None = None
    """Function `path.to.module:function` with the arguments of `environment.function`. It returns a list of texts: the
    policy's turns and, between them, the environment's replies, which are not trained on; null: the demonstration is
    the ground truth."""


class TrainerConfig(Section):
    """Batch sizes and execution of the trainer. One step trains on one rollout batch."""

    total_steps: NonNegativeInt
    """Number of steps; with 0 the run ends after the warm start, with an evaluation and the export."""
    train_batch_size: PositiveInt
    """Number of trajectories per rollout batch. verl counts prompts; this is `rollout.n` times as many."""
    ppo_mini_batch_size: PositiveInt
    """Number of trajectories per optimizer update."""
    ppo_epochs: PositiveInt = 1
    """Number of passes over each rollout batch."""
    max_tokens_per_gpu: PositiveInt = 16384
    """Maximum number of tokens of a micro-batch per context-parallel rank, including padding."""
    packing: bool = True
    """Pack the sequences of a micro-batch one after another. `false` pads all of them to the longest."""
    share_prompts: bool = True
    """Compute the prompt of a group's responses once in each micro-batch. Layers of Transformer Engine, context
    parallelism, FP8, `packing=false` and routing replay compute it for each response."""
    skip_zero_advantage: bool = False
    """Leave trajectories with advantage 0, such as those of a group with equal rewards, out of the updates. They add
    nothing to the gradients, and still count in the mean that the loss is; entropy, clip fractions and KL then describe
    the trajectories that are left. Needs `algorithm.adv_estimator=grpo`, `rloo` or `function`, an objective that is not
    the user's, and a loss without other terms."""
    logprob_chunk_size: PositiveInt = 1024
    """Number of tokens whose logits are in memory at a time."""
    fused_kernels: bool = True
    """Compute log-probs, entropy and loss with Triton kernels on GPUs. With `false`, on CPUs, and where the kernels do
    not work, PyTorch operators are used."""
    offload: bool = False
    """Move parameters and optimizer states to host memory while colocated engines work."""
    collective_timeout_s: PositiveFloat = 1800.0
    """Timeout of collectives between trainer ranks in seconds, where they do not wait for rollouts. Must exceed
    `rollout.start_timeout_s`."""
    max_restarts: NonNegativeInt = 3
    """Maximum number of restarts from the newest checkpoint without a new step in between, after a trainer rank or
    another part of the run fails; 0 disables restarts. Invalid input, a failed weight probe, a full disk, a lost node
    and a part that fails to start when the run begins end the run at once."""

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per rollout batch."""
        return self.ppo_epochs * self.train_batch_size // self.ppo_mini_batch_size


class WeightSyncConfig(Section):
    """Weight updates from the trainer to the engines, and the probe that verifies them."""

    transport: Literal["store", "cuda_ipc", "nccl"] = "store"
    """How weights are transferred: `store` uses shared memory, from which restarted engines load, too; with `cuda_ipc`
    colocated engines read the trainer's parameters in GPU memory; `nccl` sends from GPU to GPU, also to other hosts (by
    gloo without GPUs)."""
    lora: Literal["adapters", "merged"] | None = None
    """What engines receive under `model.lora`: the `adapters`, which vLLM applies beside the weights of `model.path`,
    or all weights with the adapters `merged`; null: `adapters`, or `merged` where vLLM cannot serve them, which is said
    when the run starts."""
    bucket_mib: PositiveInt = 256
    """Size of one transfer bucket in MiB."""
    engine_store: Literal["shared", "own"] = "shared"
    """Store that engines load from with `transport=store`: the trainer's (`shared`), or one of their own that receives
    the changes of each version (`own`). Engines on other hosts always have their own."""
    full_every: PositiveInt = 16
    """Number of policy versions after which a store of the engines' own receives all weights instead of the changes."""
    stall_timeout_s: PositiveFloat = 60.0
    """Longest time in seconds that another host's system may be silent during a transfer between hosts, because it has
    ended or its network is cut off. The transfer is then tried again, and after the third failure the run restarts,
    with the host's name as the reason."""
    probe_tolerance: PositiveFloat | None = None
    """Largest accepted difference between the engine's and the trainer's log-probs of the probe, in nats, as the root
    mean square over its tokens; null: 1e-4 in float32, 0.2 in bfloat16, 0.5 if the engine or the trainer computes in
    FP8."""
    probe_tokens: Annotated[int, Field(ge=2)] = 32
    """Length of the probe sequence in tokens."""
    probe_decoded_tokens: NonNegativeInt = 8
    """Tokens that each engine samples after the probe sequence. Their log-probs must be those that the same engine
    computes by prefill, up to probe_tolerance; 0 leaves decoding out of the probe."""


class CheckpointConfig(Section):
    """When checkpoints are written, and how many are kept. The last step always writes one."""

    every_steps: PositiveInt = 20
    """Number of steps between checkpoints."""
    every_s: NonNegativeFloat = 1800.0
    """Seconds since the last checkpoint after which the next completed step writes one, too; 0: only `every_steps`
    counts."""
    keep: PositiveInt = 2
    """Number of complete checkpoints that are kept; older ones are deleted."""
    async_save: bool = True
    """Copy the state to host memory and write the files while training continues; false: training waits until they are
    on disk, and no copy is made."""


class Config(Section):
    """The configuration of a run."""

    run_dir: Path
    """Folder for everything that the run writes. A run that was interrupted there is continued."""
    seed: Seed = 0
    """Seed of initialization, data order and sampling."""
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    fp8: Fp8Config | None = None
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig
    warm_start: WarmStartConfig | None = None
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts (groups) per rollout batch."""
        return self.trainer.train_batch_size // self.rollout.n

    @property
    def num_engine_ranks(self) -> int:
        """Number of ranks of all engines that generate responses."""
        return self.rollout.num_ranks

    @property
    def num_teacher_ranks(self) -> int:
        """Number of ranks of all engines that serve the teacher; 0 without such engines."""
        return 0 if self.algorithm.teacher_engines is None else self.algorithm.teacher_engines.num_ranks

    @property
    def serving_teacher(self) -> Config | None:
        """The configuration of a run whose engines are the teacher's; None if there are no such engines.

        vLLM scores a sequence only if it may generate a token after it, so `max_model_len` is larger by one.
        """
        distillation = self.algorithm.distillation
        if distillation is None or distillation.engines is None:
            return None
        values: dict[str, Any] = {
            **dict(distillation.engines),
            "colocate": False,
            "sleep_level": 0,
            "nodes_per_engine": 1,
            "enforce_eager": True,
            "quantization": None,
            "kv_cache_dtype": "auto",
            "max_response_length": self.rollout.max_response_length + 1,
        }
        sections: dict[str, Section] = {
            "model": ModelConfig(path=distillation.teacher, dtype=self.model.dtype),
            "algorithm": AlgorithmConfig(),
            "rollout": self.rollout.model_copy(update=values),
            "weight_sync": WeightSyncConfig(),
            "evaluation": EvaluationConfig(),
        }
        return self.model_copy(update=sections)

    @property
    def padding_rule(self) -> PaddingRule:
        """Padding that the trainer's layout and precision require."""
        parallel = self.parallel
        return padding_rule(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            sequence_parallel=parallel.sequence_parallel,
            fp8_multiple=self.fp8.multiple if self.fp8 is not None else None,
            packing=self.trainer.packing,
        )

    @property
    def shares_prompts(self) -> bool:
        """Whether the trajectories of a group share their prompt within a micro-batch."""
        return (
            self.trainer.share_prompts
            and self.trainer.packing
            and self.model.transformer_impl == "local"
            and self.parallel.context_parallel_size == 1
            and self.fp8 is None
            and self.algorithm.routing_replay == "none"
        )

    def group_numbers(self, num_trajectories: int) -> list[int]:
        """Return the number of each trajectory's group in a batch of whole groups, one after another."""
        return [index // self.rollout.n for index in range(num_trajectories)]

    @property
    def log_prob_noise(self) -> float:
        """Largest root mean square of differences of log-probs, in nats, that rounding explains on the weight probe."""
        if self.fp8 is not None or self.rollout.quantization is not None or self.rollout.kv_cache_dtype != "auto":
            return FP8_LOG_PROB_NOISE
        return FLOAT32_LOG_PROB_NOISE if self.model.dtype == "float32" else BFLOAT16_LOG_PROB_NOISE

    @property
    def probe_tolerance(self) -> float:
        """Tolerance of the weight probe in nats."""
        return self.weight_sync.probe_tolerance or self.log_prob_noise

    @property
    def max_micro_batch_tokens(self) -> int:
        """Maximum number of tokens of a micro-batch on all context-parallel ranks together, including padding."""
        return self.trainer.max_tokens_per_gpu * self.parallel.context_parallel_size

    @property
    def most_micro_batches(self) -> int:
        """Micro-batches of an update on one data-parallel rank if all its trajectories have the maximum length."""
        per_rank = -(-self.trainer.ppo_mini_batch_size // self.parallel.data_parallel_size)
        fitting = max(1, self.max_micro_batch_tokens // self.padding_rule.allocated([self.max_sequence_length]))
        return round_up(-(-per_rank // fitting), self.parallel.num_micro_batches_multiple)

    @property
    def max_sequence_length(self) -> int:
        """Maximum length of prompt and response together in training, in tokens."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def evaluated_length(self) -> int:
        """Maximum length of a response to a held-out prompt, in tokens."""
        return self.evaluation.max_response_length or self.rollout.max_response_length

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and response together on the engines, in tokens."""
        longest = max(self.rollout.max_response_length, self.evaluated_length if self.data.validation else 0)
        return self.data.max_prompt_length + longest

    @property
    def has_new_weights(self) -> bool:
        """Whether RL starts with other weights than those of `model_path`: after a warm start, or with adapters."""
        return self.warm_start is not None or (self.model.lora is not None and self.model.lora.path is not None)

    @property
    def has_reference_copy(self) -> bool:
        """Whether the trainer holds a reference model beside the policy: that of new adapters is the policy itself."""
        return self.algorithm.needs_reference and (self.model.lora is None or self.has_new_weights)

    @property
    def model_path(self) -> Path:
        """Folder of the Hugging Face checkpoint that the run starts from."""
        return self.run_dir / "initial_model" if self.model.path is None else self.model.path
