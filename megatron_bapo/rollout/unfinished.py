"""Answers on their way, to what a checkpoint keeps of them and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from megatron_bapo.records import UnfinishedAnswer, UnfinishedGroup
from megatron_bapo.rollout.generation import Answer, GrowingGroup, Reply, answers_so_far
from megatron_bapo.rollout.messages import Completion, Generated


def unfinished_group(serial: int, group: GrowingGroup, told: Mapping[str, Generated]) -> UnfinishedGroup:
    """With what engines have `told` of requests in flight; without answers while no token is known."""
    answers = tuple(_saved(answer) for answer in answers_so_far(group, told))
    return UnfinishedGroup(serial, group.prompt.prompt.prompt_id, answers)


def restored_answer(saved: UnfinishedAnswer) -> Answer:
    """Segments between which no reply stood are one."""
    answer = Answer(
        spans=[*saved.version_spans],
        turns=[*saved.turns],
        turn_ended=saved.turn_ended,
        finish_reason=saved.finish_reason,
    )
    num = len(saved.response_token_ids)
    mask = np.ones(num, bool) if saved.loss_mask is None else saved.loss_mask
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), num] if num else []
    num_sampled = np.concatenate([[0], np.cumsum(mask)])
    replies = (turn for turn in saved.turns if turn["role"] != "assistant")
    for start, end in pairwise(borders):
        token_ids = saved.response_token_ids[start:end]
        if mask[start]:
            log_probs = saved.behaviour_log_probs[num_sampled[start] : num_sampled[end]]
            answer.append(Completion(token_ids, log_probs, "abort", ""))
        else:
            answer.append(Reply(next(replies), token_ids))
    return answer


def _saved(answer: Answer) -> UnfinishedAnswer:
    return UnfinishedAnswer(
        response_token_ids=np.concatenate([np.zeros(0, np.int32), *(s.token_ids for s in answer.segments)]),
        behaviour_log_probs=np.concatenate([np.zeros(0, np.float32), *(s.log_probs for s in answer.sampled)]),
        version_spans=tuple(answer.spans),
        finish_reason=answer.finish_reason,
        loss_mask=answer.loss_mask,
        turns=tuple(answer.turns),
        turn_ended=answer.turn_ended,
    )
