"""Imports torch without garbage collections, if nothing has imported it yet."""

import gc
import sys

if "torch" not in sys.modules:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        if was_enabled:
            gc.enable()
    # Later full collections don't visit torch's objects, for a tenth of a second each. Objects of a user who has
    # imported torch before are not frozen: a model in a cycle would never be freed.
    gc.freeze()
