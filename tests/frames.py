"""The functions of the library between a call and the event that it leads to."""

import sys
from pathlib import Path

import metagrad

LIBRARY = str(Path(metagrad.__file__).parent)


def frames_of(call, is_reached):
    """Return the file and the name of each function of the library on the stack of the first event of a call.

    ``is_reached(frame, event, function)`` takes the arguments of a profile function.
    """
    found = []

    def profile(frame, event, function):
        if found or not is_reached(frame, event, function):
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith(LIBRARY):
                found.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found[::-1]
