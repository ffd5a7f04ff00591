"""A reference for routing replay: transformers' models that record their experts, or are forced to given ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from megatron_bapo.trainer.micro_batches import Example


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the routers of the layers with experts, in order."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def input_tokens(example: Example) -> torch.Tensor:
    """Return the prompt and response tokens, int64 [P+R]."""
    trajectory = example.trajectory
    return torch.from_numpy(
        np.concatenate([trajectory.prompt_token_ids, trajectory.response_token_ids]).astype(np.int64)
    )


@torch.no_grad()
def routes_of(model: PreTrainedModel, tokens: torch.Tensor) -> np.ndarray:
    """Return the experts of tokens int64 [T], int8 [T, L, K]."""
    found = list[torch.Tensor]()
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(output[2])) for router in routers(model)]
    model(tokens[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).to(torch.int8).numpy()


@contextmanager
def forced(model: PreTrainedModel, routes: np.ndarray) -> Iterator[None]:
    """Let the routers choose the experts [T, L, K] and weigh them by their own normalized scores."""

    def of_layer(layer: int) -> object:
        def replace(router: torch.nn.Module, inputs: tuple, output: tuple) -> tuple:
            experts = torch.from_numpy(routes[:, layer].astype(np.int64))
            is_sigmoid = hasattr(router, "e_score_correction_bias")
            weights = (output[0].sigmoid() if is_sigmoid else output[0].softmax(-1)).gather(1, experts)
            scale = getattr(router, "routed_scaling_factor", 1.0)
            return output[0], scale * weights / weights.sum(-1, keepdim=True), experts

        return replace

    hooks = [router.register_forward_hook(of_layer(i)) for i, router in enumerate(routers(model))]
    yield
    for hook in hooks:
        hook.remove()


def log_probs(model: PreTrainedModel, example: Example) -> torch.Tensor:
    """Return the log-probs of the sampled tokens, float32 [S]."""
    tokens, trajectory = input_tokens(example), example.trajectory
    all_log_probs = model(tokens[None, :-1]).logits[0].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
    return all_log_probs[len(trajectory.prompt_token_ids) + trajectory.sampled_positions - 1]
