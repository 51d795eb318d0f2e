# syntax=docker/dockerfile:1
# Images with dtrain and its dependencies; docs/containers.md says how to run them.
#
#   docker build --target cpu --tag dtrain:cpu .
#   docker build --target cuda --tag dtrain:cuda .
#   docker build --target cpu --build-arg PYTHON=3.13 --build-arg EXTRAS=s3,text --build-arg APT_PACKAGES=g++ .
#
# Packages that constraints.txt names have its versions; pip chooses the others, such as NVIDIA's. The base image can be pinned
# by its digest: --build-arg BASE=python@sha256:...

ARG PYTHON=3.12
ARG BASE=python:${PYTHON}-slim-bookworm

# -- torch for CPUs is 0.2 GB; that of PyPI brings CUDA's libraries, several GB
FROM ${BASE} AS torch-cpu
ENV PATH=/opt/dtrain/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/dtrain \
    && pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt torch

FROM ${BASE} AS torch-cuda
ENV PATH=/opt/dtrain/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/dtrain \
    && pip install --constraint constraints.txt torch

# -- dtrain and its other dependencies
FROM torch-cpu AS packages-cpu
ARG EXTRAS=demo,s3,http,hf,text,tensorboard,optuna
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt ".[$EXTRAS]"

FROM torch-cuda AS packages-cuda
ARG EXTRAS=demo,s3,http,hf,text,tensorboard,optuna
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip pip install --constraint constraints.txt ".[$EXTRAS]"

# -- the images: without sources, pip's cache and compilers (train.compile needs g++)
FROM ${BASE} AS base
ARG APT_PACKAGES=
# tini is process 1: it passes signals on, also while Python is still importing, and removes zombies.
# hadolint ignore=DL3008,SC2086
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini libgomp1 $APT_PACKAGES \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home dtrain \
    && install --directory --owner=dtrain --group=dtrain /workspace
# The cache holds indexes of shards, and the marks of one's own runs: with the runs, so that a new container finds both.
ENV PATH=/opt/dtrain/bin:$PATH PYTHONUNBUFFERED=1 DTRAIN_CACHE=/workspace/cache
# A number, because Kubernetes refuses names with runAsNonRoot.
USER 1000:1000
# Runs are in /workspace/runs: mount a volume at /workspace.
WORKDIR /workspace
# Without a shell, which would not pass signals on.
ENTRYPOINT ["tini", "--", "dtrain"]
CMD ["--help"]

FROM base AS cpu
COPY --from=packages-cpu /opt/dtrain /opt/dtrain

FROM base AS cuda
# NVIDIA's container toolkit adds the driver of the machine.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=packages-cuda /opt/dtrain /opt/dtrain
