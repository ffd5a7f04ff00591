"""Attention whose output is weighted by the sigmoid of a gate: Megatron's module under more tensor parallelism."""

from __future__ import annotations

from typing import Any

from megatron_bapo.parallel.megatron import SelfAttention


class GatedAttention(SelfAttention):
    """Megatron's self-attention with an output gate.

    With more tensor-parallel ranks than key/value heads, Megatron-Core 0.16.1 selects a rank's queries among those of
    its key/value head, but not their gates (`get_query_key_value_tensors` in attention.py; 0.19.2 selects both).
    """

    def get_query_key_value_tensors(self, *args: Any, **settings: Any) -> Any:
        found: Any = super().get_query_key_value_tensors(*args, **settings)
        if not settings.get("output_gate"):
            return found
        query, key, value, gate = found
        ranks, rank = gate.size(2) // query.size(2), self.pg_collection.tp.rank()
        return query, key, value, gate.chunk(ranks, dim=2)[rank % ranks]
