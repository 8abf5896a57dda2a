# One image for every pod of a cluster, and for a machine of its own:
#   docker build --build-arg ACCELERATOR=gpu -t registry.example.com/slipstream:gpu .    (or cpu, the default)
# CUDA comes with the wheels of requirements/gpu.lock; the host gives the driver.
FROM python:3.11-slim-bookworm

# A compiler for kernels that are built when they are first used; wget for the probes of KubeRay.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ gcc git libc6-dev libgomp1 libnuma1 make wget \
    && rm -rf /var/lib/apt/lists/*

ARG ACCELERATOR=cpu
ENV ACCELERATOR=${ACCELERATOR} \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/opt/slipstream/.venv/bin:${PATH} \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/slipstream

# What the installation reads, and no more: another line of code does not install the packages anew.
COPY pyproject.toml README.md LICENSE slipstream.py ./
COPY requirements requirements
COPY configs/__init__.py configs/
COPY jobs/__init__.py jobs/
COPY pipeline/__init__.py pipeline/run/versions.py pipeline/
RUN requirements/install.sh "${ACCELERATOR}" .venv python3

COPY . .
# The stamp is to be younger than the files that make compares it with.
RUN touch ".venv/.installed-${ACCELERATOR}" \
    && useradd --uid 1000 --create-home slipstream
USER slipstream
