"""A module that a trial imports, late."""

import no_such_library  # type: ignore
