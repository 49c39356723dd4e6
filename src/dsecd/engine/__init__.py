"""What is true of every sandbox whatever it runs in: states, lifetimes, journal, recovery."""
