"""One check of a pod that has changed since the check was due."""

from typing import Any, cast

import pytest

from agent.network_policy import outcomes, pod_check
from agent.network_policy.outcomes import Outcome
from agent.network_policy.source import NetworkPolicies
from agent.pods.object_labels import ObjectLabels
from agent.pods.pod_state import AddressClaims
from tests.agent.network_policy.test_readiness import Policies
from tests.agent.strict.strict_pods import strict_pod


@pytest.mark.parametrize("missing", [{"netns": None}, {"claims": AddressClaims()}])
async def test_pod_without_a_namespace_or_an_address_is_not_tried(missing: dict[str, Any]) -> None:
    state = strict_pod("web", "198.18.0.3")
    for name, value in missing.items():
        setattr(state, name, value)
    policies = cast(NetworkPolicies, Policies())
    found = await pod_check.check(state, None, policies, ObjectLabels())
    assert found == Outcome(outcomes.FAILED, "The pod has no address.")
