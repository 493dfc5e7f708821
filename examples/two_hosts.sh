#!/usr/bin/env bash
# A trainer of two ranks on one host sends its weights to an inference server of two tensor-parallel
# workers on another, and both hosts are this machine: two network namespaces with a cable between
# them. Linux, root, iproute2.
#
#     sudo PYTHON=.venv/bin/python examples/two_hosts.sh
#
# Nothing on the machine's own network changes, no packet leaves it, and all is removed at the end.
set -euo pipefail

PYTHON=${PYTHON:-python3}
TRAINER=weightsync-trainer-$$
SERVER=weightsync-server-$$
TRAINER_ADDRESS=10.83.7.1
SERVER_ADDRESS=10.83.7.2
URL=http://$SERVER_ADDRESS:8000
# Both sides read the token from here; without it the server would make one and print it.
WEIGHTSYNC_TOKEN=${WEIGHTSYNC_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export WEIGHTSYNC_TOKEN

FOLDER=
pids=()

clean_up() {
    trap - EXIT
    for pid in "${pids[@]}"; do
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    for host in "$TRAINER" "$SERVER"; do
        ip netns del "$host" 2>/dev/null || true   # the cable goes with its ends
    done
    [ -z "$FOLDER" ] || rm -r "$FOLDER"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Two hosts, and a cable from one to the other.
ip netns add "$TRAINER"
ip netns add "$SERVER"
ip link add eth0 netns "$TRAINER" type veth peer name eth0 netns "$SERVER"
ip -n "$TRAINER" address add "$TRAINER_ADDRESS/24" dev eth0
ip -n "$SERVER" address add "$SERVER_ADDRESS/24" dev eth0
for host in "$TRAINER" "$SERVER"; do
    ip -n "$host" link set lo up
    ip -n "$host" link set eth0 up
done

# The inference server. Hosts share no memory, so it gets a /dev/shm of its own: that is how
# weightsync knows that this is another host. (`ip netns exec` makes the mount private.)
ip netns exec "$SERVER" sh -c 'mount -t tmpfs -o size=256m tmpfs /dev/shm && exec "$@"' sh \
    "$PYTHON" -m weightsync serve --model tiny --tensor-parallel 2 --host "$SERVER_ADDRESS" --port 8000 &
pids+=($!)

# The trainer: two ranks of FSDP2. They wait for the server, and send three updates, each what it holds;
# rank 0 reads the server's version.
FOLDER=$(mktemp -d)
cat >"$FOLDER/train.py" <<'TRAIN'
import json
import sys
import urllib.request

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import weightsync as ws
from weightsync.serve.model import load_model

url = sys.argv[1]
dist.init_process_group("gloo")
model = load_model("tiny").model
fully_shard(model)
with ws.connect(model, to=url, wait_s=120) as sender:  # the server may still be loading
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)  # where a trainer would step its optimizer
        report = sender.send_weights()
        if dist.get_rank() == 0:
            print(report)

if dist.get_rank() == 0:
    print("path", report.path)
    for worker in report.receivers:
        print(worker.target, "read from ranks", list(worker.sources), flush=True)
    with urllib.request.urlopen(f"{url}/weight_info", timeout=5) as reply:
        held = json.load(reply)
    print("the server holds version", held["version"], "and is", held["state"], flush=True)
    if held["version"] != report.version:
        sys.exit(f"it should hold version {report.version}")
dist.barrier()
dist.destroy_process_group()
TRAIN
GLOO_SOCKET_IFNAME=lo ip netns exec "$TRAINER" "$PYTHON" -m torch.distributed.run --nproc-per-node 2 \
    --master-addr 127.0.0.1 --master-port 29500 "$FOLDER/train.py" "$URL" &
pids+=($!)
wait $! # in the background, so that Ctrl-C and kill reach this script at once
