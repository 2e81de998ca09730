"""The agent's side of strict: relays, how they hang on the node, and what they are to carry."""
