from networks.residual import Residual

__all__ = ["Residual"]
