"""deploy/chart/podgate: a renderer of what it uses of Helm's templates, and what is made of it."""
