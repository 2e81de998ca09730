"""What an agent with a pod in each of two namespaces answers to those who read it."""

from agent.admin.report import AgentReport, Drops, RulesReport
from tests.agent.operate.page import reports


class Agent:
    """Knows shop/web and bank/vault; counts its reports."""

    def __init__(self) -> None:
        self.made = 0

    async def report(self) -> AgentReport:
        self.made += 1
        return reports.report(reports.pod(), reports.pod("vault", namespace="bank"))

    async def drops(self) -> Drops:
        return reports.drops(reports.source(), reports.source(namespace="bank", pod="vault"))

    async def rules(self) -> RulesReport:
        return RulesReport(sources=[], policies=[], problems=[])

    def unhealthy_reason(self) -> str | None:
        return None

    def unready_reason(self) -> str | None:
        return None

    async def metrics(self) -> bytes:
        return b""
