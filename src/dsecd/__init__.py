"""dsecd, the daemon that owns every sandbox of one host."""

__version__ = "0.1.0"
