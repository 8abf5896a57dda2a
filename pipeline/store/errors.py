"""Errors of the policy store."""


class StaleAttempt(RuntimeError):
    """The train workers have restarted since this caller's stream was built."""


class StoreTimeout(TimeoutError):
    """The policy store did not answer, or a wait inside it passed its deadline. The message names what was missing."""
