"""Level-triggered notifications: which pods changed, never what. A subscriber reads the rest."""

import asyncio
from collections.abc import Collection


class Subscription:
    """The pods that changed since they were last taken, the oldest change first.

    A pod that changes several times before it is taken is one entry: a subscriber that is slow
    misses intermediate states, never the last one.
    """

    def __init__(self, wake: asyncio.Event | None = None) -> None:
        """wake: the event to set, for a subscriber that waits for several things."""
        self._uids: dict[str, None] = {}
        self.changed = wake or asyncio.Event()
        """Set by every mark, for a subscriber that waits for several things."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._uids

    def mark(self, uid: str) -> None:
        """Record that this pod changed."""
        self._uids[uid] = None
        self.changed.set()

    def take(self) -> list[str]:
        """All that changed. The caller is to handle them."""
        uids = list(self._uids)
        self._uids.clear()
        return uids

    @property
    def waiting(self) -> Collection[str]:
        """What waits to be taken, the oldest first."""
        return self._uids.keys()

    def take_one(self, uid: str) -> None:
        """Take one that waits. The caller is to handle it."""
        del self._uids[uid]

    async def wait(self) -> None:
        """Wait until there is anything to take."""
        while not self._uids:
            self.changed.clear()
            await self.changed.wait()

    async def next(self) -> list[str]:
        """All that changed, as soon as there is anything."""
        await self.wait()
        return self.take()


class Changes:
    """One kind of change, and who subscribed to it."""

    def __init__(self) -> None:
        self._subscriptions: list[Subscription] = []

    def subscribe(self, subscription: Subscription | None = None) -> Subscription:
        """A subscription to changes from now on. One that is given can belong to several kinds."""
        subscription = Subscription() if subscription is None else subscription
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        self._subscriptions.remove(subscription)

    def mark(self, uid: str) -> None:
        """Record that this pod changed, for every subscriber."""
        for subscription in self._subscriptions:
            subscription.mark(uid)
