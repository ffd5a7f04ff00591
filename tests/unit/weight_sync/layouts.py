"""Layouts of trainer and engines of a small model, for which transfers are planned."""

from dataclasses import dataclass

from megatron_bapo.config.architecture import Architecture
from megatron_bapo.config.schema import ParallelConfig
from megatron_bapo.model.weight_layouts import EngineLayout, Placement, many_hosts, weight_plan
from megatron_bapo.weight_sync.plan import WeightPlan
from tests.unit.model.shards import architecture


@dataclass(frozen=True)
class Layout:
    """Trainer ranks, and engines of one layout."""

    name: str
    architecture: Architecture
    trainer: ParallelConfig
    engine: EngineLayout
    num_engines: int

    def __str__(self) -> str:
        return self.name

    @property
    def num_senders(self) -> int:
        return self.trainer.world_size

    def plan(self, bucket_bytes: int) -> WeightPlan:
        """Return the plan in which every rank is a separate host, and a part has one sender."""
        hosts = many_hosts(self.trainer, self.engine, self.num_engines, 1, colocated=False)
        placement = Placement(hosts.sender_hosts, hosts.reader_hosts, one_sender=True)
        return weight_plan(
            self.architecture, self.trainer, self.engine, placement, dtype="float32", bucket_bytes=bucket_bytes
        )


LAYOUTS = [
    Layout(
        "tp2-dp2 to one engine tp1",
        architecture("qwen3"),
        ParallelConfig(world_size=4, tensor_model_parallel_size=2),
        EngineLayout(),
        1,
    ),
    Layout("tp1 to three engines tp2", architecture("qwen3"), ParallelConfig(), EngineLayout(2), 3),
    Layout(
        "tp2-pp2 to two engines pp2",
        architecture("qwen3"),
        ParallelConfig(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
        EngineLayout(1, 2),
        2,
    ),
    Layout(
        "ep2 to two engines tp2 with expert parallelism",
        architecture("qwen3_moe"),
        ParallelConfig(world_size=2, expert_model_parallel_size=2),
        EngineLayout(2, expert_parallel=True),
        2,
    ),
]
