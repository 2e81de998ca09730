"""Services at the socket: the programs of `src/services.c`, their maps and links."""
