class SignalException(Exception):  # noqa: N818 -- torch's name
    def __init__(self, msg: str, sigval: int) -> None:
        super().__init__(msg)
        self.sigval = sigval
