"""Checks in milliseconds whether a cluster accepts this process's token.

Ray itself retries for twenty seconds, prints a warning every second, and then reports that it can't connect.
"""

from __future__ import annotations

import grpc
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.grpc_utils import init_grpc_channel
from ray._private.utils import read_ray_address
from ray.core.generated.gcs_service_pb2 import GetClusterIdRequest
from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
from ray.exceptions import AuthenticationError

TIMEOUT_S = 5.0
_CURE = "export RAY_AUTH_MODE=token, and write the cluster's token to ~/.ray/auth_token, or export it as RAY_AUTH_TOKEN"
_NO_TOKEN = f"it requires a token, and this process has none; {_CURE}"


def auth_error(address: str) -> str:
    """Why the cluster whose head is at ``host:port`` refuses this process; "" if it does not, or does not answer."""
    enabled = is_token_auth_enabled()
    try:
        with init_grpc_channel(address) as channel:
            NodeInfoGcsServiceStub(channel).GetClusterId(GetClusterIdRequest(), timeout=TIMEOUT_S)
    except AuthenticationError:
        return _NO_TOKEN
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return f"it rejects this process's token; {_CURE}" if enabled else _NO_TOKEN
    return ""


def local_auth_error() -> str:
    """The same for the cluster on this machine, as ``RAY_ADDRESS=auto`` finds it."""
    address = read_ray_address()
    return auth_error(address) if address else ""
