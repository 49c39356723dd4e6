"""Metadata images: a tree of nodes and the places of its chunks become an EROFS file system."""
