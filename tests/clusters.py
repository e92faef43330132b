"""Ray clusters of several node processes on this machine, and an S3 server that can be away for a while."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OBJECT_STORE = 80 << 20
QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A node that is gone is missed after seconds, not half a minute."""


@contextlib.contextmanager
def cluster_of(nodes: int, cpus: int, folder: Path | None = None) -> Iterator[Any]:
    """Start a cluster: a head without CPUs, and nodes of so many each; with a folder, each has a home of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": OBJECT_STORE, "_system_config": QUICK}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for node in range(nodes):
            own: dict[str, Any] = {} if folder is None else {"env_vars": _home(folder / f"host-{node}")}
            cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE, **own)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _home(folder: Path) -> dict[str, str]:
    for name in ("tmp", "home"):
        (folder / name).mkdir(parents=True)
    return {"TMPDIR": str(folder / "tmp"), "HOME": str(folder / "home")}


def slow(trajectory: Any) -> float:
    """Reward a trajectory after some thought."""
    time.sleep(0.05)
    return float(len(trajectory.response) % 3)


class Store:
    """An S3 server of this process, by moto; what it holds outlives that it is stopped."""

    def __init__(self) -> None:
        """Start it, on a port that it keeps."""
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip

    def away(self, seconds: float) -> None:
        """Stop it for a while."""
        from moto.server import ThreadedMotoServer

        self._server.stop()
        time.sleep(seconds)
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Stop it for good."""
        self._server.stop()


@contextlib.contextmanager
def s3() -> Iterator[Store]:
    """Start a server with a bucket `bucket`, and tell this process and its children where it is."""
    store = Store()
    before = {name: os.environ.get(name) for name in store.env}
    os.environ.update(store.env)
    try:
        import boto3

        boto3.client("s3").create_bucket(Bucket="bucket")
        yield store
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        store.stop()
