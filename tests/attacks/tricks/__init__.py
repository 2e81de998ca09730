"""What attackers do, a module for each kind."""
