"""`python -m agent.relay FD`: started by the agent. FD: a socket connected to the agent."""

import sys

from agent.relay.main import Relay, open_control_socket

sys.exit(Relay(open_control_socket(int(sys.argv[1]))).run())
