"""Payloads between two stages through a real connector of vLLM-Omni, without a model: one process for each stage.

Standard output has a JSON object a line: `ready`, and when the file of `--start` has appeared and all is done, `ended`,
with what the connectors themselves say they moved. SIGTERM ends all processes. The stages have the titles of vLLM-Omni's
stage cores, talk to their parent over ZMQ as those do, and report to its real coordinator.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import time

CONNECTORS = {
    "shm": "SharedMemoryConnector",
    "mooncake": "MooncakeTransferEngineConnector",
    "mooncake-store": "MooncakeStoreConnector",
    "nixl": "NixlConnector",
    "yuanrong": "YuanrongConnector",
}


def connector(name, stage, port):
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    sends = stage == 0
    here = "127.0.0.1"
    extra = {"host": here, "stage_id": stage, "role": "sender" if sends else "receiver"}
    sender = {"zmq_port": port} if sends else {"sender_host": here, "sender_zmq_port": port}
    if name == "mooncake":
        # The device `cpu` would pin the memory, which needs CUDA.
        extra |= {"protocol": "tcp", "memory_pool_size": 64 << 20, "memory_pool_device": "cpu:0", "zmq_port": port}
        extra |= sender
    elif name == "nixl":
        extra |= sender | {"memory_type": "DRAM", "receive_device": "cpu"}
    elif name == "mooncake-store":
        extra |= {"metadata_server": "P2PHANDSHAKE", "master": f"{here}:{port}", "segment": 128 << 20}
        extra |= {"localbuf": 64 << 20, "proto": "tcp"}
    elif name == "yuanrong":
        # The published package has its modules in a folder below the one that the connector imports them from.
        from vllm_omni.distributed.omni_connectors.connectors import yuanrong_connector
        from yr.datasystem.kv_client import KVClient, SetParam, WriteMode

        vars(yuanrong_connector).update(KVClient=KVClient, SetParam=SetParam, WriteMode=WriteMode)
        extra |= {"port": port}
    return OmniConnectorFactory.create_connector(ConnectorSpec(name=CONNECTORS[name], extra=extra))


def payload(form, size, chunk):
    import torch

    if form == "tensor":
        return torch.arange(size, dtype=torch.int64).to(torch.uint8) + chunk
    return {"codes": {"audio": torch.zeros(size // 4, dtype=torch.int32)}, "meta": {"chunk": chunk}}


def stage(number, hub, coordinator, port, options):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import setproctitle

    setproctitle.setproctitle(f"VLLM::StageEngineCoreProc_stage{number}_replica0_DP0")
    import msgspec
    import zmq
    from vllm_omni.distributed.omni_coordinator import OmniCoordClientForStage

    moves = connector(options.connector, number, port)
    link = zmq.Context().socket(zmq.DEALER)
    link.setsockopt(zmq.IDENTITY, number.to_bytes(2, "little"))
    link.connect(hub)
    reports = OmniCoordClientForStage(coordinator, f"{hub}#in{number}", f"{hub}#out{number}", number)
    link.send(msgspec.msgpack.encode({"t": "ready"}))
    while (told := msgspec.msgpack.decode(link.recv()))["t"] == "request":
        moved = 0
        for chunk in range(options.chunks):
            key = f"{told['id']}_0_{chunk}"
            if number == 0:
                time.sleep(options.every)
                done, size, _ = moves.put("0", "1", key, payload(options.payload, options.bytes, chunk))
                assert done, key
                moved += size
                continue
            source = {"source_host": "127.0.0.1", "source_port": port} if options.connector == "mooncake" else None
            while not (taken := moves.get("0", "1", key, source)):
                time.sleep(0.002)
            moved += taken[1]
            if hasattr(taken[0], "release"):
                taken[0].release()
        link.send(msgspec.msgpack.encode({"t": "done", "id": told["id"], "stage": number, "bytes": moved}))
    reports.close()
    getattr(moves, "close", lambda: None)()


def master(port):
    """The store's master, which keeps where each object is."""
    import mooncake

    program = os.path.join(os.path.dirname(mooncake.__file__), "mooncake_master")
    command = [program, f"--rpc_port={port}", "--enable_http_metadata_server=false", "--logtostderr"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    answers(port, "the store's master")
    return process


def answers(port, who):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"{who} does not answer")


