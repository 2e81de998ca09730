"""A GPU agent's condition of pods, gpu.example.com/healthy. It needs podgate-client only;
docs/guides/conditions.md is its tutorial."""

import sys

from podgate_client import conditions, podinfo


def check(pod: str) -> tuple[str, str, str]:
    """Status, reason and message of a pod's GPU; a real agent queries its driver here."""
    return "True", "SelfTestPassed", f"The GPU of {pod} passes."


def main(conditions_target: str, podinfo_target: str) -> None:
    def report(pod_uid: str, kind: str = "healthy") -> None:
        publisher.set(pod_uid, kind, *check(names.get(pod_uid, pod_uid)))

    names: dict[str, str] = {}
    handlers = conditions.Handlers(
        on_problem=lambda problem: print(problem, file=sys.stderr),  # noqa: T201
        on_rejected=lambda one: print(one.message, file=sys.stderr),  # noqa: T201
        on_reset=report,
    )
    with conditions.ConditionPublisher(
        "gpu.example.com", conditions_target, handlers=handlers
    ) as publisher:
        for state in podinfo.PodInfoClient(podinfo_target):
            now = {pod.pod_uid: pod.pod_name for pod in state.pods}
            new, gone, names = now.keys() - names, names.keys() - now, now
            for uid in new:
                report(uid)
            for uid in gone:
                publisher.remove(uid, "healthy")
            publisher.complete()


if __name__ == "__main__":
    main(*sys.argv[1:3] or ("", ""))
