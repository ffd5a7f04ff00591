"""The gated delta rule over padded sequences, in chunks (arXiv 2412.06464).

A head has a state S, a matrix of key width x value width that is 0 before a sequence. With decay a = exp(g), a token
makes it S <- a S + beta k (v - a S^T k)^T, and its output is S^T q / sqrt(D). Within a chunk of C tokens the
corrections of all tokens solve one triangular system, so only the state passes from chunk to chunk.

Legend: B sequences, L longest sequence, H value heads, D width of a key, E width of a value, N chunks, C tokens of a
chunk.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megatron_bapo.config.linear_attention_fields import CHUNK


def gated_delta_rule(
    query_BLHD: torch.Tensor,
    key_BLHD: torch.Tensor,
    value_BLHE: torch.Tensor,
    log_decay_BLH: torch.Tensor,
    beta_BLH: torch.Tensor,
) -> torch.Tensor:
    """Return the output [B, L, H, E] in the dtype of `value_BLHE`; it is computed in fp32.

    Queries and keys are normalized by the caller. No token depends on a later one, so padding belongs behind a
    sequence.
    """
    length, dtype = query_BLHD.size(1), value_BLHE.dtype

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """Return [B, H, N, C, ...] in fp32 of [B, L, H, ...], with zeros behind the last token."""
        x = F.pad(x.float().transpose(1, 2), (*(0, 0) * (x.dim() - 3), 0, -length % CHUNK))
        # Products copy what is not contiguous, and the backward pass would keep the copies, too.
        return x.contiguous().unflatten(2, (-1, CHUNK))

    query, key, value = (chunks(x) for x in (query_BLHD, key_BLHD, value_BLHE))
    decay, beta = chunks(log_decay_BLH).cumsum(-1), chunks(beta_BLH)[..., None]
    query = query / math.sqrt(query.size(-1))
    # [..., i, j] is the decay between tokens j and i >= j. It is masked before exp, which could overflow above.
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (decay[..., None] - decay[..., None, :]).masked_fill(later, -math.inf).exp()
    scores = query @ key.mT * between
    system = (beta * key) @ key.mT * between  # unit lower triangular: what is on the diagonal is not read
    since_start, until_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * value, beta * key * since_start], dim=-1), upper=False, unitriangular=True
    )
    written, read = solved.split([value.size(-1), key.size(-1)], dim=-1)
    query, key = query * since_start, key * until_end
    state, outputs = query.new_zeros(*query.shape[:2], query.size(-1), value.size(-1)), []
    for chunk in range(query.size(2)):
        corrected = written[:, :, chunk] - read[:, :, chunk] @ state
        from_before = query[:, :, chunk] @ state
        outputs.append(from_before + scores[:, :, chunk] @ corrected)
        kept = since_start[:, :, chunk, -1:] * state
        state = kept + key[:, :, chunk].mT @ corrected
    return torch.cat(outputs, dim=2)[:, :, :length].transpose(1, 2).to(dtype)
