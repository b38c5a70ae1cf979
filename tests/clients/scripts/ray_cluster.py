"""A Ray cluster of two nodes on this machine that serves a model: PORT ARGS, then commands on stdin, an answer each.

    status   number of replicas that run, and the nodes they are on
    kill     kills one replica's process with signal 9, and says on which node
    exit
"""

import json
import os
import signal
import sys

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from stretto.ray import app

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}  # one CPU: one replica each


def replicas() -> list:
    return [actor for actor in list_actors(filters=[("state", "=", "ALIVE")], detail=True)
            if actor.class_name.startswith("ServeReplica")]


def main() -> None:
    port, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": True, "dashboard_port": 0})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=True)
    serve.start(http_options={"port": port, "host": "127.0.0.1"})
    serve.run(app(settings), name="stories", route_prefix="/")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "exit":
            break
        found = replicas()
        if command == "kill":
            os.kill(found[0].pid, signal.SIGKILL)
            print(json.dumps({"node": found[0].node_id}), flush=True)
        else:
            print(json.dumps({"replicas": len(found), "nodes": sorted({one.node_id for one in found})}), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
