"""The command line of DSec."""
