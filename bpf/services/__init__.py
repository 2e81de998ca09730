"""Socket-level service translation: the programs of `src/services.c`, their maps and links."""
