"""Health of the proxy's process, as kube-proxy's /healthz and /livez have it."""

from agent.services.proxy import health
from agent.services.proxy.health import ProxyHealth


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


def test_proxy_without_a_state_is_healthy() -> None:
    clock = Clock()
    made = ProxyHealth(clock)
    clock.seconds += 10 * health.LATE_SECONDS
    assert made.is_healthy


def test_state_that_waits_for_a_minute_makes_the_proxy_unhealthy_until_it_is_written() -> None:
    clock = Clock()
    made = ProxyHealth(clock)
    made.queued()
    clock.seconds += health.LATE_SECONDS - 1
    made.queued()  # the next state: the first one is still waiting
    verdicts = [made.is_healthy]
    clock.seconds += 1
    verdicts.append(made.is_healthy)
    made.updated()
    verdicts.append(made.is_healthy)
    assert verdicts == [True, False, True]


def test_report_has_kube_proxy_s_fields() -> None:
    clock = Clock()
    made = ProxyHealth(clock)
    clock.seconds += 1
    made.updated()
    clock.seconds += 1
    first, second = "1970-01-12T13:46:41Z", "1970-01-12T13:46:42Z"
    family = {"lastUpdated": first, "healthy": True}
    assert made.report() == {
        "lastUpdated": second,  # of a healthy proxy the present
        "currentTime": second,
        "healthy": True,
        "status": {"IPv4": family, "IPv6": family},
    }
    made.queued()
    clock.seconds += health.LATE_SECONDS
    report = made.report()
    assert (report["healthy"], report["lastUpdated"]) == (False, first)
    assert report["status"]["IPv4"] == {"lastUpdated": first, "healthy": False}
