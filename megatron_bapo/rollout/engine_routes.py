"""The experts that an engine chose, as vLLM returns them and as trajectories carry them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_bapo.config.architecture import read_architecture
from megatron_bapo.records import NO_ROUTE
from megatron_bapo.rollout.messages import Completion


@dataclass(frozen=True)
class RouteFormat:
    """Which rows and layers of vLLM's arrays the trainer needs, and in which type."""

    layers: tuple[int, ...]
    """Layers with experts."""
    dtype: np.dtype

    @staticmethod
    def of(model_path: Path) -> RouteFormat:
        """Return the format of a mixture-of-experts model."""
        architecture = read_architecture(model_path)
        return RouteFormat(tuple(sorted(architecture.moe_layers)), np.dtype(f"i{architecture.route_item_bytes}"))

    def attached(self, completion: Completion, experts: np.ndarray | None, num_tokens: int) -> Completion:
        """Return the completion with the first `num_tokens` rows of `experts` [N, layers of the model, K].

        An engine that runs ahead has computed more. Without experts the completion stays as it is.
        """
        if experts is None or num_tokens <= 0:
            return completion
        return replace(completion, routes=experts[:num_tokens, list(self.layers)].astype(self.dtype))


def joined_routes(parts: Sequence[np.ndarray], num_tokens: int) -> np.ndarray | None:
    """Return the routes of the first `num_tokens` tokens, with `NO_ROUTE` where they end earlier; None without parts.

    They end earlier if an engine was lost with the last tokens of a response, whose routes it had not returned.
    """
    if not parts:
        return None
    routes = np.full((num_tokens, *parts[0].shape[1:]), NO_ROUTE, parts[0].dtype)
    known = np.concatenate(parts)[:num_tokens]
    routes[: len(known)] = known
    return routes
