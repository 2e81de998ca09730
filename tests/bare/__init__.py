"""podgate's make targets on a bare Debian, as a newcomer has it."""
