"""The seed of made states and frames."""

import os
import secrets

_NEW = "new"


def seed() -> str:
    """PODGATE_TEST_SEED; "new" is another one each time (`make fuzz`). Without it always the same:
    a suite's result depends on the sources alone."""
    given = os.environ.get("PODGATE_TEST_SEED", "podgate")
    return secrets.token_hex(4) if given == _NEW else given