def data_system(port, folder):
    """Yuanrong's worker, which has the objects, and the service in it that keeps where each is."""
    import yr.datasystem

    package = os.path.dirname(yr.datasystem.__file__)
    command = [os.path.join(package, "datasystem_worker"), f"--worker_address=127.0.0.1:{port}"]
    command += [f"--metastore_address=127.0.0.1:{free_port()}", "--start_metastore_service=true"]
    command += ["--shared_memory_size_mb=128", "--log_monitor=false", f"--unix_domain_socket_dir={folder}/uds"]
    command += [f"--log_dir={folder}/logs", f"--rocksdb_store_dir={folder}/rocksdb"]
    libraries = {"LD_LIBRARY_PATH": os.path.join(package, "lib")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, env=os.environ | libraries, **quiet)
    answers(port, "the data system's worker")
    return process


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tell(out, what, **more):
    print(json.dumps({"event": what, **more}), file=out, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("connector", choices=CONNECTORS)
    parser.add_argument("--start", required=True, help="a file whose appearance starts the transfers")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of a chunk's tensor")
    parser.add_argument("--payload", choices=["object", "tensor"], default="object")
    parser.add_argument("--every", type=float, default=0.01, help="seconds between chunks")
    options = parser.parse_args()
    # What the packages log goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.setdefault("MC_FORCE_TCP", "1")
    os.environ.setdefault("UCX_TLS", "tcp,self,sm")

    import msgspec
    import zmq
    from vllm_omni.distributed.omni_coordinator import OmniCoordinatorRuntime

    port = free_port()
    folder = tempfile.TemporaryDirectory(prefix="omnitap-real-", ignore_cleanup_errors=True)
    store = None
    if options.connector == "mooncake-store":
        store = master(port)
    elif options.connector == "yuanrong":
        store = data_system(port, folder.name)
    runtime = OmniCoordinatorRuntime(host="127.0.0.1", heartbeat_timeout=30)
    hub = f"ipc://{folder.name}/hub"
    link = zmq.Context().socket(zmq.ROUTER)
    link.bind(hub)
    spawn = multiprocessing.get_context("spawn")
    stages = [
        spawn.Process(target=stage, args=(number, hub, runtime.router_address, port, options), daemon=True)
        for number in (0, 1)
    ]
    for process in stages:
        process.start()

    def heard():
        while not link.poll(500):
            if not all(process.is_alive() for process in stages):
                raise SystemExit("a stage has ended")
        return msgspec.msgpack.decode(link.recv_multipart()[-1])

    for _ in stages:
        assert heard()["t"] == "ready"
    tell(out, "ready", pids=[process.pid for process in stages])
    while not os.path.exists(options.start):
        time.sleep(0.05)
    moved = [0, 0]
    for request in range(options.requests):
        # As the server makes ids: eight characters of its own at the end.
        ident = f"real-{request}-{os.urandom(4).hex()}"
        for number in (0, 1):
            link.send_multipart([number.to_bytes(2, "little"), msgspec.msgpack.encode({"t": "request", "id": ident})])
        for _ in stages:
            done = heard()
            moved[done["stage"]] += done["bytes"]
    tell(out, "ended", hops=options.requests * options.chunks, sent=moved[0], received=moved[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})
    for number in (0, 1):
        link.send_multipart([number.to_bytes(2, "little"), msgspec.msgpack.encode({"t": "stop"})])
    for process in stages:
        process.join(5)
    runtime.close()
    if store:
        store.terminate()
        store.wait()
    folder.cleanup()


if __name__ == "__main__":
    main()
