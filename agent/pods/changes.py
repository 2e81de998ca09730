"""Level-triggered notifications: which pods changed, never what. A subscriber reads the rest."""

import asyncio


class Subscription:
    """The pods that changed since they were last taken, the oldest change first.

    A pod that changes several times before it is taken is one entry: a subscriber that is slow
    misses intermediate states, never the last one.
    """

    def __init__(self, wake: asyncio.Event | None = None) -> None:
        """wake: the event to set, for a subscriber that waits for several things."""
        self._uids: dict[str, None] = {}
        self._changed = wake or asyncio.Event()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be taken."""
        return not self._uids

    def mark(self, uid: str) -> None:
        """Record that this pod changed."""
        self._uids[uid] = None
        self._changed.set()

    def take(self) -> list[str]:
        """All that changed. The caller is to handle them."""
        uids = list(self._uids)
        self._uids.clear()
        return uids

    def take_one(self) -> str | None:
        """The pod that waits longest, for a subscriber that handles one at a time."""
        if not self._uids:
            return None
        uid = next(iter(self._uids))
        del self._uids[uid]
        return uid

    async def wait(self) -> None:
        """Wait until there is anything to take."""
        while not self._uids:
            self._changed.clear()
            await self._changed.wait()

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

    def mark(self, uid: str) -> None:
        """Record that this pod changed, for every subscriber."""
        for subscription in self._subscriptions:
            subscription.mark(uid)
