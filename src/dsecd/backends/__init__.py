"""Kinds of sandboxes. Each module implements `abc.Backend`; none imports another."""
