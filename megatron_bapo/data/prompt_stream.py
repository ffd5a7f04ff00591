"""Order of the training prompts: reshuffled in every epoch and resumable at any prompt.

With a curriculum an epoch also visits each prompt exactly once, and either returns or skips it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from megatron_bapo.data.curriculum import Curriculum
from megatron_bapo.errors import UserError
from megatron_bapo.records import Prompt


class PromptStream:
    """Endless sequence of prompts; every epoch returns or skips each prompt exactly once.

    The position is counted in prompts, not batches, so that no prompt is lost or repeated between epochs.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, curriculum: Curriculum | None = None
    ) -> None:
        if not prompts:
            raise UserError("there are no prompts to train on; give data.train prompts that are not in data.validation")
        self._prompts = list(prompts)
        self._seed = seed
        self._shuffle = shuffle
        self.curriculum = curriculum
        self.num_skipped = 0
        """Prompts that the curriculum has skipped since the start of the first epoch."""
        self._fingerprint = _fingerprint(self._prompts)
        self._start_epoch(epoch=0, position=0)

    @property
    def num_taken(self) -> int:
        """Prompts returned or skipped since the start of the first epoch."""
        return self._epoch * len(self._prompts) + self._position

    def take(self, num: int) -> list[Prompt]:
        """Return the next `num` prompts, across as many epochs as needed."""
        taken: list[Prompt] = []
        while len(taken) < num:
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1, position=0)
            indices = self._order[self._position : self._position + num - len(taken)]
            wanted = [self._prompts[index] for index in indices if self._is_wanted(index)]
            taken += wanted
            self._position += len(indices)
            self.num_skipped += len(indices) - len(wanted)
        return taken

    def _is_wanted(self, index: int) -> bool:
        if self.curriculum is None:
            return True
        prompt_id = self._prompts[index].prompt_id
        number = random.Random(f"{self._seed}/{self._epoch}/{prompt_id}").random()
        return number < self.curriculum.probability(prompt_id)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values from which a stream over the same prompts can continue."""
        state = {"epoch": self._epoch, "position": self._position} | self._identity()
        if self.curriculum is not None:
            state |= {"num_skipped": self.num_skipped, "curriculum": self.curriculum.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Raises UserError if prompts, seed or shuffling have changed."""
        for key, value in self._identity().items():
            if state[key] != value:
                raise UserError(
                    f"cannot continue the interrupted run's prompt order: its {key} was {state[key]} and is {value}. "
                    "Restore the old data settings and files, or start in a new run_dir."
                )
        self._start_epoch(state["epoch"], state["position"])
        if self.curriculum is not None:
            self.num_skipped = state["num_skipped"]
            self.curriculum.load_state_dict(state["curriculum"])

    def _identity(self) -> dict[str, Any]:
        return {
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
        }

    def _start_epoch(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)


def _fingerprint(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.prompt_id, prompt.messages, prompt.ground_truth]).encode())
    return digest.hexdigest()[:16]
