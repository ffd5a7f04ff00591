"""Joins weight transfer groups with this process's device."""

from __future__ import annotations

from functools import partial

from megatron_bapo.parallel.platform import give_up, transfer_group
from megatron_bapo.weight_sync.membership import Membership
from megatron_bapo.weight_sync.ray_store import open_store


def transfer_member(rendezvous: str, place: int, address: str, timeout_s: float) -> Membership:
    """Return the membership of the rank at a place of the plan.

    `rendezvous` is that of a `WeightRoute`, this process listens on `address`, and `timeout_s` limits one transfer.
    """
    connect = partial(transfer_group, address=address, timeout_s=timeout_s)
    return Membership(open_store(rendezvous, timeout_s), place, connect, give_up, timeout_s)
