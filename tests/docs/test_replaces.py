"""Each of our names on docs/replaces.md exists."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "replaces.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## The systems taken over") :]
NAMES = sorted(set(re.findall(r"`(weightsync(?:\.\w+)+)`", PAGE)))


THEIRS = """
IPCWeightTransferEngine config parallel_config init_info_cls update_info_cls trainer_send_weights
iterator trainer_args IPCTrainerSendWeightsArgs send_mode llm_handle url packed
packed_buffer_size_bytes IPCWeightTransferInitInfo IPCWeightTransferUpdateInfo names dtype_names
shapes ipc_handles tensor_sizes ipc_handles_pickled parse_init_info parse_update_info
init_transfer_engine start_weight_update finish_weight_update shutdown receive_weights update_info
load_weights WeightTransferEngine IPCTrainerInitInfo IPCTrainerWeightTransferEngine TensorIpcData
request_id tensor_id tensor TensorIpcQueue TensorIpcSender queue send_tensor set_target_engine
new_message TensorIpcReceiver recv_tensor handle cleanup_request_tensors MsgpackEncoder
size_threshold oob_tensor_consumer encode encode_into MsgpackDecoder share_mem oob_tensor_provider
OOBTensorConsumer mm-tensor-ipc maximum-concurrent-videos APIServerProcessManager target_server_fn
listen_address sock args num_servers input_addresses output_addresses stats_update_address
client_config tensor_queue wait_for_completion_or_failure api_server_manager engine_manager
coordinator proc CoreEngineProcManager CoreEngineActorManager procs timeout kill_process_tree
get_engine_client_zmq_addr local_only host port CpuGpuBuffer size dtype device pin_memory
with_numpy copy_to_gpu copy_to_cpu copy_slice from_tensor to_tensor length tensor_data
ConstantList record_function_or_nullcontext IterationDetails compute_iteration_details
report_usage_stats MessageQueue n_reader n_local_reader local_reader_ranks max_chunk_bytes
max_chunks connect_ip Handle enqueue obj dequeue cancel indefinite acquire_read acquire_write
create_from_handle rank create_from_process_group pg writer_rank external_writer_handle blocking
create_from_process_group_single_reader reader_rank broadcast_object wait_until_ready
export_handle recv ShmRingBuffer SpinTimer SpinCondition check_shm_free_space
"""
"""Every class, function and keyword of the five systems that a port may meet."""


def found(name: str) -> Any:
    """Return what a dotted name means: a module, or what is in one."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            importlib.import_module(".".join(parts[:index]))
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", NAMES)
def test_our_names_exist(name: str) -> None:
    assert found(name) is not None


def test_there_is_a_table_for_each_system() -> None:
    heads = re.findall(r"^### (.*)$", SECTION, flags=re.MULTILINE)
    assert heads == [
        "`ipc_engine`",
        "`tensor_ipc`",
        "The multimodal path",
        "`v1.utils`",
        "`shm_broadcast`",
    ]
    assert SECTION.count("| their name | ours | what differs |") == len(heads)
    rows = [line for line in SECTION.splitlines() if line.startswith("| `")]
    assert all("`weightsync." in row or "| none |" in row for row in rows)


def test_every_name_of_theirs_is_in_a_table() -> None:
    cells = " ".join(line.split(" | ")[0] for line in SECTION.splitlines() if line.startswith("| "))
    cells += " ".join(re.findall(r"`[^`]*`", SECTION))
    missing = [
        name for name in THEIRS.split() if not re.search(rf"(?<![\w]){name}(?![\w-])", cells)
    ]
    assert missing == []
