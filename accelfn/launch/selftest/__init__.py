"""What ``accelfn test`` runs on every rank: small programs whose results are known, and a table of them.

The package imports no torch by itself, so that the command can draw the table without.
"""

__all__: tuple[str, ...] = ()  # a program, started with python -m accelfn.launch.selftest
