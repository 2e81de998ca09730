"""`podgate hub`: one reader of the API server that serves services to many nodes."""
