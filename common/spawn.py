"""The store through which the processes of mp.spawn find each other; for `train_mp.py`."""
import socket
import sys

import torch.distributed as dist

from .errors import UsageError, reason


def serve_store(host: str, port: int, nodes: int, node_rank: int = 0) -> tuple[dist.TCPStore | None, int]:
    """Start a TCPStore on node 0; return it (None on the other nodes) and its port. If `port` is 0, choose a free one.

    For several nodes, it listens on all addresses, because the first host may resolve its own name to 127.0.1.1. Raises
    UsageError, for example if the port is in use.
    """
    if node_rank >= nodes:
        raise UsageError(f"--node-rank {node_rank}: the {nodes} node(s) of --nnodes have the numbers 0 to {nodes - 1}")
    if nodes > 1 and not port:
        raise UsageError(f"--nnodes {nodes}: the other hosts cannot guess the port; choose one with --port")
    if node_rank:
        return None, port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family) if nodes == 1 else None
        port = listener.getsockname()[1] if listener else port
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False,
                              use_libuv=sys.platform != "win32",  # torch for Windows lacks libuv
                              master_listen_fd=listener.detach() if listener else None)
        return store, store.port
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        why = "in use" if "EADDRINUSE" in str(error) or "in use" in str(error) else reason(error)
        raise UsageError(f"--port {port} on --ip {host}: {why}") from None
