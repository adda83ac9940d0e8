"""What the user can mend is a UserError; any other error is a defect of this package."""


class UserError(Exception):
    """A mistake in what was given: its message says what is wrong, what is allowed, what to do."""


class DataError(UserError, ValueError):
    """A data file, or a record in it, that cannot be used: the message names the place."""


class NotFiniteError(UserError):
    """What the model computed is NaN, infinite, or too large to go on with."""
