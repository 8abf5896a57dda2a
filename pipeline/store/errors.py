"""Errors of the policy store."""


class StaleAttempt(RuntimeError):
    """The train workers have restarted since this caller's stream was built."""


class StoreTimeout(TimeoutError):
    """A wait for the policy store passed its deadline; the message names phase, version and party."""
