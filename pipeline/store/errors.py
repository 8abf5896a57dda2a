"""Errors of the policy store."""


class StaleAttempt(RuntimeError):
    """Error of a caller whose stream was built before the train workers restarted."""


class StoreTimeout(TimeoutError):
    """Error of a policy store that did not answer, or of a wait inside it that passed its deadline. The message names
    the missing event."""
