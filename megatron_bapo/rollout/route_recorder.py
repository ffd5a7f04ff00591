"""Records which experts an engine on CPUs chooses for every token. It runs inside vLLM's worker processes.

vLLM 0.32 returns routes (`enable_return_routed_experts`) only from its second model runner, which needs Triton, and so
not on CPUs (`_verify_aux_output_compatibility` in vllm/config/vllm.py). This recorder writes the experts of each
computed token to a table with a row for each slot of the KV cache. A request reads the rows of its own slots after
every step. Tokens whose KV cache another request has computed thereby have the routes of that pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

RECORD = "record_routes"
"""Entry of `SamplingParams.extra_args` of requests whose routes are recorded."""


class RouteRecorder:
    """The routes of the tokens in a model runner's KV cache, and of its requests."""

    def __init__(self, runner: Any) -> None:
        """Connect to the routers of the model and to the forward pass of a started `runner`."""
        config, cache = runner.vllm_config.model_config, runner.kv_cache_config
        num_slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
        shape = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._runner = runner
        self._by_slot = np.zeros((num_slots, *shape), np.int16)
        self._by_request: dict[str, list[np.ndarray]] = {}
        self._step: dict[int, np.ndarray] = {}
        bind_routed_experts_capturer(runner.model, self)  # pyright: ignore[reportArgumentType]
        self._forward: Callable[..., Any] = runner._model_forward
        runner._model_forward = self._recorded_forward

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep the experts of one layer in the step that is computed; vLLM's routers call this."""
        self._step[layer_id] = topk_ids.numpy()

    def take(self, request_id: str) -> dict[int, np.ndarray]:
        """Return and forget the experts of a request's completions, int16 [N, layers, K] each, by their index.

        N counts the tokens that have entered the model, from the first one of the prompt. Layers without experts have
        zeros. vLLM calls the completions of request R `R-SUFFIX`, or `INDEX_R-SUFFIX` if there are several.
        """
        found = dict[int, np.ndarray]()
        for name in [*self._by_request]:
            whole, _, _ = name.rpartition("-")
            index, _, rest = whole.partition("_")
            if whole == request_id:
                found[0] = np.concatenate(self._by_request.pop(name))
            elif rest == request_id and index.isdecimal():
                found[int(index)] = np.concatenate(self._by_request.pop(name))
        return found

    def _recorded_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if self._step:
            self._store()
            self._step = {}
        return output

    def _store(self) -> None:
        """Write the experts of the step's tokens to their slots, then read those that the requests lack."""
        batch, table = self._runner.input_batch, self._runner.input_batch.block_table[0]
        starts = self._runner.query_start_loc.np
        for row, name in enumerate(batch.req_ids):
            first, num_new = int(batch.num_computed_tokens_cpu[row]), int(starts[row + 1] - starts[row])
            new = self._slots(table, row, first, first + num_new)
            for layer, experts in self._step.items():
                self._by_slot[new, layer] = experts[starts[row] : starts[row + 1]]
            if (self._runner.requests[name].sampling_params.extra_args or {}).get(RECORD):
                parts = self._by_request.setdefault(name, [])
                parts.append(self._by_slot[self._slots(table, row, sum(map(len, parts)), first + num_new)])

    @staticmethod
    def _slots(table: Any, row: int, start: int, end: int) -> np.ndarray:
        """Return the slots of a request's tokens from `start` to `end`, int64."""
        positions = np.arange(start, end)
        blocks = table.get_numpy_array()[row, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size
