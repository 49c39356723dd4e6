"""What layers are made of: directories, tar archives, OCI images, the uppers of sandboxes."""
