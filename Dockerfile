# The GPU lock (requirements.txt) with Transformer Engine's compiled torch extension, set up as `make setup` does it on a
# machine with a GPU. The build needs no GPU; CUDA's libraries and headers are packages of the lock.
#
#   docker build --tag megatron-bapo .
#   docker run --gpus all --ipc host --ulimit memlock=-1 --rm -it megatron-bapo make gpu-check
FROM ubuntu:24.04

# NCCL uses InfiniBand if it finds libibverbs, and TCP without a word if not. KubeRay 1.5 probes its pods with wget, and
# launch/ray_node.sh calls ip and pkill.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap ca-certificates g++ gcc git make python3.12-dev python3.12-venv \
       ibverbs-providers iproute2 libibverbs1 librdmacm1 procps wget \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron-bapo
COPY . .
RUN make setup HAS_GPU=yes TRANSFORMER_ENGINE=required WHEEL_CACHE=/opt/wheels

ENV PATH=/opt/megatron-bapo/.venv/bin:$PATH
CMD ["megatron-bapo", "doctor"]
