"""A stand-in for what ``accelfn launch`` uses of torch's launcher: one machine, without a rendezvous.

Importing torch takes longer than a launch. The tests that start it a dozen times have this package in its
place; others check that torch's own does the same.
"""
