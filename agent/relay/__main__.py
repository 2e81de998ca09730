"""`python -m agent.relay FD`: started by the agent, never by hand. FD: a socket to the agent."""

import sys

from agent.relay.main import Relay, end_of

sys.exit(Relay(end_of(int(sys.argv[1]))).run())
