"""Every exception that accelfn raises on purpose.

AccelfnError
    ConfigurationError  (also a ValueError)           a setting that cannot be used
    NotAvailableError   (also a NotImplementedError)  machinery that this version does not have
    MissingExtraError   (also an ImportError)         an optional package that is not installed
"""

__all__ = ("AccelfnError", "ConfigurationError", "MissingExtraError", "NotAvailableError")


class AccelfnError(Exception):
    """Base of all errors of this library."""


class ConfigurationError(AccelfnError, ValueError):
    """A setting has a value that cannot be used, or contradicts another one."""


class NotAvailableError(AccelfnError, NotImplementedError):
    """The request is valid but this version has no machinery for it."""


class MissingExtraError(AccelfnError, ImportError):
    """An optional package is needed and not installed."""
