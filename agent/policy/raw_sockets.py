"""Admission of raw and packet sockets of the host's namespace, by cgroups that policies name."""

import structlog

from agent.logs import Event
from agent.policy.matching import RuleSet
from agent.settings import RawSocketMode
from bpf.errors import BpfError
from bpf.raw_socket_policy import RawSocketPolicy

log = structlog.get_logger(__name__)


class RawSocketAdmission:
    """Writes the admitted cgroups. Methods block for as many system calls as there are cgroups."""

    def __init__(self, policy: RawSocketPolicy, mode: RawSocketMode) -> None:
        self._policy = policy
        self._is_denied = mode is RawSocketMode.DENY_PODS
        if not self._is_denied:
            policy.set_denies_pods(is_denied=False)

    def update(self, rules: RuleSet, *, is_complete: bool) -> None:
        """Admit all cgroups that rules name, whichever pods and ports these are for.

        is_complete: whether these are all policies. Before, nothing more is rejected: on a node
        that has just started, the network's own pods may need such sockets.
        """
        cgroups = rules.named_cgroups()
        try:
            if is_complete:
                self._policy.admit_only(cgroups)
                self._policy.set_denies_pods(is_denied=self._is_denied)
            else:
                self._policy.admit(cgroups)
        except BpfError as error:
            log.error(Event.RAW_SOCKETS_NOT_ADMITTED, error=str(error))
