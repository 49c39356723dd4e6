"""The store that hosts share: immutable objects by digest, and names that move."""
