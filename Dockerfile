# The image of the workflows for Kubernetes (docs/cluster.md). PyTorch is its build for CPUs; with an empty index, it is PyPI's,
# which brings CUDA:
#     docker build --tag REGISTRY/tree-attention:1-cpu .
#     docker build --tag REGISTRY/tree-attention:1-cuda --build-arg PIP_EXTRA_INDEX_URL= .
FROM debian:bookworm-slim
# KubeRay asks nodes for their state with wget. Arrow reaches object stores with the certificates.
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv wget && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 ray && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /home/ray/tree-attention
COPY constraints.txt LICENSE NOTICE pyproject.toml ./
COPY treenet treenet
COPY treeproc treeproc
COPY workflows workflows
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt '.[all]' && rm -rf build *.egg-info
USER ray
