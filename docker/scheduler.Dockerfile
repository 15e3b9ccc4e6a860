# The scheduler: no torch, no compiler, no root. From the root of the repository:
#   docker build -f docker/scheduler.Dockerfile -t pagemill-scheduler .

FROM python:3.11-slim-bookworm AS build
RUN python -m venv /opt/pagemill
ENV PATH=/opt/pagemill/bin:$PATH
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY proto proto
COPY clients/pagemill/client clients/pagemill/client
COPY scheduler_svc scheduler_svc
RUN pip install --no-cache-dir -c constraints.txt '.[scheduler]'

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --no-create-home pagemill
COPY --from=build /opt/pagemill /opt/pagemill
COPY docker/healthcheck.py /opt/pagemill/healthcheck.py
ENV PATH=/opt/pagemill/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
# Clients, workers, metrics.
EXPOSE 50051 50052 9400
# Healthy once a worker is ready: only then can the server answer.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "/opt/pagemill/healthcheck.py", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m", "scheduler_svc"]
