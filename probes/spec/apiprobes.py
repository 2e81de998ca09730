"""Probes of a pod manifest, with the API's defaults and checks.

Defaults are those of pkg/apis/core/v1/defaults.go `SetDefaults_Probe`, checks those of
pkg/apis/core/validation/validation.go `validateProbe`; comments mark where podgate is stricter.
"""

from probes.spec.definitions import PORT_MAX, ContainerPort, Handler, Probe
from probes.spec.fields import Fields
from probes.spec.handlers import KINDS


def read_probe(fields: Fields, named_ports: dict[str, int], *, readiness: bool) -> Probe | None:
    """Read one probe of the API's shape; None if anything about it is wrong."""
    mistakes = len(fields.errors)
    handler = _read_handler(fields, named_ports)
    success_threshold = fields.integer("successThreshold", default=1, minimum=0) or 1
    if not readiness and success_threshold != 1:
        fields.add_problem("successThreshold", f"must be 1 here, not {success_threshold}")
    grace: int | None = None
    if fields.has("terminationGracePeriodSeconds"):
        if readiness:
            fields.add_problem(
                "terminationGracePeriodSeconds", "is not allowed on a readiness probe"
            )
        else:
            grace = fields.integer("terminationGracePeriodSeconds", default=1, minimum=1)
    initial_delay = fields.integer("initialDelaySeconds", default=0, minimum=0)
    # As in the API, an explicit 0 of these means "not given".
    timeout = fields.integer("timeoutSeconds", default=1, minimum=0) or 1
    # The API reads 0 as 10 here, which is not what an author of 0 means, so podgate reports it.
    period = fields.integer("periodSeconds", default=10, minimum=1)
    failure_threshold = fields.integer("failureThreshold", default=3, minimum=0) or 3
    if handler is None or len(fields.errors) != mistakes:
        return None
    return Probe(
        handler=handler,
        initial_delay_seconds=float(initial_delay),
        timeout_seconds=float(timeout),
        period_seconds=float(period),
        success_threshold=success_threshold,
        failure_threshold=failure_threshold,
        termination_grace_period_seconds=None if grace is None else float(grace),
    )


def _read_handler(fields: Fields, named_ports: dict[str, int]) -> Handler | None:
    given = [name for name in KINDS if fields.has(name)]
    if not given:
        fields.add_problem(None, f"needs a handler: one of {', '.join(KINDS)}")
        return None
    if len(given) > 1:
        fields.add_problem(None, f"has {len(given)} handlers ({', '.join(given)}): keep one")
        return None
    return KINDS[given[0]].read(fields.child(given[0]), named_ports)


def ports_of(container: Fields) -> list[ContainerPort]:
    """The ports that the container declares."""
    found = []
    for port in container.children("ports"):
        name = port.text("name")
        number = port.raw("containerPort")
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= PORT_MAX:
            port.add_problem("containerPort", f"must be a number from 1 to {PORT_MAX}")
        else:
            found.append(ContainerPort(name, port.text("protocol", "TCP"), number))
    return found
