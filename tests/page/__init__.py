"""The status page of a real agent in Chromium: `make test-page`."""
