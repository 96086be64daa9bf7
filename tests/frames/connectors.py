"""Writes connectors.jsonl: control messages of transfer-engine connectors, encoded by vLLM-Omni's own classes.

Needs an environment with vllm-omni 0.30.0. The transfer engines themselves are not needed: the connectors' modules
can be imported without them. NIXL's connector encodes plain maps, which are built here as its source builds them.
"""

import json
import pathlib

import msgspec
from vllm_omni.distributed.omni_connectors.connectors import (
    mooncake_transfer_engine_connector as mooncake,
    mori_transfer_engine_connector as mori,
    nixl_connector as nixl,
)
from vllm_omni.platforms.npu.omni_connectors import yuanrong_transfer_engine_connector as yuanrong

encode = msgspec.msgpack.encode
KEY = "speech-0123456789abcdef-1a2b3c4d_0_2"
STAGED = f"{KEY}@0_1"
CLAIM = "5f0c9a7be2d84d7f9d3a6b1c2e4f8a90"
GENERATION = "0b1c2d3e4f5061728394a5b6c7d8e9f0"
SIZE = 262_144

offer = {
    "schema_version": nixl._SCHEMA_VERSION,
    "kind": nixl._KIND_TENSORS,
    "agent_metadata": b"a" * 64,
    "descriptor_groups": [
        {"memory_type": "DRAM", "tensor_indices": [0], "regions": [[0x7F8AE79AB800, SIZE, 0, ""]]}
    ],
    "tensor_specs": [{"shape": [65_536], "dtype": "torch.int32", "device": "cpu", "size": SIZE}],
    "size": SIZE,
    "sender_host": "127.0.0.1",
    "sender_zmq_port": 50_151,
    "generation": GENERATION,
    "claim_id": CLAIM,
}
messages = {
    "mooncake query": mooncake.QUERY_INFO + encode(mooncake.QueryRequest(request_id=STAGED)),
    "mooncake info": encode(mooncake.QueryResponse(request_id=STAGED, data_size=SIZE, is_fast_path=False)),
    "mooncake pull": encode(
        mooncake.MooncakeAgentMetadata(
            remote_hostname="10.0.0.7",
            remote_port=15_999,
            request_id=STAGED,
            dst_addrs=[0x7F8AE79AB800],
            lengths=[SIZE],
        )
    ),
    "mooncake done": mooncake.TRANS_DONE,
    "mooncake error": mooncake.TRANS_ERROR,
    "mooncake not found": mooncake.INFO_NOT_FOUND,
    "mori query": mori.QUERY_INFO + encode(mori.QueryRequest(request_id=STAGED)),
    "mori info": encode(mori.QueryResponse(request_id=STAGED, data_size=SIZE, is_fast_path=True)),
    "mori pull": encode(
        mori.MoriPullRequest(
            request_id=STAGED, engine_desc_packed=b"e" * 40, mem_desc_packed=b"m" * 24, dst_offset=4096, length=SIZE
        )
    ),
    "mori done": mori.TRANS_DONE,
    "nixl claim": nixl._GET_META_MSG + encode({"key": KEY, "generation": None, "claim_id": CLAIM}),
    "nixl offer": encode(offer),
    "nixl not found": nixl._META_NOT_FOUND,
    "nixl released": nixl._XFER_DONE_MSG + encode({"key": KEY, "generation": GENERATION, "claim_id": CLAIM}),
    "nixl released without claim": nixl._XFER_DONE_MSG + encode({"key": KEY, "generation": None, "claim_id": None}),
    "nixl ack": nixl._ACK,
    "yuanrong query": yuanrong.QUERY_INFO + encode(yuanrong.QueryRequest(request_id=STAGED)),
    "yuanrong ready": encode(
        yuanrong.QueryResponse(
            request_id=STAGED,
            rpc_port=40_123,
            data_size=SIZE,
            is_fast_path=True,
            src_addrs=[0x12C0_0000_0000],
            lengths=[SIZE],
        )
    ),
    "yuanrong not found": yuanrong.INFO_NOT_FOUND,
    "yuanrong read": yuanrong.CLEANUP_KEY + encode(yuanrong.CleanupRequest(request_id=STAGED)),
    "yuanrong ack": yuanrong.ACK_OK,
    "yuanrong error": yuanrong.ACK_ERROR,
}
with (pathlib.Path(__file__).parent / "connectors.jsonl").open("w") as out:
    for name, payload in messages.items():
        out.write(json.dumps({"name": name, "hex": payload.hex()}) + "\n")
