"""Layers as files: names, digests, import and the EROFS images they become."""
