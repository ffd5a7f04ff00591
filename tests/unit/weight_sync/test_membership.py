"""How the ranks of a group find each other in the store."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore

from megatron_bapo.weight_sync.membership import Membership, TransferFailed
from megatron_bapo.weight_sync.route import TransferGroup

NUM_RANKS = 24
GROUP = TransferGroup("group", "plan", tuple(range(NUM_RANKS)))


class ObservedStore(FileStore):
    """Knows the most keys that a rank has looked for at a time."""

    most_keys = 0

    def check(self, keys: Sequence[str]) -> bool:
        self.most_keys = max(self.most_keys, len(keys))
        return super().check([*keys])


def member(folder: Path, place: int, limit_s: float = 60.0) -> tuple[ObservedStore, Membership]:
    store = ObservedStore(str(folder / "store"), -1)
    return store, Membership(store, place, lambda *_: None, lambda _: None, limit_s)


def test_only_the_first_rank_looks_for_the_keys_of_all_ranks(tmp_path: Path):
    """Otherwise the keys that Ray's head looks up would grow with the square of the number of ranks."""
    stores, members = zip(*(member(tmp_path, place) for place in GROUP.places), strict=True)
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        list(threads.map(lambda each: each.join(GROUP), members))
    assert [store.most_keys for store in stores] == [NUM_RANKS] + [1] * (NUM_RANKS - 1)


def test_a_rank_that_waits_in_vain_for_the_first_one_names_its_place(tmp_path: Path):
    _, waiting = member(tmp_path, 5, limit_s=0.5)
    with pytest.raises(TransferFailed, match="places 0 of the weight transfer plan did not confirm that all ranks"):
        waiting.join(GROUP)
