import pytest

from accelfn import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigurationError", ValueError),
        ("NotAvailableError", NotImplementedError),
        ("MissingExtraError", ImportError),
    ],
)
def test_every_error_can_be_caught_by_its_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.AccelfnError)
    assert issubclass(error, builtin)
