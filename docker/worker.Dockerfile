# The worker, for CPUs or for NVIDIA GPUs. From the root of the repository:
#   docker build -f docker/worker.Dockerfile --target cpu -t pagemill-worker:cpu .
#   docker build -f docker/worker.Dockerfile --target cuda -t pagemill-worker:cuda .

FROM python:3.11-slim-bookworm AS base
RUN python -m venv /opt/pagemill \
    && useradd --system --uid 10001 --no-create-home pagemill
ENV PATH=/opt/pagemill/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    # As `pagemill serve` sets it: idle OpenMP threads soon sleep, and leave their core to others.
    GOMP_SPINCOUNT=20000
WORKDIR /src
COPY constraints.txt ./

# torch is the large layer, so it comes before the sources.
FROM base AS torch-cpu
# Compiles the CPU's kernels for the processor they run on, at the first start (ADR 0016).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch

FROM base AS torch-cuda
# The plain package brings the CUDA libraries with it; the driver comes from the host.
RUN pip install --no-cache-dir -c constraints.txt torch

FROM scratch AS sources
COPY pyproject.toml README.md LICENSE /
COPY proto /proto
COPY worker_svc /worker_svc
COPY kernels /kernels

FROM torch-cpu AS cpu
COPY --from=sources / ./
RUN pip install --no-cache-dir -c constraints.txt '.[worker]'
WORKDIR /
USER 10001:10001
ENTRYPOINT ["python", "-m", "worker_svc"]

FROM torch-cuda AS cuda
COPY --from=sources / ./
RUN pip install --no-cache-dir -c constraints.txt '.[worker]'
WORKDIR /
USER 10001:10001
ENTRYPOINT ["python", "-m", "worker_svc"]
