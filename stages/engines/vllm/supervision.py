"""The servers of an engine, watched while they work.

A server that does not answer, or no longer holds what it was given, is brought to the
policy again before anything more is asked of it. One that cannot be is given up.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from nanoskyrl.stages.core.errors import EngineError, ProofError
from nanoskyrl.stages.engines.vllm.client import Lost, Refused
from nanoskyrl.stages.engines.vllm.config import VllmConfig
from nanoskyrl.stages.engines.vllm.delivery import Counts, Delivery, Server
from nanoskyrl.stages.engines.vllm.keeper import ServerKeeper, hint_of

BRINGS = 3
"""How often in a row a server is brought to a policy before it counts as failing: twice by a new process."""


class Supervisor(ServerKeeper):
    """Keeps servers fit to be asked: each holds the policy."""

    def __init__(self, config: VllmConfig, delivery: Delivery, counts: Counts) -> None:
        """Know no server until `find`."""
        super().__init__(config)
        self.delivery, self.counts = delivery, counts
        self._homes: dict[str, Server] = {}

    async def bring_all(self) -> list[dict[str, Any]]:
        """Bring every server to the policy, and return what each proved.

        Raises:
            EngineError: one does not start or answer.
            ProofError: one does not hold the weights afterwards.
        """
        self._homes.clear()
        tasks = [asyncio.ensure_future(self._locked_bring(server)) for server in self.servers]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            raise

    async def _locked_bring(self, server: Server) -> dict[str, Any]:
        async with server.lock:
            return await self._bring(server)

    async def _bring(self, server: Server, why: str | None = None) -> dict[str, Any]:
        """Bring a server to the policy, and return what it proved; one that fails at it is started again.

        Args:
            server: One whose lock is held.
            why: What became of it; None: it was not up yet, or answered so far.

        Raises:
            EngineError: it does not start, says no, or keeps failing.
            ProofError: it does not hold the weights afterwards.
        """
        failed: Exception | None = None
        for _ in range(BRINGS):
            if why is not None:
                self.replace(server, why)
                self.counts["restarts"] += server.process is not None
            try:
                await self.ready(server)
                return await self.delivery.bring(server)
            except EngineError as error:
                if why is None:  # it never was up, and would not be the next time
                    raise
                failed = error
            except (Lost, Refused) as error:
                failed = error
                if isinstance(error, Refused):
                    break
            why = str(failed)
        raise EngineError(
            f"server {server.client.url} cannot be given the policy: {failed}", hint=hint_of(server)
        ) from failed

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return nats of each token but the first from the first server that is left.

        Raises:
            EngineError: none is left.
        """
        for trial in range(self.config.tries):
            server = self.home("")
            era = server.era
            try:
                return await server.client.prompt_logprobs(server.name, ids)
            except (Lost, Refused) as error:
                why = str(error)
            await self.recover(server, era, why, trial)
        raise EngineError(f"server {server.client.url} gives no log-probs: {why}", hint=hint_of(server))

    def home(self, group: str) -> Server:
        """Return the server of a group: the one it had, else the least busy.

        Raises:
            EngineError: none is left.
        """
        server = self._homes.get(group) if group else None
        if server is None or server.lost is not None:
            if not self.living:
                reasons = "; ".join(server.lost or "" for server in self.servers)
                raise EngineError(f"no vLLM server is left: {reasons}", hint="See the logs, and start again")
            server = min(self.living, key=lambda one: (one.open, one.index))
            if group:
                self._homes[group] = server
        return server

    async def recover(self, server: Server, era: int, why: str, trial: int) -> None:
        """Make a server fit to be asked again, or give it up; one caller works while the others wait.

        Args:
            server: One that was asked in vain.
            era: Its own when it was asked.
            why: What became of that.
            trial: How often it was asked before; where it still holds the policy, the pause grows with it.

        Raises:
            ProofError: it cannot be given the policy.
        """
        async with server.lock:
            if server.era != era or server.lost is not None:
                return
            if await self._still_ours(server):
                await asyncio.sleep(min(0.1 * 2**trial, 5.0))
                return
            try:
                await self._bring(server, why)
            except EngineError as error:
                server.lost = str(error)

    async def _still_ours(self, server: Server) -> bool:
        """Say whether a server answers and holds what it was given."""
        for _ in range(3):
            if server.process is not None and not server.process.running:
                return False
            if await server.client.healthy():
                break
            await asyncio.sleep(0.5)
        else:
            return False
        try:
            names = {model["id"] for model in await server.client.models()}
            return server.name in names and (server.digest is None or await _holds(server))
        except (Lost, Refused):
            return False

    async def verify(self) -> None:
        """Raise ProofError unless every server still holds the policy that it was brought to."""
        for server in self.servers:
            if server.lost or server.digest is None:
                continue  # another's server says nothing of what it holds
            for trial in range(self.config.tries):
                era = server.era
                try:
                    holds = await _holds(server)
                    break
                except (Lost, Refused) as error:  # it died since; whatever it sampled before came from our weights
                    await self.recover(server, era, str(error), trial)
            else:
                continue
            if not holds:
                raise ProofError(
                    f"server {server.client.url} was given other weights during the rollout",
                    hint="Let one process at a time work with a run's servers; run the rollout again",
                )


async def _holds(server: Server) -> bool:
    """Say whether a server that answers holds the weights that it was given, and was given none since."""
    state = (await server.client.worker("skyrl_state", seconds=60))[0]
    return (state["digest"], state["loads"]) == (server.digest, server.loads)
