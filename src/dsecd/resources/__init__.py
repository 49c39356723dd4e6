"""Decisions about the host's memory and CPUs. Pure: numbers in, decisions with reasons out."""
