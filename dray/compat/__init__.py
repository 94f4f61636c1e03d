"""``import determined`` gives dray: for code that was written for Determined, as it is.

Inside an experiment this is so wherever the real package is not installed. For a script of one's own:

.. code-block:: python

    import dray.compat

    dray.compat.install()

    import determined as det
    from determined import pytorch

Its modules and objects are dray's own, ``determined.pytorch is dray.pytorch``. What dray has no counterpart for (Keras,
DeepSpeed, the REST client) can be imported, and raises `NotSupported` where it is first used.
"""

from dray.compat.alias import NotSupported, install, install_if_absent, lacks, told_of_real

__all__ = ["NotSupported", "install", "install_if_absent", "lacks", "told_of_real"]
