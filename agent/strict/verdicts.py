"""Sends verdicts of answered probes to the relay that serves.

Level-triggered: a pod whose verdicts changed is sent in its current state, with withdrawals for
answers that have no verdict. Each result is sent, since it renews the end of its verdict; a relay
that receives nothing more proxies the probes again as the last verdicts end.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from agent.probing.answered_probes import AnsweredProbes
from agent.relay.messages import RelayTargetSpec, SetVerdicts, Verdict
from agent.strict.active_relay import ActiveRelay

# One message for results of the same moment. A fast probe's result is valid for 101 ms and more.
_COALESCE_SECONDS = 0.005


class VerdictUpdates:
    """Follows the verdicts of all pods. Create it on the running loop."""

    def __init__(
        self, answered: AnsweredProbes, active_relay: Callable[[], ActiveRelay | None]
    ) -> None:
        self._answered = answered
        self._active_relay = active_relay
        self._changes = answered.verdicts.subscribe()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changes.wait()
            await asyncio.sleep(_COALESCE_SECONDS)
            changed = self._changes.take()
            if relay := self._active_relay():
                self.send(relay, changed)

    def send_all(self, relay: ActiveRelay) -> None:
        """For a relay that gets all targets."""
        self.send(relay, relay.answered_targets)

    def send(self, relay: ActiveRelay, uids: Iterable[str]) -> None:
        """For pods with other verdicts, or targets."""
        # Not limited: a relay that reads nothing is replaced within some seconds.
        entries = tuple(
            entry
            for uid in uids
            for target in relay.answered_targets.get(uid, ())
            for entry in self._of_target(uid, target)
        )
        if entries:
            relay.relay.channel.send(SetVerdicts(entries))

    def _of_target(self, uid: str, target: RelayTargetSpec) -> Iterator[Verdict]:
        for answer in target.answers:
            found = self._answered.verdict(uid, answer.id)
            if found is None:
                yield Verdict(target.key, answer.id, is_healthy=False, reason="", ends_ns=None)
            else:
                yield Verdict(target.key, answer.id, found.is_healthy, found.reason, found.ends_ns)
