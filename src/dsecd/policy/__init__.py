"""What a sandbox may do, turned from rules into kernel mechanisms."""
