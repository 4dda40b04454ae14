"""Tables of mistakes: each message, and the call that raises it."""

import re


def complaints(calls, error):
    """Return the messages that their calls do not raise, with what happens there."""
    found = {message: _complaint(call, error, message) for message, call in calls.items()}
    return {message: wrong for message, wrong in found.items() if wrong}


def _complaint(call, error, message):
    try:
        call()
    except Exception as found:
        is_right = isinstance(found, error) and re.search(message, str(found))
        return None if is_right else f"{type(found).__name__}: {found}"
    return "is not raised"
