"""The sections `rollout` and `evaluation`: sampling, vLLM engines and the scheduling of rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megatron_bapo.config.section import Fraction, NonNegativeInt, PositiveFraction, Section

MIN_REQUEST_LIMIT_S = 3600.0
MAX_TOKEN_S = 0.5
"""Seconds in which an engine must generate a token: several times those of a full engine with a 32B model, because an
estimate may be wrong."""

KV_OVERCOMMIT = 1.5
"""Requests are sent to an engine as long as their whole responses are expected to need at most this many times its KV
cache, because most of those that run are not whole yet. If the cache does get full, vLLM preempts the youngest response
and prefills it again later, which takes less time than a cache that is never full (`bench.kv_cache_overcommit`)."""

IDLE_LIMIT = "rollout.request_timeout_s x max_request_failures + start_timeout_s"
"""The rule of `EngineConfig.idle_limit_s`, for messages."""


class SamplingConfig(Section):
    """Sampling parameters, as vLLM defines them."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: PositiveFraction = 1.0
    """Total probability of the most likely tokens that are sampled from; 1: all tokens."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of most likely tokens that are sampled from; -1 or 0: all tokens."""
    min_p: Fraction = 0.0
    """Minimum probability of a token, relative to the most likely one; 0: no minimum."""

    @property
    def sampling(self) -> dict[str, float]:
        """The values of these keys; two that sample alike are equal."""
        values: dict[str, float] = {name: getattr(self, name) for name in SamplingConfig.model_fields}
        return values | {"top_k": self.top_k if self.top_k > 0 else -1}

    @property
    def truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary only."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class PartialRolloutConfig(Section):
    """Partial rollouts: responses that are generated in segments, each under the newest policy version."""

    token_budget: PositiveInt | None = None
    """Maximum number of tokens in one segment. An unfinished response is then queued behind older ones and continues
    under the newest policy; null: every response is one segment."""
    over_sampling: Annotated[float, Field(ge=1.0)] = 1.0
    """Prompts in flight per prompt of the batch with `mode=sync`. A step ends when its batch is complete; the other
    prompts keep their partial responses and continue in the next step."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling (arXiv 2503.14476); the keys have verl's names."""

    enable: bool = False
    """Drop groups whose rewards are all equal and generate responses to other prompts in their place. Groups of one
    (`n=1`) are kept."""
    max_num_gen_batches: Annotated[int, Field(ge=2)] = 3
    """Maximum number of batches generated for one step; groups of equal rewards are kept once it is reached."""


class EngineSizeConfig(Section):
    """Number and size of vLLM engines."""

    num_engines: PositiveInt = 1
    """Number of vLLM engines."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor parallelism of each engine."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline parallelism of each engine."""
    enable_expert_parallel: bool = False
    """Place whole experts on each tensor-parallel rank of an engine instead of a slice of every expert. vLLM's CPU
    build does not support it."""
    kv_cache_gib: PositiveFloat | None = None
    """Size of an engine's KV cache in GiB; null: vLLM's choice on a GPU, 0.5 GiB on a CPU."""
    gpu_memory_utilization: PositiveFraction = 0.85
    """Fraction of a GPU's memory that vLLM may use for weights, activations and KV cache."""

    @property
    def ranks_per_engine(self) -> int:
        """Number of an engine's ranks, each of which has one GPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_expert(self) -> int:
        """Number of an engine's ranks that have a part of each expert of a layer."""
        return 1 if self.enable_expert_parallel else self.tensor_parallel_size

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all engines together, each of which has one GPU."""
        return self.num_engines * self.ranks_per_engine


class EngineConfig(EngineSizeConfig):
    """The vLLM engines."""

    max_response_length: PositiveInt = 1024
    """Maximum length of a response in tokens, including the end-of-sequence token and an environment's replies."""
    nodes_per_engine: PositiveInt = 1
    """Number of nodes over which the ranks of each engine are spread evenly (vLLM's `nnodes`), for models that need
    more GPUs than a node has."""
    max_num_seqs: PositiveInt = 256
    """Maximum number of sequences that an engine generates at a time."""
    enforce_eager: bool = True
    """Run vLLM without CUDA graphs. `false` decodes small batches faster, with the same kernels, but an engine then
    takes longer to start, also when it is replaced during a run, and its graphs stay in GPU memory while it sleeps.
    vLLM's torch.compile is off in both cases. The trainer never uses CUDA graphs, because packed micro-batches differ
    in shape."""
    batch_invariant: bool = False
    """Use vLLM's batch-invariant kernels: the tokens of a request then do not depend on the other requests of its
    batch. They need GPUs of compute capability 9.0 (Hopper) or higher, and are slower: vLLM then leaves out fused
    all-reduces and splits of attention."""
    quantization: Literal["fp8_per_block"] | None = None
    """Quantize the linear layers of the engines to FP8 in blocks of 128 x 128 at each weight update; null: the weights
    stay in model.dtype."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = "auto"
    """Data type of the KV cache: `auto` is model.dtype; `fp8_e4m3` takes half the memory of bfloat16, so that twice as
    many tokens fit."""
    start_timeout_s: PositiveFloat = 900.0
    """Timeout in seconds for the start of an engine, and for each of its weight updates, sleeps and wake-ups."""
    request_timeout_s: PositiveFloat | None = None
    """Timeout of one request to an engine in seconds; a request that exceeds it has failed. null: half a second for
    each token of `max_response_length`, at least an hour. An engine that hangs is found by its health check before."""
    max_request_failures: PositiveInt = 3
    """Failures of a request, on any engine, after which its prompt is quarantined and written to quarantined.jsonl. A
    lost engine counts only if the request was alone on it; one that was on several lost engines is retried alone."""
    health_check_interval_s: PositiveFloat = 10.0
    """Seconds between two health checks of an engine."""
    health_check_timeout_s: PositiveFloat = 60.0
    """Timeout of a health check in seconds; an engine that exceeds it is replaced."""
    max_engine_restarts: PositiveInt = 3
    """Attempts to replace a lost engine. If all of them fail, the run restarts, as set by trainer.max_restarts."""

    @property
    def ranks_per_engine_node(self) -> int:
        """Number of an engine's ranks on each of its nodes."""
        return self.ranks_per_engine // self.nodes_per_engine

    @property
    def request_limit_s(self) -> float:
        """Timeout of one request to an engine in seconds."""
        return self.request_timeout_s or max(MIN_REQUEST_LIMIT_S, MAX_TOKEN_S * self.max_response_length)

    @property
    def idle_limit_s(self) -> float:
        """Longest time in seconds in which no group of a batch may be finished: a request fails as often as it may, and
        an engine must be replaced."""
        return self.request_limit_s * self.max_request_failures + self.start_timeout_s


