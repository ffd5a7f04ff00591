"""Weight transfers from GPU to GPU as the rollout service sees them: which engines take part in which process group.

The trainer asks for a group before each transfer. The group is kept while the same engines take part. When one of them
is lost during a transfer, the service tells all ranks of the group, and the trainer repeats the transfer with the
engines that are left. A replacement has no weights to load until the trainer sends some: it waits for the next update,
or for the trainer to wait for rollouts, whichever comes first.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

from megatron_bapo.errors import RunError
from megatron_bapo.rollout.messages import EngineLost
from megatron_bapo.weight_sync.route import TransferGroup


class TransferEngine(Protocol):
    """An engine that receives weights in a process group."""

    places: tuple[int, ...]
    """Places of its ranks in the weight transfer plan."""

    async def load_weights(self, version: int, group: TransferGroup | None = None) -> None: ...


class EngineTransfers:
    """Forms the groups and follows the engines of the current one."""

    def __init__(self, num_senders: int, publish: Callable[[str, str], Awaitable[None]], notice_s: float) -> None:
        """`num_senders` is the number of trainer ranks, and `publish` sets a key that all ranks can read.

        A lost engine is noticed within about `notice_s` after a transfer has failed.
        """
        self._num_senders, self._publish, self._notice_s = num_senders, publish, notice_s
        self._group: TransferGroup | None = None
        self._members: dict[str, TransferEngine] = {}
        """Engines of the current group."""
        self._receiving: dict[str, TransferEngine] = {}
        """Those that have neither loaded the version nor been lost."""
        self._lacking: dict[str, tuple[TransferEngine, asyncio.Future[int]]] = {}
        """Started engines without the current weights, and the futures of the version that they get."""
        self._lacks = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def group(self) -> TransferGroup:
        assert self._group is not None, "a transfer begins first"
        return self._group

    def begin(self, serving: Mapping[str, TransferEngine], plan: str, broken: str) -> TransferGroup:
        """Return the group of the engines that serve, and of those that lack weights; `plan` is the plan's digest.

        `broken` is the name of the last group if it has failed.
        """
        members = {**serving, **{name: engine for name, (engine, _) in self._lacking.items()}}
        group = self._group
        if group is None or members != self._members or plan != group.plan or broken == group.name:
            self._group = self._of(members, plan)
        self._members, self._receiving = members, dict(members)
        self._lost.clear()
        return self.group

    async def repeat(self, group: TransferGroup, reason: str) -> TransferGroup:
        """Return the group that repeats the transfer in which `group` has failed, with the engines that are left."""
        if group != self._group:  # Ray has repeated the call
            return self.group
        await self._publish(group.failed_key, reason)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._notice_s):
                await self._lost.wait()
        self._lost.clear()
        self._members = dict(self._receiving)
        self._group = self._of(self._members, group.plan)
        await self._publish(group.next_key, self._group.to_json())
        return self._group

    async def load(self, name: str, engine: TransferEngine, version: int) -> None:
        """Load a version on an engine of the group. Raises EngineLost if it does not have the version then."""
        try:
            await engine.load_weights(version, self.group)
        except BaseException as error:
            await self.lose(name, str(error))
            if isinstance(error, RunError):
                raise EngineLost(str(error)) from error
            raise
        self._receiving.pop(name, None)

    async def load_lacking(self, version: int) -> None:
        """Load a version on the engines of the group that lack weights."""
        names = [name for name, (engine, _) in self._lacking.items() if self._members.get(name) is engine]
        await asyncio.gather(*(self._load_lacking(name, version) for name in names))

    async def _load_lacking(self, name: str, version: int) -> None:
        engine, loaded = self._lacking.pop(name)
        if not self._lacking:
            self._lacks.clear()
        try:
            await self.load(name, engine, version)
        except RunError as error:
            if not loaded.done():
                loaded.set_exception(error)
        else:
            if not loaded.done():
                loaded.set_result(version)

    async def bring(self, name: str, engine: TransferEngine) -> int:
        """Wait until the trainer has sent a started engine its weights; return their version.

        Raises EngineLost if the engine is lost meanwhile.
        """
        loaded: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._lacking[name] = engine, loaded
        self._lacks.set()
        return await loaded

    async def lose(self, name: str, reason: str) -> None:
        """End the current group if this engine has not loaded its version yet."""
        if self._receiving.pop(name, None) is not None:
            self._lost.set()
            await self._publish(self.group.failed_key, f"{name} was lost: {reason}")

    async def until_lacking(self) -> None:
        """Wait until an engine lacks weights."""
        await self._lacks.wait()

    def _of(self, members: Mapping[str, TransferEngine], plan: str) -> TransferGroup:
        places = sorted(place for engine in members.values() for place in engine.places)
        return TransferGroup(secrets.token_hex(8), plan, (*range(self._num_senders), *places))
