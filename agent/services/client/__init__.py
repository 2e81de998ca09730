"""Client of service endpoints, for other programs: in podgate-client with `agent.client`."""
