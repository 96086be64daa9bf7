"""vLLM-Omni's own coordinator and stage clients, told line by line what to do.

    up ADDRESS STAGE QUEUE     a replica registers, or tells its queue length
    queue ADDRESS QUEUE        its next heartbeat has this queue length
    down ADDRESS               it is shut down in order
    stop                       the coordinator ends
Prints the address at which lists are published first, and `done` after each line.
"""

import sys

from vllm_omni.distributed.omni_coordinator import OmniCoordClientForStage, OmniCoordinator
from vllm_omni.distributed.omni_coordinator.messages import ReplicaStatus

coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat_timeout=30.0)
clients = {}
print(coordinator.pub_zmq_addr, flush=True)
for line in sys.stdin:
    what, *args = line.split()
    if what == "up":
        address, stage, queue = args[0], int(args[1]), int(args[2])
        if address not in clients:
            clients[address] = OmniCoordClientForStage(
                coordinator.router_zmq_addr, address, address + "0", stage
            )
        clients[address].update_info(status=ReplicaStatus.UP, queue_length=queue)
    elif what == "down":
        clients[args[0]].update_info(status=ReplicaStatus.DOWN)
    elif what == "stop":
        coordinator.close()
    print("done", flush=True)
