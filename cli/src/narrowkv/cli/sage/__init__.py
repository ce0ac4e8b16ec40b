"""Sage attention on the command line: what `probe`, `validate`, `bench` and `inspect` need of it."""