class RolloutConfig(SamplingConfig, EngineConfig):
    """The vLLM engines, their sampling parameters and the scheduling of rollouts."""

    n: PositiveInt = 8
    """Number of trajectories per prompt (the group size)."""
    colocate: bool = False
    """Place the engines on the trainer's GPUs; `false` gives them GPUs of their own."""
    sleep_level: Literal[0, 1, 2] = 0
    """What a colocated engine frees while the trainer works: nothing (0), the KV cache with its weights moved to host
    memory (1), or both weights and KV cache (2)."""
    mode: Literal["sync", "async"] = "sync"
    """When responses are generated: while the trainer waits for its batch (`sync`), or also while it trains
    (`async`)."""
    max_staleness: NonNegativeInt = 1
    """Maximum number of policy versions between the oldest token of a group and the weights that are trained on it."""
    on_stale: Literal["wait", "drop"] = "wait"
    """What happens to unfinished groups that would be too old for the next batch: the current batch waits for them
    (`wait`), so that no prompt is dropped for its age, or they are dropped (`drop`). `drop` is faster, but it drops the
    groups with the longest responses, so that the policy is trained on shorter ones than it writes."""
    max_reuse: PositiveInt = 1
    """Maximum number of rollout batches that a group may be part of."""
    on_weight_update: Literal["drain", "abort_and_resume", "keep"] = "drain"
    """What a weight update does to in-flight requests: `drain` waits until they finish; `abort_and_resume` aborts them
    and continues the partial responses on any engine; `keep` continues them on the same engine, which recomputes their
    KV cache."""
    partial_rollout: PartialRolloutConfig = PartialRolloutConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    max_reward_failures: NonNegativeInt = 3
    """Maximum number of prompts per batch whose reward or environment function may fail: it raises, returns an invalid
    value, or ends its process twice. These prompts are quarantined and written to quarantined.jsonl; one more failure
    ends the run."""
    object_store_mib: Annotated[int, Field(ge=75)] = 256
    """Shared memory of Ray's object store in MiB, in a run on one machine. Rollout batches pass through it; what does
    not fit is spilled to Ray's temporary folder on disk. On a cluster each node's store has BAPO_OBJECT_STORE_BYTES
    (launch/ray_node.sh)."""

    def num_gpus(self, num_trainer_ranks: int, num_engine_ranks: int) -> int:
        """Return the number of GPUs that trainer ranks and engine ranks take together, on a machine or in the run."""
        ranks = num_trainer_ranks, num_engine_ranks
        return max(ranks) if self.colocate else sum(ranks)

    @property
    def generates_while_training(self) -> bool:
        """Whether engines generate on GPUs of their own while the trainer trains, so that their times overlap."""
        return self.mode == "async" and self.max_staleness > 0 and not self.colocate

    @property
    def may_be_stale(self) -> bool:
        """Whether groups may contain tokens of older policy versions than the weights that are trained on them."""
        return self.mode == "async" or self.partial_rollout.over_sampling > 1.0 or self.max_reuse > 1


class EvaluationConfig(SamplingConfig):
    """Evaluation on the held-out prompts, with sampling parameters of its own."""

    every_steps: NonNegativeInt = 0
    """Number of steps between evaluations; 0: only before the first and after the last step."""
    n: PositiveInt = 4
    """Number of responses per held-out prompt (mean@n)."""
    max_response_length: PositiveInt | None = None
    """Maximum length of a response in tokens; null: that of the section `rollout`. A response that is many times longer
    than those of training may need a higher `rollout.request_timeout_s`."""
