"""podgate as a plugin of real container runtimes with NRI; `make test-nri BIN=DIR`."""
