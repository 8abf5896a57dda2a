"""Errors of the policy store."""


class StaleAttempt(RuntimeError):
    """Error if the caller belongs to an attempt that has ended, because the train workers were restarted since."""


class StoreTimeout(TimeoutError):
    """Error if the policy store did not answer, or a wait inside the store passed its deadline. The message names the
    missing event."""
