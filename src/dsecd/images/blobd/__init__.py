"""On-demand blobs: the control client of dsec-blobd and its readable twin."""
