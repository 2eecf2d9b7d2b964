from typing import Any


class ChildFailedError(Exception):
    def __init__(self, name: str, failures: dict[int, Any]) -> None:
        super().__init__(name)
        self.failures = failures
