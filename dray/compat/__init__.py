"""Makes ``import determined`` give dray, so that code written for Determined runs unchanged.

An experiment does so wherever the real package is not installed. In your own script:

.. code-block:: python

    import dray.compat

    dray.compat.install()

    import determined as det
    from determined import pytorch

Its modules and objects are dray's own: ``determined.pytorch is dray.pytorch``. What has no counterpart in dray (Keras,
DeepSpeed, the REST client) can be imported, and raises `NotSupported` when it is first used.
"""

from dray.compat.alias import NotSupported, install, install_if_absent, lacks, path_for_children, real_package_hint

__all__ = ["NotSupported", "install", "install_if_absent", "lacks", "path_for_children", "real_package_hint"]
