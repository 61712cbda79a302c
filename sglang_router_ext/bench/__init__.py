"""Measurement: named cases, the one clock, peers, checks and records. The command line prints what these return."""
