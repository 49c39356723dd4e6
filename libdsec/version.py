"""The version that the client reports in its `hello` and that `dsec version` prints."""

__version__ = "0.1.0"
