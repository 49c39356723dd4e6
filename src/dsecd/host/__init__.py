"""The only code of dsecd that touches the kernel's files, mounts and namespaces."""
