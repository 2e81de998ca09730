"""What the node's own APIs cost: PodInfo, and the node's service endpoints."""

from tests.bench import localnet, podinfo


def main() -> None:
    podinfo.run()
    localnet.run()


if __name__ == "__main__":
    main()
