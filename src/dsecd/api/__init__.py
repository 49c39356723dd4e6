"""The daemon's front: sockets, authorisation, operations, and the proxy into sandboxes."""
