"""A clock that is turned by hand."""


class Clock:
    """Seconds; call it for the time, like `time.monotonic`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
